"""Training and attacks away from the CPU: the same answers, no waiting, bounded memory.

`second` is a device of our own (`synchronisation`) that the CPU computes, so that this runs without
hardware; `cuda` is the same tests on a GPU. One process cannot have both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from attacks.engine.optimisers import Phase, minimise
from bench.capturing import attacking
from bench.contract.attack import Context, Reconstruction, Seen
from bench.contract.defense import Defense, Loss
from bench.contract.messages import State
from bench.data.dataset import Dataset
from bench.harness import attack, train
from bench.models import Network
from bench.protocols.evaluate import evaluate
from bench.protocols.export import load_seen, save_seen
from bench.protocols.federation import Federation
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import observe
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.protocols.split import start_federation
from bench.registry import Registry
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator
from bench.toolkit import memory
from tests.conftest import network_for
from tests.synchronisation import second_device, watched
from tests.test_shipped_plugins_conform import ATTACKS, DEFENSES, shipped

CPU = torch.device("cpu")
PROTOCOLS = ("fedsgd", "fedavg", "splitfed private", "splitfed shared")


@pytest.fixture(params=["second", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device under test, with its bookkeeping switched on."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip(f"not the device of this machine: {request.param}")
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    try:
        found = second_device()
    except ImportError:
        pytest.skip("this torch cannot have devices written in Python")
    with watched():
        yield found


@pytest.fixture
def second() -> torch.device:
    if torch.cuda.is_available():
        pytest.skip("a process with a GPU cannot have the second device")
    try:
        return second_device()
    except ImportError:
        pytest.skip("this torch cannot have devices written in Python")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A tiny federation under a defense; protocol: one of PROTOCOLS."""

    digits: Dataset
    registry: Registry
    protocol: str
    defense: str = "none"

    @property
    def name(self) -> str:
        return self.protocol.split()[0]

    @property
    def split(self) -> dict[str, Any]:
        if self.name != "splitfed":
            return {}
        return {"cut": "embed" if self.patches else "block1", "labels": self.protocol.split()[1]}

    @property
    def patches(self) -> bool:
        return "patches" in DEFENSES.get(self.defense, {})

    def network(self) -> Network:
        return network_for(self.digits, "vit_small" if self.patches else "lenet")

    def deployed(self) -> Defense:
        return self.registry.defense(self.defense, DEFENSES.get(self.defense, {}))

    def federation(self, device: torch.device, clients: int = 4) -> Federation:
        data = self.digits
        split = {"cuts": (self.split["cut"],), "labels": self.split["labels"]} if self.split else {}
        rows = [slice(24 * i, 24 * i + 24) for i in range(clients)]
        return start_federation(
            self.name, network=self.network(), defense=self.deployed(), seed=0, device=device,
            data=[(data.train_x[r], data.train_y[r]) for r in rows], **split,
        )  # fmt: skip

    def play(self, federation: Federation, steps: int = 2) -> None:
        steps = 1 if self.name == "fedsgd" else steps
        work = LocalWork(protocol=self.name, batch=8, lr=0.1, local_steps=steps)
        federation.play(work, [c.id for c in federation.clients])

    def seen(self, federation: Federation, folder: Path, batch: int = 1) -> Seen:
        """An observed round, saved and read again as in a run."""
        steps = None if self.name == "fedsgd" else 1
        seen, _ = observe(
            federation,
            protocol=ProtocolSettings(
                name=self.name, clients=4, local_steps=steps, lr=0.1, **self.split
            ),  # type: ignore[arg-type]
            threat=ThreatSettings(victims=4, batch=batch),
            aux_x=self.digits.aux_x[:40],
            defense_known={"name": self.defense, "settings": {}},
            names=("final",),
        )
        save_seen(seen, folder / "seen")
        return load_seen(folder / "seen")

    def context(self, seen: Seen, device: torch.device, budget: int) -> Context:
        network, defense, rng = self.network(), self.deployed(), generator(0, "shadow")

        return Context(
            rng=generator(0, "attack"), device=device, budget=budget, network=network,
            defense=defense, aux_x=self.digits.aux_x[:40], aux_y=self.digits.aux_y[:40],
            shadow=Rehearsals(
                seen=seen, network=network, defense=defense, rng=rng, device=device
            ),
        )  # fmt: skip

    def attacked(
        self, name: str, seen: Seen, device: torch.device, budget: int
    ) -> Reconstruction | None:
        """The attack's answer, or None where it does not apply."""
        known = ATTACKS.get(name, {})
        settings = {**known, **({"rows": 40} if "rows" in known else {})}
        attack = self.registry.attack(name, settings)
        if attack.applies(seen) is not None:
            return None
        return attack.run(seen, self.context(seen, device, budget))


