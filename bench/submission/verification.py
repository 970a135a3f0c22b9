"""`leakbench verify`: whether a submission's figures come out of its own code again."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench.jobs import Environment, versions
from bench.registry import Registry, discover
from bench.report.leaderboard import rows
from bench.runner import Keys, label_of
from bench.runner import check as check_plan
from bench.runner import run as run_plan
from bench.seeding import generator
from bench.store import Store, to_json
from bench.submission.documents import (
    LEADERBOARD,
    RUN,
    Submission,
    check_files,
    check_records,
    inside,
    read_json,
    read_submission,
)
from bench.submission.packing import cells_of
from bench.submission.selection import Entry, Recorded, recorded
from bench.suite import AttackCell, Plan, Suite

CELLS, TOLERANCE = 3, 0.02
_EPSILON = 1e-6
Verdict = Literal["equal", "within tolerance", "differs"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure of one cell or training."""

    what: str
    figure: str
    submitted: str
    rerun: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A submission whose files are as they were written."""

    folder: Path
    submission: Submission
    suite: Suite
    trainings: Sequence[Recorded]
    registry: Registry
    files: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A cell to rerun, with its training."""

    training: Recorded
    entry: Entry
    cell: AttackCell

    @property
    def label(self) -> str:
        return f"{label_of(self.training.job)} {self.cell.label} at {self.cell.checkpoint}"


def sources(folder: Path) -> list[str]:
    """Check the folder's files and name the code that a rerun will execute. Executes nothing.

    Raises ValueError naming the first file that is not as it was submitted.
    """
    if not folder.is_dir():
        raise ValueError(f"no such submission folder: {folder}.")
    check_files(folder)
    submission = read_submission(folder)
    run = read_json(folder / RUN)
    try:
        check_records(folder, run)
        recorded(run)
        table = rows(folder)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{RUN} or a record has not the form of a run ({error!r}).") from error
    if json.loads(to_json(table)) != read_json(folder / LEADERBOARD):
        raise ValueError(f"{LEADERBOARD} does not follow from the records beside it.")
    names = dict.fromkeys(s.file for s in submission.plugins if s.file is not None)
    for name in names:
        inside(folder, name)
    return list(names)


def open_submission(folder: Path) -> Opened:
    """Load the plugins of a folder that `sources` has checked: this runs their code.

    Raises ValueError if a plugin is missing or not the one that was run.
    """
    submission = read_submission(folder)
    names = dict.fromkeys(s.file for s in submission.plugins if s.file is not None)
    files = tuple(inside(folder, name).resolve() for name in names)
    registry = discover(files)
    for source in submission.plugins:
        registry.get(source.kind, source.name, where="the submission")
        if registry.sources(source.kind, source.name) != source.sources:
            raise ValueError(
                f"the {source.kind} '{source.name}' ({source.origin}) is installed here with "
                "other source than the submission was run with; install the same version of it."
            )
    suite, trainings = recorded(read_json(folder / RUN))
    return Opened(
        folder=folder, submission=submission, suite=suite, trainings=trainings,
        registry=registry, files=files,
    )  # fmt: skip


def sample(opened: Opened, *, count: int, seed: int) -> list[Sampled]:
    """Cells of the submitted plugin, drawn without replacement. Raises ValueError for count < 1."""
    if count < 1:
        raise ValueError(f"--sample must be >= 1 (cells to rerun), got {count}.")
    kind, name = opened.submission.kind, opened.submission.name
    store = Store(opened.folder)
    all_cells = [
        Sampled(training=t, entry=e, cell=c)
        for t in opened.trainings
        if kind == "attack" or t.job.defense == name
        for e, c in cells_of(t, kind, name)
        if (store.read("attack", e["key"]) or {}).get("status") == "done"
    ]
    order = torch.randperm(len(all_cells), generator=generator(seed, "verify"))
    return [all_cells[i] for i in sorted(order[:count].tolist())]


