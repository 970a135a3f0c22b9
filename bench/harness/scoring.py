"""Scores of an attack's answer, made where no plugin is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from bench.data.dataset import Dataset
from bench.harness.attack import Answer
from bench.harness.environment import dealing_of
from bench.harness.work import Work
from bench.metrics.floors import floors
from bench.metrics.recognise import Gallery
from bench.metrics.score import of_anyone, score
from bench.names import PluginKind
from bench.protocols.export import TRUTH, load_truth, save_tensors
from bench.records import RECONSTRUCTION, AttackJob, AttackRecord, TrainRecord, check_kept


@dataclass(frozen=True, kw_only=True)
class Scoring(Work):
    """The scores of one attack's answer, as executors carry it out; it leaves the reconstruction
    beside the truth.

    Attributes:
        trained: Its training's record.
        record: The attack's own, without scores.
        observed: The training's artifact folder, which holds the truth.
        answers: The attack's.
    """

    job: AttackJob
    trained: TrainRecord
    record: AttackRecord
    observed: Path
    answers: Path

    @property
    def needed(self) -> frozenset[tuple[PluginKind, str]]:
        return frozenset()

    def __call__(self) -> AttackRecord:
        """Return the record with scores and baselines."""
        look = self.trained.observations[self.job.checkpoint][self.job.threat.name]
        dataset = self.data()
        values, doubled, lowest = [], [], []
        images, truths, failed = [], [], 0
        for number, stem in enumerate(look.stems):
            answer = Answer.load(Answer.path(self.answers, number))
            name = f"{stem}{TRUTH}"
            check_kept(self.observed, self.trained, name)
            truth = truth_of(self.job, dataset, self.observed / name)
            scores = score(answer.first, **truth)
            if scores.images is not None:
                images.append(scores.images)
                if not answer.apart:
                    scores.values.update(of_anyone(scores.images, truth["x"]))
            values.append(scores.values)
            longer = answer.doubled
            doubled.append(scores.values if longer is None else score(longer, **truth).values)
            lowest.append(floors_of(self.job, dataset, truth))
            truths.append(truth["x"])
            failed += scores.failed
        if len(images) == len(truths) and len({image.shape[1:] for image in images}) == 1:
            tensors = {"images": torch.cat(images), "truth": torch.cat(truths)}
            save_tensors(tensors, self.artifacts / RECONSTRUCTION)
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


def together(scores: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Figures of several views' victims one after the other, of the metrics that all have."""
    names = [n for n in scores[0] if all(n in figures for figures in scores)]
    return {n: list(chain.from_iterable(figures[n] for figures in scores)) for n in names}


def truth_of(cell: AttackJob, dataset: Dataset, file: Path) -> dict[str, Any]:
    """Return what `score` compares an answer with: the truth in a file, and the attacker's public
    data."""
    truth = load_truth(file)
    return {
        "x": truth.x,
        "y": truth.y,
        "classes": dataset.classes,
        "aux_x": dataset.aux_x[: cell.threat.aux],
        "categorical": dataset.categorical,
        "gallery": Gallery(dataset.train_x, dataset.train_y) if truth.x.ndim == 5 else None,
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
