"""The part of `leakbench verify` that runs jobs again, in a process of its own: `python -m
bench.submission.rerunning` reads a request and writes records under the keys of the folder's own.

Nothing of what it writes or says can be trusted by whoever reads it.
"""

import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from bench.errors import UserError
from bench.harness.environment import Environment
from bench.harness.executors.task import TRAININGS
from bench.harness.keys import Code, Keys
from bench.harness.launch import local
from bench.harness.plan import Plan
from bench.harness.runner import Report
from bench.harness.runner import check as check_plan
from bench.harness.runner import run as run_plan
from bench.harness.store import Store
from bench.records import AttackJob, Cell, Run, TrainJob
from bench.records.submitted import is_submission, read_submission
from bench.registry import Registry, discover
from bench.submission.documents import inside

RECORDS, REFUSAL = "run", "refused.txt"
"""In the request's folder: records, and why nothing was run."""


def load_plugins(folder: Path) -> tuple[Registry, tuple[Path, ...]]:
    """All plugins with those of a submission, and its files: this runs its code.

    Raises UserError if a plugin is missing or not the one that was run.
    """
    plugins = read_submission(folder).plugins if is_submission(folder) else []
    names = dict.fromkeys(source.file for source in plugins if source.file is not None)
    files = tuple(inside(folder, name).resolve() for name in names)
    registry = discover(files)
    code = Code(registry)
    for source in plugins:
        registry.get(source.kind, source.name, where="the submission")
        comparable = source.sources.startswith("syntax:")  # older ones are hashes of files
        if comparable and code.package(source.kind, source.name) != source.sources:
            raise UserError(
                f"the {source.kind} '{source.name}' ({source.origin}) is installed here with "
                "other source than the submission was run with; install the same version of it."
            )
    return registry, files


class RecordedKeys(Keys):
    """Keys under which the folder has the records of the same jobs."""

    def __init__(self, registry: Registry, env: Environment, cells: list[Cell]) -> None:
        super().__init__(registry, env)
        self._recorded: dict[TrainJob | AttackJob, str] = {c.job: c.key for c in cells}
        self._recorded |= {c.job.train: c.train_key for c in cells}

    def train(self, job: TrainJob) -> str:
        return self._recorded[job]

    def attack(self, cell: AttackJob) -> str:
        return self._recorded[cell]


def with_earlier(run: Run, keys: Collection[str]) -> list[Cell]:
    """The run's cells of those keys, and the ones that must have gone before them."""
    chosen = [c.job for c in run.cells if c.key in keys]
    needed = {one for job in chosen for one in (*job.before(), job)}
    return [c for c in run.cells if c.job in needed]


def run_again(
    tell: Callable[[str], None],
    *,
    submission: str,
    cells: Collection[str],
    kind: str,
    out: str,
    device: str,
    data_dir: str,
    workers: int,
) -> None:
    """Load the submitted code, and train or attack.

    Args:
        tell: Is told what has ended.
        submission: The folder; of it run.json is read, of a submission also `source/` and
            submission.json.
        cells: Keys of the attacks, and of those that go before them.
        kind: Of `bench.harness.runner.KINDS`, what is run of what `out` lacks.
        out: Where to write.
        device: cpu or cuda.
        data_dir: Where data sets lie that are not embedded; "" for nowhere.
        workers: Processes, 0 for none.

    Raises:
        UserError: For a suite that cannot run here.
    """
    run = Run.read(Path(submission))
    again = [c for c in run.cells if c.key in cells]
    trainings = tuple(dict.fromkeys(c.job.train for c in again))
    plan = Plan(suite=run.suite, trainings=trainings, cells=tuple(c.job for c in again))
    registry, files = load_plugins(Path(submission))
    env = Environment(device=device, data_dir=Path(data_dir) if data_dir else None, plugins=files)
    if kind == TRAININGS:  # attacks have no data set to check
        check_plan(plan, registry, env)
    store = Store(Path(out) / RECORDS)

    def on_progress(report: Report, label: str, cached: bool) -> None:
        if not cached:
            tell(f"{report.done} of {report.total}: {label}")

    keys, executor = RecordedKeys(registry, env, again), local(plan, env, workers=workers)
    run_plan(plan, store, keys, on_progress=on_progress, executor=executor, kinds=[kind])


def main() -> int:
    """Carry out the request on standard input."""
    request = json.load(sys.stdin)
    try:
        run_again(lambda text: None, **request)
    except UserError as error:
        (Path(request["out"]) / REFUSAL).write_text(str(error), encoding="utf-8")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
