"""Tiny federations of every protocol, in which a defense is played for the checks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bench import data
from bench.contract.attack import Seen
from bench.contract.defense import Defense
from bench.contract.messages import SERVER, Message
from bench.data.dataset import Dataset, from_features
from bench.models import Network, build
from bench.protocols.federation import Federation, RoundResult
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import Truth, observe
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.protocols.split import start_federation
from bench.sandbox.conformance.watching import Watch, watch_defense
from bench.sandbox.hooked import HookError, PluginFault, WrongAnswer
from bench.sandbox.stage import CPU, play_round
from bench.seeding import derive_seed, generator

SHAPE, CLASSES = (1, 16, 16), 10
BATCH, SAMPLES, ROUNDS = 8, 16, 2
LR = 0.1


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A protocol with a network; cut (the last stage on the clients) and labels are splitfed's.
    is_table: Whether rounds are observed on records of a table, not on digits."""

    protocol: Literal["fedsgd", "fedavg", "splitfed"]
    model: str = "lenet"
    cut: str | None = None
    labels: Literal["private", "shared"] = "private"
    is_table: bool = False

    @property
    def name(self) -> str:
        """As findings call it."""
        return f"splitfed, {self.labels} labels" if self.cut else self.protocol

    def network(self, shape: tuple[int, ...] = SHAPE, classes: int = CLASSES) -> Network:
        """The network for such samples."""
        settings = {"init": 0.25} if self.model == "lenet" else {}
        return build(self.model, shape=shape, classes=classes, settings=settings)

    def federation(
        self, defense: Defense, network: Network, samples: Sequence[tuple[Tensor, Tensor]]
    ) -> Federation:
        """Clients with such samples under the defense itself, not a copy."""
        return start_federation(
            self.protocol,
            network=network,
            cuts=(self.cut,) if self.cut else (),
            labels=self.labels,
            defense=defense,
            data=samples,
            seed=0,
            device=CPU,
        )


CUTS = (("lenet", "block1"), ("vit_small", "embed"))
"""Networks and cuts under splitfed, of which the first is taken whose smashed data suits."""


def grounds(cut: tuple[str, str] = CUTS[0]) -> tuple[Ground, ...]:
    """Every protocol once."""
    split: dict[str, Any] = {"protocol": "splitfed", "model": cut[0], "cut": cut[1]}
    whole = (Ground(protocol="fedsgd"), Ground(protocol="fedavg"))
    return (*whole, Ground(**split, labels="private"), Ground(**split, labels="shared"))


