"""The checks of an attack, on real observations of undefended rounds."""

from __future__ import annotations

import ast
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import data
from bench.contract.attack import Attack, Context, Reconstruction, Seen
from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.metrics.score import floors, score
from bench.models import Network
from bench.protocols.observe import Truth, play_shadow
from bench.sandbox.conformance.answers import Question, check_answer
from bench.sandbox.conformance.contract import check_class, check_refusals
from bench.sandbox.conformance.findings import Finding, failed, guarded, passed, skipped
from bench.sandbox.conformance.playground import Ground, seen_of
from bench.sandbox.conformance.snapshots import (
    Snapshot,
    attributes,
    changed_attribute,
    global_generators,
    moved_generator,
    same,
)
from bench.seeding import generator

BUDGET, AUXILIARY, VICTIMS = 4, 120, 2
_SCENES: tuple[tuple[Ground, int], ...] = (
    (Ground(protocol="fedavg"), 1),
    (Ground(protocol="fedavg"), 4),
    (Ground(protocol="fedsgd", model="mlp_spm"), 1),
    (Ground(protocol="splitfed", cut="block1", labels="private"), 1),
    (Ground(protocol="splitfed", cut="block1", labels="shared"), 4),
)
"""Rounds with the batch size of each victim."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One observed round and its truth, which the attack is not given."""

    name: str
    seen: Seen
    truth: Truth
    network: Network
    dataset: Dataset

    @property
    def question(self) -> Question:
        victims, samples = self.truth.y.shape
        return Question(
            victims=victims, samples=samples, shape=self.dataset.shape,
            classes=self.dataset.classes,
        )  # fmt: skip


@cache
def _digits() -> Dataset:
    return data.load_dataset("digits", seed=0)


def scenes() -> Iterator[Scene]:
    """Observations of digits under no defense, one per protocol and batch size."""
    dataset = _digits()
    for ground, batch in _SCENES:
        seen, truth, network = seen_of(Defense(), ground, dataset, batch=batch, victims=VICTIMS)
        name = f"{ground.name}, {ground.model}, batch {batch}"
        yield Scene(name=name, seen=seen, truth=truth, network=network, dataset=dataset)


@dataclass(kw_only=True)
class Notices:
    """What was noticed over all runs of an attack."""

    changed: str | None = None
    moved: str | None = None
    kept: str | None = None
    written: list[str] = field(default_factory=list)


def check_attack(build: Callable[[], Attack], *, settings: Mapping[str, Any]) -> list[Finding]:
    """All findings on an attack; build: a new one with the settings."""
    cls = type(build())
    findings = guarded("class", lambda: check_class(cls, Attack))
    findings += guarded("bad settings", lambda: check_refusals(cls, settings))
    findings.append(_device(cls))
    notices, ran = Notices(), []
    for scene in scenes():
        name = f"runs on {scene.name}"
        reason = guarded(name, lambda s=scene, n=name: [_applies(n, build(), s)])  # type: ignore[misc]
        if reason[0].status != "passed":
            findings += reason
            continue

        def run(scene: Scene = scene, name: str = name) -> list[Finding]:
            answer = _run(build, scene, notices)
            found = check_answer(name, answer, scene.question, cls.recovers)
            if found.status == "passed" and isinstance(answer, Reconstruction):
                ran.append((scene, answer))
            return [found]

        findings += guarded(name, run)
    if not ran:
        if all(f.status != "failed" for f in findings):
            findings.append(failed(
                "runs anywhere", "the attack applies to none of the checked rounds, so nothing of "
                "it was run.", "Let applies() return None where the attack can run.", "applies",
            ))  # fmt: skip
        findings.append(skipped("everything else", "it needs a run that works"))
        return findings
    scene, first = ran[0]
    findings += guarded("same seed, same answer", lambda: _repeats(build, scene, first, notices))
    findings += guarded("budget", lambda: _budget(build, ran, notices))
    findings += _noticed(notices)
    findings += guarded("score", lambda: [_score(scene, first) for scene, first in ran[:1]])
    return findings


def _applies(name: str, attack: Attack, scene: Scene) -> Finding:
    reason = attack.applies(scene.seen)
    if reason is None:
        return passed(name)
    if not isinstance(reason, str) or not reason.strip():
        return failed(
            name, f"applies returned {reason!r}, expected None or one clause that says why not.",
            "Return the reason as text.", "applies",
        )  # fmt: skip
    return skipped(name, f"not applicable: {reason}")


def context(scene: Scene, *, budget: int = BUDGET) -> Context:
    """What a run would give the attack, with few public samples."""
    aux_x, aux_y = scene.dataset.aux_x[:AUXILIARY], scene.dataset.aux_y[:AUXILIARY]
    rng = generator(0, "conformance attack")

    def shadow(x: Tensor, y: Tensor, before: Any = None) -> Seen:
        seen = scene.seen if before is None else replace(scene.seen, before=before)
        return play_shadow(
            seen, network=scene.network, defense=Defense(), x=x, y=y, rng=rng,
            device=torch.device("cpu"),
        )  # fmt: skip

    return Context(
        rng=rng, device=torch.device("cpu"), budget=budget, aux_x=aux_x.clone(),
        aux_y=aux_y.clone(), network=scene.network, defense=Defense(), shadow=shadow,
    )  # fmt: skip


