"""Tiny federations of every protocol, in which a defense is played for the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.defense import Client, Defense
from bench.contract.messages import SERVER, Message, State
from bench.data.dataset import Dataset, from_arrays
from bench.models import Network, build
from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import Truth, observe
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.protocols.split import start_federation
from bench.sandbox.conformance.watching import Watch, watched
from bench.sandbox.hooked import HookError, WrongAnswer
from bench.sandbox.stage import CPU, play_round
from bench.seeding import generator

SHAPE, CLASSES = (1, 16, 16), 10
BATCH, SAMPLES, ROUNDS = 8, 16, 2
LR = 0.1


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A protocol with a network; cut (the last stage on the clients) and labels are splitfed's."""

    protocol: Literal["fedsgd", "fedavg", "splitfed"]
    model: str = "lenet"
    cut: str | None = None
    labels: Literal["private", "shared"] = "private"

    @property
    def name(self) -> str:
        """As findings call it."""
        return f"splitfed, {self.labels} labels" if self.cut else self.protocol

    def network(self, shape: tuple[int, ...] = SHAPE, classes: int = CLASSES) -> Network:
        """The network for such samples."""
        settings = {"init": 0.25} if self.model == "lenet" else {}
        return build(self.model, shape=shape, classes=classes, settings=settings)

    def federation(
        self, defense: Defense, network: Network, data: Sequence[tuple[Tensor, Tensor]]
    ) -> Federation:
        """Clients with such data under the defense itself, not a copy."""
        return start_federation(
            self.protocol,
            network=network,
            cuts=(self.cut,) if self.cut else (),
            labels=self.labels,
            defense=defense,
            data=data,
            seed=0,
            device=CPU,
        )


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
    """Some rounds of one federation: state and clients as they are after them.

    Attributes:
        seen: What the server received, round by round.
        used: Each client's samples in the last round.
        defense: The watched copy that played.
    """

    seen: Sequence[tuple[Message, ...]]
    state: State
    clients: Sequence[Client]
    used: Mapping[str, Tensor]
    defense: Defense


def private_data(clients: int) -> list[tuple[Tensor, Tensor]]:
    """Samples of unrelated values in [0, 1), so that one that comes up elsewhere was copied."""
    found = []
    for i in range(clients):
        rng = generator(0, "conformance data", i)
        x = torch.rand(SAMPLES, *SHAPE, generator=rng, dtype=torch.float64).float()
        found.append((x, torch.randint(CLASSES, (SAMPLES,), generator=rng)))
    return found


def company(defense: Defense) -> int:
    """Clients of a run: a few, and as many as the defense mixes."""
    return -(-3 // defense.together) * defense.together


def play(
    defense: Defense,
    ground: Ground,
    *,
    watch: Watch | None = None,
    rounds: int = ROUNDS,
    draws: int = 0,
    shift: int = 0,
) -> Played:
    """Play a few rounds with a watched copy of the defense.

    Args:
        draws: Which randomness the clients' "defense" stream has, everything else being the same.
        shift: By how many clients the data is moved on, everything else being the same.

    Raises:
        PluginFault: For a hook that raises, or returns what it may not.
    """
    copy = watched(defense, watch or Watch())
    data = private_data(company(defense))
    federation = ground.federation(copy, ground.network(), data[shift:] + data[:shift])
    for client in federation.clients if draws else ():
        mine = generator(0, "other draws", draws, client.id)
        client.rng = {**client.rng, "defense": mine}
    steps = 1 if ground.protocol == "fedsgd" else 2
    work = LocalWork(protocol=ground.protocol, batch=BATCH, lr=LR, local_steps=steps)
    results = [play_round(federation, work) for _ in range(rounds)]
    for name, value in federation.state.items():
        if not bool(torch.isfinite(value).all()):
            raise WrongAnswer("aggregate", f"left '{name}' NaN or infinite after {rounds} rounds")
    return Played(
        seen=[r.wire.seen_by(SERVER) for r in results],
        state=federation.state,
        clients=federation.clients,
        used=results[-1].used,
        defense=copy,
    )


def fitting(defense: Defense) -> tuple[str, str]:
    """The network and cut of splitfed whose smashed data the defense takes. Raises the last
    HookError if it takes none."""
    for cut in CUTS:
        try:
            play(defense, grounds(cut)[2], rounds=1)
        except HookError as error:
            if cut == CUTS[-1] or not error.refuses:
                raise
        else:
            return cut
    raise AssertionError("the last cut returns or raises")


def noise_dataset() -> Dataset:
    """Samples of unrelated values as a data set, for rounds in which images do not matter."""
    rng = generator(0, "conformance noise data")
    x = torch.rand(4 * 64, *SHAPE, generator=rng)[:, 0].numpy()
    y = torch.randint(CLASSES, (len(x),), generator=rng).numpy()
    at = (slice(128), slice(128, 192), slice(192, None))
    train, test, aux = ((x[part], y[part]) for part in at)
    names = tuple(map(str, range(CLASSES)))
    return from_arrays(name="noise", train=train, test=test, aux=aux, class_names=names)


def seen_of(
    defense: Defense, ground: Ground, dataset: Dataset, *, batch: int = 1, victims: int = 2
) -> tuple[Seen, Truth, Network]:
    """One observed round on a data set, as a run's first checkpoint has it."""
    network = ground.network(dataset.shape, dataset.classes)
    victims = -(-victims // defense.together) * defense.together
    order = torch.randperm(len(dataset.train_y), generator=generator(0, "conformance data"))
    shares = [order[i * BATCH : (i + 1) * BATCH] for i in range(victims)]
    data = [(dataset.train_x[s], dataset.train_y[s]) for s in shares]
    federation = ground.federation(defense, network, data)
    protocol = ProtocolSettings.model_validate(
        {
            "name": ground.protocol,
            "clients": victims,
            "lr": 0.5,
            "batch": BATCH,
            "local_steps": None if ground.protocol == "fedsgd" else 1,
            "cut": ground.cut,
            "labels": ground.labels,
        }
    )
    seen, truth = observe(
        federation,
        protocol=protocol,
        threat=ThreatSettings.model_validate({"victims": victims, "batch": batch}),
        aux_x=dataset.aux_x,
        defense_known={"name": "checked", "settings": {}},
        names=("init",),
    )
    return seen, truth, network
