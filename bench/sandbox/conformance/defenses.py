"""The checks of a defense setting, each on the real hooks in tiny federations."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.contract.compose import Composed
from bench.contract.defense import Defense, fresh, unmet
from bench.contract.events import Round
from bench.contract.messages import EVERYONE, UPLOAD_KINDS
from bench.protocols.export import load_seen, save_seen
from bench.sandbox.conformance.contract import Case, Rebuild, check_strength, class_cases, skip
from bench.sandbox.conformance.leaks import check_leaks
from bench.sandbox.conformance.playground import (
    Ground,
    Played,
    digits,
    fitting,
    grounds,
    observe_round,
    play,
)
from bench.sandbox.conformance.proofs import proof_cases
from bench.sandbox.conformance.watching import Watch, attributes, same
from bench.sandbox.findings import Broken, NotChecked, require
from bench.sandbox.rehearsal import Rehearsals
from bench.sandbox.stage import CPU
from bench.seeding import generator

_EQUAL = 1e-4
"""Relative difference that conversions between weights and updates may leave."""


@dataclass(kw_only=True)
class Rounds:
    """The rounds that were played of a defense setting.

    Attributes:
        watch: What was noticed in them.
        played: The runs that worked, by ground.
    """

    defense: Defense
    watch: Watch = field(default_factory=Watch)
    played: dict[Ground, Played] = field(default_factory=dict)

    @property
    def main(self) -> Ground:
        """The ground of the checks that need one: fedavg where the defense is for it."""
        return next((g for g in self.played if g.protocol == "fedavg"), list(self.played)[-1])


def defense_cases(build: Rebuild, settings: Mapping[str, Any], *, fast: bool) -> Iterator[Case]:
    """All checks of a defense, which `build` makes from settings. fast: without those that draw
    often."""
    defense = fresh(build(settings))
    rounds = Rounds(defense=defense)
    if not isinstance(defense, Composed):
        yield from class_cases(type(defense), settings)
        yield "strength", partial(check_strength, defense, settings, build)
    yield "first rounds", partial(first_rounds, rounds)
    yield from rounds.watch.cases()
    if not rounds.played:
        yield "everything else", partial(skip, "it needs a run that works")
        return
    for ground in rounds.played:
        yield f"same seed, same figures ({ground.name})", partial(check_repeats, rounds, ground)
    yield "other draws, other figures", partial(check_draws, rounds)
    yield "values that are not present", partial(check_presence, rounds)
    yield "private data in messages", partial(check_leaks, rounds.played)
    yield "zero strength is no defense", partial(check_zero_strength, rounds, settings, build)
    for ground in rounds.played:
        yield f"composed with the identity ({ground.name})", partial(check_composed, rounds, ground)
    yield "observed and attacked", partial(check_observed, rounds)
    yield from proof_cases(defense, settings, build, list(rounds.played), fast=fast)


def first_rounds(rounds: Rounds) -> list[Case]:
    """A case for every protocol; state, arguments and generators are watched."""
    fit = grounds(fitting(rounds.defense))
    return [(f"runs under {ground.name}", partial(check_run, rounds, ground)) for ground in fit]


def check_run(rounds: Rounds, ground: Ground) -> str:
    """Whether a few rounds can be played."""
    if (lack := unmet(rounds.defense, cut=bool(ground.cut))) is not None:
        raise NotChecked(f"not applicable: {lack}")
    before = attributes(rounds.defense, Defense)
    rounds.played[ground] = played = play(rounds.defense, ground, watch=rounds.watch)
    federation = played.federation
    rounds.watch.compare(before, attributes(federation.defense, Defense))
    return f"{ground.model}, {len(federation.clients)} clients"


def _difference(a: Played, b: Played) -> str | None:
    """Where two runs differ, or None."""
    for one, two in zip(a.seen, b.seen, strict=True):
        if [(m.kind, m.sender, m.step) for m in one] != [(m.kind, m.sender, m.step) for m in two]:
            return "the messages that are sent"
        for m, n in zip(one, two, strict=True):
            for name, part in m.parts.items():
                if name not in n.parts or not same(part.values, n.parts[name].values):
                    return f"'{name}' in message '{m.kind}' of {m.sender}"
                if not same(part.presence(), n.parts[name].presence()):
                    return f"what is present of '{name}' in message '{m.kind}'"
    mine, other = a.federation.state, b.federation.state
    return next((f"the model's '{n}'" for n in mine if not same(mine[n], other[n])), None)


def check_repeats(rounds: Rounds, ground: Ground) -> str:
    """Whether the same seed gives the same figures."""
    different = _difference(rounds.played[ground], play(rounds.defense, ground))
    require(different is None, f"two runs with one seed differ: {different}.")
    return "bit for bit"


def check_draws(rounds: Rounds) -> str:
    """Whether declared randomness follows the client's stream."""
    random = [m for m in rounds.defense.mechanisms_in(Round()) if m.random and not m.remembers]
    if not random:
        raise NotChecked("mechanisms() declares no randomness")
    shared = next((g for g in rounds.played if g.labels == "shared"), rounds.main)
    channels = dict.fromkeys("upload" if m.of in UPLOAD_KINDS else m.of for m in random)
    for channel in channels:
        kinds = UPLOAD_KINDS if channel == "upload" else (channel,)
        ground = rounds.main if channel == "upload" else shared
        seen = (play(rounds.defense, ground, draws=draws, rounds=1).seen[0] for draws in (1, 2))
        one, other = (
            [p.values for m in messages if m.kind in kinds for p in m.parts.values()]
            for messages in seen
        )
        require(
            not one or not all(same(a, b) for a, b in zip(one, other, strict=True)),
            f"noise on {channel} is declared, but other draws of the client's stream give the same "
            "message.",
            channel,
        )
    return ", ".join(channels)


