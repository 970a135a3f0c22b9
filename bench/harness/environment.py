"""Where jobs run: device, data folder, plugins, and what a process keeps of them."""

import json
import platform
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

from bench import data, models, registry
from bench.data.dataset import Dataset
from bench.data.partition import Dealing
from bench.names import PluginKind
from bench.records import AttackJob, NoResult, TrainJob, sound_text
from bench.seeding import numpy_generator

DATASETS_KEPT = 4
"""How many data sets a process keeps: a plan's seeds take turns, each with a split of its own."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where jobs run.

    Attributes:
        device: Of PyTorch, "cpu" or "cuda" with or without a number.
        data_dir: Folder of the data sets that are not embedded; None for those alone.
        download: Whether missing data sets may be fetched into it.
        plugins: Files that bring defenses and attacks beside the installed ones.
    """

    device: str = "cpu"
    data_dir: Path | None = None
    download: bool = False
    plugins: tuple[Path, ...] = ()


def versions() -> dict[str, str]:
    """Versions of everything that moves a number."""
    packages = ("leakbench", "torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn")
    return {"python": platform.python_version(), **{p: version(p) for p in packages}}


@cache
def registry_for(
    files: tuple[Path, ...], needed: frozenset[tuple[PluginKind, str]] | None = None
) -> registry.Registry:
    """The installed plugins that are needed, None for all, and those of the files; loaded once per
    process."""
    return registry.discover(files, needed)


def plugins_of(job: TrainJob | AttackJob) -> frozenset[tuple[PluginKind, str]]:
    """Return the kind and name of the plugins that a training or an attack runs."""
    train = job if isinstance(job, TrainJob) else job.train
    plugins: set[tuple[PluginKind, str]] = {("defense", n) for n in train.defense.split("+")}
    if isinstance(job, AttackJob):
        plugins.add(("attack", job.attack))
    return frozenset(plugins)


@lru_cache(maxsize=DATASETS_KEPT)
def _dataset(name: str, options: str, seed: int, data_dir: Path | None, download: bool) -> Dataset:
    return data.load_dataset(
        name, seed=seed, data_dir=data_dir, download=download, options=json.loads(options)
    )


def dataset_of(job: TrainJob, env: Environment) -> Dataset:
    """The data set that a training draws on, split by the training's seed."""
    settings = json.dumps(job.task.dataset_settings, sort_keys=True, default=str)
    return _dataset(job.task.dataset, settings, job.seed, env.data_dir, env.download)


def network_of(job: TrainJob, shape: tuple[int, ...], classes: int) -> models.Network:
    """The network that a training's task names, for samples of a shape."""
    task = job.task
    return models.build(task.model, shape=shape, classes=classes, settings=task.model_settings)


def samples_for_threats(job: TrainJob) -> int:
    """Samples that each client needs for the rounds that threats play on a fork."""
    return max((t.batch * t.local_steps for t in job.threats), default=1)


def shares_of(job: TrainJob, dataset: Dataset) -> list[np.ndarray]:
    """Indices of each client's training samples."""
    rng = numpy_generator(job.seed, "partition", job.task.dataset)
    owners = None if dataset.train_clients is None else dataset.train_clients.numpy()
    return dealing_of(job).deal(dataset.train_y.numpy(), rng, owners)


def dealing_of(job: TrainJob) -> Dealing:
    """Return how a training deals samples to its clients."""
    protocol = job.protocol
    least = samples_for_threats(job)
    if protocol.local_steps and any(t.recorded for t in job.threats):
        least = max(least, protocol.batch * protocol.local_steps)
    return Dealing(
        how=protocol.partition,
        clients=protocol.clients,
        alpha=protocol.alpha,
        each=protocol.shards,
        least=least,
    )


def not_applicable(reason: str) -> NoResult:
    """The record of a job that makes no sense for its defense or its observation."""
    return NoResult(status="not_applicable", reason=sound_text(reason))
