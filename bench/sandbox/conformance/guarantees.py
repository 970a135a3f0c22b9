"""Whether the ledger's events agree with the public mechanisms and survive an audit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from bench.contract.defense import Defense, fresh
from bench.contract.events import Event, Facts, Gaussian, Laplace, RandomisedResponse, Round
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS
from bench.privacy.ledger import account
from bench.sandbox.audit import audit
from bench.sandbox.conformance.findings import Finding, failed, passed, skipped
from bench.sandbox.conformance.playground import BATCH, SAMPLES, company

AUDIT_DRAWS, AUDIT_CONFIDENCE = 500, 1 - 1e-6
_SAME = 1e-6


def _facts(defense: Defense) -> Facts:
    return Facts(parameters=1000, clients=company(defense), batch=BATCH, records=SAMPLES)


def check_guarantee(defense: Defense) -> list[Finding]:
    """Whether every event's level of noise is one that `mechanisms` declares, and whether its
    sensitivity covers the declared clip."""
    name = "guarantee agrees with mechanisms"
    facts = _facts(defense)
    events = defense.guarantee(facts)
    defense.claim(facts)
    defense.constants(facts)
    in_round = Round(
        clients=facts.sampled,
        batch=facts.batch,
        local_steps=facts.local_steps,
        parameters=facts.parameters,
    )
    declared = [*defense.mechanisms(), *defense.mechanisms_in(in_round)]
    if not events:
        return [skipped(name, "guarantee() reports no event, so nothing is proven")]
    for event in events:
        wrong = _contradiction(event, declared, _acts_late(defense))
        if wrong is not None:
            return [failed(
                name, wrong, "Derive both from the same attribute of the defense.", "guarantee"
            )]  # fmt: skip
    return [passed(name, ", ".join(type(e).__name__ for e in events))]


def _acts_late(defense: Defense) -> bool:
    """Whether clips are of whole uploads, not of the samples of local steps."""
    return "gradient" not in defense.owns


def _contradiction(event: Event, declared: Sequence[Mechanism], late: bool) -> str | None:
    law = type(event).__name__
    match event:
        case Gaussian(std=level) | Laplace(scale=level):
            pass
        case RandomisedResponse(epsilon=epsilon):
            level = 1 / (1 + math.exp(-epsilon))
        case _:
            return None
    if not declared:
        return (
            f"guarantee() rests on {law} of {level:.4g}, but mechanisms() tell attackers of none."
        )
    levels = [(m, m.proof[1]) for m in declared if m.proof is not None and m.proof[0] == law]
    mine = [m for m, found in levels if math.isclose(found, level, rel_tol=_SAME)]
    if levels and not mine:
        shown = ", ".join(dict.fromkeys(f"{found:.4g}" for _, found in levels))
        return f"guarantee() says {law} of {level:.4g}, but mechanisms() declare {shown}."
    if not late or isinstance(event, RandomisedResponse):
        return None
    return _too_sure(event, mine, declared)


def _too_sure(
    event: Gaussian | Laplace, mine: Sequence[Mechanism], declared: Sequence[Mechanism]
) -> str | None:
    """Replacing a record moves a clipped upload by up to twice the clip."""
    if event.unit != "record" or event.sensitivity == 0:
        return None
    order = 2 if isinstance(event, Gaussian) else 1
    for noise in mine:
        if noise.of not in (*UPLOAD_KINDS, "smashed") or noise.clips:
            continue
        norms = [b for m in declared if m.of == noise.of and (b := m.bound_of(order)) is not None]
        if not norms and math.isfinite(event.sensitivity):
            return (
                f"guarantee() says a sensitivity of {event.sensitivity:.4g}, but mechanisms() "
                f"declare no clip of order {order} that would bound it."
            )
        if norms and event.sensitivity < 2 * min(norms) * (1 - _SAME):
            return (
                f"guarantee() says a sensitivity of {event.sensitivity:.4g} for a record, but "
                f"replacing one moves an upload clipped to {min(norms):.4g} by up to "
                f"{2 * min(norms):.4g}."
            )
    return None


def check_audit(defense: Defense) -> list[Finding]:
    """A short audit of one release against the proof. A claim that it refutes is told, since it
    may be the paper's; so is that."""
    name = "audit of the proof"
    if all(account(defense, replace(_facts(defense), split=s)).eps_record == math.inf
           for s in (False, True)):  # fmt: skip
        return [skipped(name, "nothing is proven for a record, so nothing can be refuted")]
    found = audit(fresh(defense), draws=AUDIT_DRAWS, confidence=AUDIT_CONFIDENCE)
    if found.verdict_proof == "violated":
        worst = max(
            (f for f in found.pairs if f.verdict_proof == "violated"), key=lambda f: f.eps_lower
        )
        return [failed(
            name, f"one release through the real hooks shows an epsilon of at least "
            f"{worst.eps_lower:.4g} ({worst.pair}), but guarantee() proves {worst.eps_record:.4g}.",
            "Count everything that leaves the client, with its true sensitivity.", "guarantee",
        )]  # fmt: skip
    if not found.pairs:
        return [skipped(name, "; ".join(f"{s.channel}: {s.why}" for s in found.skipped))]
    claim = "" if found.verdict_claim != "violated" else "; it refutes the claim"
    return [passed(
        name, f"{found.verdict_proof}, epsilon of one release >= {found.eps_audited:.3g}{claim}"
    )]  # fmt: skip
