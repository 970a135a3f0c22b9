"""Outside attacks' answers, scored as leakbench's own are, and held against them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bench.errors import UserError
from bench.harness.environment import Environment, dataset_of
from bench.harness.scoring import floors_of, truth_of
from bench.harness.store import Store
from bench.metrics.intervals import Interval, interval_of
from bench.metrics.named import FLOOR_SUFFIX, METRICS, range_of, sign_of
from bench.metrics.paired import ALPHA, differences
from bench.metrics.score import score
from bench.outside.answers import read_answer
from bench.outside.exports import observation, stem_of, truth_beside
from bench.records import AttackRecord, Run, read_json
from bench.report.choosing import find
from bench.report.entries import LEAK_METRICS, select_answers, values_of

Rival = Literal["own", "choice", "worst"]
"""Leakbench's own attack of the cell; over all attacks on the same victims, the attacker's choice,
and the upper bound by the truth."""

_SAME = 1e-6
"""By which figures may differ, MSE relatively, that images of single precision hold apart."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What stands beside the answers' means of one metric, None where there is none.

    Attributes:
        own: Mean of leakbench's own attack.
        floor: Of what needs no leak.
        floor_class_mean: The same given the true label.
    """

    own: float | None
    floor: float | None
    floor_class_mean: float | None


@dataclass(frozen=True, kw_only=True)
class Against:
    """An outside answer against what leakbench's attacks rebuilt of the same victims.

    Attributes:
        rival: Which of leakbench's answers.
        attack: The one that these are of; of several the one that is taken for most victims.
        metric: By which the two are compared.
        difference: How much more the outside answer leaks, mean over victims: by how much its SSIM
            is higher, or its MSE lower. Figures that agree to 1e-6 count as equal.
        p: Of a paired t-test over the victims of this one training.
        beats: Whether the outside answer leaks more.
        separated: Whether the test tells the two apart.
    """

    rival: Rival
    attack: str
    metric: str
    difference: Interval
    p: float
    beats: bool
    separated: bool


@dataclass(frozen=True, kw_only=True)
class OutsideAnswer:
    """One file's answer, scored.

    Attributes:
        file: As it was given.
        failed: Victims without an answer, scored as the mean public image.
        figures: Metric -> mean over victims.
        against: The answer against leakbench's own, those that there are.
        values: Metric -> one figure per victim.
    """

    file: str
    failed: int
    figures: Mapping[str, Interval]
    against: tuple[Against, ...]
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
        beside: Metric of any answer -> leakbench's own attack and the floors.
        floors: Metric -> one figure per victim of what needs no leak.
    """

    cell: str
    name: str
    attack: str
    victims: int
    samples: int
    answers: tuple[OutsideAnswer, ...]
    beside: Mapping[str, Beside]
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
        answers.append(
            OutsideAnswer(
                file=str(path),
                failed=scores.failed,
                figures={n: _interval(v, n) for n, v in scores.values.items()},
                against=_compare(scores.values, records, chosen.label),
                values=scores.values,
            )
        )
    measured = [m for m in METRICS if any(m in answer.values for answer in answers)]
    own = records[chosen.label].values if chosen.label in records else {}
    victims, samples = truth["y"].shape
    return Scored(
        cell=chosen.key,
        name=chosen.name,
        attack=chosen.label,
        victims=victims,
        samples=samples,
        answers=tuple(answers),
        beside={
            name: Beside(
                own=_mean(own.get(name)),
                floor=_mean(floors.get(name)),
                floor_class_mean=_mean(floors.get(f"{name}{FLOOR_SUFFIX}")),
            )
            for name in measured
        },
        floors={k: v for k, v in floors.items() if k.removesuffix(FLOOR_SUFFIX) in measured},
    )


def _interval(values: list[float], metric: str) -> Interval:
    interval = interval_of([np.array(values)], range_of(metric))
    assert interval is not None  # there are victims
    return interval


def _compare(
    values: Mapping[str, list[float]], records: Mapping[str, AttackRecord], own: str
) -> tuple[Against, ...]:
    """Compare an answer's figures with leakbench's of the same victims: its own attack by
    SSIM, MSE or LnAcc, the first that it has, the others by the first metric of a worst case."""
    rivals: list[tuple[Rival, str, str, np.ndarray]] = []
    measured = records[own].values if own in records else {}
    own_metric = next((m for m in (*LEAK_METRICS, "lnacc") if m in measured), None)
    if own_metric is not None:
        rivals.append(("own", own, own_metric, values_of(records[own], own_metric)))
    whose: tuple[tuple[Rival, bool], ...] = (("choice", False), ("worst", True))
    for rival, by_truth in whose:
        cases = ((m, select_answers(records, m, by_truth=by_truth)) for m in LEAK_METRICS)
        metric, case = next((case for case in cases if case[1]), ("", None))
        if case is not None:
            best, names = case
            rivals.append((rival, max(records, key=names.count), metric, best))
    comparisons = []
    for rival, attack, metric, theirs in rivals:
        if metric in values and np.isfinite(values[metric]).all():  # errors of records may be inf
            ours = np.array(values[metric])
            same = np.isclose(ours, theirs, rtol=_SAME, atol=0 if metric == "mse" else _SAME)
            more = np.where(same, 0.0, sign_of(metric) * (ours - theirs))
            test = differences([{0: more}, {0: np.zeros_like(more)}], reference=1)[0]
            assert test is not None  # both have the same victims
            comparisons.append(
                Against(
                    rival=rival,
                    attack=attack,
                    metric=metric,
                    difference=test.interval,
                    p=test.p,
                    beats=test.interval.mean > 0,
                    separated=test.p <= ALPHA,
                )
            )
    return tuple(comparisons)


def _mean(values: list[float] | None) -> float | None:
    return None if values is None else float(np.mean(values))


def _read_export(cell: str) -> tuple[str, int] | None:
    """Return the key and the view in an exported file; None for other files."""
    base = stem_of(Path(cell))
    exported = f"{base}.json"
    if not os.path.isfile(exported):  # unlike Path.is_file, False for names too long to be one
        return None
    try:
        about = read_json(Path(exported), links=True)
        return str(about["cell"]), int(about.get("view", 0))
    except (OSError, UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{exported} is no export of leakbench: it names no cell.") from error
