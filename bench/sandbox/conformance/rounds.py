"""Checks of whole rounds: seeds, presence, leaks, zero strength, composition, observation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.compose import Composed
from bench.contract.defense import Defense, fresh
from bench.contract.hooks import members_of
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import EVERYONE, UPLOAD_KINDS, Message, Sealed, as_kind
from bench.protocols.export import load_seen, save_seen
from bench.sandbox.conformance.findings import (
    Broken,
    Finding,
    NotChecked,
    failed,
    findings_of,
    passed,
    skipped,
)
from bench.sandbox.conformance.leaks import check_leaks, check_sealed
from bench.sandbox.conformance.playground import LR, Ground, Played, noise_dataset, play, seen_of
from bench.sandbox.conformance.watching import Watch, same
from bench.sandbox.rehearsal import play_shadow
from bench.sandbox.stage import CPU
from bench.seeding import generator

_EQUAL = 1e-4
"""Relative difference that conversions between weights and updates may leave."""


@dataclass(kw_only=True)
class Examination:
    """One defense setting under examination.

    Attributes:
        rebuild: Builds it from other settings.
        played: The runs of the grounds that worked.
    """

    defense: Defense
    rebuild: Callable[[Mapping[str, Any]], Defense]
    settings: Mapping[str, Any]
    findings: list[Finding] = field(default_factory=list)
    played: dict[Ground, Played] = field(default_factory=dict)

    def add(self, name: str, check: Callable[[], str | Sequence[Finding]]) -> None:
        """Run a check, whose fault becomes a finding."""
        self.findings += findings_of(name, check, *members_of(self.defense))


def examine_rounds(own: Examination) -> None:
    """The checks that need whole rounds."""
    for ground in own.played:
        own.add(f"same seed, same figures ({ground.name})", partial(_repeats, own, ground))
    ground = main_ground(own)
    own.add("other draws, other figures", lambda: _other_draws(own, ground))
    own.add("values that are not present", lambda: _presence(own))
    own.add("sealed boxes", lambda: _sealed(own))
    own.add("private data in messages", lambda: _leaks(own))
    own.add("zero strength is no defense", lambda: _zero_strength(own, ground))
    own.add("composed with the identity", lambda: _composed(own, ground))
    own.add("observed and attacked", lambda: _observed(own, ground))


def main_ground(own: Examination) -> Ground:
    """The ground of the checks that need one: fedavg where the defense is for it."""
    return next((g for g in own.played if g.protocol == "fedavg"), list(own.played)[-1])


def _differs(a: Played, b: Played) -> str | None:
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
    for name, value in a.state.items():
        if not same(value, b.state[name]):
            return f"the model's '{name}'"
    return None


def _repeats(own: Examination, ground: Ground) -> str:
    different = _differs(own.played[ground], play(own.defense, ground))
    if different is None:
        return "bit for bit"
    raise Broken(
        f"two runs with one seed differ: {different}.",
        'Draw from client.rng["defense"] alone, and keep nothing between runs.',
    )


def _other_draws(own: Examination, ground: Ground) -> list[Finding]:
    """Whether declared randomness follows the client's stream."""
    name = "other draws, other figures"
    random = [m for m in own.defense.mechanisms() if m.random and not m.remembers]
    declared = {type(m).__name__: m for m in random}
    if not declared:
        raise NotChecked("mechanisms() declares no randomness")
    return [_other_draw(own, ground, name, m) for m in declared.values()]


def _other_draw(own: Examination, ground: Ground, name: str, mechanism: Mechanism) -> Finding:
    kind, kinds, hook = type(mechanism).__name__, (mechanism.of,), str(mechanism.of)
    if mechanism.of in UPLOAD_KINDS:
        kinds, hook = UPLOAD_KINDS, "upload"  # type: ignore[assignment]
    else:
        ground = next((g for g in own.played if g.labels == "shared"), ground)
    runs = [play(own.defense, ground, draws=d, rounds=1) for d in (1, 2)]
    values = [
        [p.values for m in r.seen[0] if m.kind in kinds for p in m.parts.values()] for r in runs
    ]
    if not values[0]:
        return skipped(name, f"{kind}: no {kinds[0]} left a client")
    if not all(same(a, b) for a, b in zip(*values, strict=True)):
        return passed(name, kind)
    return failed(
        name,
        f"{kind} is declared, but other draws of the client's stream give the same message.",
        'Draw from client.rng["defense"], which follows the run\'s seed.',
        hook,
    )


def _presence(own: Examination) -> str:
    """Whether the server reads a value that is not present, or is given one."""
    sent = [
        (g, m, n, p)
        for g, run in own.played.items()
        for messages in run.seen
        for m in messages
        for n, p in m.parts.items()
        if p.present is not None and not bool(p.present.all())
    ]
    if not sent:
        raise NotChecked("the defense withholds nothing")
    withheld_under = list(dict.fromkeys(g for g, *_ in sent))
    for g in withheld_under:
        run = play(own.defense, g, watch=Watch(poisons=True))
        for key, value in own.played[g].state.items():
            if not same(value, run.state[key]):
                raise Broken(
                    f"under {g.name} the model's '{key}' depends on values that were not sent.",
                    "Read part.values only where part.presence() is True.",
                    "mix" if "mix" in own.defense.owns else "aggregate",
                )
    for _, message, key, part in sent:
        absent = part.values[~part.presence()]
        if len(absent) > 1 and len(absent.unique()) > 1:
            raise Broken(
                f"message '{message.kind}' carries values of '{key}' that it says are withheld.",
                "Set withheld values to 0 (bench.toolkit.vectors.showing).",
                "upload",
            )
    return f"not read under {', '.join(g.name for g in withheld_under)}"


