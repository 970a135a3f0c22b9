"""One attack on one observation: what a worker does after the training.

The process holds what the server saw and public samples. It reads neither the private data nor the
truth, which `bench.harness.scoring` does in another process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.contract.attack import Attack, Context, Reconstruction, Seen
from bench.harness.cascade import Earlier, is_separable, of_victims, spare
from bench.harness.environment import network_of, not_applicable, versions
from bench.harness.shared import SharedWork
from bench.harness.work import Work
from bench.metrics.answers import answer_of, tensors_of, validate_answer
from bench.protocols.export import PUBLIC, load_seen, save_tensors
from bench.records import AttackJob, check_kept, outcomes, sound_text
from bench.registry import judge
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator
from bench.toolkit.precision import whole_float32

RELEASES_BYTES = 4 * 2**30
"""Of all observed rounds that an attack reads, whatever the machine has."""
RESOLVED = 1e-4
"""Share of what was seen, squared: where answers leave more unexplained, more budget may help."""
ANSWER = "answer-"
"""What the names of an attack's answers begin with, one for each view."""
_AGAIN = "doubled/"
"""Before the names of what an attack answered at twice its budget."""


@dataclass(frozen=True, kw_only=True)
class Attacking(Work):
    """One attack, as executors carry it out; it leaves its answer.

    Attributes:
        trained: What became of its training.
        observed: The training's artifact folder.
        earlier: Column, record and artifact folder of the attacks that it goes after.
        followed: Whether another attack goes after it.
    """

    job: AttackJob
    trained: outcomes.TrainOutcome
    observed: Path
    earlier: tuple[tuple[str, outcomes.AttackRecord, Path], ...] = ()
    followed: bool = False

    @whole_float32()
    def __call__(self) -> outcomes.AttackOutcome:
        """Attack one observation; see `docs/records.md` for the record, which has no scores yet.

        One that spends gradient evaluations on images of the reference defense, and does not
        explain what was seen, runs a second time at twice its budget: whether it had converged. The
        record's other figures, `seconds` included, are those of the first run.
        """
        cell, trained = self.job, self.trained
        if trained.status != "done":
            return not_applicable(f"the training is {trained.status}: {trained.reason}")
        look = trained.observations[cell.checkpoint][cell.threat.name]
        if look.status != "done":
            return not_applicable(str(look.reason))
        records = []
        for number, stem in enumerate(look.stems):
            record = _attack_view(self, trained, stem, number, alone=not look.views)
            if isinstance(record, outcomes.NoResult):
                return record
            records.append(record)
        record = join_views(records) if look.views else records[0]
        notes = record.notes if look.reason is None else (*record.notes, look.reason)
        return replace(record, notes=notes)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An attack's answer about one view, as it lies on disk.

    Attributes:
        first: The answer.
        doubled: The one at twice the budget, None where the attack did not run twice.
        unexplained: See `Judge.unexplained`; None where it was not asked or is not known.
        apart: Whether each victim's messages tell of that victim only.
    """

    first: Reconstruction
    doubled: Reconstruction | None
    unexplained: Tensor | None
    apart: bool

    @staticmethod
    def path(folder: Path, view: int) -> Path:
        """Its file."""
        return folder / f"{ANSWER}{view}.safetensors"

    def save(self, path: Path) -> None:
        """Write it."""
        again = {} if self.doubled is None else tensors_of(self.doubled)
        tensors = tensors_of(self.first) | {f"{_AGAIN}{n}": v for n, v in again.items()}
        if self.unexplained is not None:
            tensors["unexplained"] = self.unexplained
        save_tensors(tensors | {"apart": torch.tensor(self.apart)}, path)

    @classmethod
    def load(cls, path: Path) -> Answer:
        """Read what `save` wrote."""
        tensors = load_file(path)
        again = {n.removeprefix(_AGAIN): v for n, v in tensors.items() if n.startswith(_AGAIN)}
        return cls(
            first=answer_of(tensors),
            doubled=answer_of(again) if again else None,
            unexplained=tensors.get("unexplained"),
            apart=bool(tensors["apart"]),
        )


def _attack_view(
    work: Attacking, trained: outcomes.TrainRecord, stem: str, number: int, *, alone: bool
) -> outcomes.AttackRecord | outcomes.NoResult:
    """Attack what was seen of clients that did the same work, and write the answer.

    Args:
        stem: What the names of its files begin with.
        number: Its number among the views.
        alone: Whether there is one view, not one of several of recorded rounds.
    """
    cell, env = work.job, work.env
    began = time.perf_counter()
    plugins = work.registry()
    attack = plugins.attack(cell.attack, cell.settings)
    defense = plugins.defense(cell.train.defense, cell.train.settings)
    place = work.observed / f"{stem}-seen"
    for begins in (place.name, PUBLIC):
        check_kept(work.observed, trained, begins)
    everything = load_seen(place, most_bytes=RELEASES_BYTES)
    seen = _restrict(attack, everything)
    if (reason := attack.applies(seen)) is not None:
        return not_applicable(reason)
    granted = load_file(work.observed / f"{PUBLIC}.safetensors")
    public = granted["x"][: cell.threat.aux], granted["y"][: cell.threat.aux]
    earlier = [_load_earlier(*before, number) for before in work.earlier]
    spared = spare(earlier, everything, defense)
    left, victims = spared.left, len(everything.clients)
    if spared.by and left:
        seen, everything = of_victims(seen, left), of_victims(everything, left)
    stream = (cell.checkpoint, cell.threat.name, *(() if alone else (number,)))
    observation = (str(place), env.device, attack.reads, str(left))
    shared = SharedWork(observation=observation, seed=cell.train.seed, stream=stream)
    samples, classes = int(seen.known["samples"]), int(seen.network["classes"])
    shape = (len(left), samples, *public[0].shape[1:])

    def context(seen: Seen, budget: int, shared: SharedWork | None = None) -> Context:
        rehearsals = Rehearsals(
            seen=seen,
            network=network_of(cell.train, shape[2:], classes),
            defense=defense,
            rng=generator(cell.train.seed, "attack", cell.label, *stream),
            device=torch.device(env.device),
        )
        return rehearsals.context(public, budget=budget, shared=shared)

    def run_once(attack: Attack, seen: Seen, budget: int) -> Reconstruction:
        """One run of the attack; every run of a cell makes the same draws, so starts are paired."""
        answer = attack.run(seen, context(seen, budget, shared))
        if not isinstance(answer, Reconstruction):
            raise TypeError(
                f"attack '{cell.attack}' must return a Reconstruction, got {type(answer).__name__}."
            )
        return validate_answer(answer, shape, classes)

    answer = run_once(attack, seen, cell.budget) if left else Reconstruction()
    seconds = time.perf_counter() - began
    judged = replace(shared, observation=(str(place), env.device, "judge", str(left)))
    ctx = context(everything, budget=0, shared=judged)
    losses = judge().losses(everything, ctx, answer) if left else torch.empty(0)
    optimises = answer.evaluations > 0 and answer.images is not None
    doubles = defense.is_reference and not attack.is_floor and optimises
    unexplained = None
    if doubles or (work.followed and not spared.by and not attack.is_floor):
        unexplained = judge().unexplained(everything, ctx, answer)
    again, doubled = None, None
    if doubles and (unexplained is None or bool((unexplained > RESOLVED).any())):
        began = time.perf_counter()
        # All that depends on the budget is rebuilt, so that nothing else differs.
        anew = plugins.attack(cell.attack, cell.settings)
        loaded = load_seen(place, most_bytes=RELEASES_BYTES)
        seen_anew = _restrict(anew, of_victims(loaded, left) if spared.by else loaded)
        again = run_once(anew, seen_anew, 2 * cell.budget)
        doubled = outcomes.DoubledRun(
            budget=2 * cell.budget,
            values={},
            gradient_evaluations=again.evaluations,
            seconds=time.perf_counter() - began,
        )
        again = spared.whole(again)
    Answer(
        first=spared.whole(answer),
        doubled=again,
        unexplained=None if spared.by else unexplained,
        apart=is_separable(everything, defense),
    ).save(Answer.path(work.artifacts, number))
    notes = [sound_text(str(note)) for note in answer.notes]
    notes += [spared.note] if spared.by else []
    read, observed = len(seen.releases), cell.threat.rounds
    if read < observed and not attack.is_floor:
        which = "the last" if seen is not everything else f"{read}, which fit the memory,"
        notes.append(f"read {which} of {observed} observed rounds")
    return outcomes.AttackRecord(
        victims=victims,
        samples=samples,
        failed=0,
        is_floor=attack.is_floor,
        budget=cell.budget,
        values={},
        floors={},
        loss=None if answer.loss is None or spared.by else [float(v) for v in answer.loss],
        judged=spared.judge(None if losses is None else losses.tolist()),
        gradient_evaluations=int(answer.evaluations),
        notes=tuple(notes),
        device=env.device,
        versions=versions(),
        seconds=seconds,
        doubled=doubled,
        scoring="",
    )


def join_views(records: Sequence[outcomes.AttackRecord]) -> outcomes.AttackRecord:
    """One attack's records of all views of recorded rounds as one, victims one after the other."""

    def all_of(parts: Sequence[list[float] | None]) -> list[float] | None:
        known = [p for p in parts if p is not None]
        return list(chain.from_iterable(known)) if len(known) == len(parts) else None

    again = [r.doubled for r in records if r.doubled]
    doubled = None
    if again:  # a view that was explained did not run twice
        doubled = replace(
            again[0],
            gradient_evaluations=sum(d.gradient_evaluations for d in again),
            seconds=sum(d.seconds for d in again),
        )
    return replace(
        records[0],
        victims=sum(r.victims for r in records),
        samples=max(r.samples for r in records),
        loss=all_of([r.loss for r in records]),
        judged=all_of([r.judged for r in records]),
        gradient_evaluations=sum(r.gradient_evaluations for r in records),
        notes=tuple(dict.fromkeys(n for r in records for n in r.notes)),
        seconds=sum(r.seconds for r in records),
        doubled=doubled,
        views=tuple(r.victims for r in records),
    )


def _load_earlier(label: str, record: outcomes.AttackRecord, artifacts: Path, view: int) -> Earlier:
    """Load an earlier attack's answer about a view."""
    path = Answer.path(artifacts, view)
    check_kept(artifacts, record, path.name)
    answer = Answer.load(path)
    return Earlier(
        label=label,
        answer=answer.first,
        unexplained=None if answer.unexplained is None else answer.unexplained.tolist(),
        judged=record.of_view(view).judged,
    )


def _restrict(attack: Attack, seen: Seen) -> Seen:
    """Return what the attack reads of what was seen."""
    whole = attack.reads == "all" or not seen.earlier
    return seen if whole else replace(seen, earlier=())
