"""The checks of a defense setting, each on the real hooks in tiny federations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench.contract.compose import Composed
from bench.contract.defense import Defense, fresh, unmet
from bench.contract.events import Event, Facts, Gaussian, Laplace, RandomisedResponse, Round
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS
from bench.privacy.ledger import account
from bench.sandbox.audit import Audit, audit
from bench.sandbox.conformance.contract import check_class, check_roles, check_strength
from bench.sandbox.conformance.findings import (
    LEFT_OUT,
    Broken,
    Finding,
    NotChecked,
    begin_check,
    failed,
    findings_of,
    passed,
    skipped,
)
from bench.sandbox.conformance.patterns import check_patterns
from bench.sandbox.conformance.playground import (
    BATCH,
    SAMPLES,
    Ground,
    company,
    fitting,
    grounds,
    play,
)
from bench.sandbox.conformance.probes import Probes
from bench.sandbox.conformance.rounds import Examination, examine_rounds
from bench.sandbox.conformance.watching import Watch, attributes, changed_attribute
from bench.sandbox.hooked import PluginFault
from bench.sandbox.noise import Pair, checks_of

AUDIT_DRAWS, AUDIT_CONFIDENCE = 500, 1 - 1e-6
_SAME = 1e-6


def check_defense(
    defense: Defense,
    *,
    settings: Mapping[str, Any],
    rebuild: Callable[[Mapping[str, Any]], Defense],
    fast: bool = False,
) -> list[Finding]:
    """All findings on a defense; `rebuild` is as in `Examination`. fast: without those that draw
    often."""
    own = Examination(defense=defense, rebuild=rebuild, settings=settings)
    if not isinstance(defense, Composed):
        own.findings += check_class(type(defense), Defense, settings)
        own.add("roles", lambda: check_roles(defense))
        own.add("strength", lambda: check_strength(defense, settings, rebuild))
    _run_everywhere(own)
    if own.played:
        examine_rounds(own)
        _examine_privacy(own, fast=fast)
    else:
        own.findings.append(skipped("everything else", "it needs a run that works"))
    return own.findings


# --- every protocol -------------------------------------------------------------------------------


def _run_everywhere(own: Examination) -> None:
    """Play every protocol that the defense is for; state, arguments and generators are watched."""
    before = attributes(own.defense, Defense)
    begin_check("first rounds")
    try:
        cut = fitting(own.defense)
    except PluginFault:
        cut = ("lenet", "block1")  # the runs below say what is wrong
    watch = Watch()
    kept: str | None = None
    for ground in grounds(cut):
        name = f"runs under {ground.name}"
        lack = unmet(own.defense, cut=bool(ground.cut))
        if lack is not None:
            own.findings.append(skipped(name, f"not applicable: {lack}"))
            continue
        own.add(name, partial(_run, own, ground, watch))
        if ground in own.played:
            kept = kept or changed_attribute(
                before, attributes(own.played[ground].defense, Defense)
            )
    noticed: tuple[tuple[Mapping[str, str], str], ...] = (
        (watch.changed, f"{len(watch.called)} hooks watched"),
        (watch.moved, ""),
        (watch.state, ""),
        ({kept: kept} if kept else {}, ""),
    )
    for (name, wrong, change), (found, right) in zip(_NOTICES, noticed, strict=True):
        if found:
            hook, what = next(iter(found.items()))
            own.findings.append(failed(name, wrong.format(hook, what), change, hook))
        else:
            own.findings.append(passed(name, right))


def _run(own: Examination, ground: Ground, watch: Watch) -> str:
    own.played[ground] = played = play(own.defense, ground, watch=watch)
    return f"{ground.model}, {len(played.clients)} clients"


_NOTICES = (
    (
        "arguments untouched",
        "{} changed its argument {} in place.",
        "Make a new tensor (x + 1, not x += 1); hooks of one step share their arguments.",
    ),
    (
        "global generators untouched",
        "{} moved {}.",
        'Draw from client.rng["defense"], or from the rng that the hook is given.',
    ),
    (
        "process untouched",
        "{} changed {} for the whole process.",
        "Put back what you change before the hook returns; other plugins share the process.",
    ),
    (
        "no state on self",
        "the attribute {} changed during a run.",
        "Keep a client's notes in client.memory and what was agreed in client.plan: one object "
        "serves all clients.",
    ),
)
"""Name of a check, what is wrong with a hook or attribute, and what to change."""


# --- privacy --------------------------------------------------------------------------------------


def _examine_privacy(own: Examination, *, fast: bool) -> None:
    split = [g for g in own.played if g.cut]
    whole = [g for g in own.played if not g.cut]
    probes = Probes(defense=own.defense, split=(split or whole)[-1], whole=(whole or split)[-1])
    own.add("guarantee agrees with mechanisms", lambda: _guarantee(own.defense))
    own.add("which values are sent", lambda: _patterns(own, probes))
    if fast:
        own.findings += [skipped(n, LEFT_OUT) for n in ("declared noise", "audit of the proof")]
        return
    own.add("declared noise", lambda: _declared(probes))
    own.add("audit of the proof", lambda: _audit(own))


def _declared(probes: Probes) -> list[Finding]:
    mechanisms = probes.mechanisms()
    if not mechanisms:
        return [skipped("declared noise", "mechanisms() declares none")]
    return check_mechanisms(mechanisms, probes.pairs)


def check_mechanisms(
    mechanisms: Sequence[Mechanism], pairs_of: Callable[[str], Sequence[Pair]]
) -> list[Finding]:
    """One finding per declared mechanism; see `checks_of`."""
    return [
        finding
        for name, check in checks_of(mechanisms, pairs_of)
        for finding in findings_of(name, check)
    ]


def _facts(defense: Defense) -> Facts:
    return Facts(parameters=1000, clients=company(defense), batch=BATCH, records=SAMPLES)


def _guarantee(defense: Defense) -> str:
    """Whether every event's level of noise is one that `mechanisms` declares, and whether its
    sensitivity covers the declared clip."""
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
        raise NotChecked("guarantee() reports no event, so nothing is proven")
    for event in events:
        # Where the gradient is the defense's, clips are of samples of local steps, not of uploads.
        wrong = _contradiction(event, declared, late="gradient" not in defense.owns)
        if wrong is not None:
            change = "Derive both from the same attribute of the defense."
            raise Broken(wrong, change, "guarantee")
    return ", ".join(type(e).__name__ for e in events)


def _contradiction(event: Event, declared: Sequence[Mechanism], *, late: bool) -> str | None:
    """late: whether clips are of whole uploads."""
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


def _strong(own: Examination) -> tuple[Defense, str]:
    """The defense where its strength, or that of every member, is strongest, and what is set."""
    composed = isinstance(own.defense, Composed)
    members = own.defense.members if isinstance(own.defense, Composed) else {"": own.defense}
    ends = {
        f"{name}.{m.strength.setting}" if composed else m.strength.setting: m.strength.strong
        for name, m in members.items()
        if m.strength is not None
    }
    if not ends:
        return own.defense, ""
    try:
        strong = own.rebuild({**own.settings, **ends})
    except ValueError as error:
        raise NotChecked(f"it cannot be made as strong as it says: {error}") from None
    return strong, " at " + ", ".join(f"{name}={value:g}" for name, value in ends.items())


def _proven(defense: Defense) -> float:
    """The smallest epsilon that is proven for a record, under some protocol."""
    facts = [replace(_facts(defense), split=s) for s in (False, True)]
    return min(account(defense, f).eps_record for f in facts)


def _patterns(own: Examination, probes: Probes) -> str:
    strong, at = _strong(own)
    epsilon = _proven(strong)
    if epsilon == math.inf:
        raise NotChecked(f"nothing is proven for a record{at}")
    return check_patterns(strong, probes.whole, epsilon, alone=probes.alone)


def _audit(own: Examination) -> str:
    """A short audit of one release against the proof, at the given settings and where the defense
    is strongest. A claim that it refutes is told, since it may be the paper's; so is that."""
    strong, at = _strong(own)
    settings = {"": own.defense} | {at: strong}
    provable = {at: d for at, d in settings.items() if _proven(d) < math.inf}
    if not provable:
        raise NotChecked("nothing is proven for a record, so nothing can be refuted")
    audits = {at: _audited(defense, at) for at, defense in provable.items()}
    if not any(a.pairs for a in audits.values()):
        skips = next(iter(audits.values())).skipped
        raise NotChecked("; ".join(f"{s.channel}: {s.why}" for s in skips))
    tested, untested = [], []
    for at, made in audits.items():
        judged = [f for f in made.pairs if f.verdict_proof == "consistent"]
        if any(f.eps_record < f.cap for f in judged):
            claim = "" if made.verdict_claim != "violated" else "; it refutes the claim"
            tested.append(
                f"consistent{at}, epsilon of one release >= {made.eps_audited:.3g}{claim}"
            )
        elif judged:
            least = min(judged, key=lambda f: f.eps_record)
            untested.append(
                f"not testable{at}: {least.draws} draws refute no proof above "
                f"{least.cap:.3g}, and it says {least.eps_record:.4g}"
            )
    if not tested:
        raise NotChecked("; ".join(untested) or "no audited input differs in one record")
    return "; ".join([*tested, *untested])


def _audited(defense: Defense, at: str) -> Audit:
    """The audit; Broken if it refutes the proof."""
    made = audit(fresh(defense), draws=AUDIT_DRAWS, confidence=AUDIT_CONFIDENCE)
    if made.verdict_proof == "violated":
        worst = max(
            (f for f in made.pairs if f.verdict_proof == "violated"), key=lambda f: f.eps_lower
        )
        raise Broken(
            f"one release through the real hooks{at} shows an epsilon of at least "
            f"{worst.eps_lower:.4g} ({worst.pair}), but guarantee() proves {worst.eps_record:.4g}.",
            "Count everything that leaves the client, with its true sensitivity.",
            "guarantee",
        )
    return made
