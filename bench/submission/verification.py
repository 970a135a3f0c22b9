"""`leakbench verify`: whether a submission's figures come out of its own code again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.errors import UserError
from bench.harness.environment import Environment, versions
from bench.harness.keys import Code, Keys
from bench.harness.launch import local
from bench.harness.plan import Plan
from bench.harness.runner import cell_label, label_of
from bench.harness.runner import check as check_plan
from bench.harness.runner import run as run_plan
from bench.harness.store import Store
from bench.records import LEADERBOARD, Cell, Row, Run, TrainJob, canonical, read_rows
from bench.registry import Registry, discover
from bench.report.files import Files
from bench.seeding import generator
from bench.submission.documents import (
    Submission,
    check_files,
    check_records,
    inside,
    read_submission,
)
from bench.submission.figures import Comparison, compare
from bench.submission.packing import cells_of
from bench.submission.selection import check_suite


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A submission whose files are as they were written."""

    folder: Path
    submission: Submission
    run: Run
    registry: Registry
    files: tuple[Path, ...]


def sources(folder: Path) -> list[str]:
    """Check the folder's files and name the code that a rerun will execute. Executes nothing.

    Raises UserError naming the first file that is not as it was submitted.
    """
    if not folder.is_dir():
        raise UserError(f"no such submission folder: {folder}.")
    check_files(folder)
    submission = read_submission(folder)
    run = Run.read(folder)
    check_records(folder, run)
    check_suite(run)
    if _told(read_rows(folder / LEADERBOARD)) != _told(Files(folder).rows):
        raise UserError(f"{LEADERBOARD} does not follow from the records beside it.")
    names = dict.fromkeys(s.file for s in submission.plugins if s.file is not None)
    for name in names:
        inside(folder, name)
    return list(names)


def _told(table: Sequence[Row]) -> list[str]:
    """All that rows say; what a flag's values add to its code follows from the rest, and flags of
    older files have them rounded."""
    return [
        canonical([replace(row, flags=()), [(f.code, f.subject) for f in row.flags]])
        for row in table
    ]


def open_submission(folder: Path) -> Opened:
    """Load the plugins of a folder that `sources` has checked: this runs their code.

    Raises UserError if a plugin is missing or not the one that was run.
    """
    submission = read_submission(folder)
    names = dict.fromkeys(s.file for s in submission.plugins if s.file is not None)
    files = tuple(inside(folder, name).resolve() for name in names)
    registry = discover(files)
    code = Code(registry)
    for source in submission.plugins:
        registry.get(source.kind, source.name, where="the submission")
        comparable = source.sources.startswith("syntax:")  # older ones are hashes of files
        if comparable and code.package(source.kind, source.name) != source.sources:
            raise UserError(
                f"the {source.kind} '{source.name}' ({source.origin}) is installed here with "
                "other source than the submission was run with; install the same version of it."
            )
    run = Run.read(folder)
    return Opened(folder=folder, submission=submission, run=run, registry=registry, files=files)


def candidates(opened: Opened) -> list[Cell]:
    """All cells that a sample is drawn from, whatever their status: those of an attack, or those
    of a defense and of the undefended rows that it is compared with."""
    kind, name = opened.submission.kind, opened.submission.name
    return [c for t in opened.run.trainings for c in cells_of(t, kind, name)]


def sample(opened: Opened, *, count: int, seed: int) -> list[Cell]:
    """So many candidates drawn without replacement, all of them if there are no more, in their
    order; the first draw is a row of the plugin itself.

    Raises UserError for count < 1, and if the plugin has no cell.
    """
    if count < 1:
        raise UserError(f"--sample must be >= 1 (cells to rerun), got {count}.")
    kind, name = opened.submission.kind, opened.submission.name
    cells = candidates(opened)
    own = [i for i, c in enumerate(cells) if kind == "attack" or c.defense == name]
    if not own:
        raise UserError(
            f"the submission holds no cell of '{name}' to rerun, so nothing of it can be verified."
        )
    rng = generator(seed, "verify")
    first = own[int(torch.randint(len(own), (), generator=rng))]
    others = [i for i in torch.randperm(len(cells), generator=rng).tolist() if i != first]
    return [cells[i] for i in sorted([first, *others[: count - 1]])]


def trainings_of(sampled: Sequence[Cell]) -> dict[TrainJob, str]:
    """The trainings that a sample's cells need, each once, and the keys of their records."""
    return {c.job.train: c.train_key for c in sampled}


def rerun(
    opened: Opened,
    sampled: Sequence[Cell],
    *,
    device: str,
    data_dir: Path | None,
    tolerance: float,
    workers: int,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """Train and attack again in a temporary folder, and compare every figure that follows from the
    code; what a clock says is not compared.

    Args:
        opened: The submission.
        sampled: What is run again.
        device: Where.
        data_dir: Where data sets lie that are not embedded.
        tolerance: Of means, where figures are not equal.
        workers: Processes, 0 to run in this one.
        tell: Is told what has ended.

    Raises:
        UserError: For a suite that cannot run here.
    """
    if not 0 <= tolerance <= 1:
        raise UserError(f"--tolerance must lie in [0, 1], got {tolerance}.")
    trainings = trainings_of(sampled)
    plan = Plan(
        suite=opened.run.suite, trainings=tuple(trainings), cells=tuple(c.job for c in sampled)
    )
    env = Environment(device=device, data_dir=data_dir, plugins=opened.files)
    check_plan(plan, opened.registry, env)
    keys = Keys(opened.registry, env)
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        again = Store(Path(folder))
        again.prepare()
        executor = local(plan, env, workers=workers)
        run_plan(plan, again, keys, executor=executor, on_progress=lambda p: tell(p.label))
        first = Store(opened.folder)
        for job, key in trainings.items():
            made = first.read("train", key), again.read("train", keys.train(job))
            found += compare(label_of(job), *made, tolerance)
        for cell in sampled:
            scored = first.read("attack", cell.key), again.read("attack", keys.attack(cell.job))
            found += compare(cell_label(cell.job), *scored, tolerance)
    return found


def same_environment(opened: Opened, device: str) -> bool:
    """Whether versions and device are those of the submission, so that figures should be equal."""
    now = versions() | {"device": device}
    return all(opened.submission.environment.get(k) == v for k, v in now.items())
