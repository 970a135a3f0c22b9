"""Outside attacks' answers, scored as leakbench's own are, and held against them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.errors import UserError
from bench.harness.environment import Environment, dataset_of
from bench.harness.scoring import floors_of, truth_of
from bench.harness.store import Store
from bench.metrics.intervals import Interval, interval_of
from bench.metrics.named import FLOOR_SUFFIX, METRICS, range_of
from bench.metrics.score import score
from bench.outside.answers import read_answer
from bench.outside.exports import observation, stem_of, truth_beside
from bench.records import AttackRecord, Run, read_json
from bench.report.choosing import find
from bench.report.entries import select_answers


@dataclass(frozen=True, kw_only=True)
class OutsideAnswer:
    """One file's answer, scored.

    Attributes:
        file: As it was given.
        failed: Victims without an answer, scored as the mean public image.
        figures: Metric -> mean over victims.
        values: Metric -> one figure per victim.
    """

    file: str
    failed: int
    figures: Mapping[str, Interval]
    values: Mapping[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Outside attacks' answers to one cell, scored.

    Attributes:
        cell: Key of what was attacked.
        name: Its name.
        attack: Leakbench's own.
        victims: How many.
        samples: Of each victim.
        answers: In the order of the files.
        beside: Metric of any answer -> leakbench's own attacks and the floors.
        floors: Metric -> one figure per victim of what needs no leak.
    """

    cell: str
    name: str
    attack: str
    victims: int
    samples: int
    answers: tuple[OutsideAnswer, ...]
    beside: Mapping[str, Mapping[str, float | None]]
    floors: Mapping[str, list[float]]


def score_files(
    folder: Path, cell: str, reconstructions: Sequence[Path], env: Environment, view: int = 0
) -> Scored:
    """Score reconstructions of one cell exactly as leakbench's own attacks are.

    Args:
        folder: The result folder.
        cell: See `bench.report.choosing.find`, or an exported FILE or FILE.json, which holds its
            cell's key.
        reconstructions: Safetensors or npz files with any of images [V, K, ...], labels [V, K] and
            label_counts [V, C], and failed, bool [V], for victims without an answer; K may be left
            out where it is 1.
        env: Where data sets lie.
        view: Which view of recorded rounds, from 0; an exported FILE says it itself.

    Returns:
        Figures per answer and metric, with floors and leakbench's own attack beside them.

    Raises:
        UserError: With one sentence for anything else.
    """
    run = Run.read(folder)
    named, view = _read_export(cell) or (cell, view)
    chosen = find(run.cells, named)
    files = observation(folder, chosen, view)
    dataset = dataset_of(chosen.job.train, env)
    truth = truth_of(chosen.job, dataset, truth_beside(files))
    floors = floors_of(chosen.job, dataset, truth)
    store = Store(folder, run)
    # Of the finished attacks on the same observation.
    same = (chosen.train_key, chosen.checkpoint, chosen.threat)
    beside = (c for c in run.cells if (c.train_key, c.checkpoint, c.threat) == same)
    outcomes = ((c.label, store.read("attack", c.key)) for c in beside)
    records = {n: r.of_view(view) for n, r in outcomes if isinstance(r, AttackRecord)}
    answers = []
    for path in reconstructions:
        answer = read_answer(path, x=truth["x"], y=truth["y"], classes=dataset.classes)
        scores = score(answer, **truth)
        values = scores.values
        intervals = ((n, interval_of([np.array(v)], range_of(n))) for n, v in values.items())
        figures = {name: interval for name, interval in intervals if interval}
        answers.append(
            OutsideAnswer(file=str(path), failed=scores.failed, figures=figures, values=values)
        )
    measured = [m for m in METRICS if any(m in answer.values for answer in answers)]
    own = records[chosen.label].values if chosen.label in records else {}
    others: dict[str, dict[str, float | None]] = {}
    for name in measured:
        choice, worst = (select_answers(records, name, by_truth=known) for known in (False, True))
        others[name] = {
            "own": _mean(own.get(name)),
            "choice": _mean(choice and choice[0]),
            "worst": _mean(worst and worst[0]),
            "floor": _mean(floors.get(name)),
            "floor_class_mean": _mean(floors.get(f"{name}{FLOOR_SUFFIX}")),
        }
    victims, samples = truth["y"].shape
    return Scored(
        cell=chosen.key,
        name=chosen.name,
        attack=chosen.label,
        victims=victims,
        samples=samples,
        answers=tuple(answers),
        beside=others,
        floors={k: v for k, v in floors.items() if k.removesuffix(FLOOR_SUFFIX) in measured},
    )


def _mean(values: list[float] | np.ndarray | None) -> float | None:
    return None if values is None else float(np.mean(values))


def _read_export(cell: str) -> tuple[str, int] | None:
    """Return the key and the view in an exported file; None for other files."""
    exported = f"{stem_of(Path(cell))}.json"
    if not os.path.isfile(exported):  # unlike Path.is_file, False for names too long to be one
        return None
    try:
        about = read_json(Path(exported), links=True)
        return str(about["cell"]), int(about.get("view", 0))
    except (OSError, UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{exported} is no export of leakbench: it names no cell.") from error
