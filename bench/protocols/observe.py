"""Observed rounds from a run's present state: what the server saw, and the truth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.defense import Client, Defense
from bench.contract.events import Round
from bench.contract.mechanisms import average
from bench.contract.messages import SERVER, SUM, UPLOAD_KINDS, Message, detached
from bench.errors import UserError
from bench.protocols.aggregated import read_updates
from bench.protocols.federation import Federation, RoundResult
from bench.protocols.local_training import LocalWork
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.seeding import derive_seed, generator

READ_BY_AGGREGATION = "read_by_aggregation"
"""Of what is known: uploads are those that the server's own aggregation reads."""
MOST_BYTES = 10**9
"""Of the messages of a recorded round."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The private samples behind an observation.

    Attributes:
        x: Samples [V, K, ...], in the order in which the last release uses them first.
        y: Their labels, int64 [V, K].
    """

    x: Tensor
    y: Tensor


@dataclass(frozen=True, kw_only=True)
class Victims:
    """The clients of an observation, and what each does in every release.

    Attributes:
        ids: Their ids.
        cut: After which stage they are cut, None without a cut.
        batch: Samples of a step.
        samples: Distinct samples of each, a whole number of batches.
        steps: Steps of a release; after samples / batch steps they begin anew.
    """

    ids: Sequence[str]
    cut: str | None = None
    batch: int
    samples: int
    steps: int


def observe(
    federation: Federation,
    *,
    protocol: ProtocolSettings,
    threat: ThreatSettings,
    aux_x: Tensor,
    defense_known: Mapping[str, Any],
    names: tuple[str, ...],
    earlier: int | None = None,
    look: Callable[[Federation, RoundResult], None] = lambda federation, result: None,
) -> tuple[Seen, Truth]:
    """Play one round of `threat.victims` clients on a fork of the federation.

    The victims are drawn by the seed among the clients that hold enough distinct samples. All of
    them take part, with distinct samples, whatever the defense draws elsewhere: the server attacks
    those who did. Victims and samples depend on the threat and `names` alone, so that every
    release of a threat has the same.

    Args:
        federation: The run, which stays as it is.
        names: Names of the random streams, such as the checkpoint.
        earlier: Number of a release before the last one, from 0, which has randomness of its own;
            None: the last one.
        look: Is shown the fork and the round that it has played.

    Returns:
        What the server saw, and the truth behind it.

    Raises:
        UserError: If too few clients hold enough samples, or the defense needs more together.
    """
    streams = ("observe", threat.name, *names)
    victims = _victims(federation, protocol, threat, streams)
    play = streams if earlier is None else (*streams, "release", str(earlier))
    copy = federation.fork(*play)
    if earlier is not None and copy.round == 0:
        # Third parties draw from streams of their own; before the first round they hold no state.
        parties = derive_seed(federation.seed, *play, "parties")
        copy.parties = dict(copy.defense.third_parties(parties))
    by_id = {c.id: c for c in copy.clients}
    queues = {
        v: order_of(by_id[v], victims, federation.seed, streams, earlier) for v in victims.ids
    }
    copy.queues, copy.pinned = dict(queues), True
    copy.buffers = copy.network.calibrate(copy.mean_weights(), aux_x.to(copy.device))
    work = LocalWork(
        protocol=protocol.name,
        batch=victims.batch,
        lr=protocol.lr,
        local_steps=victims.steps,
        mode=threat.mode,
    )
    result = copy.play(work, victims.ids, observed=True)
    look(copy, result)
    present = [v for v in victims.ids if v in result.used]
    return _view(copy, result, replace(victims, ids=present), protocol, threat, defense_known)


