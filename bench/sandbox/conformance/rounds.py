"""Checks of whole rounds: seeds, presence, leaks, zero strength, composition, observation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.compose import Composed
from bench.contract.defense import Defense, fresh
from bench.contract.mechanisms import (
    BernoulliMask,
    GaussianNoise,
    LabelNoise,
    LaplaceNoise,
    Mechanism,
    SignPerturbation,
    SmashedNoise,
)
from bench.contract.messages import EVERYONE, SERVER, UPLOAD_KINDS, Message, Sealed, as_kind
from bench.protocols.export import load_seen, save_seen
from bench.protocols.observe import play_shadow
from bench.sandbox.conformance.findings import Finding, failed, guarded, passed, skipped
from bench.sandbox.conformance.leaks import check_leaks, check_sealed
from bench.sandbox.conformance.playground import (
    LR,
    Draw,
    Ground,
    Played,
    noise_dataset,
    play,
    seen_of,
)
from bench.sandbox.conformance.snapshots import same
from bench.sandbox.conformance.spying import Watch
from bench.seeding import generator

_EQUAL = 1e-4
"""Relative difference that conversions between weights and updates may leave."""


@dataclass(kw_only=True)
class Examination:
    """One defense setting under examination. rebuild: the same with other settings, None for a
    composed defense. played: the runs of the grounds that worked."""

    defense: Defense
    rebuild: Callable[[Mapping[str, Any]], Defense] | None
    settings: Mapping[str, Any]
    findings: list[Finding] = field(default_factory=list)
    played: dict[Ground, Played] = field(default_factory=dict)

    def add(self, name: str, check: Callable[[], Sequence[Finding]]) -> None:
        self.findings += guarded(name, check)


def examine_rounds(own: Examination) -> None:
    for ground, played in own.played.items():
        name = f"same seed, same figures ({ground.name})"
        own.add(name, lambda g=ground, p=played, n=name: _repeats(own, g, p, n))  # type: ignore[misc]
    ground = main_ground(own)
    own.add("other draws", lambda: _other_draws(own, ground))
    own.add("presence", lambda: _presence(own, ground))
    own.add("byte count", lambda: [_bytes(own)])
    own.add("private data in messages", lambda: _leaks(own))
    own.add("zero strength", lambda: _zero_strength(own, ground))
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


def _repeats(own: Examination, ground: Ground, first: Played, name: str) -> list[Finding]:
    different = _differs(first, play(own.defense, ground))
    if different is None:
        return [passed(name, "bit for bit")]
    return [failed(
        name, f"two runs with one seed differ: {different}.",
        'Draw from client.rng["defense"] alone, and keep nothing between runs.', "",
    )]  # fmt: skip


def _random(mechanisms: Sequence[Mechanism]) -> dict[str, tuple[str, ...]]:
    """Kinds of messages by the declared mechanisms that make them random."""
    found: dict[str, tuple[str, ...]] = {}
    for m in mechanisms:
        noisy = (
            (isinstance(m, (GaussianNoise, SmashedNoise, LabelNoise)) and m.std > 0)
            or (isinstance(m, LaplaceNoise) and m.scale > 0)
            or (isinstance(m, SignPerturbation) and (m.keep < 1 or m.low < m.high))
            or (isinstance(m, BernoulliMask) and m.sampled)
        )
        if noisy:
            kinds = UPLOAD_KINDS if m.of in UPLOAD_KINDS else (m.of,)
            found[type(m).__name__] = kinds
    return found


def _other_draws(own: Examination, ground: Ground) -> list[Finding]:
    """Whether declared randomness follows the client's stream."""
    name, declared = "other draws, other figures", _random(own.defense.mechanisms())
    if not declared:
        return [skipped(name, "mechanisms() declares no randomness")]
    shared = [g for g in own.played if g.labels == "shared"]
    found = []
    for mechanism, kinds in declared.items():
        where = ground if kinds == UPLOAD_KINDS else (shared or [ground])[0]
        runs = [play(own.defense, where, draw=Draw(defense=d), rounds=1) for d in (1, 2)]
        values = [
            [p.values for m in r.seen[0] if m.kind in kinds for p in m.parts.values()] for r in runs
        ]
        if not values[0]:
            found.append(skipped(name, f"{mechanism}: no {kinds[0]} left a client"))
        elif all(same(a, b) for a, b in zip(*values, strict=True)):
            found.append(failed(
                name, f"{mechanism} is declared, but other draws of the client's stream give the "
                "same message.", 'Draw from client.rng["defense"], which follows the run\'s seed.',
                "upload" if kinds == UPLOAD_KINDS else kinds[0],
            ))  # fmt: skip
        else:
            found.append(passed(name, mechanism))
    return found


