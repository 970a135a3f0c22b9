"""`leakbench verify`: whether figures of a submission come out of its own code again, and those of
results out of leakbench's."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench import models
from bench.errors import UserError
from bench.files import no_link, sha256
from bench.harness.environment import Environment, versions
from bench.harness.keys import Code
from bench.harness.plan import expand
from bench.harness.runner import cell_label, label_of
from bench.harness.store import Store
from bench.records import (
    LEADERBOARD,
    RUN,
    SUMS,
    AttackOutcome,
    Cell,
    Kind,
    Row,
    Run,
    TrainJob,
    TrainOutcome,
    canonical,
    check_sum,
    read_outcome,
    read_rows,
)
from bench.records.submitted import (
    MANIFEST,
    SUBMISSION,
    Submission,
    is_submission,
    read_submission,
)
from bench.registry import discover
from bench.report import leaderboard
from bench.report.escaping import one_line
from bench.seeding import generator
from bench.submission.documents import check_files, check_records, inside
from bench.submission.figures import Comparison, compare
from bench.submission.isolation import Isolation
from bench.submission.packing import cells_of
from bench.submission.rerunning import (
    PROGRESS,
    RECORDS,
    REFUSAL,
    Rerunning,
    plugins_of,
    run_again,
)
from bench.submission.selection import check_suite

_LONGEST = 2**16
"""Characters of a line that the code of others writes; the rest is another line."""
_LAST_WORDS = 5
"""Lines of a process that failed."""
_LAST_LINES_S = 10.0
"""How long the lines of a process that has ended may take to be read."""


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


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """What came of running the submitted code.

    Attributes:
        comparisons: Every figure of the sample, submitted and rerun.
        end: How the process ended, where it did not come to its end.
    """

    comparisons: list[Comparison]
    end: str | None = None


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
    if is_submission(folder):
        check_records(folder, run)
    else:
        _check_results(folder, run)
    check_suite(run)
    if is_submission(folder) and not follows(folder):
        raise UserError(f"{LEADERBOARD} does not follow from the records beside it.")
    for name in names:
        inside(folder, name)
    # A model that is a file is code too, wherever it lies.
    named = dict.fromkeys(models.file_of(t.job.task.model) for t in run.trainings)
    return [*names, *(str(file) for file in named if file is not None)]


def _check_results(folder: Path, run: Run) -> None:
    """Raises UserError if results lack a record of their run, or cannot be run again."""
    if run.plugins:
        raise UserError(
            f"{folder} was made with files that it does not hold ({', '.join(run.plugins)}): "
            "only a submission can be run again by others."
        )
    store = Store(folder)
    for kind, key in run.record_names:
        if store.read(kind, key) is None:
            raise UserError(f"{folder} has no {kind} record {key} to compare a rerun with.")


def follows(folder: Path) -> bool:
    """Whether leaderboard.json is what this version of leakbench makes of the records beside it;
    of results, which an older one may have written, that is something to know. A part of some has
    none."""
    try:
        check_sum(folder, LEADERBOARD)
        written = read_rows(folder / LEADERBOARD)
    except FileNotFoundError as error:
        if is_submission(folder):
            raise UserError(f"{folder} has no {LEADERBOARD}.") from error
        return True
    return _told(written) == _told(leaderboard.rows(folder))


def _told(table: Sequence[Row]) -> list[str]:
    """All that rows say; what a flag's values add to its code follows from the rest, and flags of
    older files have them rounded."""
    return [
        canonical([replace(row, flags=()), [(f.code, f.subject) for f in row.flags]])
        for row in table
    ]


def manifest_of(folder: Path) -> str:
    """SHA-256 of the file that lists the hashes of all others; of run.json where there is none."""
    listed = [n for n in (MANIFEST, SUMS) if (folder / n).is_file()]
    return sha256(folder / (listed or [RUN])[0])


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


def trainings_of(sampled: Sequence[Cell]) -> dict[TrainJob, str]:
    """The trainings that a sample's cells need, each once, and the keys of their records."""
    return {c.job.train: c.train_key for c in sampled}


