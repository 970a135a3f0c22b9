"""Shared fixtures: small networks, federations and observations."""

import fcntl
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import settings

from bench import suite as suites
from bench.contract.attack import Context, Seen
from bench.contract.defense import Defense
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.harness import launch, runner
from bench.harness.environment import Environment, registry_for
from bench.harness.keys import Keys
from bench.harness.plan import expand
from bench.harness.store import Store
from bench.models import Network, build
from bench.protocols.federation import Federation
from bench.protocols.observe import Truth, observe
from bench.protocols.settings import ProtocolSettings, ThreatSettings
from bench.protocols.split import start_federation
from bench.registry import Registry, discover
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator

Value = TypeVar("Value")

# The same inputs every time, however busy the machine is; `--hypothesis-profile=default` draws
# others, and `many` thousands.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("many", max_examples=3000, deadline=None)
settings.load_profile("fixed")


def part(divisor: int) -> int:
    """Return how many examples a costly property gets of those that the profile asks for."""
    return settings().max_examples // divisor


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is left in the user's folder for caches, nor read from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _installed_plugins() -> Iterator[None]:
    """The installed defenses and attacks, which no test changes, are looked up once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.registry.entry_points", cache(entry_points))
        yield


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker for each core and one more, since some wait for browsers and other processes; none
    for benchmarks, whose timings a neighbour would disturb, or with the one GPU."""
    alone = config.option.benchmark_only or config.option.markexpr == "gpu"
    return 0 if alone else len(os.sched_getaffinity(0)) + 1


DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds that each test file took when `pytest --record-durations` last ran all of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help=f"write {DURATIONS.name} anew."
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, so that none is left for one worker at the end; new ones lead."""
    known = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -known.get(item.path.name, float("inf")))


class DurationRecorder:
    """Adds up what the tests of a file took, on whichever worker they ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[Path(report.location[0]).name] += report.duration

    def pytest_sessionfinish(self) -> None:
        rounded = {name: round(s, 1) for name, s in sorted(self.seconds.items())}
        DURATIONS.write_text(json.dumps(rounded, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record_durations and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(DurationRecorder())
    spread = "PYTEST_XDIST_WORKER" in os.environ
    if config.getoption("numprocesses", 0):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # NumPy's threads of the workers too
    torch.set_num_threads(1 if spread else max(1, (os.cpu_count() or 2) // 2))


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_dataset("digits", seed=0)


@pytest.fixture(scope="session")
def photos() -> Dataset:
    return load_dataset("photos", seed=0)


@pytest.fixture(scope="session")
def registry() -> Registry:
    return discover()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of data sets that are not embedded; tests that need it skip without it."""
    given = os.environ.get("LEAKBENCH_DATA")
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(given) if given else beside
    if not folder.is_dir():
        pytest.skip("no data folder: set LEAKBENCH_DATA to one")
    return folder


def network_for(dataset: Dataset, name: str = "lenet", **settings: Any) -> Network:
    if name == "lenet" and not settings:
        settings = {"init": 0.25}
    return build(name, shape=dataset.shape, classes=dataset.classes, settings=settings)


def federation_of(
    dataset: Dataset, network: Network, defense: Defense, *, clients: int = 4, each: int = 24,
    seed: int = 0, protocol: str = "fedavg", **split: Any,
) -> Federation:  # fmt: skip
    """Clients with `each` consecutive samples of a shuffled training part; split: cuts and labels
    of splitfed."""
    order = torch.randperm(len(dataset.train_y), generator=generator(seed, "test data"))
    shares = [order[i * each : (i + 1) * each] for i in range(clients)]
    return start_federation(
        protocol,
        network=network,
        defense=defense,
        data=[(dataset.train_x[s], dataset.train_y[s]) for s in shares],
        seed=seed,
        device=torch.device("cpu"),
        **split,
    )


def seen_under(
    dataset: Dataset, network: Network, defense: Defense, *, protocol: str = "fedavg",
    lr: float = 0.5, seed: int = 0, clients: int = 8, split: Mapping[str, Any] | None = None,
    **threat: Any,
) -> tuple[Seen, Truth]:  # fmt: skip
    """One observed round of a fresh federation; split: cut and labels of splitfed."""
    steps = None if protocol == "fedsgd" else 1
    settings = ProtocolSettings(
        name=protocol,
        clients=clients,
        local_steps=steps,
        lr=lr,
        **(split or {}),  # type: ignore[arg-type]
    )
    cuts = {"cuts": settings.cuts, "labels": settings.labels} if split else {}
    federation = federation_of(
        dataset,
        network,
        defense,
        clients=clients,
        seed=seed,
        protocol=protocol,
        **cuts,
        each=max(24, threat.get("batch", 1) * threat.get("local_steps", 1)),
    )
    return observed_round(federation, dataset, settings, **threat)


def observed_round(
    federation: Federation,
    dataset: Dataset,
    protocol: ProtocolSettings,
    *,
    name: str = "init",
    **threat: Any,
) -> tuple[Seen, Truth]:
    """One observed round of a federation, fresh or trained; all clients are victims unless told.

    name: Of the random streams.
    """
    return observe(
        federation,
        protocol=protocol,
        threat=ThreatSettings(**{"victims": protocol.clients, **threat}),
        aux_x=dataset.aux_x,
        defense_known={"name": "test", "settings": {}},
        names=(name,),
    )


def context_for(
    dataset: Dataset, network: Network, defense: Defense, *, budget: int = 200, seed: int = 0
) -> Context:
    def no_shadow(x: torch.Tensor, y: torch.Tensor) -> Seen:
        raise AssertionError("this attack needs no shadow")

    return Context(
        rng=generator(seed, "test attack"),
        device=torch.device("cpu"),
        budget=budget,
        aux_x=dataset.aux_x,
        aux_y=dataset.aux_y,
        network=network,
        defense=defense,
        shadow=no_shadow,
    )


def rehearsing_context(
    dataset: Dataset, network: Network, defense: Defense, seen: Seen, *, budget: int = 200
) -> Context:
    """A context whose shadow plays the observed round on public data."""
    plain = context_for(dataset, network, defense, budget=budget)
    rng = generator(0, "shadow")
    shadow = Rehearsals(seen=seen, network=network, defense=defense, rng=rng, device=plain.device)
    return replace(plain, shadow=shadow)


TINY = """
name = "tiny"
version = 1
checkpoints = ["init", "final"]
budget = 5
audit = 0

[protocol]
name = "fedavg"
clients = 3
rounds = 1
local_steps = 1
batch = 8
lr = 0.1

[[tasks]]
dataset = "digits"
model = "mlp_spm"

[[threats]]
victims = 2

[[defenses]]
name = "none"

[[defenses]]
name = "spm"
settings = { epsilon = [0.5, 2.0] }

[[attacks]]
name = "ilrg"

[[attacks]]
name = "prior_only"
"""


def require(value: Value | None) -> Value:
    """Return a value that must be there."""
    assert value is not None
    return value


def changed(text: str, changes: Mapping[str, str]) -> str:
    """Replace pieces of a text that must be there."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


RAISING = """
from bench.api import Attack

class Raising(Attack):
    "Raises."
    def run(self, seen, ctx):
        raise RuntimeError("boom")
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """Writes a suite of a second or two; keyword arguments replace pieces of its text."""

    def write(**replacements: str) -> Path:
        text = TINY
        for old, new in replacements.items():
            text = text + new if old == "append" else changed(text, {old: new})
        path = tmp_path / "tiny.toml"
        path.write_text(text)
        return path

    return write


Run = Callable[..., tuple[Store, runner.Report]]


def run_suite(
    suite: Path, out: Path, *, plugins: tuple[Path, ...] = (), workers: int = 0,
    only: dict[str, Any] | None = None, fresh: bool = False,
) -> tuple[Store, runner.Report]:  # fmt: skip
    """Run a suite's file without the command line."""
    env = Environment(plugins=plugins)
    registry = registry_for(plugins)
    plan = expand(suites.read_suite(str(suite)), only)
    runner.check(plan, registry, env)
    store = Store(out)
    report = runner.run(
        plan, store, Keys(registry, env), executor=launch.local(plan, env, workers=workers),
        fresh=fresh, command=["test"],
    )  # fmt: skip
    return store, report


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a suite's file into tmp_path: store and report."""

    def go(suite: Path, *, out: str = "out", **how: Any) -> tuple[Store, runner.Report]:
        return run_suite(suite, tmp_path / out, **how)

    return go


MadeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Fills a folder of that name the first time that any worker asks for it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name: str, fill: Callable[[Path], object]) -> Path:
        folder = shared / f"once-{name}"
        folder.mkdir(exist_ok=True)
        with (shared / f"once-{name}.lock").open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_size == 0:
                fill(folder)
                lock.write("filled")
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tiny_made(made_once: MadeOnce) -> Path:
    """The finished run of the suite `TINY`, which no test changes."""

    def fill(folder: Path) -> None:
        (folder / "tiny.toml").write_text(TINY)
        _, report = run_suite(folder / "tiny.toml", folder / "out")
        assert report.failures == []

    return made_once("tiny", fill) / "out"


@pytest.fixture(scope="session")
def committed_site(made_once: MadeOnce) -> Path:
    """The site of some committed results, which lie beside it."""
    from bench.report import site

    committed = Path(__file__).parents[1] / "results"

    def fill(folder: Path) -> None:
        for name in ("quick", "curves", "as_trained_data"):
            shutil.copytree(committed / name, folder / "results" / name)
        site.write(folder / "results", folder / "site")

    return made_once("site", fill) / "site"


@pytest.fixture
def tiny_copy(tiny_made: Path, tmp_path: Path) -> Path:
    """A copy of that run where `run` goes on with it."""
    return Path(shutil.copytree(tiny_made, tmp_path / "out"))