def record_round(
    federation: Federation,
    result: RoundResult,
    protocol: ProtocolSettings,
    threat: ThreatSettings,
    defense_known: Mapping[str, Any],
) -> tuple[list[tuple[Seen, Truth]], list[str]]:
    """Return the round that the federation has just played, as the server saw it.

    Args:
        federation: As the round left it, with the normalisation statistics of public data in the
            state before the round.
        result: The round, with a log of its messages of at most `MOST_BYTES`.

    Returns:
        What was seen with the truth behind it, once for all clients that did alike, and a clause
        for each reason why others that took part are not among the victims.
    """
    if result.wire.logged > MOST_BYTES:
        size = f"{result.wire.logged / 1e9:.2g} GB of messages, of which at most 1 are kept"
        return [], [f"a round holds {size}"]
    groups: dict[Victims, list[str]] = {}
    left_out = set[str]()
    for client in result.joined:
        used = result.used[client.id]
        samples = whole_batches(used)
        if client.number % federation.defense.cycle:
            left_out.add("clients without the first of the settings dealt")
        elif samples is None:
            left_out.add("clients whose batches of a round share some samples and not others")
        else:
            steps, batch = used.shape
            work = Victims(ids=(), cut=client.cut, batch=batch, samples=samples, steps=steps)
            groups.setdefault(work, []).append(client.id)
    if federation.defense.only_sums and (left_out or len(groups) > 1):
        return [], ["the server gets a sum over clients that do unlike work"]
    views = [
        _view(federation, result, replace(work, ids=ids), protocol, threat, defense_known)
        for work, ids in groups.items()
    ]
    return views, sorted(left_out)


def whole_batches(used: Tensor) -> int | None:
    """Distinct samples of a client's steps [S, B] of a round, if every pass over them is a whole
    number of batches, so that an attacker knows how many they are; else None."""
    steps, batch = used.shape
    samples = len(used.unique())
    each = samples // batch
    if samples % batch:
        return None
    passes = [used[i : i + each] for i in range(0, steps, each)]
    return samples if all(len(p.unique()) == p.numel() for p in passes) else None


def _view(
    federation: Federation,
    result: RoundResult,
    victims: Victims,
    protocol: ProtocolSettings,
    threat: ThreatSettings,
    defense_known: Mapping[str, Any],
) -> tuple[Seen, Truth]:
    """Return what the server saw of a round that the federation has just played, and the truth."""
    by_id = {c.id: c for c in federation.clients}
    chosen = {v: result.used[v].flatten()[: victims.samples] for v in victims.ids}
    truth = truth_of([by_id[v] for v in victims.ids], chosen)
    defense = federation.defense
    messages, read = read_messages(defense, result, victims.ids)
    uploads = [m for m in messages if m.kind in UPLOAD_KINDS]
    largest = max([1, *(sum(p.values.numel() for p in m.parts.values()) for m in uploads)])
    known_round = round_of(federation, victims, lr=protocol.lr, parameters=largest)
    known_round = replace(known_round, messages=messages)
    mechanisms = defense.mechanisms_in(known_round)
    known: dict[str, Any] = {
        "batch": victims.batch,
        "local_steps": victims.steps,
        "samples": victims.samples,
        "lr": protocol.lr,
        "mode": threat.mode,
        "threat": threat.describe(),
        "defense": dict(defense_known),
        "mechanisms": [m.to_dict() for m in mechanisms],
    }
    if read:
        left = [m for m in known["mechanisms"] if m["of"] not in UPLOAD_KINDS]
        known |= {"mechanisms": left, READ_BY_AGGREGATION: True}
    if victims.cut is not None:
        known["cut"] = victims.cut
    elif defense.only_sums and not read:
        truth = as_one(truth, victims.batch)
        count = len(victims.ids)
        known |= {
            "batch": victims.batch * count,
            "samples": victims.samples * count,
            "summed": count,
            "mechanisms": [m.to_dict() for m in average(mechanisms, count)],
        }
    learns = defense.forms_model == "server" or threat.hears == "every_broadcast"
    if threat.labels:
        known["truth_labels"] = truth.y.tolist()
    seen = Seen(
        protocol=protocol.name,
        labels=protocol.labels,
        server=tuple(detached(s) for s in federation.server_steps()),
        party=SERVER,
        network=federation.network.describe(),
        initial=detached(federation.initial),
        const=detached(federation.const),
        buffers=detached(federation.buffers or {}),
        before=detached(result.before),
        after=detached(result.after) if learns else None,
        messages=messages,
        clients=(SUM,) if "summed" in known else tuple(victims.ids),
        known=known,
    )
    return seen, truth


