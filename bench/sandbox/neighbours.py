"""Pairs of neighbouring inputs, and what the server receives for each through the real hooks.

No defense is named here: the scale of an input comes from the public mechanisms, what cannot be
played from the hooks and roles that a defense has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor

from bench.contract.compose import Composed
from bench.contract.defense import Client, Defense, Local, fresh
from bench.contract.events import Unit
from bench.contract.mechanisms import Clip, SmashedNoise
from bench.contract.messages import EVERYONE, SERVER, Message, Part, Stage
from bench.metrics.distinguish import Array
from bench.models import build
from bench.protocols.federation import STREAMS, Federation
from bench.protocols.local_training import LocalWork
from bench.seeding import derived_seed, generator

Channel = Literal["upload", "smashed", "labels", "smashed and labels", "coordination"]
Row = Mapping[str, Tensor]
"""What the server received in one draw, flat and by name."""
Release = Callable[[bool, int, torch.Generator], list[Row]]

VICTIM = "client-0"
CLASSES = 10
_MOST_SMASHED = 4096
_PILOT_DRAWS = 24
_CLEAR = "it passes unchanged; where a protocol sends it, it goes in the clear."
_UNPLAYABLE = (ValueError, LookupError, TypeError, AttributeError)
"""What a hook raises that needs more than an audit prepares."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two neighbouring inputs of one channel.

    units: for which the inputs are neighbours; a record or coordinate is replaced, a client is
    added or removed (the update is 0 in its place). what: how they differ. release(second, draws,
    rng): what the server received of the first or second input, one row per draw. parameters,
    split, clients: facts of the release. covered: whether the defense acts on the channel.
    share: of the audit's draws that are affordable here.
    """

    name: str
    channel: Channel
    units: frozenset[Unit]
    what: str
    release: Release
    parameters: int
    clients: int = 1
    split: bool = False
    covered: bool = True
    share: float = 1.0

    def outputs(self, draws: int, *, seed: int) -> tuple[Array, Array]:
        """Float64 [draws, F] of the first and the second input, in the same columns."""
        rows = [self.release(w, draws, generator(seed, self.name, int(w))) for w in (False, True)]
        return tabulate(*rows)


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A channel that cannot be audited, and why."""

    channel: str
    why: str


def neighbours(
    defense: Defense, *, parameters: int, seed: int
) -> tuple[tuple[Pair, ...], tuple[Skipped, ...]]:
    """All pairs that a defense setting can be audited on. parameters: size D of the tensors."""
    pairs: list[Pair] = []
    skipped: list[Skipped] = []
    for channel, find in (
        ("upload", _upload_pairs),
        ("smashed", _split_pairs),
        ("coordination", _federation_pairs),
    ):
        try:
            for pair in find(defense, parameters, seed):
                if isinstance(pair, Pair):
                    pair.release(False, 2, generator(seed, "probe"))
                    pairs.append(pair)
                else:
                    skipped.append(pair)
        except _UNPLAYABLE as error:
            skipped.append(Skipped(channel=channel, why=f"its hooks cannot be played: {error}"))
    return tuple(pairs), tuple(skipped)


def overrides(defense: Defense, hook: str) -> bool:
    """Whether the defense, or a member of a composed one, has its own version of a hook."""
    members = defense.members.values() if isinstance(defense, Composed) else [defense]
    return any(getattr(type(m), hook) is not getattr(Defense, hook) for m in members)


# --- what a server receives, as numbers -------------------------------------------------------


def features(messages: Iterable[Message]) -> dict[str, Tensor]:
    """Values that are present, presence where it is not plain, and sizes, by name."""
    found: dict[str, Tensor] = {}
    for i, message in enumerate(messages):
        at = f"{i} {message.sender} {message.kind}"
        found[f"{at} bytes"] = torch.tensor([message.n_bytes], dtype=torch.float64)
        for name, part in message.parts.items():
            found |= {f"{at} {name}{k}": v for k, v in _of_part(part).items()}
        for name, sealed in message.sealed.items():
            found[f"{at} {name} sealed"] = sealed.covers.double().flatten()
    return found


def _of_part(part: Part) -> dict[str, Tensor]:
    values = part.values.detach().double()
    if part.present is None:
        return {"": values.flatten()}
    there = part.present
    return {"": torch.where(there, values, 0.0).flatten(), " sent": there.double().flatten()}


