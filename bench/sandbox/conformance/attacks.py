"""The checks of an attack, on real observations of undefended rounds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench import data
from bench.contract.attack import Attack, Context, Reconstruction, Seen
from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.foreign import Left, foreign_code
from bench.models import Network
from bench.protocols.observe import Truth
from bench.sandbox.conformance.contract import check_class
from bench.sandbox.conformance.findings import (
    LEFT_OUT,
    Broken,
    Finding,
    NotChecked,
    failed,
    findings_of,
    passed,
    skipped,
)
from bench.sandbox.conformance.playground import Ground, seen_of
from bench.sandbox.conformance.watching import (
    Snapshot,
    attributes,
    changed_attribute,
    same,
)
from bench.sandbox.hooked import named
from bench.sandbox.rehearsal import Rehearsals
from bench.sandbox.stage import CPU
from bench.seeding import generator

BUDGET, AUXILIARY, VICTIMS = 4, 120, 2
FEW = 30
"""Public samples of a fast examination."""
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
    """One observed round and its truth, which the attack is not given. Truth and public samples are
    from the data set."""

    name: str
    seen: Seen
    truth: Truth
    network: Network
    dataset: Dataset


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
class Examined:
    """One attack under examination, and what was noticed over all of its runs.

    Attributes:
        build: A new attack with the settings.
        auxiliary: Public samples that it gets.
        ran: The scenes on which it ran, with its answers.
        changed: Something that it was given and changed.
        moved: Global generators that it moved.
        state: What it changed that decides figures.
        kept: An attribute of its own that changed.
    """

    build: Callable[[], Attack]
    auxiliary: int = AUXILIARY
    ran: list[tuple[Scene, Reconstruction]] = field(default_factory=list)
    changed: str | None = None
    moved: str | None = None
    state: str | None = None
    kept: str | None = None

    def run(self, scene: Scene, *, budget: int = BUDGET) -> Reconstruction:
        """One run in an empty folder, where neither a result nor a truth lies, with everything
        watched."""
        attack = self.build()
        ctx = context(scene, budget=budget, auxiliary=self.auxiliary)
        before, left = attributes(attack, Attack), Left()
        given = Snapshot.of(("seen", "ctx.aux_x", "ctx.aux_y"), (scene.seen, ctx.aux_x, ctx.aux_y))
        with (
            tempfile.TemporaryDirectory() as folder,
            chdir(folder),
            named("run", attack),
            foreign_code(left, relays=False),
        ):
            answer = attack.run(scene.seen, ctx)
        self.changed = self.changed or given.changed()
        self.moved = self.moved or " and ".join(left.moved)
        self.state = self.state or " and ".join(left.deciding)
        self.kept = self.kept or changed_attribute(before, attributes(attack, Attack))
        return checked_answer(answer, scene, attack.recovers)


def check_attack(
    build: Callable[[], Attack], *, settings: Mapping[str, Any], fast: bool = False
) -> list[Finding]:
    """All findings on an attack, which `build` makes anew with the settings. fast: on the
    first round alone to which it applies, with fewer public samples."""
    auxiliary = FEW if fast else AUXILIARY
    cls, own = type(build()), Examined(build=build, auxiliary=auxiliary)
    findings = check_class(cls, Attack, settings)
    for scene in scenes():
        name = f"runs on {scene.name}"
        if fast and own.ran:
            findings.append(skipped(name, LEFT_OUT))
        else:
            findings += findings_of(name, partial(_run, own, scene), cls)
    if not own.ran:
        if all(f.status != "failed" for f in findings):
            findings.append(
                failed(
                    "runs anywhere",
                    "the attack applies to none of the checked rounds, so nothing of it was run.",
                    "Let applies() return None where the attack can run.",
                    "applies",
                )
            )
        findings.append(skipped("everything else", "it needs a run that works"))
        return findings
    findings += findings_of("same seed, same answer", lambda: _repeats(own), cls)
    findings += findings_of("budget", lambda: _budget(own), cls)
    findings += _noticed(own)
    return findings


def _run(own: Examined, scene: Scene) -> str:
    attack = own.build()
    with named("applies", attack):
        reason = attack.applies(scene.seen)
    if reason is not None:
        if isinstance(reason, str) and reason.strip():
            raise NotChecked(f"not applicable: {reason}")
        raise Broken(
            f"applies returned {reason!r}, expected None or one clause that says why not.",
            "Return the reason as text.",
            "applies",
        )
    own.ran.append((scene, own.run(scene)))
    return ", ".join(sorted(attack.recovers))


def context(scene: Scene, *, budget: int = BUDGET, auxiliary: int = AUXILIARY) -> Context:
    """What a run would give the attack, with few public samples."""
    rng = generator(0, "conformance attack")

    return Context(
        rng=rng,
        device=CPU,
        budget=budget,
        aux_x=scene.dataset.aux_x[:auxiliary].clone(),
        aux_y=scene.dataset.aux_y[:auxiliary].clone(),
        network=scene.network,
        defense=Defense(),
        shadow=Rehearsals(
            seen=scene.seen, network=scene.network, defense=Defense(), rng=rng, device=CPU
        ),
    )


def _repeats(own: Examined) -> str:
    scene, first = own.ran[0]
    again = own.run(scene)
    for entry in fields(Reconstruction):
        a, b = getattr(first, entry.name), getattr(again, entry.name)
        equal = same(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        if not equal:
            raise Broken(
                f"two runs with one seed differ in {entry.name}.",
                "Draw from ctx.rng alone, and keep nothing between runs.",
                "run",
            )
    return "bit for bit"


def _budget(own: Examined) -> str:
    """Evaluations are at most budget x starts. How many starts there are is the attack's own and
    may grow where a budget is small, so what is found is an attack that spends the same, and
    much, whatever the budget."""
    spending = [(s, a) for s, a in own.ran if a.evaluations]
    if not spending:
        raise NotChecked("the attack reports no gradient evaluations")
    scene, first = spending[0]
    less = own.run(scene, budget=1)
    samples = scene.truth.y.numel()
    shown = f"{less.evaluations} at budget 1, {first.evaluations} at budget {BUDGET}"
    if less.evaluations == first.evaluations > 2 * BUDGET * samples:
        raise Broken(
            f"the gradient evaluations do not follow the budget: {shown}.",
            "Stop each start after ctx.budget evaluations, and report their sum.",
            "run",
        )
    return f"gradient evaluations: {shown}"


_NOTICES = (
    ("arguments untouched", "changed", "Make a new tensor; other attacks get the same."),
    ("global generators untouched", "moved", "Draw from ctx.rng."),
    ("process untouched", "changed for the whole process", "Put back what the run changes."),
    ("no state on self", "changed its attribute", "Keep a run's state in local variables."),
)


def _noticed(own: Examined) -> list[Finding]:
    noticed = (own.changed, own.moved, own.state, own.kept)
    return [
        failed(name, f"run {what} {which}.", change, "run") if which else passed(name)
        for (name, what, change), which in zip(_NOTICES, noticed, strict=True)
    ]


# --- what an attack may answer --------------------------------------------------------------------


def checked_answer(answer: object, scene: Scene, recovers: frozenset[str]) -> Reconstruction:
    """An attack's answer, in which nothing is wrong.

    Raises:
        Broken: For the first thing that is.
    """
    if not isinstance(answer, Reconstruction):
        got = "None" if answer is None else f"a {type(answer).__name__}"
        raise Broken(
            f"run returned {got}, expected a Reconstruction.",
            "Return bench.api.Reconstruction(...).",
            "run",
        )
    for problem in _problems(answer, scene, recovers):
        raise Broken(f"run {problem}.", "Answer as bench.api.Reconstruction says.", "run")
    return answer


def _problems(a: Reconstruction, scene: Scene, recovers: frozenset[str]) -> Iterator[str]:
    """What is wrong with dtypes, shapes and ranges of V victims with K samples of C classes."""
    wide, shape, classes = tuple(scene.truth.y.shape), scene.dataset.shape, scene.dataset.classes
    victims = wide[:1]
    given = {"images": a.images, "labels": a.labels, "counts": a.label_counts}
    for what in sorted(recovers):
        if given[what] is None:
            yield f"gave no {what}, which `recovers` promises"
    for what, value in given.items():
        if value is not None and what not in recovers:
            yield f"gave {what}, which `recovers` does not name"
    yield from _tensor("images", a.images, (*wide, *shape), "float")
    yield from _tensor("labels", a.labels, wide, "int64")
    yield from _tensor("label_counts", a.label_counts, (*victims, classes), "int64")
    yield from _tensor("loss", a.loss, victims, "float")
    yield from _tensor("failed", a.failed, victims, "bool")
    usable = torch.ones(victims, dtype=torch.bool)
    if a.failed is not None:
        usable &= ~a.failed.bool()
    if a.images is not None:
        images = a.images[usable]
        if not bool(torch.isfinite(images).all()):
            yield "gave images with NaN or infinite values, and did not call these victims failed"
        elif len(shape) == 3 and images.numel():
            low, high = float(images.min()), float(images.max())
            if low < -1e-3 or high > 1 + 1e-3:
                yield f"gave images with values in [{low:.3g}, {high:.3g}], expected [0, 1]"
    if a.labels is not None and bool(((a.labels < 0) | (a.labels >= classes)).any()):
        yield f"gave labels outside of 0 to {classes - 1}"
    if a.label_counts is not None and bool((a.label_counts < 0).any()):
        yield "gave label counts below 0"
    if type(a.evaluations) is not int or a.evaluations < 0:
        yield f"reported {a.evaluations!r} gradient evaluations, expected a whole number >= 0"
    if not isinstance(a.notes, tuple) or not all(isinstance(n, str) for n in a.notes):
        yield "gave notes that are no tuple of texts"


def _tensor(
    what: str, value: Tensor | None, shape: tuple[int, ...], expected: str
) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        yield f"gave {what} of shape {got}, expected {list(shape)}"
        return
    exact = str(value.dtype) == f"torch.{expected}"
    if not (value.is_floating_point() if expected == "float" else exact):
        yield f"gave {what} as {value.dtype}, expected {expected}"
    if value.device.type != "cpu":
        yield f"gave {what} on {value.device}, while it ran on the CPU"
