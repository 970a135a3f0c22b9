"""Rehearsals: an attacker plays the deployed defense on public data, from the state it saw."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.contract.attack import Context, Seen, Shared
from bench.contract.defense import Defense, fresh
from bench.contract.messages import State, detached
from bench.models import Network
from bench.protocols.local_training import LocalWork
from bench.protocols.split import start_federation
from bench.sandbox.stage import play_round, token
from bench.seeding import derive_seed


@dataclass(frozen=True, kw_only=True)
class Rehearsals:
    """`Context.shadow` of an attack: rounds of the deployed defense on public data, from the state
    that was seen. This is how an attacker trains through the defense.

    Attributes:
        seen: What the server saw.
        network: The network.
        defense: With its public settings; every call plays a fresh copy.
        rng: From which every call draws the clients' and third parties' secrets.
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
        """Play a round. Activation k of a client's first step is that of its sample k.

        Args:
            x: Samples [V, N, ...] of V shadow clients, whose whole data is one batch per step.
            y: Their labels, int64 [V, N].
            before: The state to play from, that of `release` unless given.
            release: What the server saw then, the last round unless given.
        """
        seen, defense = self.seen if release is None else release, fresh(self.defense)
        seed, asked = token(self.rng), len(x)
        # Clients that are mixed must be as many as in the run: the last ones are filled up.
        fill = torch.arange(-(-asked // defense.together) * defense.together) % asked
        x, y = x[fill].to(self.device), y[fill].to(self.device)  # together, not client by client
        cut = seen.known.get("cut")
        shadow = start_federation(
            seen.protocol,
            network=self.network,
            cuts=() if cut is None else (str(cut),),
            labels=seen.labels,
            defense=defense,
            data=list(zip(x, y, strict=True)),
            seed=derive_seed(seed, "shadow"),
            device=self.device,
            params=self._move(seen.initial),
        )
        before = shadow.state = self._move(seen.before if before is None else before)
        shadow.const, shadow.buffers = self._move(seen.const), self._move(seen.buffers)
        shadow.queues = {c.id: torch.arange(len(c.y)) for c in shadow.clients}
        shadow.pinned = True
        plans = defense.public_plans(seen.messages)
        for i, client in enumerate(shadow.clients):
            client.plan.update(self._move(plans[i % len(plans)]) if plans else {})
        work = LocalWork(
            protocol=seen.protocol,
            batch=int(seen.known["batch"]),
            lr=float(seen.known["lr"]),
            local_steps=int(seen.known["local_steps"]),
            mode=seen.known["mode"],
        )
        own = {c.id for c in shadow.clients[:asked]}
        result = play_round(shadow, work, seen.party)
        return replace(
            seen,
            earlier=(),
            server=tuple(detached(s) for s in shadow.server_steps()),
            before=detached(before),
            after=None if seen.after is None else detached(shadow.state),
            messages=result.wire.messages_for(seen.party),
            clients=tuple(c.id for c in result.joined if c.id in own),
            known={k: v for k, v in seen.known.items() if k != "truth_labels"},
        )

    def context(
        self, public: tuple[Tensor, Tensor], *, budget: int, shared: Shared | None = None
    ) -> Context:
        """Return what an attack may use beside what was seen; see `Context`.

        public: Samples and their labels.
        """
        return Context(
            rng=self.rng,
            device=self.device,
            budget=budget,
            aux_x=public[0].clone(),
            aux_y=public[1].clone(),
            network=self.network,
            defense=self.defense,
            shadow=self,
            shared=shared,
        )

    def _move(self, value: Any) -> Any:
        """The same on the device, with all tensors in it."""
        if isinstance(value, Tensor):
            return value.to(self.device)
        return {k: self._move(v) for k, v in value.items()} if isinstance(value, Mapping) else value
