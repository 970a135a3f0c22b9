"""What executors carry out: a job with all that it needs, wherever it runs."""

from dataclasses import dataclass
from pathlib import Path

from bench.data.dataset import Dataset
from bench.harness.environment import Environment, dataset_of, plugins_of, registry_for
from bench.names import PluginKind
from bench.records import AttackJob, AttackOutcome, TrainJob, TrainOutcome
from bench.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Work:
    """A job: called, it gives its record and leaves files in `artifacts`.

    Attributes:
        job: The training or the attack.
        env: Where it runs.
        artifacts: Folder for its files.
    """

    job: TrainJob | AttackJob
    env: Environment
    artifacts: Path

    @property
    def training(self) -> TrainJob:
        """The training that it belongs to."""
        return self.job if isinstance(self.job, TrainJob) else self.job.train

    @property
    def needed(self) -> frozenset[tuple[PluginKind, str]]:
        """Kind and name of the plugins that it runs."""
        return plugins_of(self.job)

    def __call__(self) -> TrainOutcome | AttackOutcome:
        raise NotImplementedError

    def registry(self) -> Registry:
        """The plugins that it runs, and no others."""
        return registry_for(self.env.plugins, self.needed)

    def data(self) -> Dataset:
        """Its data set."""
        return dataset_of(self.training, self.env)

    def prepare(self) -> None:
        """Import the plugins, which is no part of its time."""
        self.registry()