def rerun(
    opened: Opened,
    sampled: Sequence[Sampled],
    *,
    device: str,
    data_dir: Path | None,
    tolerance: float,
    workers: int,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """Train and attack again in a temporary folder, and compare.

    workers: processes, 0 to run in this one. Raises ValueError for a suite that cannot run here.
    """
    if not tolerance >= 0:
        raise ValueError(f"--tolerance must be >= 0, got {tolerance}.")
    trainings = list({t.training.entry["key"]: t.training for t in sampled}.values())
    plan = Plan(
        suite=opened.suite, trainings=tuple(t.job for t in trainings),
        cells=tuple(s.cell for s in sampled),
    )  # fmt: skip
    env = Environment(device=device, data_dir=data_dir, plugins=opened.files)
    check_plan(plan, opened.registry, env)
    keys = Keys(opened.registry, env)
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        again = Store(Path(folder))
        again.prepare()
        run_plan(plan, again, keys, workers=workers, on_progress=lambda p: tell(p.label))
        first = Store(opened.folder)
        for training in trainings:
            a = first.read("train", training.entry["key"])
            b = again.read("train", keys.train(training.job))
            found += _compare(label_of(training.job), a, b, _of_training, tolerance)
        for item in sampled:
            a = first.read("attack", item.entry["key"])
            b = again.read("attack", keys.attack(item.cell))
            found += _compare(item.label, a, b, _of_cell, tolerance)
    return found


def same_environment(opened: Opened, device: str) -> bool:
    """Whether versions and device are those of the submission, so that figures should be equal."""
    now = versions() | {"device": device}
    return all(opened.submission.environment.get(k) == v for k, v in now.items())


# --- comparing ------------------------------------------------------------------------------------

Figures = Iterator[tuple[str, Any, float | None]]
"""Name, value (a number, "inf", None or one number per victim), and its own tolerance."""


def _compare(
    what: str,
    a: Mapping[str, Any] | None,
    b: Mapping[str, Any] | None,
    figures: Callable[[Mapping[str, Any]], Figures],
    tolerance: float,
) -> Iterator[Comparison]:
    status = [("none" if r is None else str(r["status"])) for r in (a, b)]
    if a is None or b is None or status != ["done", "done"]:
        reason = "" if b is None or not b.get("reason") else f" ({b['reason']})"
        yield Comparison(
            what=what, figure="status", submitted=status[0], rerun=f"{status[1]}{reason}",
            verdict="equal" if status[0] == status[1] else "differs",
        )  # fmt: skip
        return
    again = {name: value for name, value, _ in figures(b)}
    for name, value, own in figures(a):
        other = again.get(name)
        yield Comparison(
            what=what, figure=name, submitted=_shown(value), rerun=_shown(other),
            verdict=_verdict(value, other, tolerance if own is None else own),
        )  # fmt: skip


def _of_training(record: Mapping[str, Any]) -> Figures:
    correct = record["correct"]
    yield "accuracy", None if correct is None else correct / record["test_samples"], None
    yield "own accuracy", record.get("personal_accuracy"), None
    yield "eps claimed", record["ledger"]["eps_claimed"], _EPSILON
    yield "eps proven", record["ledger"]["eps_record"], _EPSILON


def _of_cell(record: Mapping[str, Any]) -> Figures:
    yield "failed victims", record["failed"], 0.0
    for metric, values in record["values"].items():
        yield metric, values, None


def _verdict(a: Any, b: Any, tolerance: float) -> Verdict:
    """Equal to the last victim; or means that are as near as the tolerance, which grows with
    figures beyond 1."""
    if a == b:
        return "equal"
    x, y = _mean(a), _mean(b)
    if x is None or y is None or not (math.isfinite(x) and math.isfinite(y)):
        return "differs"
    return "within tolerance" if abs(x - y) <= tolerance * max(1.0, abs(x)) else "differs"


def _mean(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, list):
        return sum(map(float, value)) / len(value) if value else None
    return float(value)


def _shown(value: Any) -> str:
    mean = _mean(value)
    if mean is None:
        return "-"
    return f"{mean:.4g}" + (f" (mean of {len(value)})" if isinstance(value, list) else "")
