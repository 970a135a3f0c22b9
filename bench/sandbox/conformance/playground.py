"""Tiny federations of every protocol, in which a defense is played for the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.defense import Client, Defense
from bench.contract.messages import SERVER, Message, State, detached
from bench.data.dataset import Dataset
from bench.models import Network, build
from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import Truth, observe
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.protocols.split import start_federation
from bench.sandbox.conformance.findings import HookError, WrongAnswer
from bench.sandbox.conformance.spying import Watch, watched
from bench.seeding import generator

SHAPE, CLASSES = (1, 16, 16), 10
BATCH, SAMPLES, ROUNDS = 8, 16, 2
LR = 0.1


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A protocol with a network. cut, labels: of splitfed."""

    protocol: Literal["fedsgd", "fedavg", "splitfed"]
    model: str = "lenet"
    cut: str | None = None
    labels: Literal["private", "shared"] = "private"

    @property
    def name(self) -> str:
        """As findings call it."""
        return f"splitfed, {self.labels} labels" if self.cut else self.protocol

    def network(self) -> Network:
        settings = {"init": 0.25} if self.model == "lenet" else {}
        return build(self.model, shape=SHAPE, classes=CLASSES, settings=settings)

    def split(self) -> dict[str, Any]:
        return {"cuts": (self.cut,), "labels": self.labels} if self.cut else {}


CUTS = (("lenet", "block1"), ("vit_small", "embed"))
"""Networks and cuts under splitfed, of which the first is taken whose smashed data suits."""


def grounds(cut: tuple[str, str] = CUTS[0]) -> tuple[Ground, ...]:
    """Every protocol once."""
    model, place = cut
    return (
        Ground(protocol="fedsgd"),
        Ground(protocol="fedavg"),
        Ground(protocol="splitfed", model=model, cut=place, labels="private"),
        Ground(protocol="splitfed", model=model, cut=place, labels="shared"),
    )


@dataclass(frozen=True, kw_only=True)
class Played:
    """Some rounds of one federation. seen: what the server received, round by round; clients: as
    they are after it; used: each client's samples in the last round."""

    seen: Sequence[tuple[Message, ...]]
    state: State
    before: State
    clients: Sequence[Client]
    used: Mapping[str, Tensor]
    watch: Watch
    defense: Defense


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Which randomness a run has. data: of the private samples; defense: of the clients' stream
    of that name and of third parties, everything else being the same."""

    data: int = 0
    defense: int = 0


def private_data(clients: int, draw: Draw) -> list[tuple[Tensor, Tensor]]:
    """Samples of unrelated values in [0, 1), so that one that comes up elsewhere was copied."""
    found = []
    for i in range(clients):
        rng = generator(draw.data, "conformance data", i)
        x = torch.rand(SAMPLES, *SHAPE, generator=rng, dtype=torch.float64).float()
        found.append((x, torch.randint(CLASSES, (SAMPLES,), generator=rng)))
    return found


def company(defense: Defense) -> int:
    """Clients of a run: a few, and as many as the defense mixes."""
    return -(-3 // defense.together) * defense.together


def start(defense: Defense, ground: Ground, draw: Draw, *, seed: int = 0) -> Federation:
    """A federation of the ground with the defense itself, not a copy."""
    federation = start_federation(
        ground.protocol, network=ground.network(), defense=defense,
        data=private_data(company(defense), draw), seed=seed, device=torch.device("cpu"),
        **ground.split(),
    )  # fmt: skip
    if draw.defense:
        for client in federation.clients:
            mine = generator(seed, "other draws", draw.defense, client.id)
            client.rng = {**client.rng, "defense": mine}
    return federation


def play(
    defense: Defense,
    ground: Ground,
    *,
    draw: Draw | None = None,
    watch: Watch | None = None,
    rounds: int = ROUNDS,
    batch: int = BATCH,
) -> Played:
    """Play a few rounds with a watched copy of the defense. Raises HookError or WrongAnswer."""
    watch = watch or Watch()
    copy = watched(defense, watch)
    federation = start(copy, ground, draw or Draw())
    work = LocalWork(
        protocol=ground.protocol, batch=batch, lr=LR,
        local_steps=1 if ground.protocol == "fedsgd" else 2,
    )  # fmt: skip
    everyone = [c.id for c in federation.clients]
    before, seen, used = detached(federation.state), [], {}
    for _ in range(rounds):
        result = federation.play(work, everyone, observed=True)
        seen.append(result.wire.seen_by(SERVER))
        used = result.used
    for name, value in federation.state.items():
        if not bool(torch.isfinite(value).all()):
            raise WrongAnswer("aggregate", f"left '{name}' NaN or infinite after {rounds} rounds")
    return Played(
        seen=seen, state=federation.state, before=before, clients=federation.clients, used=used,
        watch=watch, defense=copy,
    )  # fmt: skip


def fitting(defense: Defense) -> tuple[str, str]:
    """The network and cut of splitfed whose smashed data the defense takes. Raises the last
    HookError if it takes none."""
    for cut in CUTS:
        try:
            play(defense, grounds(cut)[2], rounds=1)
        except HookError as error:
            if cut == CUTS[-1] or not isinstance(error.error, ValueError):
                raise
        else:
            return cut
    raise AssertionError("the last cut returns or raises")


def noise_dataset() -> Dataset:
    """Samples of unrelated values as a data set, for rounds in which images do not matter."""
    rng = generator(0, "conformance noise data")
    x = torch.rand(4 * 64, *SHAPE, generator=rng)
    y = torch.randint(CLASSES, (len(x),), generator=rng)
    return Dataset(
        name="noise", task="image", train_x=x[:128], train_y=y[:128], test_x=x[128:192],
        test_y=y[128:192], aux_x=x[192:], aux_y=y[192:],
        class_names=tuple(map(str, range(CLASSES))),
    )  # fmt: skip


def seen_of(
    defense: Defense,
    ground: Ground,
    dataset: Dataset,
    *,
    batch: int = 1,
    seed: int = 0,
    victims: int = 2,
    known: Mapping[str, Any] | None = None,
) -> tuple[Seen, Truth, Network]:
    """One observed round on a data set, as a run's first checkpoint has it."""
    network = build(
        ground.model, shape=dataset.shape, classes=dataset.classes,
        settings={"init": 0.25} if ground.model == "lenet" else {},
    )  # fmt: skip
    victims = -(-victims // defense.together) * defense.together
    order = torch.randperm(len(dataset.train_y), generator=generator(seed, "conformance data"))
    shares = [order[i * BATCH : (i + 1) * BATCH] for i in range(victims)]
    federation = start_federation(
        ground.protocol, network=network, defense=defense,
        data=[(dataset.train_x[s], dataset.train_y[s]) for s in shares], seed=seed,
        device=torch.device("cpu"), **ground.split(),
    )  # fmt: skip
    protocol = ProtocolSettings.model_validate(
        {
            "name": ground.protocol, "clients": victims, "lr": 0.5, "batch": BATCH,
            "local_steps": None if ground.protocol == "fedsgd" else 1, "cut": ground.cut,
            "labels": ground.labels,
        }
    )  # fmt: skip
    seen, truth = observe(
        federation, protocol=protocol,
        threat=ThreatSettings.model_validate({"victims": victims, "batch": batch}),
        aux_x=dataset.aux_x, defense_known=dict(known or {"name": "checked", "settings": {}}),
        names=("init",),
    )  # fmt: skip
    return seen, truth, network