def _presence(own: Examination, ground: Ground) -> list[Finding]:
    """Whether the server reads a value that is not present, or is given one."""
    name, found = "values that are not present", []
    sent = [
        (g, m, n, p)
        for g, run in own.played.items()
        for messages in run.seen
        for m in messages
        for n, p in m.parts.items()
        if p.present is not None and not bool(p.present.all())
    ]
    if not sent:
        return [skipped(name, "the defense withholds nothing")]
    for g in dict.fromkeys(g for g, *_ in sent):
        run = play(own.defense, g, watch=Watch(poisons=True))
        for key, value in own.played[g].state.items():
            if not same(value, run.state[key]):
                hook = "mix" if "mix" in own.defense.owns else "aggregate"
                return [failed(
                    name, f"under {g.name} the model's '{key}' depends on values that were not "
                    "sent.", "Read part.values only where part.presence() is True.", hook,
                )]  # fmt: skip
        found.append(g.name)
    for _, message, key, part in sent:
        absent = part.values[~part.presence()]
        if len(absent) > 1 and len(absent.unique()) > 1:
            return [failed(
                name, f"message '{message.kind}' carries values of '{key}' that it says are "
                "withheld.", "Set withheld values to 0 (bench.toolkit.vectors.showing).", "upload",
            )]  # fmt: skip
    return [passed(name, f"not read under {', '.join(found)}")]


def _bytes(own: Examination) -> Finding:
    """Sizes, which `returns` has checked at every hook; here they are told."""
    run = own.played[main_ground(own)]
    sent = [m for m in run.seen[0] if m.kind in UPLOAD_KINDS]
    size = sum(m.n_bytes for m in sent) / max(1, len(sent))
    return passed("byte count", f"{size:.0f} bytes per upload")


def _leaks(own: Examination) -> list[Finding]:
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
    found = check_sealed(boxes)
    for ground, played in own.played.items():
        leaks = check_leaks(ground, played)
        if leaks[0].status == "failed" or ground == list(own.played)[-1]:
            return found + leaks
    return found


def _zero_strength(own: Examination, ground: Ground) -> list[Finding]:
    name = "zero strength is no defense"
    declared = getattr(own.defense, "zero_strength", None)
    if own.rebuild is None:
        return [skipped(name, "a composed defense has no setting of its own")]
    if declared is None:
        return [skipped(
            name, "not declared: give the class `zero_strength`, the settings that make it the "
            "identity, if there are any",
        )]  # fmt: skip
    try:
        weak = own.rebuild({**own.settings, **declared})
    except ValueError as error:
        return [failed(
            name, f"the settings of zero_strength are refused: {error}",
            "Declare settings that the constructor takes.", "zero_strength",
        )]  # fmt: skip
    without, under = play(Defense(), ground), play(weak, ground)
    size = max(float(v.abs().max()) for v in without.state.values())
    for key, value in without.state.items():
        off = float((value - under.state[key]).abs().max())
        if off > _EQUAL * size:
            return [failed(
                name, f"with {dict(declared)} the model's '{key}' differs by {off:.3g} from the "
                "undefended one's.", "Find what still acts at that strength, or mend the "
                "declaration.", "zero_strength",
            )]  # fmt: skip
    return [passed(name, f"with {dict(declared)}")]


def _composed(own: Examination, ground: Ground) -> list[Finding]:
    name = "composed with the identity"
    members = {"identity": Defense(), "checked": fresh(own.defense)}
    different = _differs(own.played[ground], play(Composed(members), ground))
    if different is None:
        return [passed(name, "nothing changes")]
    return [failed(
        name, f"beside a defense that does nothing, something changes: {different}.",
        "Name every exclusive role in owns, and change no other defense's messages.", "owns",
    )]  # fmt: skip


def _observed(own: Examination, ground: Ground) -> list[Finding]:
    """One observed round as attacks get it: exported, reloaded, read, rehearsed."""
    name, data = "observed and attacked", noise_dataset()
    seen, _, network = seen_of(fresh(own.defense), ground, data)
    with tempfile.TemporaryDirectory() as folder:
        save_seen(seen, Path(folder) / "seen")
        again = load_seen(Path(folder) / "seen")
    if [m.kind for m in again.messages] != [m.kind for m in seen.messages]:
        return [failed(name, "the export does not hold the messages.", "Use plain parts.", "say")]
    update = _updates(again)
    victims = len(seen.clients)
    shadow = play_shadow(
        again, network=network, defense=fresh(own.defense),
        x=data.aux_x[: 2 * victims].view(victims, 2, *network.shape)[:, :1],
        y=data.aux_y[: 2 * victims].view(victims, 2)[:, :1],
        rng=generator(0, "conformance shadow"), device=torch.device("cpu"),
    )  # fmt: skip
    rehearsed = {m.kind for m in shadow.messages}
    if _kinds(again.messages) - rehearsed:
        missing = ", ".join(sorted(_kinds(again.messages) - rehearsed))
        return [failed(
            name, f"an attacker's rehearsal of the round lacks the message(s) {missing}.",
            "Let every run from the same state send the same kinds of messages, or say in "
            "public_plans what was agreed.", "public_plans",
        )]  # fmt: skip
    return [passed(name, f"{victims} clients, {update} values of an upload visible, rehearsed")]


def _kinds(messages: Sequence[Message]) -> set[str]:
    """Kinds of what clients send to the server itself."""
    return {m.kind for m in messages if m.sender != SERVER and m.receiver != EVERYONE
            and m.sender.startswith("client-") and m.parts}  # fmt: skip


def _updates(seen: Seen) -> int:
    """Visible coordinates of the first client's upload, read as an attack reads them."""
    kind = seen.upload_kind()
    if kind is None:
        return 0
    (message,) = seen.of(seen.clients[0], kind)
    base = {n: seen.before[n] for n in message.parts}
    parts = as_kind(message, "update", base=base, lr=LR).parts
    return sum(int(p.presence().sum()) for p in parts.values())