def check_tolerance(tolerance: float) -> None:
    """Raises UserError for one outside [0, 1]."""
    if not 0 <= tolerance <= 1:
        raise UserError(f"--tolerance must lie in [0, 1], got {tolerance}.")


def rerun(
    opened: Opened,
    sampled: Sequence[Cell],
    *,
    isolation: Isolation,
    env: Environment,
    tolerance: float,
    workers: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Rerun:
    """Train and attack again in a temporary folder, and compare every figure that follows from the
    code; what a clock says is not compared.

    The submitted code runs in a process of its own; with no isolation and no workers in this one.

    Args:
        opened: The submission.
        sampled: What is run again.
        isolation: What the code may reach.
        env: Device and data folder.
        tolerance: Of means, where figures are not equal.
        workers: Processes, 0 for none.
        tell: Is told what has ended.

    Raises:
        UserError: For a suite that cannot run here.
    """
    check_tolerance(tolerance)
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="leakbench-", ignore_cleanup_errors=True) as name:
        out = Path(name).resolve()
        request = Rerunning(
            submission=str(opened.folder.resolve()),
            cells=[c.key for c in sampled],
            out=str(out),
            device=env.device,
            data_dir=str(env.data_dir or ""),
            workers=workers,
        )
        end: str | None = None
        if isolation.bwrap is None and workers == 0:
            run_again(request, tell)
        else:
            end = _run_apart(isolation, request, tell)
        first, again = Store(opened.folder), out / RECORDS
        for job, key in trainings_of(sampled).items():
            made = first.read("train", key), _read_made(again, "train", key)
            found += compare(label_of(job), *made, tolerance)
        for cell in sampled:
            scored = first.read("attack", cell.key), _read_made(again, "attack", cell.key)
            found += compare(cell_label(cell.job), *scored, tolerance)
    return Rerun(comparisons=found, end=end)


def _run_apart(isolation: Isolation, request: Rerunning, tell: Callable[[str], None]) -> str | None:
    """Run the code in a process of its own; how that ended, if not as it should. The process, and
    with a sandbox all that it started, is gone afterwards.

    Raises UserError with what it refused.
    """
    out, folder = Path(request.out), Path(request.submission)
    # Not the records: figures that a plugin can read it can give back.
    names = ("source", RUN, SUBMISSION)
    shown = [folder / n for n in names if (folder / n).exists()]
    shown += [Path(request.data_dir)] if request.data_dir else []
    process = isolation.start(
        [sys.executable, "-m", "bench.submission.rerunning"],
        scratch=out, shown=shown, device=request.device,
    )  # fmt: skip
    last: deque[str] = deque(maxlen=_LAST_WORDS)

    def listen() -> None:
        assert process.stdout is not None
        while line := process.stdout.readline(_LONGEST):
            text = one_line(line)
            if text.startswith(PROGRESS):
                tell(text.removeprefix(PROGRESS))
            elif text.strip():
                last.append(text[:200])

    try:
        with suppress(BrokenPipeError):  # how it ended says why it does not listen
            assert process.stdin is not None
            with process.stdin as file:
                file.write(request.to_json())
        # Without a sandbox something that the code started may outlive it, and hold the pipe.
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        code = process.wait()
        listener.join(_LAST_LINES_S)
    finally:
        process.kill()
        process.wait()
    refusal = out / REFUSAL
    if code == 2 and refusal.is_file() and not refusal.is_symlink():
        raise UserError(one_line(refusal.read_text(errors="replace")[:2000]))
    return None if code == 0 else f"The rerun's process ended with {code}: {' / '.join(last)}"


def _read_made(folder: Path, kind: Kind, key: str) -> TrainOutcome | AttackOutcome | None:
    """A record that a rerun left, None if it left none. Raises UserError for a link in its place,
    which could lead anywhere, and for what is no record."""
    path = Store(no_link(folder.parent, folder.name)).path(kind, key)
    try:
        return read_outcome(path, kind)
    except FileNotFoundError:
        return None


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
