"""Rehearsals: an attacker plays the deployed defense on public data, from the state it saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.defense import Defense, fresh
from bench.contract.messages import State, detached
from bench.models import Network
from bench.protocols.local_training import LocalWork
from bench.protocols.split import start_federation
from bench.sandbox.stage import play_round, token
from bench.seeding import derived_seed


@dataclass(frozen=True, kw_only=True)
class Rehearsals:
    """`Context.shadow` of an attack.

    Attributes:
        seen: What the server saw.
        network: The network.
        defense: With its public settings; every call plays a fresh copy.
        rng: From which every call draws its secrets.
        device: Where to compute.
    """

    seen: Seen
    network: Network
    defense: Defense
    rng: torch.Generator
    device: torch.device

    def __call__(
        self, x: Tensor, y: Tensor, before: State | None = None, release: Seen | None = None
    ) -> Seen:
        """See `play_shadow`: from the state of `release`, the last one unless given, or from
        `before`."""
        seen = self.seen if release is None else release
        return play_shadow(
            seen if before is None else replace(seen, before=before),
            network=self.network,
            defense=fresh(self.defense),
            x=x,
            y=y,
            rng=self.rng,
            device=self.device,
        )


def play_shadow(
    seen: Seen,
    *,
    network: Network,
    defense: Defense,
    x: Tensor,
    y: Tensor,
    rng: torch.Generator,
    device: torch.device,
) -> Seen:
    """One round of the deployed defense on public data, from the state that was seen.

    This is how an attacker trains through the defense. Activation k of a client's first step is
    that of its sample k.

    Args:
        defense: The defense with its public settings.
        x: Samples [V, N, ...] of V shadow clients, whose whole data is one batch per step.
        y: Their labels, int64 [V, N].
        rng: Generator from which the clients' and third parties' secrets are drawn anew.
    """
    seed, asked = token(rng), len(x)
    # Clients that are mixed must be as many as in the run: the last ones are filled up.
    fill = torch.arange(-(-asked // defense.together) * defense.together) % asked
    x, y = x[fill].to(device), y[fill].to(device)  # together, not client by client
    cut = seen.known.get("cut")

    def moved(state: State) -> State:
        return {k: v.to(device) for k, v in state.items()}

    shadow = start_federation(
        seen.protocol,
        network=network,
        cuts=() if cut is None else (str(cut),),
        labels=seen.labels,
        defense=defense,
        data=list(zip(x, y, strict=True)),
        seed=derived_seed(seed, "shadow"),
        device=device,
        params=moved(seen.initial),
    )
    before = shadow.state = moved(seen.before)
    shadow.const, shadow.buffers = moved(seen.const), moved(seen.buffers)
    shadow.queues = {c.id: torch.arange(len(c.y)) for c in shadow.clients}
    shadow.pinned = True
    plans = defense.public_plans(seen.messages)
    for i, client in enumerate(shadow.clients):
        client.plan.update(_moved(plans[i % len(plans)], device) if plans else {})
    work = LocalWork(
        protocol=seen.protocol,
        batch=int(seen.known["batch"]),
        lr=float(seen.known["lr"]),
        local_steps=int(seen.known["local_steps"]),
        mode=seen.known["mode"],
    )
    own = {c.id for c in shadow.clients[:asked]}
    result = play_round(shadow, work)
    return replace(
        seen,
        earlier=(),
        server=tuple(detached(s) for s in shadow.server_steps()),
        before=detached(before),
        after=None if seen.after is None else detached(shadow.state),
        messages=result.wire.seen_by(seen.party),
        clients=tuple(c.id for c in result.joined if c.id in own),
        known={k: v for k, v in seen.known.items() if k != "truth_labels"},
    )


def _moved(value: Any, device: torch.device) -> Any:
    """The same on the device, with all tensors in it."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: _moved(v, device) for k, v in value.items()}
    return value
