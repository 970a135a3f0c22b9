"""Scores of an attack's answer, made where no plugin is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch


from bench.data.dataset import Dataset
from bench.harness.attack import Answer
from bench.harness.environment import Environment, dataset_of, dealing_of
from bench.metrics.floors import floors
from bench.metrics.score import of_anyone, score
from bench.protocols.export import load_truth, save_tensors
from bench.records import RECONSTRUCTION, AttackJob, AttackRecord, TrainRecord, check_kept


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The scores of one attack's answer, as executors carry it out.

    Attributes:
        cell: The attack.
        env: Where its data set lies.
        trained: Its training's record.
        record: The attack's own, without scores.
        observed: The training's artifact folder, which holds the truth.
        answers: The attack's.
        artifacts: Folder for the reconstruction beside the truth.
        dataset: As `dataset_of` gives it, or None to load it where it runs.
    """

    cell: AttackJob
    env: Environment
    trained: TrainRecord
    record: AttackRecord
    observed: Path
    answers: Path
    artifacts: Path
    dataset: Dataset | None = None

    def __call__(self) -> AttackRecord:
        """The record with scores and baselines."""
        look = self.trained.observations[self.cell.checkpoint][self.cell.threat.name]
        dataset = dataset_of(self.cell.train, self.env) if self.dataset is None else self.dataset
        values, doubled, lowest = [], [], []
        images, truths, failed = [], [], 0
        for number, stem in enumerate(look.stems):
            answer = Answer.load(Answer.path(self.answers, number))
            name = f"{stem}-truth"
            check_kept(self.observed, self.trained, name)
            truth = truth_of(self.cell, dataset, self.observed / f"{name}.safetensors")
            scores = score(answer.first, **truth)
            if scores.images is not None:
                images.append(scores.images)
                if not answer.apart:
                    scores.values.update(of_anyone(scores.images, truth["x"]))
            values.append(scores.values)
            longer = answer.doubled
            doubled.append(scores.values if longer is None else score(longer, **truth).values)
            lowest.append(floors_of(self.cell, dataset, truth))
            truths.append(truth["x"])
            failed += scores.failed
        if len(images) == len(truths) and len({one.shape[1:] for one in images}) == 1:
            found = {"images": torch.cat(images), "truth": torch.cat(truths)}
            save_tensors(found, self.artifacts / RECONSTRUCTION)
        joined, record = together(values), self.record
        again = together(doubled)
        return replace(
            record,
            failed=failed,
            values=joined,
            floors=together(lowest),
            doubled=record.doubled
            and replace(record.doubled, values={n: v for n, v in again.items() if n in joined}),
        )

    def prepare(self) -> None:
        """Load the data set."""
        if self.dataset is None:
            dataset_of(self.cell.train, self.env)


def together(scores: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Figures of several views' victims one after the other, of the metrics that all have."""
    named = [n for n in scores[0] if all(n in one for one in scores)]
    return {n: list(chain.from_iterable(one[n] for one in scores)) for n in named}


def truth_of(cell: AttackJob, dataset: Dataset, file: Path) -> dict[str, Any]:
    """What `score` compares an answer with: the truth in a file, and the attacker's public data."""
    truth = load_truth(file)
    return {
        "x": truth.x,
        "y": truth.y,
        "classes": dataset.classes,
        "aux_x": dataset.aux_x[: cell.threat.aux],
        "categorical": dataset.categorical,
    }


def floors_of(
    cell: AttackJob, dataset: Dataset, truth: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Per metric and victim what needs no leak; `truth` is what `truth_of` gives."""
    aux, owners = slice(None, cell.threat.aux), dataset.aux_clients
    return floors(
        **truth,
        aux_y=dataset.aux_y[aux],
        aux_clients=None if owners is None else owners[aux],
        dealing=dealing_of(cell.train),
        granted=cell.threat.labels,
    )