def read_messages(
    defense: Defense, result: RoundResult, clients: Sequence[str]
) -> tuple[tuple[Message, ...], bool]:
    """Return what the server holds of a round, and whether uploads are those that its own
    aggregation reads."""
    messages = result.wire.messages_for(SERVER)
    read = read_updates(defense, result, clients)
    if read:
        others = [m for m in messages if m.kind not in UPLOAD_KINDS or m.sender not in read]
        messages = (*others, *read.values())
    return tuple(messages), bool(read)


def round_of(federation: Federation, victims: Victims, *, lr: float, parameters: int) -> Round:
    """Return what is known of a round that the federation has just played."""
    return Round(
        clients=len(victims.ids),
        batch=victims.batch,
        local_steps=victims.steps,
        lr=lr,
        parameters=parameters,
        uploads=max((federation.uploads[v] - 1 for v in victims.ids), default=0),
        constants={n: v.numel() for n, v in federation.const.items() if n in federation.state},
    )


def truth_of(clients: Sequence[Client], chosen: Mapping[str, Tensor]) -> Truth:
    """The samples of some clients, of each those with the indices `chosen`."""
    return Truth(
        x=torch.stack([c.x[chosen[c.id]] for c in clients]).cpu(),
        y=torch.stack([c.y[chosen[c.id]] for c in clients]).cpu(),
    )


def as_one(truth: Truth, batch: int) -> Truth:
    """Return all victims' samples as those of one, step after step."""

    def join(values: Tensor) -> Tensor:
        steps = values.unflatten(1, (-1, batch)).transpose(0, 1)
        return steps.flatten(0, 2)[None]

    return Truth(x=join(truth.x), y=join(truth.y))


def _victims(
    federation: Federation,
    protocol: ProtocolSettings,
    threat: ThreatSettings,
    streams: tuple[str, ...],
) -> Victims:
    """Return the victims that a threat observes, and their work."""
    turn = federation.defense.cycle
    place = protocol.cuts[0] if protocol.cuts else None
    here = [c for c in federation.clients if c.cut == place and c.number % turn == 0]
    need = threat.batch * threat.local_steps
    able = [c for c in here if len(c.y) >= need]
    if len(able) < threat.victims:
        where = f" and are cut after {place}" if len(set(protocol.cuts)) > 1 else ""
        where += " and have the first of the settings dealt" if turn > 1 else ""
        raise UserError(
            f"threat {threat.name} observes {threat.victims} clients with {need} distinct "
            f"samples each, but only {len(able)} of {len(federation.clients)} hold so many{where}."
        )
    if threat.victims < federation.defense.together:
        raise UserError(
            f"threat {threat.name} observes {threat.victims} clients, but the defense needs "
            f"{federation.defense.together} that take part together."
        )
    order = torch.randperm(len(able), generator=generator(federation.seed, *streams, "victims"))
    chosen = [able[i] for i in order[: threat.victims]]
    return Victims(
        ids=tuple(c.id for c in chosen),
        cut=place,
        batch=threat.batch,
        samples=need,
        steps=threat.local_steps * threat.local_epochs,
    )


def order_of(
    client: Client,
    victims: Victims,
    seed: int,
    streams: tuple[str, ...],
    earlier: int | None = None,
) -> Tensor:
    """Return the indices of a victim's samples, step after step: its own in an order that every
    epoch, and every release but the last, shuffles again."""
    order = torch.randperm(len(client.y), generator=generator(seed, *streams, client.id, "batch"))
    own, rows = order[: victims.samples], []
    for epoch in range(-(-victims.steps * victims.batch // victims.samples)):
        names = (client.id, "epoch", epoch, "last" if earlier is None else earlier)
        again = torch.randperm(len(own), generator=generator(seed, *streams, *names))
        rows.append(own if epoch == 0 and earlier is None else own[again])
    return torch.cat(rows)
