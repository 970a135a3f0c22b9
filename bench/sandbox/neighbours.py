"""Pairs of neighbouring inputs, and what the server receives for each through the real hooks.

No defense is named here: the scale of an input comes from the public mechanisms, what cannot be
played from the hooks and roles that a defense has. A hook that raises is an error, but for
`smashed` and records in whole rounds, which may be refused by a ValueError.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bench.contract.defense import Client, Defense, fresh
from bench.contract.events import Facts, Round, Unit
from bench.contract.hooks import members_of, overrides
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import SERVER, UPLOAD_KINDS, Message, Part
from bench.metrics.distinguish import Array
from bench.models import build
from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork
from bench.sandbox import stage
from bench.sandbox.hooked import HookError, WrongAnswer, name_errors
from bench.seeding import generator

CLASSES = 10
_MOST_SMASHED = 4096
_PILOT_DRAWS = 24
_FAR = 2.0**20
"""Beyond every clip; a power of two, so that what a clip leaves of it is exact."""
_CLEAR = "it passes unchanged; where a protocol sends it, it goes in the clear."
_RECORD: frozenset[Unit] = frozenset({"record"})


Channel = Literal["upload", "smashed", "labels", "smashed and labels", "coordination"]
Received = Mapping[str, Tensor]
"""What the server received in one draw, flat and by name."""
Release = Callable[[bool, int, torch.Generator], list[Received]]
_NOTHING = torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class NeighbourPair:
    """Two neighbouring inputs of one channel.

    Attributes:
        units: For which the inputs are neighbours; a record or coordinate is replaced, a client
            is added or removed (the update is 0 in its place).
        release: (second, draws, rng) -> what the server received of the first or second input,
            one row per draw.
        facts: Of one release, for the ledger: its coordinates, how many clients act together, and
            whether smashed data is sent.
        covered: Whether the defense acts on the channel.
        share: Of the audit's draws that are affordable here.
    """

    name: str
    channel: Channel
    units: frozenset[Unit]
    what: str
    release: Release
    facts: Facts
    covered: bool = True
    share: float = 1.0

    def outputs(self, draws: int, *, seed: int, rounds: int = 1) -> tuple[Array, Array]:
        """Float64 [draws, F] of the first and the second input, in the same columns.

        rounds: Releases of one draw, all of the same input. Each column then is a mean over them,
        of the values and once more of their magnitudes.

        Raises:
            HookError: For a hook that raised.
            WrongAnswer: For values that are not finite.
        """
        count = draws * rounds
        rows = [self.release(w, count, generator(seed, self.name, int(w))) for w in (False, True)]
        a, b = tabulate(*rows)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise WrongAnswer(self.channel, "sent values that are NaN or infinite")
        if rounds == 1:
            return a, b
        a, b = (rows.reshape(-1, rounds, rows.shape[1]) for rows in (a, b))
        one, other = (np.concatenate([r.mean(axis=1), np.abs(r).mean(axis=1)], 1) for r in (a, b))
        return one, other


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A channel that cannot be audited, and why."""

    channel: str
    why: str


# --- rows of numbers ------------------------------------------------------------------------------


def row_of(messages: Iterable[Message]) -> dict[str, Tensor]:
    """Values that are present, presence where it is not plain, and sizes, by name."""
    columns: dict[str, Tensor] = {}
    for i, message in enumerate(messages):
        at = f"{i} {message.sender} {message.kind}"
        columns[f"{at} bytes"] = torch.tensor([message.n_bytes], dtype=torch.float64)
        for name, part in message.parts.items():
            columns |= {k: v.flatten() for k, v in columns_of(part, f"{at} {name}").items()}
        for name, sealed in message.sealed.items():
            columns[f"{at} {name} sealed"] = sealed.covers.double().flatten()
    return columns


def columns_of(part: Part, name: str) -> dict[str, Tensor]:
    """A part's values, 0 where they were not sent, and where that is not plain, which were sent."""
    values = part.values.detach().double()
    if part.present is None:
        return {name: values}
    sent = torch.where(part.present, values, 0.0)
    return {name: sent, f"{name} sent": part.present.double()}


