"""The checks of a defense setting, each on the real hooks in tiny federations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.contract.compose import Composed
from bench.contract.defense import Defense
from bench.sandbox.conformance.contract import check_class, check_refusals, check_roles
from bench.sandbox.conformance.findings import (
    Finding,
    HookError,
    WrongAnswer,
    failed,
    passed,
    skipped,
)
from bench.sandbox.conformance.guarantees import check_audit, check_guarantee
from bench.sandbox.conformance.noise import check_mechanisms
from bench.sandbox.conformance.playground import Ground, fitting, grounds, play
from bench.sandbox.conformance.probes import Probes, mechanisms_of
from bench.sandbox.conformance.rounds import Examination, examine_rounds
from bench.sandbox.conformance.snapshots import attributes, changed_attribute
from bench.sandbox.conformance.spying import Watch
from bench.sandbox.neighbours import overrides


def check_defense(
    defense: Defense,
    *,
    settings: Mapping[str, Any],
    rebuild: Callable[[Mapping[str, Any]], Defense] | None,
) -> list[Finding]:
    """All findings on a defense that was built from `settings`."""
    own = Examination(defense=defense, rebuild=rebuild, settings=settings)
    if not isinstance(defense, Composed):
        own.add("class", lambda: check_class(type(defense), Defense))
        own.add("bad settings", lambda: check_refusals(type(defense), settings))
        own.add("roles", lambda: [check_roles(defense, lambda h: overrides(defense, h))])
    _run_everywhere(own)
    if own.played:
        examine_rounds(own)
        _examine_privacy(own)
    else:
        own.findings.append(skipped("everything else", "it needs a run that works"))
    return own.findings


# --- every protocol -------------------------------------------------------------------------------


def _run_everywhere(own: Examination) -> None:
    """Play every protocol that the defense is for; state, arguments and generators are watched."""
    before = attributes(own.defense, Defense)
    needs = own.defense.requires
    try:
        cut = fitting(own.defense)
    except (HookError, WrongAnswer):
        cut = ("lenet", "block1")  # the runs below say what is wrong
    watch = Watch()
    kept: str | None = None
    for ground in grounds(cut):
        name = f"runs under {ground.name}"
        if needs and not ground.cut:
            why = f"not applicable: no {', '.join(sorted(needs))} data leaves the client"
            own.findings.append(skipped(name, why))
            continue

        def run(ground: Ground = ground, name: str = name) -> list[Finding]:
            played = play(own.defense, ground, watch=watch)
            own.played[ground] = played
            return [passed(name, f"{ground.model}, {len(played.clients)} clients")]

        own.add(name, run)
        if ground in own.played:
            kept = kept or changed_attribute(
                before, attributes(own.played[ground].defense, Defense)
            )
    own.findings += [_arguments(watch), _generators(watch), _memory(kept)]


def _arguments(watch: Watch) -> Finding:
    name = "arguments untouched"
    for hook, path in watch.changed.items():
        return failed(
            name, f"{hook} changed its argument {path} in place.",
            "Make a new tensor (x + 1, not x += 1); hooks of one step share their arguments.", hook,
        )  # fmt: skip
    return passed(name, f"{len(watch.called)} hooks watched")


def _generators(watch: Watch) -> Finding:
    name = "global generators untouched"
    for hook, generator_name in watch.moved.items():
        return failed(
            name, f"{hook} moved the global generator of {generator_name}.",
            'Draw from client.rng["defense"], or from the rng that the hook is given.', hook,
        )  # fmt: skip
    return passed(name)


def _memory(kept: str | None) -> Finding:
    name = "no state on self"
    if kept is not None:
        return failed(
            name, f"the attribute {kept} changed during a run.",
            "Keep a client's notes in client.memory and what was agreed in client.plan: one object "
            "serves all clients.", kept,
        )  # fmt: skip
    return passed(name)


# --- privacy --------------------------------------------------------------------------------------


def _examine_privacy(own: Examination) -> None:
    split = [g for g in own.played if g.cut]
    whole = [g for g in own.played if not g.cut]
    probes = Probes(
        defense=own.defense, split=(split or whole)[-1], whole=(whole or split)[-1]
    )  # fmt: skip
    own.add("declared noise", lambda: _declared(own, probes))
    own.add("guarantee", lambda: check_guarantee(own.defense))
    own.add("audit", lambda: check_audit(own.defense))


def _declared(own: Examination, probes: Probes) -> list[Finding]:
    mechanisms = mechanisms_of(probes)
    if not mechanisms:
        return [skipped("declared noise", "mechanisms() declares none")]
    return check_mechanisms(mechanisms, probes.pairs)