Make = Callable[..., Run]


@pytest.fixture
def run(digits: Dataset, registry: Registry) -> Make:
    def make(protocol: str, defense: str = "none") -> Run:
        return Run(digits=digits, registry=registry, protocol=protocol, defense=defense)

    return make


def trained(run: Run, device: torch.device) -> tuple[Federation, Any]:
    federation = run.federation(device)
    for _ in range(2):
        run.play(federation)
    data = run.digits
    few = replace(data, test_x=data.test_x[:50], test_y=data.test_y[:50], aux_x=data.aux_x[:40])
    return federation, evaluate(federation, few, has_global=True)


def _alike(run: Run, device: torch.device, tmp_path: Path) -> None:
    here, there = trained(run, CPU), trained(run, device)
    assert all(v.device.type == device.type for v in there[0].state.values())
    if run.defense not in RANDOM_BITS:
        alike = [
            torch.isclose(value, there[0].state[name].cpu(), atol=1e-4).flatten()
            for name, value in here[0].state.items()
        ]
        few = 0.01 if run.defense in STEPS and device.type == "cuda" else 0.0
        assert float((~torch.cat(alike)).double().mean()) <= few
        assert here[1].correct == there[1].correct
    run.seen(there[0], tmp_path)


STEPS = {"quantise", "top_k"}
"""A value at a step falls to either side by its last digits; on other draws or places a quarter of
all values and more differ."""
RANDOM_BITS = {"fedml_he", "mask_crypt", "selective_shield"}
"""Encryption draws from the system, and the last digits of a score decide what is encrypted."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_training_elsewhere_gives_the_state_of_a_cpu(
    run: Make, device: torch.device, protocol: str, tmp_path: Path
) -> None:
    _alike(run(protocol), device, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("defense", [d for d in shipped("leakbench.defenses") if d != "none"])
def test_every_defense_elsewhere_trains_as_on_a_cpu(
    run: Make, device: torch.device, defense: str, protocol: str, tmp_path: Path
) -> None:
    one = run(protocol, defense)
    if one.deployed().requires and one.name != "splitfed":
        pytest.skip("the protocol has no smashed data")
    _alike(one, device, tmp_path)


@pytest.mark.parametrize("attack", ["ilrg", "inverting_gradients", "split_label"])
def test_an_attack_elsewhere_answers_as_on_a_cpu(
    run: Make, device: torch.device, attack: str, tmp_path: Path
) -> None:
    one = run("splitfed private" if attack == "split_label" else "fedavg")
    _answers_alike(one, attack, device, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("defense", ["none", "gaussian", "spm", "standalone", "selective_shield"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("attack", shipped("leakbench.attacks"))
def test_every_attack_elsewhere_answers_as_on_a_cpu(
    run: Make, device: torch.device, attack: str, protocol: str, defense: str, tmp_path: Path
) -> None:
    _answers_alike(run(protocol, defense), attack, device, tmp_path)


def test_rehearsed_batches_are_counted_elsewhere_as_on_a_cpu(
    run: Make, device: torch.device, tmp_path: Path
) -> None:
    """Masked batches of several samples are doubtful, so that ilrg rehearses public ones."""
    one = run("splitfed private", "pm_sfl")
    _answers_alike(one, "ilrg", device, tmp_path, batch=8)


def _answers_alike(
    one: Run, attack: str, device: torch.device, tmp_path: Path, *, batch: int = 1
) -> None:
    federation = one.federation(CPU)
    one.play(federation)
    seen = one.seen(federation, tmp_path, batch)
    here = one.attacked(attack, seen, CPU, 3)
    there = one.attacked(attack, seen, device, 3)
    assert (here is None) == (there is None)
    if here is None or there is None:
        return
    for name in ("images", "labels", "label_counts", "loss", "failed"):
        a, b = getattr(here, name), getattr(there, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert b.device.type == "cpu"
            if one.defense == "none":
                assert torch.allclose(a.double(), b.double(), rtol=1e-2, atol=1e-2), name
    assert here.evaluations == there.evaluations


# --- nothing waits --------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS[1:])
def test_more_local_steps_do_not_make_the_host_wait_more_often(
    run: Make, second: torch.device, protocol: str
) -> None:
    waits = []
    for steps in (1, 3):
        federation = run(protocol).federation(second)
        with watched() as log:
            run(protocol).play(federation, steps)
        waits.append(log)
    assert waits[0] == waits[1], waits[1] - waits[0]
    assert not waits[0], "undefended training never asks for a value"


@pytest.mark.parametrize(("attack", "per_budget"), [
    ("inverting_gradients", 1 / 8), pytest.param("dlg", 3 / 8, marks=pytest.mark.slow),
    pytest.param("idlg", 3 / 8, marks=pytest.mark.slow),
    pytest.param("decoder", 0, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_larger_budget_makes_the_host_wait_once_per_eight_iterations_at_most(
    run: Make, second: torch.device, attack: str, per_budget: float, tmp_path: Path
) -> None:
    """dlg plays three waves of starts, one of them in nine phases, each of which ends with a look;
    the decoder looks at held-out images 20 times in all, or at each step of a shorter training."""
    one = run("fedavg")
    seen = one.seen(one.federation(CPU), tmp_path)
    waits: list[Counter[str]] = []
    budgets = {"decoder": (10, 20), "inverting_gradients": (4, 12)}.get(attack, (40, 120))
    for budget in budgets:
        with watched() as log:
            one.attacked(attack, seen, second, budget)
        waits.append(log)
    more = sum(waits[1].values()) - sum(waits[0].values())
    assert more <= per_budget * (budgets[1] - budgets[0]), waits[1] - waits[0]


def test_lbfgs_makes_the_host_wait_once_per_eight_iterations(second: torch.device) -> None:
    def quartic(z: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return (z**4 + z**2).sum(dim=1), 4 * z**3 + 2 * z

    start, stop = torch.linspace(1, 2, 12).view(3, 4).to(second), torch.zeros(3, device=second)
    waits = []
    for evaluations in (9, 25):
        with watched() as log:
            minimise(
                [Phase(evaluate=quartic, stop=stop, dtype=torch.float32)], start,
                max_evaluations=evaluations, least_gain=0.0,
            )  # fmt: skip
        waits.append(log)
    assert sum(waits[1].values()) - sum(waits[0].values()) <= 2, waits[1] - waits[0]


def test_the_count_sees_what_stops_a_gpu_and_nothing_else(second: torch.device) -> None:
    x, rows = torch.arange(6.0).to(second), torch.arange(2).to(second)

    def one(call: Callable[[], Any]) -> int:
        with watched() as log:
            call()
        return sum(log.values())

    stops: list[Callable[[], Any]] = [
        lambda: float(x.sum()), lambda: bool(x[0] > 0), lambda: x.tolist(), lambda: x.cpu(),
        lambda: x[x > 1], lambda: x.nonzero(), lambda: x[[0, 1]], lambda: x.unique(),
        lambda: torch.ones(3).to(second), lambda: torch.tensor([1.0], device=second),
        lambda: torch.repeat_interleave(rows, rows), lambda: torch.equal(x, x),
    ]  # fmt: skip
    for number, call in enumerate(stops):
        assert one(call) == 1, number
    free: list[Callable[[], Any]] = [
        lambda: x[rows], lambda: torch.where(x > 1, x, 0.0), lambda: x.masked_fill(x > 1, 0.0),
        lambda: torch.ones(3).to(second, non_blocking=True), lambda: x * 2,
        lambda: torch.zeros(3, device=second), lambda: torch.arange(3, device=second),
        lambda: torch.repeat_interleave(rows, rows, output_size=1),
    ]  # fmt: skip
    for number, call in enumerate(free):
        assert one(call) == 0, number


def test_the_second_device_refuses_what_a_gpu_refuses(second: torch.device) -> None:
    x, rng = torch.ones(3).to(second), torch.Generator()
    with pytest.raises(RuntimeError, match="mixes tensors"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="generator of the CPU"):
        torch.randn(3, generator=rng, device=second)
    with pytest.raises(RuntimeError, match="numpy"):
        x.numpy()


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "inner", "call"), [
    (train, "_train", lambda: train.Training.__call__(Mock())),
    (attack, "not_applicable", lambda: attack.Attacking.__call__(Mock())),
    (attacking, "discover", lambda: attacking.attack_view(Mock(), ["dlg"])),
])  # fmt: skip
def test_convolutions_keep_all_bits_of_float32_wherever_work_begins(
    monkeypatch: pytest.MonkeyPatch, module: Any, inner: str, call: Callable[[], Any]
) -> None:
    """cuDNN's default, TF32, keeps 11 of 24; what the user has set is put back."""

    class Reached(Exception):
        pass

    def look(*_: Any) -> None:
        noted.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))
        raise Reached

    noted: list[tuple[bool, str]] = []
    monkeypatch.setattr(module, inner, look)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(Reached):
            call()
        assert noted == [(False, "highest")]
        assert torch.backends.cudnn.allow_tf32, "the default, as it was before"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


