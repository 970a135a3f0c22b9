"""One observed round from a run's present state: what the server saw, and the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.events import Round
from bench.contract.messages import SERVER, UPLOAD_KINDS, Message, detached
from bench.errors import UserError
from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.seeding import generator


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The private samples behind an observation.

    Attributes:
        x: Samples [V, K, ...].
        y: Their labels, int64 [V, K].
    """

    x: Tensor
    y: Tensor


def observe(
    federation: Federation,
    *,
    protocol: ProtocolSettings,
    threat: ThreatSettings,
    aux_x: Tensor,
    defense_known: Mapping[str, Any],
    names: tuple[str, ...],
) -> tuple[Seen, Truth]:
    """Play one round of `threat.victims` clients on a fork of the federation.

    The victims are drawn by the seed among the clients that hold enough distinct samples
    (batch * local_steps). All of them take part, with distinct samples, whatever the defense draws
    elsewhere: the server attacks those who did.

    Args:
        federation: The run, which stays as it is.
        names: Names of the random streams, such as the checkpoint.

    Returns:
        What the server saw, and the truth behind it.

    Raises:
        UserError: If too few clients hold enough samples, or the defense needs more together.
    """
    need = threat.batch * threat.local_steps
    place = protocol.cuts[0] if protocol.cuts else None
    able = [c.id for c in federation.clients if len(c.y) >= need and c.cut == place]
    if len(able) < threat.victims:
        where = f" and are cut after {place}" if len(set(protocol.cuts)) > 1 else ""
        raise UserError(
            f"threat {threat.name} observes {threat.victims} clients with {need} distinct "
            f"samples each, but only {len(able)} of {len(federation.clients)} hold so many{where}."
        )
    if threat.victims < federation.defense.together:
        raise UserError(
            f"threat {threat.name} observes {threat.victims} clients, but the defense needs "
            f"{federation.defense.together} that take part together."
        )
    streams = ("observe", threat.name, *names)
    order = torch.randperm(len(able), generator=generator(federation.seed, *streams, "victims"))
    victims = [able[i] for i in order[: threat.victims]]
    copy = federation.fork(*streams)
    copy.queues, copy.pinned = {}, True
    copy.buffers = copy.network.calibrate(copy.mean_weights(), aux_x.to(copy.device))
    work = LocalWork(
        protocol=protocol.name,
        batch=threat.batch,
        lr=protocol.lr,
        local_steps=threat.local_steps,
        mode=threat.mode,
    )
    result = copy.play(work, victims, observed=True)
    by_id = {c.id: c for c in copy.clients}
    present = [v for v in victims if v in result.used]
    # Activations come sample by sample, so that their order counts; an update has none.
    chosen = {v: _distinct(result.used[v].flatten()) for v in present}
    truth = Truth(
        x=torch.stack([by_id[v].x[chosen[v]] for v in present]).cpu(),
        y=torch.stack([by_id[v].y[chosen[v]] for v in present]).cpu(),
    )
    messages = result.wire.seen_by(SERVER)
    known_round = Round(
        clients=len(present),
        batch=threat.batch,
        local_steps=threat.local_steps,
        lr=protocol.lr,
        parameters=_uploaded(messages),
    )
    known: dict[str, Any] = {
        "batch": threat.batch,
        "local_steps": threat.local_steps,
        "lr": protocol.lr,
        "mode": threat.mode,
        "threat": threat.describe(),
        "defense": dict(defense_known),
        "mechanisms": [m.to_dict() for m in federation.defense.mechanisms_in(known_round)],
    }
    if place is not None:
        known["cut"] = place
    if threat.labels:
        known["truth_labels"] = truth.y.tolist()
    seen = Seen(
        protocol=protocol.name,
        labels=protocol.labels,
        server=tuple(detached(s) for s in copy.server_steps()),
        party=SERVER,
        network=federation.network.describe(),
        initial=detached(federation.initial),
        const=detached(copy.const),
        buffers=detached(copy.buffers),
        before=detached(result.before),
        after=detached(copy.state) if threat.hears_broadcast else None,
        messages=messages,
        clients=tuple(present),
        known=known,
    )
    return seen, truth


def _uploaded(messages: Sequence[Message]) -> int:
    """Values of the largest upload, at least 1."""
    uploads = [m for m in messages if m.kind in UPLOAD_KINDS]
    return max([1, *(sum(p.values.numel() for p in m.parts.values()) for m in uploads)])


def _distinct(indices: Tensor) -> Tensor:
    """The distinct values in the order of their first appearance."""
    return torch.tensor(list(dict.fromkeys(indices.tolist())), device=indices.device)
