"""The accountant: events and facts -> claimed and proven epsilon.

`eps_claimed` is the paper's own formula with the paper's unit. `eps_record` is what is proven
against the server for replacing one training record, over the whole run, at the run's delta;
infinite where anything leaves the client unprotected.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from bench.api import Defense
from bench.privacy.events import (
    Event,
    Facts,
    Gaussian,
    Laplace,
    RandomisedResponse,
    Unprotected,
    Withheld,
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One defense setting's line in the ledger. `unit` and `claim_delta` belong to the claim."""

    eps_claimed: float | None
    unit: str | None
    claim_delta: float | None
    eps_record: float
    delta: float
    constants: dict[str, float | str]
    reasons: tuple[str, ...]


def gaussian_epsilon(*, noise_multiplier: float, steps: int, delta: float) -> float:
    """Epsilon at `delta` of `steps` Gaussian releases with std = noise_multiplier * sensitivity.

    Renyi accountant of opacus without subsampling, on a grid of orders that reaches down to
    1.0005, since small noise has its best order near 1. Infinite without noise; 0 for no step.
    """
    if steps == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    from opacus.accountants.analysis import rdp

    near_one = [1 + 10 ** (-k / 20) for k in range(1, 67)]
    orders = near_one + [1 + x / 10 for x in range(1, 110)] + [*range(12, 64), *range(64, 1025, 8)]
    values = rdp.compute_rdp(q=1.0, noise_multiplier=noise_multiplier, steps=steps, orders=orders)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opacus warns when the best order is at an end
        epsilon, _ = rdp.get_privacy_spent(orders=orders, rdp=values, delta=delta)
    return max(0.0, float(epsilon))


def record_epsilon(events: Sequence[Event], delta: float) -> float:
    """Epsilon of all events together, composed over their counts and coordinates.

    Gaussian events compose with each other in Renyi divergence (squared multipliers add),
    pure events add up. No event means that nothing is randomised: infinite.
    """
    if not events or any(isinstance(e, Unprotected) for e in events):
        return math.inf
    inverse_square = 0.0
    pure = 0.0
    for event in events:
        match event:
            case Gaussian(sensitivity=s, std=std, count=n):
                if std <= 0 and n and s:
                    return math.inf
                inverse_square += n * (s / std) ** 2 if n and s else 0.0
            case Laplace(sensitivity=s, scale=scale, count=n):
                if scale <= 0 and n and s:
                    return math.inf
                pure += n * s / scale if n and s else 0.0
            case RandomisedResponse(epsilon=eps, coordinates=d, count=n):
                pure += n * d * eps
            case Withheld():
                pass
            case _:
                raise TypeError(f"the ledger has no rule for {type(event).__name__} events.")
    gaussian = (
        gaussian_epsilon(noise_multiplier=inverse_square**-0.5, steps=1, delta=delta)
        if inverse_square
        else 0.0
    )
    return gaussian + pure


def explain(event: Event) -> str:
    """One sentence on what an event protects or leaves open."""
    match event:
        case Gaussian(sensitivity=s, std=std, unit=unit, count=n):
            return (
                f"Gaussian noise of std {std:.4g} on a vector of L2 sensitivity {s:.4g} for one "
                f"{unit}, released {n} times."
            )
        case Laplace(sensitivity=s, scale=scale, unit=unit, count=n):
            return (
                f"Laplace noise of scale {scale:.4g} on a vector of L1 sensitivity {s:.4g} for "
                f"one {unit}, released {n} times."
            )
        case RandomisedResponse(epsilon=eps, coordinates=d, covers=covers, count=n):
            return (
                f"Randomised response of epsilon {eps:.4g} on each of {d} {covers}, released "
                f"{n} times: {n * d * eps:.6g} in all for the {covers} alone."
            )
        case Unprotected(what=what, why=why):
            return f"{what[:1].upper()}{what[1:]}: no DP, {why}."
        case Withheld(what=what):
            return f"{what[:1].upper()}{what[1:]}: never leaves the client."
    raise TypeError(f"the ledger cannot explain {type(event).__name__} events.")


_SMASHED = Unprotected(
    what="the smashed data of every step",
    why="the defense does not touch it",
)


def account(defense: Defense, facts: Facts) -> Entry:
    """The ledger's line for a defense setting over a run with these facts."""
    events = defense.guarantee(facts)
    if facts.split and not any(m.of == "smashed" for m in defense.mechanisms()):
        events = (*events, _SMASHED)
    claim = defense.claim(facts)
    reasons = tuple(explain(e) for e in events) or ("Nothing is randomised, so nothing is proven.",)
    return Entry(
        eps_claimed=claim[0] if claim else None,
        claim_delta=claim[1] if claim else None,
        unit=claim[2] if claim else None,
        eps_record=record_epsilon(events, facts.delta),
        delta=facts.delta,
        constants=dict(defense.constants(facts)),
        reasons=reasons,
    )
