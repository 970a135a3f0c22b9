"""The accountant: events and facts -> claimed and proven epsilon.

`eps_claimed` is the paper's own formula with the paper's unit. `eps_record` is what is proven
against the server for replacing one training record, over the whole run, at the run's delta;
infinite where anything leaves the client unprotected.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

from bench.contract.defense import Defense
from bench.contract.events import (
    Encrypted,
    Event,
    Facts,
    Gaussian,
    Laplace,
    RandomisedResponse,
    Unprotected,
    Withheld,
)
from bench.privacy.entry import Entry
from bench.privacy.gaussian import exact_gaussian_epsilon


def gaussian_epsilon(*, noise_multiplier: float, steps: int, delta: float) -> float:
    """Epsilon at `delta` of `steps` Gaussian releases with std = noise_multiplier * sensitivity.

    Renyi accountant of opacus without subsampling, on a grid of orders that reaches down to
    1.0005, since small noise has its best order near 1. Infinite without noise; 0 for no step.
    """
    if steps == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    near_one = [1 + 10 ** (-k / 20) for k in range(1, 67)]
    orders = near_one + [1 + x / 10 for x in range(1, 110)] + [*range(12, 64), *range(64, 1025, 8)]
    return _renyi(1.0, noise_multiplier, steps, orders, delta)


def subsampled_gaussian_epsilon(
    *, noise_multiplier: float, rate: float, steps: int, delta: float
) -> float:
    """Epsilon at `delta` of `steps` Gaussian releases on Poisson samples, each record with
    probability `rate`, for adding or removing one.

    Renyi accountant of opacus, which papers quote; its PRV accountant and dp-accounting's are
    tighter by a few percent (tests). Infinite without noise; 0 for no step.
    """
    if rate >= 1:
        return gaussian_epsilon(noise_multiplier=noise_multiplier, steps=steps, delta=delta)
    if steps == 0 or rate == 0:
        return 0.0
    if noise_multiplier <= 0:
        return math.inf
    orders = [1 + x / 10 for x in range(1, 110)] + [*range(12, 64), *range(64, 513, 16)]
    return _renyi(rate, noise_multiplier, steps, orders, delta)


def _renyi(
    rate: float, noise_multiplier: float, steps: int, orders: Sequence[float], delta: float
) -> float:
    """Epsilon by opacus' Renyi accountant, at the best of the orders."""
    from opacus.accountants.analysis import rdp

    values = rdp.compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=steps, orders=orders)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opacus warns when the best order is at an end
        epsilon, _ = rdp.get_privacy_spent(orders=orders, rdp=values, delta=delta)
    return max(0.0, float(epsilon))


_DISTRIBUTED = 100.0
"""Sum of pure epsilons up to which their composition is computed as a distribution; beyond, a
grid fine enough would not fit memory, and delta buys next to nothing."""


def record_epsilon(events: Sequence[Event], delta: float) -> float:
    """Epsilon of all events together, composed over their counts and coordinates.

    Gaussian events compose exactly: squared multipliers add. Pure events add up, or, where that
    is less, compose as the worst mechanisms of their epsilons do (randomised response; privacy
    loss distributions of dp-accounting, rounded up). No event means that nothing is randomised:
    infinite.
    """
    if not events or any(isinstance(e, Unprotected) for e in events):
        return math.inf
    inverse_square = 0.0
    pure: list[tuple[float, int]] = []
    for event in events:
        match event:
            case Gaussian(sensitivity=s, std=std, count=n):
                if std <= 0 and n and s:
                    return math.inf
                inverse_square += n * (s / std) ** 2 if n and s else 0.0
            case Laplace(sensitivity=s, scale=scale, count=n):
                if scale <= 0 and n and s:
                    return math.inf
                pure += [(s / scale, n)] if n and s else []
            case RandomisedResponse(epsilon=eps, coordinates=d, count=n):
                pure += [(eps, n * d)] if n * d and eps else []
            case Withheld() | Encrypted():
                pass
            case _:
                raise TypeError(f"the ledger has no rule for {type(event).__name__} events.")
    mu = math.sqrt(inverse_square)
    added = sum(eps * n for eps, n in pure)
    simple = exact_gaussian_epsilon(mu=mu, delta=delta) + added if mu else added
    if not pure or (len(pure) == 1 and pure[0][1] == 1 and not mu) or added > _DISTRIBUTED:
        return simple
    return min(simple, _distributed(pure, mu, delta))


