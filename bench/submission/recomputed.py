"""Figures of a folder that follow from what it holds, computed again without a rerun."""

from __future__ import annotations

from dataclasses import replace

import torch
from safetensors.torch import load_file

from bench.errors import UserError
from bench.harness.runner import cell_label, label_of
from bench.harness.store import Store
from bench.metrics.score import image_values
from bench.privacy.ledger import account
from bench.protocols.export import load_truth
from bench.records import (
    RECONSTRUCTION,
    AttackRecord,
    Cell,
    PlannedTraining,
    Run,
    TrainRecord,
    check_kept,
)
from bench.registry import Registry
from bench.submission.figures import Comparison, compare

_ROUNDING = 1e-4
"""Of scores that another machine computed."""
_EPSILONS = ("eps claimed", "eps proven", "unit of the claim")


def recomputed(run: Run, store: Store, registry: Registry) -> list[Comparison]:
    """Compare epsilons with those that follow from a training's facts, scores with those of stored
    reconstructions, and what reads no message with its plugin: as far as a folder holds them and
    the registry knows them.

    Raises:
        UserError: For a stored file that is not the one that its record lists, or has other truth.
    """
    usable = registry.usable
    comparisons: list[Comparison] = []
    for training in run.trainings:
        record = store.read("train", training.key)
        if not isinstance(record, TrainRecord):
            continue
        job = training.job
        if all(("defense", part) in usable for part in job.defense.split("+")):
            ledger = account(registry.defense(job.defense, job.settings), record.facts)
            again = replace(record, ledger=ledger)
            pairs = compare(label_of(job), record, again, _ROUNDING)
            comparisons += (c for c in pairs if c.figure in _EPSILONS)
        for cell in training.cells:
            scored = store.read("attack", cell.key)
            if isinstance(scored, AttackRecord):
                scores = _scores(training, record, cell, scored, store)
                remade = replace(scored, values={**scored.values, **scores})
                if ("attack", cell.attack) in usable:
                    attack = registry.attack(cell.attack, cell.job.settings)
                    remade = replace(remade, is_floor=attack.is_floor)
                pairs = compare(cell_label(cell.job), scored, remade, _ROUNDING)
                comparisons += (c for c in pairs if c.figure in ("is floor", *scores))
    return comparisons


def _scores(
    training: PlannedTraining, trained: TrainRecord, cell: Cell, record: AttackRecord, store: Store
) -> dict[str, list[float]]:
    """Scores of a stored reconstruction by metric, those that need no other data; none where it is
    not stored."""
    path = store.artifacts(cell.key) / RECONSTRUCTION
    if not path.is_file():
        return {}
    check_kept(path.parent, record, path.name)
    tensors = load_file(path)
    images, truth = tensors["images"], tensors["truth"]
    place = store.artifacts(training.key)
    files = [place / n for n in trained.observations[cell.checkpoint][cell.threat].truths]
    if all(f.is_file() for f in files):
        for file in files:
            check_kept(place, trained, file.name)
        whole = torch.cat([load_truth(f).x for f in files])
        if not torch.equal(whole, truth):
            raise UserError(f"{path} has other private samples than its training.")
    if images.shape != truth.shape or len(images) != record.victims:
        raise UserError(f"{path} has not the {record.victims} victims of its record.")
    scores = image_values(images, truth, ())
    return {m: scores[m].tolist() for m in ("mse", "psnr", "ssim", "success") if m in scores}