def tabulate(a: Sequence[Received], b: Sequence[Received]) -> tuple[Array, Array]:
    """Rows of two inputs as matrices with the same columns.

    Where rows differ in shape, what one lacks is 0, and a column beside every tensor holds its
    size, -1 where it is missing.
    """
    rows = [*a, *b]
    names = dict.fromkeys(name for row in rows for name in row)
    sizes = torch.tensor([[len(row[n]) if n in row else -1 for n in names] for row in rows])
    alike, columns = bool((sizes == sizes[0]).all()), [torch.zeros(len(rows), 0).double()]
    for name, size in zip(names, sizes.T, strict=True):
        columns.append(pad_sequence([row.get(name, _NOTHING) for row in rows], batch_first=True))
        if not alike:
            columns.append(size[:, None].double())
    out = torch.cat(columns, dim=1)
    return out[: len(a)].numpy(), out[len(a) :].numpy()


# --- the pairs of a defense ---------------------------------------------------------------------


def neighbours(
    defense: Defense, *, parameters: int, seed: int
) -> tuple[tuple[NeighbourPair, ...], tuple[Skipped, ...]]:
    """All pairs that a defense setting, made by `guard`, can be audited on.

    Raises:
        HookError: For a hook that raised.
        WrongAnswer: For one that returned what it may not.
    """
    channels = (_upload_pairs, _split_pairs, _federation_pairs)
    entries = [entry for channel in channels for entry in channel(defense, parameters, seed)]
    pairs = tuple(entry for entry in entries if isinstance(entry, NeighbourPair))
    return pairs, tuple(entry for entry in entries if isinstance(entry, Skipped))


def _after(mechanisms: Sequence[Mechanism], values: Tensor) -> Tensor:
    """What the mechanisms leave of one row, before anything is drawn."""
    for mechanism in mechanisms:
        values = mechanism.apply(values)
    return values


# --- uploads --------------------------------------------------------------------------------------


def _upload_pairs(defense: Defense, size: int, seed: int) -> Iterator[NeighbourPair | Skipped]:
    why = None
    if before := defense.owns & {"gradient", "joins", "batch"}:
        why = f"the defense acts before the upload too (role {', '.join(sorted(before))})"
    elif overrides(defense, "say") or overrides(defense, "inspect"):
        why = "what is uploaded depends on what clients find or tell each other before"
    if why:
        yield Skipped(channel="upload", why=f"{why}, so that only whole rounds are played.")
        return
    acting = [m for m in defense.mechanisms_in(Round()) if m.of in UPLOAD_KINDS]
    first, ones = torch.eye(size)[:1], torch.ones(1, size)
    one, every = _after(acting, _FAR * first), _after(acting, _FAR * ones)
    clipped = float(one[0, 0]) < _FAR
    if not clipped:
        one, every = 10 * first, 10 * ones
    unit = one if clipped else first
    covered = overrides(defense, "upload")
    what = "every sign is flipped" + ("" if covered else ", and it is sent as it is")
    everything = ("all signs", _RECORD, every, -every, what)

    def magnitude(name: str, small: Tensor, large: Tensor) -> tuple[Any, ...]:
        what = f"one value is {large[0, 0]:g}, not {small[0, 0]:g}"
        return name, {"coordinate", "record"}, small, large, what

    cases = [
        ("one sign", {"coordinate", "record"}, one, -one, "one sign is flipped"),
        everything,
        ("zero", {"record", "client"}, one if clipped else every, one * 0, "the update is 0"),
        magnitude("magnitude", 0.1 * unit, 0.2 * unit),
        magnitude("big magnitude", 0.5 * unit, unit),
    ]
    facts = Facts(parameters=size, clients=defense.together, split="smashed" in defense.requires)
    for name, units, a, b, what in cases if covered else [everything]:
        yield NeighbourPair(
            name=f"upload: {name}",
            channel="upload",
            units=frozenset(units),
            what=what,
            facts=facts,
            covered=covered,
            release=_upload(defense, a, b, seed),
        )


def _upload(defense: Defense, a: Tensor, b: Tensor, seed: int) -> Release:
    """Uploads of clients whose local training moved the variables by a or b [1, D]. Where the
    server reads sums alone, that of one client, as attackers rehearse it."""
    name = "head.weight"

    def release(second: bool, draws: int, rng: torch.Generator) -> list[Received]:
        params, update = {name: torch.zeros_like(a)}, {name: b if second else a}
        message, local = stage.train_alone(defense, params, update, seed)
        alone = not defense.third_parties(0)
        rows: list[Received] = []
        for _ in range(draws):
            stages: Any = ("round", "upload")
            client = stage.client_alone(rng) if alone else stage.inform_client(defense, stages, rng)
            sent = defense.upload([message], local, client)
            if plans := defense.public_plans(sent):
                client.plan.update(plans[0])
                sent = defense.upload([message], local, client)
            rows.append(row_of(sent))
        return rows

    return release