def tabulate(a: Sequence[Row], b: Sequence[Row]) -> tuple[Array, Array]:
    """Rows of two inputs as matrices with the same columns. Where rows differ in shape, what one
    lacks is 0, and a column beside every tensor holds its size, -1 where it is missing."""
    rows = [*a, *b]
    sizes: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            sizes[name] = max(sizes.get(name, 0), value.numel())
    if sizes and all(
        len(r) == len(sizes) and all(r[n].numel() == k for n, k in sizes.items()) for r in rows
    ):
        out = torch.stack([torch.cat([row[n] for n in sizes]) for row in rows])
        return out[: len(a)].numpy(), out[len(a) :].numpy()
    out = torch.zeros(len(rows), sum(sizes.values()) + len(sizes), dtype=torch.float64)
    for i, row in enumerate(rows):
        at = 0
        for name, size in sizes.items():
            value = row.get(name, out.new_zeros(0))
            out[i, at : at + len(value)] = value
            out[i, at + size] = len(value) if name in row else -1
            at += size + 1
    return out[: len(a)].numpy(), out[len(a) :].numpy()


# --- a client alone ---------------------------------------------------------------------------


def _victim(rng: torch.Generator) -> Client:
    return Client(
        id=VICTIM, x=torch.zeros(1, 1), y=torch.zeros(1, dtype=torch.int64),
        rng=dict.fromkeys(STREAMS, rng),
    )  # fmt: skip


def _prepared(defense: Defense, stages: Sequence[Stage], rng: torch.Generator) -> Client:
    """A client that has heard the third parties, whose randomness is fresh."""
    client = _victim(rng)
    parties = defense.third_parties(_token(rng))
    roster = [f"client-{i}" for i in range(defense.together)]
    for stage in stages:
        heard = [m for p in parties.values() for m in p.begin(stage, roster, 0, 0)]
        defense.hear(stage, client, [m for m in heard if m.receiver in (VICTIM, EVERYONE)])
    return client


def _token(rng: torch.Generator) -> int:
    return int(torch.randint(2**62, (1,), generator=rng))


# --- uploads ----------------------------------------------------------------------------------


def _upload_pairs(defense: Defense, size: int, seed: int) -> Iterator[Pair | Skipped]:
    before = defense.owns & {"gradient", "joins", "batch"}
    why = None
    if before:
        why = f"the defense acts before the upload too (role {', '.join(sorted(before))})"
    elif overrides(defense, "say") or overrides(defense, "inspect"):
        why = "what is uploaded depends on what clients find or tell each other before"
    if why:
        yield Skipped(channel="upload", why=f"{why}, so that only whole rounds are played.")
        return
    norms = [m for m in defense.mechanisms() if isinstance(m, Clip) and m.of != "smashed"]
    scale = min((m.norm for m in norms), default=10.0)
    l1 = any(m.order == 1 for m in norms)
    one = torch.zeros(size)
    one[0] = scale
    every = torch.ones(size) * scale
    if norms:
        every = every / (size if l1 else size**0.5)
    unit = one / (1.0 if norms else 10.0)
    coordinate: frozenset[Unit] = frozenset({"coordinate", "record"})
    record: frozenset[Unit] = frozenset({"record"})
    covered = overrides(defense, "upload")
    what = "every sign is flipped" + ("" if covered else ", and it is sent as it is")
    everything = ("all signs", record, every, -every, what)
    client: frozenset[Unit] = frozenset({"record", "client"})
    cases = [
        ("one sign", coordinate, one, -one, "one sign is flipped"),
        everything,
        ("zero", client, one if norms else every, one * 0, "the update is 0"),
        ("magnitude", coordinate, 0.1 * unit, 0.2 * unit,
         f"one value is {0.2 * unit[0]:g}, not {0.1 * unit[0]:g}"),
        ("big magnitude", coordinate, 0.5 * unit, unit,
         f"one value is {unit[0]:g}, not {0.5 * unit[0]:g}"),
    ]  # fmt: skip
    for name, units, a, b, what in cases if covered else [everything]:
        yield Pair(
            name=f"upload: {name}", channel="upload", units=units, what=what, parameters=size,
            clients=defense.together, covered=covered, split="smashed" in defense.requires,
            release=_upload(defense, a, b, seed),
        )  # fmt: skip


