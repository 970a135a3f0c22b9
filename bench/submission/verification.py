"""`leakbench verify`: whether figures of a submission come out of its own code again, and those of
results out of leakbench's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import models
from bench.errors import UserError
from bench.harness.environment import versions
from bench.harness.keys import Code
from bench.harness.plan import expand
from bench.harness.store import Store
from bench.records import (
    RUN,
    Cell,
    Run,
    check_together,
)
from bench.records.submitted import (
    Submission,
    is_submission,
    read_submission,
)
from bench.registry import discover
from bench.seeding import generator
from bench.submission.documents import check_files, inside
from bench.submission.figures import Comparison
from bench.submission.packing import cells_of
from bench.submission.recomputed import recomputed
from bench.submission.rerunning import plugins_of
from bench.submission.selection import check_suite


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A folder whose files are as they were written; nothing of it was executed.

    Attributes:
        folder: Where it lies.
        submission: What it says of itself; None of results, which need leakbench's plugins alone.
        run: How it was made.
    """

    folder: Path
    submission: Submission | None
    run: Run

    @property
    def environment(self) -> Mapping[str, str]:
        """Versions and device that it was made with."""
        if self.submission is not None:
            return self.submission.environment
        return dict(self.run.versions) | {"device": self.run.device}


def sources(folder: Path) -> list[str]:
    """Check the folder's files and name the code that a rerun will execute. Executes nothing.

    Raises UserError naming the first file that is not as it was written.
    """
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}.")
    names: dict[str, None] = {}
    if is_submission(folder):
        check_files(folder)
        names = dict.fromkeys(s.file for s in plugins_of(folder) if s.file is not None)
    run = Run.read(folder)
    if run.plugins and not is_submission(folder):
        raise UserError(
            f"{folder} was made with files that it does not hold ({', '.join(run.plugins)}): "
            "only a submission can be run again by others."
        )
    store = Store(folder, run)
    for kind, key in run.record_names:
        if store.read(kind, key) is None:
            raise UserError(f"{RUN} names the {kind} record {key}, which is missing.")
    check_together(run.trainings, store.read)
    check_suite(run)
    for name in names:
        inside(folder, name)
    # A model that is a file is code too, wherever it lies.
    named = dict.fromkeys(models.file_of(t.job.task.model) for t in run.trainings)
    return [*names, *(str(file) for file in named if file is not None)]


def recomputed_figures(opened: Opened) -> list[Comparison]:
    """See `recomputed`, of leakbench's own plugins: none of the folder's code runs."""
    return recomputed(opened.run, Store(opened.folder, opened.run), discover())


def open_folder(folder: Path) -> Opened:
    """Read a folder that `sources` has checked. Executes nothing."""
    submission = read_submission(folder) if is_submission(folder) else None
    return Opened(folder=folder, submission=submission, run=Run.read(folder))


def candidates(opened: Opened, only: Mapping[str, str] | None = None) -> list[Cell]:
    """All cells that a sample is drawn from, whatever their status: of a submission those of an
    attack, or those of a defense and of the undefended rows that it is compared with.

    Args:
        opened: The folder.
        only: As of `leakbench run`.

    Raises:
        UserError: For a filter that the run's suite does not know.
    """
    cells, made = opened.run.cells, opened.submission
    if made is not None:
        cells = [c for t in opened.run.trainings for c in cells_of(t, made.kind, made.name)]
    wanted = set(expand(opened.run.suite, only).cells) if only else {c.job for c in cells}
    return [c for c in cells if c.job in wanted]


def sample(
    opened: Opened,
    *,
    seed: int,
    count: int = 3,
    trainings: int | None = None,
    only: Mapping[str, str] | None = None,
) -> list[Cell]:
    """So many candidates drawn without replacement, all of them if there are no more, in their
    order; the first draw is a row of the submitted plugin.

    Args:
        opened: The folder.
        seed: Of the draw.
        count: Cells.
        trainings: In place of cells so many trainings, with all candidates on them.
        only: As of `candidates`.

    Raises:
        UserError: For numbers < 1, and if there is no cell.
    """
    for option, number in (("--sample", count), ("--trainings", trainings)):
        if number is not None and number < 1:
            raise UserError(f"{option} must be >= 1, got {number}.")
    made, groups = opened.submission, dict[str, list[Cell]]()
    for cell in candidates(opened, only):
        groups.setdefault(cell.key if trainings is None else cell.train_key, []).append(cell)
    drawn = list(groups.values())
    own = [i for i, cells in enumerate(drawn) if made is None or _is_own(cells[0], made)]
    if not own:
        what = "these results" if made is None else f"the submission of '{made.name}'"
        raise UserError(f"{what} holds no such cell to rerun, so nothing of it can be verified.")
    rng = generator(seed, "verify")
    first = own[int(torch.randint(len(own), (), generator=rng))]
    others = [i for i in torch.randperm(len(drawn), generator=rng).tolist() if i != first]
    number = count if trainings is None else trainings
    return [cell for i in sorted([first, *others[: number - 1]]) for cell in drawn[i]]


def _is_own(cell: Cell, made: Submission) -> bool:
    return made.kind == "attack" or cell.defense == made.name


def same_environment(opened: Opened, device: str) -> bool:
    """Whether versions and device are those that it was made with, so that figures should be
    equal."""
    now = versions() | {"device": device}
    return all(opened.environment.get(k) == v for k, v in now.items())


def changed_code(opened: Opened, sampled: Sequence[Cell]) -> list[str]:
    """What of leakbench's code that a sample needs is not that of the run, which may be older."""
    plugins = {("defense", part) for c in sampled for part in c.defense.split("+")}
    plugins |= {("attack", c.attack) for c in sampled}
    registry = discover()
    known = [(k, n) for k, n in sorted(plugins) if (k, n) in registry.usable]
    now = Code(registry).of(known)  # type: ignore[arg-type]
    return [name for name, code in now.items() if opened.run.code.get(name, code) != code]