# --- split learning -------------------------------------------------------------------------------


def _split_pairs(defense: Defense, size: int, seed: int) -> Iterator[NeighbourPair | Skipped]:
    rng = generator(seed, "probe")
    split = "smashed" in defense.requires
    y = torch.nn.functional.one_hot(torch.tensor([0, 1]), CLASSES).float()
    labelled = not torch.equal(defense.labels(y, stage.client_alone(rng)), y)
    changed, smashed = False, split or overrides(defense, "smashed")
    ends = _bound_smashed(defense, size, rng) if smashed else None
    if ends is not None:
        part = defense.smashed(ends[1], stage.inform_client(defense, ("round", "step"), rng))
        changed = part.present is not None or not torch.equal(part.values, ends[1])
        if not (split or changed):
            ends = None
            yield Skipped(channel="smashed", why=_CLEAR)
    elif smashed:
        yield Skipped(
            channel="smashed", why=f"no tensor of up to {_MOST_SMASHED} values suits the hook."
        )
    if split and not labelled:
        yield Skipped(channel="labels", why=_CLEAR)
    cases: list[tuple[str, Channel, str, bool, Any, Any]] = []
    labels, what = (y[:1], y[1:]), "another class"
    if ends is not None:
        width = int((ends[0] != ends[1]).sum())
        values = f"{width} smashed values are {ends[1].max():g}, not {ends[0].min():g}"
        cases.append(("smashed data", "smashed", values, changed, ends, None))
    if labelled:
        cases.append(("label", "labels", what, True, None, labels))
    if labelled and ends is not None and changed:
        both = f"{values}, and {what}"
        cases.append(("smashed data, label", "smashed and labels", both, True, ends, labels))
    for name, channel, what, covered, *inputs in cases:
        yield NeighbourPair(
            name=name,
            channel=channel,
            units=frozenset({"label", "record"}) if channel == "labels" else _RECORD,
            what=what,
            covered=covered,
            release=_step(defense, *inputs),
            facts=Facts(parameters=size, clients=defense.together, split=True),
        )


