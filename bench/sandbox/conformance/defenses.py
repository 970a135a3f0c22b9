"""The checks of a defense setting, each on the real hooks in tiny federations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.contract.compose import Composed
from bench.contract.defense import Defense
from bench.sandbox.conformance.contract import check_class, check_roles
from bench.sandbox.conformance.findings import Broken, Finding, skipped
from bench.sandbox.conformance.guarantees import check_audit, check_guarantee
from bench.sandbox.conformance.noise import check_mechanisms
from bench.sandbox.conformance.playground import Ground, fitting, grounds, play
from bench.sandbox.conformance.probes import Probes, mechanisms_of
from bench.sandbox.conformance.rounds import Examination, examine_rounds
from bench.sandbox.conformance.snapshots import attributes, changed_attribute
from bench.sandbox.conformance.spying import Watch
from bench.sandbox.hooked import PluginFault


def check_defense(
    defense: Defense,
    *,
    settings: Mapping[str, Any],
    rebuild: Callable[[Mapping[str, Any]], Defense] | None,
) -> list[Finding]:
    """All findings on a defense.

    Args:
        defense: Built from the settings.
        settings: Of its constructor.
        rebuild: Builds it from other settings, None for a composed one.
    """
    own = Examination(defense=defense, rebuild=rebuild, settings=settings)
    if not isinstance(defense, Composed):
        own.findings += check_class(type(defense), Defense, settings)
        own.add("roles", lambda: check_roles(defense))
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
    except PluginFault:
        cut = ("lenet", "block1")  # the runs below say what is wrong
    watch = Watch()
    kept: str | None = None
    for ground in grounds(cut):
        name = f"runs under {ground.name}"
        if needs and not ground.cut:
            why = f"not applicable: no {', '.join(sorted(needs))} data leaves the client"
            own.findings.append(skipped(name, why))
            continue

        def run(ground: Ground = ground) -> str:
            own.played[ground] = play(own.defense, ground, watch=watch)
            return f"{ground.model}, {len(own.played[ground].clients)} clients"

        own.add(name, run)
        if ground in own.played:
            kept = kept or changed_attribute(
                before, attributes(own.played[ground].defense, Defense)
            )
    own.add("arguments untouched", lambda: _arguments(watch))
    own.add("global generators untouched", lambda: _generators(watch))
    own.add("no state on self", lambda: _memory(kept))


def _arguments(watch: Watch) -> str:
    for hook, path in watch.changed.items():
        raise Broken(
            f"{hook} changed its argument {path} in place.",
            "Make a new tensor (x + 1, not x += 1); hooks of one step share their arguments.",
            hook,
        )
    return f"{len(watch.called)} hooks watched"


def _generators(watch: Watch) -> str:
    for hook, generator_name in watch.moved.items():
        raise Broken(
            f"{hook} moved the global generator of {generator_name}.",
            'Draw from client.rng["defense"], or from the rng that the hook is given.',
            hook,
        )
    return ""


def _memory(kept: str | None) -> str:
    if kept is not None:
        raise Broken(
            f"the attribute {kept} changed during a run.",
            "Keep a client's notes in client.memory and what was agreed in client.plan: one object "
            "serves all clients.",
            kept,
        )
    return ""


# --- privacy --------------------------------------------------------------------------------------


def _examine_privacy(own: Examination) -> None:
    split = [g for g in own.played if g.cut]
    whole = [g for g in own.played if not g.cut]
    probes = Probes(defense=own.defense, split=(split or whole)[-1], whole=(whole or split)[-1])
    own.add("declared noise", lambda: _declared(own, probes))
    own.add("guarantee", lambda: check_guarantee(own.defense))
    own.add("audit", lambda: check_audit(own.defense))


def _declared(own: Examination, probes: Probes) -> list[Finding]:
    mechanisms = mechanisms_of(probes)
    if not mechanisms:
        return [skipped("declared noise", "mechanisms() declares none")]
    return check_mechanisms(mechanisms, probes.pairs)