def _distributed(pure: Sequence[tuple[float, int]], mu: float, delta: float) -> float:
    """Composition of (epsilon, count) pure mechanisms and one Gaussian, by their privacy loss
    distributions, rounded up."""
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as pld

    grid = 1e-3
    found = None
    for epsilon, count in pure:
        worst = pld.from_privacy_parameters(
            common.DifferentialPrivacyParameters(epsilon, 0.0), value_discretization_interval=grid
        ).self_compose(count)
        found = worst if found is None else found.compose(worst)
    assert found is not None
    if mu:
        found = found.compose(
            pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=grid)
        )
    return float(found.get_epsilon_for_delta(delta))


def in_plain_words(entry: Entry, events: Sequence[Event]) -> tuple[str, str, str]:
    """Three sentences: what the claim says, what is proven, what neither protects."""
    if entry.eps_claimed is None:
        claim = "The paper claims no epsilon for this setting."
    else:
        at = f" at delta {entry.claim_delta:g}" if entry.claim_delta else ""
        whole = "" if entry.unit == "record" else ", which is not the same as a training record"
        claim = f"The paper claims epsilon {entry.eps_claimed:.4g}{at} for one {entry.unit}{whole}."
    open_ = [e.what for e in events if isinstance(e, Unprotected)]
    if math.isinf(entry.eps_record):
        why = f": {_listed(open_)} would tell it" if open_ else " since nothing is noised"
        proof = (
            "Nothing is proven about how well the server can tell whether one training record "
            f"was another{why}."
        )
    else:
        proof = (
            f"Proven is epsilon {entry.eps_record:.4g} at delta {entry.delta:g}: over the whole "
            "run the server can tell whether one training record was another with odds of at "
            f"most e^{entry.eps_record:.3g} to one."
        )
    hidden = [e.what for e in events if isinstance(e, Encrypted | Withheld)]
    rest = (
        "Neither number covers what many records of a client have in common"
        + (f", nor whoever gets hold of {_listed(hidden)}" if hidden else "")
        + ("." if math.isfinite(entry.eps_record) else ", and a claim without proof binds nobody.")
    )
    return claim, proof, rest


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


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
        case Encrypted(what=what):
            return f"{what[:1].upper()}{what[1:]}: ciphertexts to the server, which has no key."
        case Withheld(what=what):
            return f"{what[:1].upper()}{what[1:]}: never leaves the client."
    raise TypeError(f"the ledger cannot explain {type(event).__name__} events.")


_SMASHED = Unprotected(what="the smashed data of every step", why="the defense does not touch it")


def account(defense: Defense, facts: Facts) -> Entry:
    """The ledger's line for a defense setting over a run with these facts."""
    events = defense.guarantee(facts)
    if facts.split and not any(m.of == "smashed" for m in defense.mechanisms()):
        events = (*events, _SMASHED)
    claim = defense.claim(facts)
    reasons = tuple(explain(e) for e in events) or ("Nothing is randomised, so nothing is proven.",)
    entry = Entry(
        eps_claimed=claim[0] if claim else None,
        claim_delta=claim[1] if claim else None,
        unit=claim[2] if claim else None,
        eps_record=record_epsilon(events, facts.delta),
        delta=facts.delta,
        constants=dict(defense.constants(facts)),
        reasons=reasons,
    )
    return replace(entry, words=in_plain_words(entry, events))