def _bound_smashed(
    defense: Defense, size: int, rng: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """One sample's smashed data [1, ...] at both ends of what the mechanisms let through.

    They differ in at most `size` values, since a claim may be for so many. The shape is the
    first that the hook takes: flat, or tokens, by number of values.
    """
    client = stage.inform_client(defense, ("round", "step"), rng)
    for shape in _shapes(size):
        try:
            defense.smashed(torch.zeros(1, *shape), client)
            break
        except HookError as error:
            if not error.refuses:
                raise
    else:
        return None
    acting = [m for m in defense.mechanisms_in(Round()) if m.of == "smashed"]
    a, b, first = (torch.zeros(1, *shape) for _ in range(3))
    first.view(-1)[0] = _FAR
    low, high = (float(_after(acting, a + x).flatten()[0]) for x in (-_FAR, _FAR))
    alone = float(_after(acting, first).flatten()[0])
    if alone != high:  # a norm, which one value can fill
        a.view(-1)[0], b.view(-1)[0] = -alone, alone
        return a, b
    if low == -_FAR:
        low, high = 0.0, 1.0
    elif high == _FAR:
        high = low + 1
    a, b = a + low, b + low
    b.view(-1)[:size] = high
    return a, b


def _shapes(size: int) -> Iterator[tuple[int, ...]]:
    yield (size,)
    for values in range(1, _MOST_SMASHED + 1):
        yield (values,)
        yield from ((n, values // n) for n in range(1, values + 1) if values % n == 0)


def _step(
    defense: Defense, smashed: tuple[Tensor, Tensor] | None, labels: tuple[Tensor, Tensor] | None
) -> Release:
    """Smashed data, labels or both of one sample. Without third parties rows are a batch; with
    them each draw is a step of its own, so that their randomness is drawn anew."""

    def send(second: bool, rows: int, client: Client) -> list[Received]:
        sides: dict[str, Tensor] = {}
        if smashed is not None:
            part = defense.smashed(smashed[second].repeat_interleave(rows, dim=0), client)
            sides |= {k: v.reshape(rows, -1) for k, v in columns_of(part, "smashed").items()}
        if labels is not None:
            y = defense.labels(labels[second].repeat_interleave(rows, dim=0), client)
            sides["labels"] = y.double()
        return [{n: v[i] for n, v in sides.items()} for i in range(rows)]

    def release(second: bool, draws: int, rng: torch.Generator) -> list[Received]:
        if not defense.third_parties(0):
            return send(second, draws, stage.client_alone(rng))
        return [
            send(second, 1, stage.inform_client(defense, ("round", "step"), rng))[0]
            for _ in range(draws)
        ]

    return release


# --- whole rounds ---------------------------------------------------------------------------------


def _federation_pairs(defense: Defense, size: int, seed: int) -> Iterator[NeighbourPair | Skipped]:
    needs = defense.requires - {"cut"}  # without one the whole network is the bottom submodel
    if needs:
        why = f"whole rounds are played without {', '.join(sorted(needs))}."
        yield Skipped(channel="coordination", why=why)
        return
    inputs = max(1, (size - 2) // 2)
    releases, pilot = {}, {}
    refusal: HookError | None = None
    for name, (x, y) in _records(inputs).items():
        try:
            releases[name] = _rounds(defense, x, y, seed)
            pilot[name] = releases[name](False, _PILOT_DRAWS, generator(seed, "pilot", name))
        except HookError as error:
            if not error.refuses:
                raise
            refusal = error  # a record that the defense has no room for
    if refusal is not None and len(pilot) < 2:
        raise refusal
    first, second = max(combinations(pilot, 2), key=lambda p: _gap(pilot[p[0]], pilot[p[1]]))

    def release(other: bool, draws: int, rng: torch.Generator) -> list[Received]:
        return releases[second if other else first](False, draws, rng)

    yield NeighbourPair(
        name="whole round",
        channel="coordination",
        units=_RECORD,
        what=f"the record is {second}, not {first}",
        release=release,
        facts=Facts(parameters=2 * inputs + 2, clients=defense.together),
        share=0.125 if defense.third_parties(0) else 0.25,  # keys of its own for every round
    )


def _gap(a: Sequence[Received], b: Sequence[Received]) -> float:
    """How far apart two pilots are: squared differences of means over variances, summed."""
    one, two = tabulate(a, b)
    spread = one.var(axis=0) + two.var(axis=0) + 1e-12
    return float(((one.mean(axis=0) - two.mean(axis=0)) ** 2 / spread).sum())


def _records(inputs: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Candidate records (x [1, inputs], y [1]) by description."""
    ones, first = torch.ones(1, inputs), torch.eye(inputs)[:1]
    drawn = {
        "1, class 0": (ones, 0),
        "1, class 1": (ones, 1),
        "-1, class 0": (-ones, 0),
        "10, class 0": (10 * ones, 0),
        "0.1, class 0": (0.1 * ones, 0),
        "1 in one feature, class 0": (first, 0),
        "10 in one feature, class 1": (10 * first, 1),
    }
    return {name: (x, torch.tensor([y])) for name, (x, y) in drawn.items()}


def _rounds(defense: Defense, x: Tensor, y: Tensor, seed: int) -> Release:
    """Everything addressed to the server by the client and third parties in one real round."""
    others = [
        (torch.randn(x.shape, generator=generator(seed, "others", i)), torch.tensor([i % 2]))
        for i in range(1, defense.together)
    ]
    start = Federation.start(
        network=build("logistic", shape=(x.shape[1],), classes=2),
        defense=fresh(defense),
        data=[(x, y), *others],
        seed=seed,
        device=stage.CPU,
    )
    work = LocalWork(protocol="fedavg", batch=1, lr=1.0, local_steps=1)

    def release(_: bool, draws: int, rng: torch.Generator) -> list[Received]:
        rows: list[Received] = []
        for _i in range(draws):
            forked = stage.with_fresh_secrets(start, "audit", stage.token(rng))
            with name_errors("a round", *members_of(defense)):
                wire = stage.play_round(forked, work).wire
            senders = {stage.VICTIM, *forked.parties}
            rows.append(row_of(m for m in wire.messages_for(SERVER) if m.sender in senders))
        return rows

    return release