@dataclass(frozen=True, kw_only=True)
class Played:
    """Some rounds of one federation.

    Attributes:
        federation: As it is after them; its defense is the watched copy that played.
        results: The rounds.
        seen: What the server received, round by round.
    """

    federation: Federation
    results: Sequence[RoundResult]
    seen: Sequence[tuple[Message, ...]]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One observed round of a data set, and its truth, which an attack is not given."""

    name: str
    data: Dataset
    seen: Seen
    truth: Truth
    network: Network


def private_data(clients: int) -> list[tuple[Tensor, Tensor]]:
    """Samples of unrelated values in [0, 1), so that one that comes up elsewhere was copied."""
    samples = []
    for i in range(clients):
        rng = generator(0, "conformance data", i)
        x = torch.rand(SAMPLES, *SHAPE, generator=rng, dtype=torch.float64).float()
        samples.append((x, torch.randint(CLASSES, (SAMPLES,), generator=rng)))
    return samples


def company(defense: Defense, least: int = 3) -> int:
    """Clients of a run: a few, and as many as the defense mixes."""
    return -(-least // defense.together) * defense.together


def play(
    defense: Defense,
    ground: Ground,
    *,
    watch: Watch | None = None,
    rounds: int = ROUNDS,
    draws: int = 0,
    shift: int = 0,
    lr: float = LR,
) -> Played:
    """Play a few rounds with a watched copy of the defense.

    Args:
        draws: Which randomness the clients' "defense" stream has, and third parties where the
            server reads sums alone, everything else being the same.
        shift: By how many clients the data is moved on, everything else being the same.

    Raises:
        PluginFault: For a hook that raises, or returns what it may not.
    """
    copy = watch_defense(defense, watch or Watch())
    samples = private_data(company(defense))
    federation = ground.federation(copy, ground.network(), samples[shift:] + samples[:shift])
    if draws and defense.only_sums:
        parties = federation.defense.third_parties(derive_seed(0, "other draws", draws))
        federation.parties = dict(parties)
    for client in federation.clients if draws else ():
        client.rng = {**client.rng, "defense": generator(0, "other draws", draws, client.id)}
    steps = 1 if ground.protocol == "fedsgd" else 2
    work = LocalWork(protocol=ground.protocol, batch=BATCH, lr=lr, local_steps=steps)
    results = [play_round(federation, work) for _ in range(rounds)]
    for name, value in federation.state.items():
        if not bool(torch.isfinite(value).all()):
            raise WrongAnswer("aggregate", f"left '{name}' NaN or infinite after {rounds} rounds")
    seen = [r.wire.messages_for(SERVER) for r in results]
    return Played(federation=federation, results=results, seen=seen)


def fitting(defense: Defense) -> tuple[str, str]:
    """The network and cut of splitfed whose smashed data the defense takes, the first if none."""
    for cut in CUTS:
        try:
            play(defense, grounds(cut)[2], rounds=1)
            return cut
        except PluginFault as error:
            if not (isinstance(error, HookError) and error.refuses):
                break
    return CUTS[0]


@cache
def digits() -> Dataset:
    """The data set of observed rounds."""
    return data.load_dataset("digits", seed=0)


@cache
def table() -> Dataset:
    """Records of the digits: two numeric columns, and six that say which of four pixels is lit."""
    source, groups = digits(), tuple((first, first + 4) for first in range(2, 26, 4))

    def records(x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
        pixels = x.flatten(1)
        lit = [one_hot(pixels[:, 100 + n :: 9][:, :4].argmax(dim=1), 4) for n in range(6)]
        return torch.cat([pixels[:, 120:122], *lit], dim=1).numpy(), y.numpy()

    return from_features(
        name="table",
        train=records(source.train_x, source.train_y),
        test=records(source.test_x, source.test_y),
        aux=records(source.aux_x, source.aux_y),
        class_names=source.class_names,
        categorical=groups,
    )


def observe_round(defense: Defense, ground: Ground, *, batch: int = 1) -> Scene:
    """One observed round, as a run's first checkpoint has it."""
    dataset, victims = table() if ground.is_table else digits(), company(defense, 2)
    network = ground.network(dataset.shape, dataset.classes)
    order = torch.randperm(len(dataset.train_y), generator=generator(0, "conformance data"))
    shares = [order[i * BATCH : (i + 1) * BATCH] for i in range(victims)]
    samples = [(dataset.train_x[s], dataset.train_y[s]) for s in shares]
    federation = ground.federation(defense, network, samples)
    settings = {
        "name": ground.protocol,
        "clients": victims,
        "lr": 0.5,
        "batch": BATCH,
        "local_steps": None if ground.protocol == "fedsgd" else 1,
        "cut": ground.cut,
        "labels": ground.labels,
    }
    protocol = ProtocolSettings.model_validate(settings)
    seen, truth = observe(
        federation,
        protocol=protocol,
        threat=ThreatSettings.model_validate({"victims": victims, "batch": batch}),
        aux_x=dataset.aux_x,
        defense_known={"name": "checked", "settings": {}},
        names=("init",),
    )
    name = f"{ground.name}, {ground.model}, batch {batch}"
    return Scene(name=name, data=dataset, seen=seen, truth=truth, network=network)