def _run(
    build: Callable[[], Attack], scene: Scene, notices: Notices, *, budget: int = BUDGET
) -> object:
    """One run in an empty folder with everything watched."""
    attack, ctx = build(), context(scene, budget=budget)
    before, generators = attributes(attack, Attack), global_generators()
    given = Snapshot.of(("seen", "ctx.aux_x", "ctx.aux_y"), (scene.seen, ctx.aux_x, ctx.aux_y))
    with _empty_folder() as folder:
        answer = attack.run(scene.seen, ctx)
        notices.written += [str(p.relative_to(folder)) for p in sorted(folder.rglob("*"))]
    notices.changed = notices.changed or given.changed()
    notices.moved = notices.moved or moved_generator(generators)
    notices.kept = notices.kept or changed_attribute(before, attributes(attack, Attack))
    return answer


@contextmanager
def _empty_folder() -> Iterator[Path]:
    """Run where no file lies, neither a result nor a truth."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(here)


def _device(cls: type) -> Finding:
    name = "device"
    try:
        tree = ast.parse(Path(inspect.getfile(cls)).read_text())
    except (OSError, TypeError, SyntaxError) as error:
        return skipped(name, f"its source cannot be read: {error}")
    for node in ast.walk(tree):
        fixed = isinstance(node, ast.Constant) and str(node.value).startswith("cuda")
        moves = isinstance(node, ast.Attribute) and node.attr == "cuda"
        if fixed or moves:
            return failed(
                name, f"line {getattr(node, 'lineno', '?')} names CUDA, while a run names its "
                "device.", "Use ctx.device for every tensor that the attack makes.", "run",
            )  # fmt: skip
    return passed(name, "as far as a CPU can tell")


def _repeats(
    build: Callable[[], Attack], scene: Scene, first: Reconstruction, notices: Notices
) -> list[Finding]:
    name = "same seed, same answer"
    again = _run(build, scene, notices)
    assert isinstance(again, Reconstruction)
    for entry in fields(Reconstruction):
        a, b = getattr(first, entry.name), getattr(again, entry.name)
        equal = same(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        if not equal:
            return [failed(
                name, f"two runs with one seed differ in {entry.name}.",
                "Draw from ctx.rng alone, and keep nothing between runs.", "run",
            )]  # fmt: skip
    return [passed(name, "bit for bit")]


def _budget(
    build: Callable[[], Attack], ran: Sequence[tuple[Scene, Reconstruction]], notices: Notices
) -> list[Finding]:
    """Evaluations are at most budget x starts. How many starts there are is the attack's own and
    may grow where a budget is small, so what is found is an attack that spends the same, and
    much, whatever the budget."""
    name = "budget"
    spending = [(s, a) for s, a in ran if a.evaluations]
    if not spending:
        return [skipped(name, "the attack reports no gradient evaluations")]
    scene, first = spending[0]
    less = _run(build, scene, notices, budget=1)
    assert isinstance(less, Reconstruction)
    samples = scene.question.victims * scene.question.samples
    shown = f"{less.evaluations} at budget 1, {first.evaluations} at budget {BUDGET}"
    if less.evaluations == first.evaluations > 2 * BUDGET * samples:
        return [failed(
            name, f"the gradient evaluations do not follow the budget: {shown}.",
            "Stop each start after ctx.budget evaluations, and report their sum.", "run",
        )]  # fmt: skip
    return [passed(name, f"gradient evaluations: {shown}")]


def _noticed(notices: Notices) -> list[Finding]:
    return [
        failed("arguments untouched", f"run changed {notices.changed} in place.",
               "Make a new tensor; other attacks get the same.", "run")
        if notices.changed else passed("arguments untouched"),
        failed("global generators untouched",
               f"run moved the global generator of {notices.moved}.", "Draw from ctx.rng.", "run")
        if notices.moved else passed("global generators untouched"),
        failed("no state on self", f"the attribute {notices.kept} changed during a run.",
               "Keep a run's state in local variables.", "run")
        if notices.kept else passed("no state on self"),
        failed("needs no file", f"run wrote {', '.join(notices.written[:3])} where it ran.",
               "Return everything in the Reconstruction.", "run")
        if notices.written else passed("needs no file", "it ran in an empty folder"),
    ]  # fmt: skip


def _score(scene: Scene, answer: Reconstruction) -> Finding:
    """How far above the floor, at a budget too small to judge the attack by."""
    truth: dict[str, Any] = {
        "x": scene.truth.x, "y": scene.truth.y, "classes": scene.dataset.classes,
        "aux_x": scene.dataset.aux_x[:AUXILIARY],
    }  # fmt: skip
    values = score(answer, **truth).values
    floor = floors(**truth, aux_y=scene.dataset.aux_y[:AUXILIARY])
    shown = [
        f"{m} {sum(values[m]) / len(values[m]):.2f} (floor {sum(floor[m]) / len(floor[m]):.2f})"
        for m in ("ssim", "label_accuracy", "lnacc")
        if m in values and m in floor
    ]
    return passed("score", f"for information, at budget {BUDGET}: {', '.join(shown)}")