# --- memory ---------------------------------------------------------------------------------------

GIB = 2**30


def gpu_with(
    monkeypatch: pytest.MonkeyPatch, *, free: int, total: int, allocated: int, reserved: int
) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    return memory.usable_bytes(torch.device("cuda"))


def test_a_process_uses_what_is_free_but_no_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = {"free": 60 * GIB, "total": 80 * GIB, "allocated": 10 * GIB, "reserved": 16 * GIB}
    monkeypatch.delenv(memory.GPU_SHARE, raising=False)
    # 60 free and 6 kept for reuse; a whole card's share leaves 70.
    assert gpu_with(monkeypatch, **alone) == 66 * GIB
    monkeypatch.setenv(memory.GPU_SHARE, "0.25")
    assert gpu_with(monkeypatch, **alone) == 10 * GIB
    monkeypatch.setenv(memory.GPU_SHARE, "0.1")
    assert gpu_with(monkeypatch, **alone) == 0
    for wrong in ("0", "1.5", "half"):
        monkeypatch.setenv(memory.GPU_SHARE, wrong)
        with pytest.raises(ValueError, match=f"LEAKBENCH_GPU_SHARE must be .*'{wrong}'"):
            gpu_with(monkeypatch, **alone)
    assert memory.usable_bytes(CPU) == 2 * GIB


