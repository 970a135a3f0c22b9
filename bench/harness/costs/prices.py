"""What each job of a plan is estimated to cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.harness.costs.lookup import Estimate, Table
from bench.harness.environment import dataset_of
from bench.harness.keys import Keys
from bench.records import AttackJob, TrainJob


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A table of costs, asked about whole jobs.

    Attributes:
        table: Of measured costs.
        keys: Where defenses and data sets are found.
    """

    table: Table
    keys: Keys
    _samples: dict[str, int] = field(default_factory=dict, repr=False)
    _references: dict[str, bool] = field(default_factory=dict, repr=False)

    def of(self, job: TrainJob | AttackJob, device: str) -> Estimate:
        """What the job takes on a device of that kind, cpu or cuda."""
        if isinstance(job, TrainJob):
            return self.table.training(job, device=device, samples=self._size(job))
        return self.table.attack(job, device=device, reference=self._is_reference(job.train))

    def _size(self, job: TrainJob) -> int:
        """Samples of the whole training set, where local epochs divide them; else 0."""
        if not job.protocol.local_epochs:
            return 0
        split = f"{job.task.dataset} {job.task.dataset_settings}"
        if split not in self._samples:
            self._samples[split] = len(dataset_of(job, self.keys.env).train_y)
        return self._samples[split]

    def _is_reference(self, job: TrainJob) -> bool:
        if job.defense not in self._references:
            built = self.keys.registry.defense(job.defense, job.settings)
            self._references[job.defense] = built.is_reference
        return self._references[job.defense]