def _upload(defense: Defense, a: Tensor, b: Tensor, seed: int) -> Release:
    """Uploads of clients whose local training moved the variables by a or b [D]."""
    name = "head.weight"
    params = {name: torch.zeros(1, len(a))}
    state, const = defense.variables(params, [name], generator(seed, "variables"))
    received = defense.receive(state, const)

    def release(second: bool, draws: int, rng: torch.Generator) -> list[Row]:
        update = (b if second else a).view(1, -1)
        local = Local(
            broadcast=received, start=received, end={name: received[name] + update}, const=const,
            grad_sum={name: -update}, lr=1.0, steps=1,
        )  # fmt: skip
        message = Message(
            kind="update", sender=VICTIM, receiver=SERVER, round=0,
            parts={name: Part(values=update)},
        )  # fmt: skip
        alone = not defense.third_parties(0)
        rows: list[Row] = []
        for _ in range(draws):
            client = _victim(rng) if alone else _prepared(defense, ("round", "upload"), rng)
            rows.append(features(defense.upload([message], local, client)))
        return rows

    return release


# --- split learning ---------------------------------------------------------------------------


def _split_pairs(defense: Defense, size: int, seed: int) -> Iterator[Pair | Skipped]:
    rng = generator(seed, "probe")
    split = "smashed" in defense.requires
    y = torch.nn.functional.one_hot(torch.tensor([0, 1]), CLASSES).float()
    labelled = not torch.equal(defense.labels(y, _victim(rng)), y)
    ends, changed = None, False
    if split or overrides(defense, "smashed"):
        ends = _smashed_ends(defense, size, rng)
        if ends is None:
            yield Skipped(
                channel="smashed", why=f"no tensor of up to {_MOST_SMASHED} values suits the hook."
            )
        else:
            part = defense.smashed(ends[1], _prepared(defense, ("round", "step"), rng))
            changed = part.present is not None or not torch.equal(part.values, ends[1])
    if ends is not None and not (split or changed):
        ends = None
        yield Skipped(channel="smashed", why=_CLEAR)
    if split and not labelled:
        yield Skipped(channel="labels", why=_CLEAR)
    both: frozenset[Unit] = frozenset({"label", "record"})
    record: frozenset[Unit] = frozenset({"record"})
    common: dict[str, Any] = {"parameters": size, "clients": defense.together, "split": True}
    if ends is not None:
        width = int((ends[0] != ends[1]).sum())
        what = f"{width} smashed values are {ends[1].max():g}, not {ends[0].min():g}"
        yield Pair(
            name="smashed data", channel="smashed", units=record, what=what, covered=changed,
            release=_step(defense, ends, None), **common,
        )  # fmt: skip
    if labelled:
        labels = (y[:1], y[1:])
        yield Pair(
            name="label", channel="labels", units=both, what="another class",
            release=_step(defense, None, labels), **common,
        )  # fmt: skip
        if ends is not None and changed:
            yield Pair(
                name="smashed data, label", channel="smashed and labels", units=record,
                what=f"{what}, and another class", release=_step(defense, ends, labels), **common,
            )  # fmt: skip