def _sealed(own: Examination) -> list[Finding]:
    boxes: list[tuple[Sealed, Mapping[str, Tensor]]] = []
    own_values: dict[str, Mapping[str, Tensor]] = {}

    def uploaded(arguments: tuple[Any, ...], result: Any) -> None:
        local, client = arguments[1], arguments[2]
        update = {n: local.end[n] - v for n, v in local.broadcast.items()}
        own_values[client.id] = {**update, **{f"end {n}": v for n, v in local.end.items()}}

    def finished(arguments: tuple[Any, ...], result: Any) -> None:
        for client, messages in result.items():
            boxes.extend((s, own_values[client]) for m in messages for s in m.sealed.values())

    watch = Watch(listeners={"upload": uploaded, "finish_uploads": finished})
    play(own.defense, main_ground(own), watch=watch, rounds=1)
    return [passed("sealed boxes", check_sealed(boxes))] if boxes else []


def _leaks(own: Examination) -> str:
    return [check_leaks(ground, played) for ground, played in own.played.items()][-1]


def _zero_strength(own: Examination, ground: Ground) -> str:
    declared = getattr(own.defense, "zero_strength", None)
    if isinstance(own.defense, Composed):
        raise NotChecked("a composed defense has no setting of its own")
    if declared is None:
        raise NotChecked(
            "not declared: give the class `zero_strength`, the settings that make it the "
            "identity, if there are any"
        )
    try:
        weak = own.rebuild({**own.settings, **declared})
    except ValueError as error:
        raise Broken(
            f"the settings of zero_strength are refused: {error}",
            "Declare settings that the constructor takes.",
            "zero_strength",
        ) from error
    without, under = play(Defense(), ground), play(weak, ground)
    size = max(float(v.abs().max()) for v in without.state.values())
    for key, value in without.state.items():
        off = float((value - under.state[key]).abs().max())
        if off > _EQUAL * size:
            raise Broken(
                f"with {dict(declared)} the model's '{key}' differs by {off:.3g} from the "
                "undefended one's.",
                "Find what still acts at that strength, or mend the declaration.",
                "zero_strength",
            )
    return f"with {dict(declared)}"


def _composed(own: Examination, ground: Ground) -> str:
    members = {"identity": Defense(), "checked": fresh(own.defense)}
    different = _differs(own.played[ground], play(Composed(members), ground))
    if different is None:
        return "nothing changes"
    raise Broken(
        f"beside a defense that does nothing, something changes: {different}.",
        "Name every exclusive role in owns, and change no other defense's messages.",
        "owns",
    )


def _observed(own: Examination, ground: Ground) -> str:
    """One observed round as attacks get it: exported, reloaded, read, rehearsed."""
    data = noise_dataset()
    seen, _, network = seen_of(fresh(own.defense), ground, data)
    with tempfile.TemporaryDirectory() as folder:
        save_seen(seen, Path(folder) / "seen")
        again = load_seen(Path(folder) / "seen")
    if [m.kind for m in again.messages] != [m.kind for m in seen.messages]:
        raise Broken("the export does not hold the messages.", "Use plain parts.", "say")
    update = _updates(again)
    victims = len(seen.clients)
    shadow = play_shadow(
        again,
        network=network,
        defense=fresh(own.defense),
        x=data.aux_x[: 2 * victims].view(victims, 2, *network.shape)[:, :1],
        y=data.aux_y[: 2 * victims].view(victims, 2)[:, :1],
        rng=generator(0, "conformance shadow"),
        device=CPU,
    )
    missing = _kinds(again.messages) - {m.kind for m in shadow.messages}
    if missing:
        raise Broken(
            "an attacker's rehearsal of the round lacks the message(s) "
            f"{', '.join(sorted(missing))}.",
            "Let every run from the same state send the same kinds of messages, or say in "
            "public_plans what was agreed.",
            "public_plans",
        )
    return f"{victims} clients, {update} values of an upload visible, rehearsed"


def _kinds(messages: Sequence[Message]) -> set[str]:
    """Kinds of what clients send to the server itself."""
    return {
        m.kind
        for m in messages
        if m.sender.startswith("client-") and m.receiver != EVERYONE and m.parts
    }


def _updates(seen: Seen) -> int:
    """Visible coordinates of the first client's upload, read as an attack reads them."""
    kind = seen.upload_kind()
    if kind is None:
        return 0
    (message,) = seen.of(seen.clients[0], kind)
    base = {n: seen.before[n] for n in message.parts}
    parts = as_kind(message, "update", base=base, lr=LR).parts
    return sum(int(p.presence().sum()) for p in parts.values())