class Refuses(Defense):
    """Runs out of memory in every call for more clients than `fits`."""

    def __init__(self, fits: int, sizes: list[int]) -> None:
        self.fits, self.sizes = fits, sizes

    def __deepcopy__(self, memo: dict[int, Any]) -> Refuses:
        return self

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        some = torch._C._functorch.get_unwrapped(x[0] if isinstance(x, tuple) else x)
        self.sizes.append(len(some))
        if self.sizes[-1] > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().gradient(loss, variables, x, y, draw)


@pytest.mark.parametrize("protocol", ["fedavg", "splitfed shared"])
def test_training_that_does_not_fit_goes_on_with_fewer_clients_at_once(
    digits: Dataset, registry: Registry, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """As on a GPU, where all clients go at once: `_chunk` is None."""
    monkeypatch.setattr(Federation, "_chunk", lambda self: None)
    states, sizes = [], []
    for fits in (5, 2):
        sizes = []

        class Small(Run):
            def deployed(self, fits: int = fits, sizes: list[int] = sizes) -> Defense:
                return Refuses(fits, sizes)

        one = Small(digits=digits, registry=registry, protocol=protocol)
        federation = one.federation(CPU, clients=5)
        one.play(federation)
        states.append(federation.state)
    assert sizes == [5, 3, 2, 2, 1, 2, 2, 1]  # the second step begins with what fitted
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], atol=1e-5), name
    monkeypatch.setattr(Small, "deployed", lambda self: Refuses(0, []))
    hopeless = one.federation(CPU, clients=2)
    with pytest.raises(torch.OutOfMemoryError):
        one.play(hopeless)