def _smashed_ends(
    defense: Defense, size: int, rng: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """One sample's smashed data [1, ...] at both ends of what the mechanism lets through.

    They differ in at most `size` values, since a claim may be for so many. The shape is the
    first that the hook takes: flat, or tokens, by number of values.
    """
    client = _prepared(defense, ("round", "step"), rng)
    shape = next((s for s in _shapes(size) if _takes(defense, s, client)), None)
    if shape is None:
        return None
    rest, low, high, changed = 0.0, 0.0, 1.0, size
    for mechanism in defense.mechanisms():
        if isinstance(mechanism, SmashedNoise) and mechanism.low is not None:
            rest = low = mechanism.low
            high = low + 1 if mechanism.high is None else mechanism.high
        elif isinstance(mechanism, Clip) and mechanism.of == "smashed":
            low, high = -mechanism.norm, mechanism.norm
            changed = 1
    a, b = (torch.full((1, *shape), rest) for _ in range(2))
    a.view(-1)[:changed], b.view(-1)[:changed] = low, high
    return a, b


def _shapes(size: int) -> Iterator[tuple[int, ...]]:
    yield (size,)
    for values in range(1, _MOST_SMASHED + 1):
        yield (values,)
        yield from ((n, values // n) for n in range(1, values + 1) if values % n == 0)


def _takes(defense: Defense, shape: tuple[int, ...], client: Client) -> bool:
    try:
        defense.smashed(torch.zeros(1, *shape), client)
    except ValueError:
        return False
    return True


def _step(
    defense: Defense, smashed: tuple[Tensor, Tensor] | None, labels: tuple[Tensor, Tensor] | None
) -> Release:
    """Smashed data, labels or both of one sample. Without third parties rows are a batch; with
    them each draw is a step of its own, so that their randomness is drawn anew."""

    def sent(second: bool, rows: int, client: Client) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if smashed is not None:
            part = defense.smashed(smashed[second].repeat_interleave(rows, dim=0), client)
            found |= {f"smashed{k}": v.view(rows, -1) for k, v in _of_part(part).items()}
        if labels is not None:
            y = defense.labels(labels[second].repeat_interleave(rows, dim=0), client)
            found["labels"] = y.double()
        return found

    def release(second: bool, draws: int, rng: torch.Generator) -> list[Row]:
        if not defense.third_parties(0):
            found = sent(second, draws, _victim(rng))
            return [{n: v[i] for n, v in found.items()} for i in range(draws)]
        rows: list[Row] = []
        for _ in range(draws):
            client = _prepared(defense, ("round", "step"), rng)
            rows.append({n: v[0] for n, v in sent(second, 1, client).items()})
        return rows

    return release


# --- whole rounds -----------------------------------------------------------------------------


def _federation_pairs(defense: Defense, size: int, seed: int) -> Iterator[Pair | Skipped]:
    if defense.requires:
        yield Skipped(
            channel="coordination",
            why=f"whole rounds are played without {', '.join(sorted(defense.requires))}.",
        )
        return
    inputs = max(1, (size - 2) // 2)
    releases, pilot = {}, {}
    failure: Exception | None = None
    for name, (x, y) in _records(inputs).items():
        try:
            releases[name] = _rounds(defense, x, y, seed)
            pilot[name] = releases[name](False, _PILOT_DRAWS, generator(seed, "pilot", name))
        except _UNPLAYABLE as error:  # a record that the defense has no room for
            failure = error
    if len(pilot) < 2:
        why = f"no two records can be played in whole rounds: {failure}"
        yield Skipped(channel="coordination", why=why)
        return
    first, second = max(combinations(pilot, 2), key=lambda p: _gap(pilot[p[0]], pilot[p[1]]))

    def release(other: bool, draws: int, rng: torch.Generator) -> list[Row]:
        return releases[second if other else first](False, draws, rng)

    yield Pair(
        name="whole round", channel="coordination", units=frozenset({"record"}),
        what=f"the record is {second}, not {first}",
        release=release, parameters=2 * inputs + 2, clients=defense.together,
        share=0.125 if defense.third_parties(0) else 0.25,  # keys of its own for every round
    )  # fmt: skip


def _gap(a: Sequence[Row], b: Sequence[Row]) -> float:
    """How far apart two pilots are: squared differences of means over variances, summed."""
    one, two = tabulate(a, b)
    spread = one.var(axis=0) + two.var(axis=0) + 1e-12
    return float(((one.mean(axis=0) - two.mean(axis=0)) ** 2 / spread).sum())


def _records(inputs: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Candidate records (x [1, inputs], y [1]) by description."""
    ones, first = torch.ones(1, inputs), torch.eye(inputs)[:1]
    drawn = {
        "1, class 0": (ones, 0), "1, class 1": (ones, 1), "-1, class 0": (-ones, 0),
        "10, class 0": (10 * ones, 0), "0.1, class 0": (0.1 * ones, 0),
        "1 in one feature, class 0": (first, 0), "10 in one feature, class 1": (10 * first, 1),
    }  # fmt: skip
    return {name: (x, torch.tensor([y])) for name, (x, y) in drawn.items()}


def _rounds(defense: Defense, x: Tensor, y: Tensor, seed: int) -> Release:
    """Everything addressed to the server by the client and third parties in one real round."""
    network = build("logistic", shape=(x.shape[1],), classes=2)
    others = [
        (torch.randn(x.shape, generator=generator(seed, "others", i)), torch.tensor([i % 2]))
        for i in range(1, defense.together)
    ]
    start = Federation.start(
        network=network, defense=fresh(defense), data=[(x, y), *others], seed=seed,
        device=torch.device("cpu"),
    )  # fmt: skip
    work = LocalWork(protocol="fedavg", batch=1, lr=1.0, local_steps=1)
    sampled = [c.id for c in start.clients]

    def release(_: bool, draws: int, rng: torch.Generator) -> list[Row]:
        rows: list[Row] = []
        for _i in range(draws):
            token = _token(rng)
            forked = start.fork("audit", token)
            forked = replace(
                forked, parties=dict(defense.third_parties(derived_seed(token, "parties")))
            )
            wire = forked.play(work, sampled, observed=True).wire
            senders = {VICTIM, *forked.parties}
            rows.append(features(m for m in wire.seen_by(SERVER) if m.sender in senders))
        return rows

    return release
