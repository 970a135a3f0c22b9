"""Runs a plan: which records are missing, in what order they are made, what failed."""

import shlex
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import models
from bench.contract.defense import Defense
from bench.data.partition import enough
from bench.errors import UserError, noting
from bench.harness import environment
from bench.harness.attack import Attacking
from bench.harness.executors.task import ATTACKS, SCORES, TRAININGS, Executor, Task
from bench.harness.keys import Keys
from bench.harness.plan import Plan
from bench.harness.scoring import Scoring
from bench.harness.store import Store, write_whole
from bench.harness.train import Training, check_company
from bench.harness.work import Work
from bench.protocols.split import Split
from bench.records import TrainOutcome, is_settled, to_json
from bench.records.jobs import AttackJob, TrainJob, canonical
from bench.records.outcomes import AttackInputs, AttackOutcome, AttackRecord, TrainRecord
from bench.records.run import RUN, Cell, PlannedTraining, Run
from bench.registry import Registry


@dataclass(kw_only=True)
class Report:
    """Counts of a run.

    Attributes:
        total: Jobs of the plan.
        ran: Jobs that were run.
        cached: Those that were finished before.
        failures: (label, reason) of failed and timed-out jobs.
        remade: What was wrong with files of finished jobs, which were run again for it.
    """

    total: int
    ran: int = 0
    cached: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    remade: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Jobs that ended, or were finished before."""
        return self.ran + self.cached


OnProgress = Callable[[Report, str, bool], None]
"""Is told the counts so far after each finished job, its label, and whether it was finished
before."""
KINDS = (TRAININGS, ATTACKS, SCORES)
"""The kinds of jobs, each of which follows from those before."""


def check(plan: Plan, registry: Registry, env: environment.Environment) -> None:
    """Find errors before any work: in names, settings, data, shapes and threats.

    Each setting, network and data set is tried once.

    Raises:
        UserError: With a sentence for each thing that is wrong.
    """
    place = plan.suite.name
    problems: dict[str, None] = {}
    # Of a data set only what is asked here: a plan has more of them than memory should hold.
    data_facts: dict[str, tuple[int, tuple[int, ...], int, np.ndarray | None] | None] = {}
    networks: dict[str, models.Network | None] = {}
    defenses: dict[str, Defense | None] = {}
    companies: set[tuple[str, str]] = set()
    for job in plan.trainings:
        task, setting = canonical([job.task, job.protocol]), f"{job.defense} {job.settings!r}"
        if setting not in defenses:
            defenses[setting] = None
            with noting(problems):
                defenses[setting] = registry.defense(job.defense, job.settings, where=place)
        split = f"{job.task.dataset} {job.task.dataset_settings!r} {job.seed}"
        if split not in data_facts:
            data_facts[split] = None
            with noting(problems):
                dataset = environment.dataset_of(job, env)
                own = dataset.train_clients
                owners = None if own is None else own.numpy()
                data_facts[split] = len(dataset.train_y), dataset.shape, dataset.classes, owners
        known = data_facts[split]
        if known is None:
            continue
        if task not in networks:
            networks[task] = None
            with noting(problems):
                network = environment.network_of(job, known[1], known[2])
                network.check()
                networks[task] = network
        with noting(problems):
            _check_samples(job, known[0], known[3], place)
        built, defense = networks[task], defenses[setting]
        if built is None or defense is None or (task, setting) in companies:
            continue
        companies.add((task, setting))
        with noting(problems):
            if job.protocol.cuts:
                Split(network=built, cuts=job.protocol.cuts, labels=job.protocol.labels)
            check_company(job, defense)
    for attack in {f"{c.attack} {c.settings!r}": c for c in plan.cells}.values():
        with noting(problems):
            registry.attack(attack.attack, attack.settings, where=place)
    if problems:
        raise UserError(" ".join(problems))


def _check_samples(job: TrainJob, samples: int, owners: np.ndarray | None, place: str) -> None:
    """Raise UserError for fewer samples, or clients of the data's own, than the clients need.

    owners: Whose each sample is, None where the data does not say.
    """
    dealing = environment.dealing_of(job)
    need = dealing.clients * environment.samples_for_threats(job)
    if samples < need:
        raise UserError(
            f"{place}: {job.task.dataset} has {samples} training samples, but "
            f"{job.protocol.clients} clients and the threats' batches need {need}."
        )
    if dealing.how == "natural":
        try:
            enough(owners, clients=dealing.clients, least=dealing.least)
        except UserError as error:
            raise UserError(f"{place}: {job.task.dataset}: {error}") from error


def label_of(job: TrainJob | AttackJob) -> str:
    """Return how errors and progress call a training, fedavg/digits/lenet/spm(epsilon=1.5)/seed 0,
    or an attack on it, ... dlg at final."""
    if isinstance(job, AttackJob):
        return f"{label_of(job.train)} {job.label} at {job.checkpoint}"
    settings = ",".join(f"{k}={v}" for k, v in job.settings.items())
    task = f"{job.protocol.name}/{job.task.dataset}/{job.task.model}"
    return f"{task}/{job.defense}({settings})/seed {job.seed}"


def run(
    plan: Plan,
    store: Store,
    keys: Keys,
    *,
    executor: Executor,
    fresh: bool = False,
    command: Sequence[str] = (),
    on_progress: OnProgress = lambda report, label, cached: None,
    kinds: Collection[str] = KINDS,
) -> Report:
    """Make every missing record while holding the folder, each training's attacks as soon as it is
    done.

    Records are written as jobs finish, so a killed run continues where it stopped.

    Args:
        plan: What to make.
        store: The result folder.
        keys: Of the plan's jobs.
        executor: Carries them out.
        fresh: Whether what is finished is made anew.
        command: How a reader would make the run again.
        on_progress: Is told of every job that ended.
        kinds: Of KINDS, what is made of what is missing.

    Raises:
        UserError: If another driver holds the folder; if a record or a job's files cannot be
            written: the run ends, what is finished is kept.
    """
    with store.lock():
        store.sweep()
        planned = describe_run(plan, keys, command)
        with _report_failed_writes(store):
            write_whole(store.folder / RUN, to_json(planned))
        store.hold(planned)  # what contradicts it is made anew
        going = _Run(plan, store, keys, fresh=fresh, on_progress=on_progress, kinds=kinds)
        with closing(executor(going.queue)) as outcomes:
            for task, ended in outcomes:
                if ended.no_space:
                    raise UserError(
                        f"{store.folder}: {task.label} could not write its files "
                        f"({ended.record.reason}). What is finished is kept; make room and run "
                        "the same command to go on."
                    )
                with _report_failed_writes(store):
                    going.take(task, ended.record)
    return going.report


@contextmanager
def _report_failed_writes(store: Store) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write results to {store.folder} ({error.strerror or error}). What is finished "
            "is kept; run the same command to go on."
        ) from error


@dataclass
class _Run:
    """A run under way: its queue of tasks, and what became of those that are done.

    A training's attacks are queued before the trainings that follow it: results come early, and
    no worker waits for the last training. The fields are as `run` takes them.
    """

    plan: Plan
    store: Store
    keys: Keys
    fresh: bool
    on_progress: OnProgress
    kinds: Collection[str]

    def __post_init__(self) -> None:
        plan = self.plan
        self.report = Report(total=len(plan.trainings) + len(plan.cells))
        self.queue: deque[Task] = deque()
        self.cells = plan.by_training()
        self.followed = {earlier for cell in plan.cells for earlier in cell.after}
        self.answered: set[AttackJob] = set()
        for job in plan.trainings:
            if self.fresh or not self._resume(job):
                self._add([self._training(job)])

    def _resume(self, job: TrainJob) -> bool:
        """Take what is finished of a training and its attacks, and queue the attacks and scores
        that are not; False if the training must be run, and then all of them."""
        key = self.keys.train(job)
        trained = self.store.read("train", key, lenient=True)
        if trained is None or not is_settled(trained):
            return False
        outcomes = {c: self._read_stored(c) for c in self.cells[job]}
        unscored = {c: r for c, r in outcomes.items() if self._is_unscored(r)}
        missing = [c for c, r in outcomes.items() if r is None]
        if (missing or unscored) and (wrong := self.store.damage(key, trained)):
            self.report.remade.append(wrong)
            return False  # its observations are gone, cut short or changed
        self.answered.update({c for c, r in outcomes.items() if r is not None})
        self.report.cached += 1
        self._advance(job, trained, cached=True)
        for cell, done in outcomes.items():
            if cell in unscored:
                self._add([self._scoring(cell, trained, unscored[cell])])
            elif done is not None:
                self.report.cached += 1
                self._advance(cell, done, cached=True)
        self._add(self._attack(cell, trained) for cell in missing if self._is_ready(cell))
        return True

    def _add(self, tasks: Iterable[Task], *, first: bool = False) -> None:
        """Queue the tasks of the kinds that are made, before or after the others."""
        allowed = [t for t in tasks if t.room.partition(" ")[0] in self.kinds]
        if first:
            self.queue.extendleft(reversed(allowed))
        else:
            self.queue.extend(allowed)

    def _read_stored(self, cell: AttackJob) -> AttackOutcome | None:
        """Return the record of an attack that need not run again; it may lack scores."""
        key = self.keys.attack(cell)
        record = self.store.read("attack", key, lenient=True, unscored=True)
        kept = self.store.artifacts(key).is_dir()  # who took all of it away meant to
        if record is None or not is_settled(record) or (self._is_unscored(record) and not kept):
            return None
        wrong = self.store.damage(key, record) if kept else None
        self.report.remade += [wrong] if wrong else []
        return None if wrong else record

    def _is_unscored(self, record: AttackOutcome | None) -> bool:
        """Return whether an answer is still to be scored by the present code."""
        return isinstance(record, AttackRecord) and record.scoring != self.keys.code.scoring

    def _is_ready(self, cell: AttackJob) -> bool:
        """Return whether all attacks that go before it have answered."""
        return self.answered.issuperset(cell.after)

    def take(self, task: Task, record: TrainOutcome | AttackOutcome) -> None:
        """Keep what a task left, and queue what it was needed for."""
        job = task.work.job
        if isinstance(job, TrainJob):
            assert not isinstance(record, AttackRecord)
            self.store.keep("train", self.keys.train(job), replace(record, inputs=job))
            ready = [c for c in self.cells[job] if self._is_ready(c)]
            self._add((self._attack(c, record) for c in ready), first=True)
            self._advance(job, record, cached=False)
            return
        assert not isinstance(record, TrainRecord)
        key = self.keys.attack(job)
        record = replace(record, inputs=AttackInputs.of(job), train=self.keys.train(job.train))
        if isinstance(task.work, Scoring):
            if isinstance(record, AttackRecord):
                record = replace(record, scoring=self.keys.code.scoring)
            self.store.keep_scored(key, record)
            self._advance(job, record, cached=False)
            return
        self.store.keep("attack", key, record)
        self.answered.add(job)
        followers = [
            c for c in self.cells[job.train]
            if job in c.after and c not in self.answered and self._is_ready(c)
        ]  # fmt: skip
        if isinstance(record, AttackRecord) or followers:
            trained = self.store.read("train", self.keys.train(job.train))
            assert trained is not None
            self._add((self._attack(c, trained) for c in followers), first=True)
            if isinstance(record, AttackRecord) and SCORES in self.kinds:
                kept = self.store.read("attack", key, unscored=True)
                self._add([self._scoring(job, trained, kept)], first=True)
                return
        self._advance(job, record, cached=False)

    def _training(self, job: TrainJob) -> Task:
        place = self.store.scratch(self.keys.train(job))
        work = Training(job=job, env=self._environment(job), artifacts=place)
        return self._task(work, f"{TRAININGS} {job.defense}")

    def _attack(self, cell: AttackJob, trained: TrainOutcome) -> Task:
        work = Attacking(
            job=cell,
            env=self._environment(cell),
            trained=trained,
            observed=self.store.artifacts(self.keys.train(cell.train)),
            artifacts=self.store.scratch(self.keys.attack(cell)),
            earlier=tuple(self._earlier_answers(cell)),
            followed=cell in self.followed,
        )
        return self._task(work, f"{ATTACKS} {cell.train.defense}")

    def _scoring(self, cell: AttackJob, trained: TrainOutcome, record: Any) -> Task:
        """The score of an answer."""
        assert isinstance(trained, TrainRecord)
        key = self.keys.attack(cell)
        work = Scoring(
            job=cell,
            env=replace(self.keys.env, plugins=()),
            trained=trained,
            record=record,
            observed=self.store.artifacts(self.keys.train(cell.train)),
            answers=self.store.artifacts(key),
            artifacts=self.store.scratch(key),
        )
        return self._task(work, SCORES)

    def _environment(self, job: TrainJob | AttackJob) -> environment.Environment:
        """Return where a job runs, with the plugin files that it needs."""
        usable, env = self.keys.registry.usable, self.keys.env
        needed = environment.plugins_of(job) & usable.keys()
        origins = {usable[plugin].origin for plugin in needed}
        return replace(env, plugins=tuple(f for f in env.plugins if str(f) in origins))

    def _earlier_answers(self, cell: AttackJob) -> Iterator[tuple[str, AttackRecord, Path]]:
        """Yield the answers of the attacks that go before; one that failed answered nothing."""
        for before in cell.after:
            key = self.keys.attack(before)
            record = self.store.read("attack", key, lenient=True, unscored=True)
            if isinstance(record, AttackRecord):
                yield before.label, record, self.store.artifacts(key)

    def _task(self, work: Work, room: str) -> Task:
        label, group = label_of(work.job), self.keys.train(work.training)
        return Task(label=label, work=work, group=group, room=room)

    def _advance(
        self, job: TrainJob | AttackJob, record: TrainOutcome | AttackOutcome, *, cached: bool
    ) -> None:
        report, label = self.report, label_of(job)
        report.ran += not cached
        if not is_settled(record):
            report.failures.append((label, f"{record.status}: {record.reason}"))
        self.on_progress(report, label, cached)


def describe_run(plan: Plan, keys: Keys, command: Sequence[str]) -> Run:
    """Return what a reader needs to make the results again, and which records belong to the
    plan."""
    trainings = []
    for job, attacks in plan.by_training().items():
        key = keys.train(job)
        cells = tuple(Cell(key=keys.attack(a), train_key=key, job=a) for a in attacks)
        trainings.append(PlannedTraining(key=key, job=job, cells=cells))
    return Run(
        suite=plan.suite,
        trainings=tuple(trainings),
        command=shlex.join(command),
        device=keys.env.device,
        versions=environment.versions(),
        plugins=tuple(str(p) for p in keys.env.plugins),
        code=keys.code.of_plan(plan),
    )
