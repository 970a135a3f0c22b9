"""One attack on one observation, and its score: what a worker does after the training."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.contract.attack import Attack, Context, Reconstruction, Seen
from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.harness.cascade import Earlier, apart, of_victims, spare, truth_of_victims
from bench.harness.environment import (
    Environment,
    dataset_of,
    dealing_of,
    network_of,
    not_applicable,
    registry_for,
    versions,
)
from bench.harness.shared import SharedWork
from bench.metrics.floors import floors
from bench.metrics.score import Scores, of_anyone, score
from bench.protocols.export import load_seen, load_truth, save_tensors
from bench.records import (
    CONVERGED,
    RECONSTRUCTION,
    AttackJob,
    AttackOutcome,
    AttackRecord,
    DoubledRun,
    NoResult,
    TrainJob,
    TrainOutcome,
    TrainRecord,
    check_kept,
    sound_text,
)
from bench.registry import judge
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator
from bench.toolkit.precision import whole_float32

Stream = tuple[str | int, ...]
"""Names of the random streams of an attack: checkpoint, threat, and the number of a view."""
RELEASES_BYTES = 4 * 2**30
"""Of all observed rounds that an attack reads, whatever the machine has."""


@dataclass(frozen=True, kw_only=True)
class Attacking:
    """One attack, as executors carry it out.

    Attributes:
        cell: The attack.
        env: Where it runs.
        trained: What became of its training.
        observed: The training's artifact folder.
        artifacts: Folder for what it rebuilds.
        earlier: What the attacks found that it goes after.
        dataset: As `dataset_of` gives it, or None to load it where it runs.
    """

    cell: AttackJob
    env: Environment
    trained: TrainOutcome
    observed: Path
    artifacts: Path
    earlier: tuple[Earlier, ...] = ()
    dataset: Dataset | None = None

    @property
    def job(self) -> TrainJob:
        return self.cell.train

    def __call__(self) -> AttackOutcome:
        return run_attack(self)

    def prepare(self) -> None:
        """Import all plugins."""
        registry_for(self.env.plugins)


@whole_float32()
def run_attack(work: Attacking) -> AttackOutcome:
    """Attack one observation and score the answer; see `docs/records.md` for the record.

    The attack gets the reloaded export; the truth is read after it returns. One that spends
    gradient evaluations on images of the reference defense runs a second time at twice its budget,
    scored under `doubled`: whether it had converged. The record's other figures, `seconds`
    included, are those of the first run.
    """
    cell, trained = work.cell, work.trained
    if trained.status != "done":
        return not_applicable(f"the training is {trained.status}: {trained.reason}")
    look = trained.observations[cell.checkpoint][cell.threat.name]
    if look.status != "done":
        return not_applicable(str(look.reason))
    views = []
    for number, stem in enumerate(look.stems):
        view = _attack_view(work, trained, stem, number if look.views else None)
        if isinstance(view, NoResult):
            return view
        views.append(view)
    images = [v.images for v in views if v.images is not None]
    alike = len({image.shape[1:] for image in images}) == 1
    if alike and len(images) == len(views):
        truth = torch.cat([v.truth for v in views])
        rebuilt = {"images": torch.cat(images), "truth": truth}
        save_tensors(rebuilt, work.artifacts / RECONSTRUCTION)
    record = joined_views([v.record for v in views]) if look.views else views[0].record
    notes = record.notes if look.reason is None else (*record.notes, look.reason)
    return replace(record, notes=notes)


@dataclass(frozen=True, kw_only=True)
class _View:
    """What an attack found in one view: its record, what it rebuilt [V, K, ...], if anything, and
    the truth of that."""

    record: AttackRecord
    images: Tensor | None
    truth: Tensor


def _attack_view(
    work: Attacking, trained: TrainRecord, stem: str, number: int | None
) -> _View | NoResult:
    """Attack what was seen of clients that did alike, and score the answer.

    Args:
        stem: What the names of its files begin with.
        number: Its number among the views of recorded rounds, None where there is one view.
    """
    cell, env = work.cell, work.env
    began = time.perf_counter()
    found = registry_for(env.plugins)
    attack = found.attack(cell.attack, cell.settings)
    defense = found.defense(cell.train.defense, cell.train.settings)
    place = work.observed / f"{stem}-seen"
    for begins in (place.name, f"{stem}-truth"):
        check_kept(work.observed, trained, begins)
    everything = load_seen(place, most_bytes=RELEASES_BYTES)
    seen = _read_by(attack, everything)
    reason = attack.applies(seen)
    if reason is not None:
        return not_applicable(reason)
    dataset = dataset_of(cell.train, env) if work.dataset is None else work.dataset
    spared = spare([e.of_view(number or 0) for e in work.earlier], everything, defense)
    left = spared.left
    if spared.by and left:
        seen, everything = of_victims(seen, left), of_victims(everything, left)
    stream = (cell.checkpoint, cell.threat.name, *(() if number is None else (number,)))
    shared = SharedWork(
        observation=(str(place), env.device, attack.reads, str(left)),
        seed=cell.train.seed,
        stream=stream,
    )
    answering = partial(_answer, cell, env, dataset, stream=stream, shared=shared)
    answer = Reconstruction()
    if left:
        answer = answering(attack, seen, budget=cell.budget)
    seconds = time.perf_counter() - began
    whole = truth_of(cell, dataset, work.observed / f"{stem}-truth.safetensors")
    truth = truth_of_victims(whole, left)
    scores = score(answer, **truth)
    if scores.images is not None and not apart(everything, defense):
        scores.values.update(of_anyone(scores.images, truth["x"]))
    optimises = answer.evaluations > 0 and answer.images is not None
    doubled = None
    if defense.is_reference and not attack.is_floor and optimises and _may_gain(scores):
        began = time.perf_counter()
        # All that depends on the budget is rebuilt, so that nothing else differs.
        anew = found.attack(cell.attack, cell.settings)
        loaded = load_seen(place, most_bytes=RELEASES_BYTES)
        seen_anew = _read_by(anew, of_victims(loaded, left) if spared.by else loaded)
        again = answering(anew, seen_anew, budget=2 * cell.budget)
        again_seconds = time.perf_counter() - began
        doubled = DoubledRun(
            budget=2 * cell.budget,
            values=spared.filled(score(again, **truth).values),
            gradient_evaluations=again.evaluations,
            seconds=again_seconds,
        )
    judged: list[float] | None = []
    if left:
        asked = _context(cell, env, dataset, defense, everything, budget=0, stream=stream)
        losses = judge().losses(everything, asked, answer)
        judged = None if losses is None else losses.tolist()
    notes = [sound_text(str(note)) for note in answer.notes]
    notes += [spared.note] if spared.by else []
    read, observed = len(seen.releases), cell.threat.rounds
    if read < observed and not attack.is_floor:
        which = "the last" if seen is not everything else f"{read}, which fit the memory,"
        notes.append(f"read {which} of {observed} observed rounds")
    victims, samples = whole["y"].shape
    record = AttackRecord(
        victims=victims,
        samples=samples,
        failed=scores.failed,
        is_floor=attack.is_floor,
        budget=cell.budget,
        values=spared.filled(scores.values),
        floors=floors_of(cell, dataset, whole),
        loss=None if answer.loss is None or spared.by else [float(v) for v in answer.loss],
        judged=spared.judged(judged),
        gradient_evaluations=int(answer.evaluations),
        notes=tuple(notes),
        device=env.device,
        versions=versions(),
        seconds=seconds,
        doubled=doubled,
    )
    return _View(record=record, images=spared.images(scores.images), truth=whole["x"])


def joined_views(records: Sequence[AttackRecord]) -> AttackRecord:
    """One attack's records of all views of recorded rounds as one: victims one after the other,
    with the metrics that all have."""

    def together(scores: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
        named = [n for n in scores[0] if all(n in one for one in scores)]
        return {n: [v for one in scores for v in one[n]] for n in named}

    def all_of(parts: Sequence[list[float] | None]) -> list[float] | None:
        known = [p for p in parts if p is not None]
        return list(chain.from_iterable(known)) if len(known) == len(parts) else None

    values = together([r.values for r in records])
    again = [r.doubled for r in records if r.doubled]
    doubled = None
    if again:  # a view with nothing to gain did not run twice
        values_again = together([(r.doubled or r).values for r in records])
        doubled = replace(
            again[0],
            values={n: v for n, v in values_again.items() if n in values},
            gradient_evaluations=sum(d.gradient_evaluations for d in again),
            seconds=sum(d.seconds for d in again),
        )
    return replace(
        records[0],
        victims=sum(r.victims for r in records),
        samples=max(r.samples for r in records),
        failed=sum(r.failed for r in records),
        values=values,
        floors=together([r.floors for r in records]),
        loss=all_of([r.loss for r in records]),
        judged=all_of([r.judged for r in records]),
        gradient_evaluations=sum(r.gradient_evaluations for r in records),
        notes=tuple(dict.fromkeys(n for r in records for n in r.notes)),
        seconds=sum(r.seconds for r in records),
        doubled=doubled,
        views=tuple(r.victims for r in records),
    )


def _read_by(attack: Attack, seen: Seen) -> Seen:
    """What was seen, as far as the attack reads it."""
    whole = attack.reads == "all" or not seen.earlier
    return seen if whole else replace(seen, earlier=())


def _may_gain(scores: Scores) -> bool:
    """Whether more SSIM is left to gain than an attack may that counts as converged."""
    similar = scores.values.get("ssim")
    return similar is None or sum(similar) < (1 - CONVERGED) * len(similar)


def _answer(
    cell: AttackJob,
    env: Environment,
    dataset: Dataset,
    attack: Attack,
    seen: Seen,
    *,
    budget: int,
    stream: Stream,
    shared: SharedWork,
) -> Reconstruction:
    """One run of the attack; every run of a cell makes the same draws, so starts are paired."""
    defense = registry_for(env.plugins).defense(cell.train.defense, cell.train.settings)
    ctx = _context(cell, env, dataset, defense, seen, budget=budget, stream=stream, shared=shared)
    answer = attack.run(seen, ctx)
    if not isinstance(answer, Reconstruction):
        raise TypeError(
            f"attack '{cell.attack}' must return a Reconstruction, got {type(answer).__name__}."
        )
    return answer


def _context(
    cell: AttackJob,
    env: Environment,
    dataset: Dataset,
    defense: Defense,
    seen: Seen,
    *,
    budget: int,
    stream: Stream,
    shared: SharedWork | None = None,
) -> Context:
    device = torch.device(env.device)
    network = network_of(cell.train, dataset)
    rng = generator(cell.train.seed, "attack", cell.label, *stream)
    aux = slice(None, cell.threat.aux)

    return Context(
        rng=rng,
        device=device,
        budget=budget,
        aux_x=dataset.aux_x[aux].clone(),
        aux_y=dataset.aux_y[aux].clone(),
        network=network,
        defense=defense,
        shadow=Rehearsals(seen=seen, network=network, defense=defense, rng=rng, device=device),
        shared=shared,
    )


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