def check_presence(rounds: Rounds) -> str:
    """Whether the server reads a value that is not present, or is given one."""
    withheld = [
        (ground, m, name, part)
        for ground, run in rounds.played.items()
        for messages in run.seen
        for m in messages
        for name, part in m.parts.items()
        if part.present is not None and not bool(part.present.all())
    ]
    if not withheld:
        raise NotChecked("the defense withholds nothing")
    under = list(dict.fromkeys(ground for ground, *_ in withheld))
    for ground in under:
        poisoned = play(rounds.defense, ground, watch=Watch(poisons=True)).federation.state
        for key, value in rounds.played[ground].federation.state.items():
            require(
                same(value, poisoned[key]),
                f"under {ground.name} the model's '{key}' depends on values that were not sent.",
                "mix" if "mix" in rounds.defense.owns else "aggregate",
            )
    for _, message, key, part in withheld:
        require(
            len(part.values[~part.presence()].unique()) <= 1,
            f"message '{message.kind}' carries values of '{key}' that it says are withheld.",
            "upload",
        )
    return f"not read under {', '.join(g.name for g in under)}"


def check_zero_strength(rounds: Rounds, settings: Mapping[str, Any], build: Rebuild) -> str:
    """Whether the settings that should make it the identity do."""
    declared = getattr(rounds.defense, "zero_strength", None)
    if isinstance(rounds.defense, Composed):
        raise NotChecked("a composed defense has no setting of its own")
    if declared is None:
        raise NotChecked(
            "not declared: give the class `zero_strength`, the settings that make it the "
            "identity, if there are any"
        )
    try:
        weak = build({**settings, **declared})
    except ValueError as error:
        raise Broken(f"the settings of zero_strength are refused: {error}") from error
    without, under = (play(d, rounds.main).federation.state for d in (Defense(), weak))
    size = max(float(v.abs().max()) for v in without.values())
    for key, value in without.items():
        off = float((value - under[key]).abs().max())
        require(
            off <= _EQUAL * size,
            f"with {dict(declared)} the model's '{key}' differs by {off:.3g} from the "
            "undefended one's.",
        )
    return f"with {dict(declared)}"


def check_composed(rounds: Rounds, ground: Ground) -> str:
    """Whether a defense beside it that does nothing changes nothing: of a role that is not in
    `owns` the protocol's default is called."""
    both = Composed({"identity": Defense(), "checked": fresh(rounds.defense)})
    different = _difference(rounds.played[ground], play(both, ground))
    require(
        different is None, f"beside a defense that does nothing, something changes: {different}."
    )
    return "nothing changes"


def check_observed(rounds: Rounds) -> str:
    """One observed round as attacks get it: exported, reloaded, rehearsed."""
    data, scene = digits(), observe_round(fresh(rounds.defense), rounds.main)
    seen, network = scene.seen, scene.network
    with tempfile.TemporaryDirectory() as folder:
        save_seen(seen, Path(folder) / "seen")
        again = load_seen(Path(folder) / "seen")
    kinds, reloaded = ([m.kind for m in s.messages] for s in (seen, again))
    require(reloaded == kinds, "the export does not hold the messages.", "say")
    victims = len(seen.clients)
    rng = generator(0, "conformance shadow")
    rehearse = Rehearsals(seen=again, network=network, defense=rounds.defense, rng=rng, device=CPU)
    x = data.aux_x[: 2 * victims].view(victims, 2, *network.shape)
    shadow = rehearse(x[:, :1], data.aux_y[: 2 * victims].view(victims, 2)[:, :1])
    sent = (m for m in again.messages if m.sender.startswith("client-") and m.parts)
    missing = {m.kind for m in sent if m.receiver != EVERYONE} - {m.kind for m in shadow.messages}
    require(
        not missing,
        f"an attacker's rehearsal of the round lacks the message(s) {', '.join(sorted(missing))}.",
    )
    return f"{victims} clients, rehearsed"
