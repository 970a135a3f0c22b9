"""The checks of an attack, on real observations of undefended rounds."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor

from bench.contract.attack import Attack, Context, Reconstruction
from bench.contract.defense import Defense
from bench.metrics.answers import check_values, validate_answer
from bench.sandbox.conformance.contract import LEFT_OUT, Case, class_cases, skip
from bench.sandbox.conformance.playground import Ground, Scene, observe_round
from bench.sandbox.conformance.watching import Watch, attributes, same
from bench.sandbox.findings import Broken, NotChecked, require
from bench.sandbox.hooked import name_errors
from bench.sandbox.rehearsal import Rehearsals
from bench.sandbox.stage import CPU
from bench.seeding import generator

BUDGET, AUXILIARY = 4, 120
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
_TABLE = Ground(protocol="fedavg", model="logistic", is_table=True)
"""For an attack that reads nothing of the others."""


def scenes() -> Iterator[Scene]:
    """Observations of digits under no defense, one per protocol and batch size."""
    for ground, batch in _SCENES:
        yield observe_round(Defense(), ground, batch=batch)


def context(scene: Scene, *, budget: int = BUDGET, auxiliary: int = AUXILIARY) -> Context:
    """What a run would give the attack, with few public samples."""
    seen, network, rng = scene.seen, scene.network, generator(0, "conformance attack")
    rehearsals = Rehearsals(seen=seen, network=network, defense=Defense(), rng=rng, device=CPU)
    public = scene.data.aux_x[:auxiliary], scene.data.aux_y[:auxiliary]
    return rehearsals.context(public, budget=budget)


@dataclass(kw_only=True)
class Trial:
    """An attack under examination.

    Attributes:
        build: A new attack with the settings.
        auxiliary: Public samples that it gets.
        ran: The scenes on which it ran, with its answers.
        refusals: Those to which it does not apply.
        watch: What was noticed over all of its runs.
    """

    build: Callable[[], Attack]
    auxiliary: int
    ran: list[tuple[Scene, Reconstruction]] = field(default_factory=list)
    refusals: list[Scene] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def run(self, scene: Scene, *, budget: int = BUDGET) -> Reconstruction:
        """One run in an empty folder, where neither a result nor a truth lies, with everything
        watched."""
        attack, ctx = self.build(), context(scene, budget=budget, auxiliary=self.auxiliary)
        before = attributes(attack, Attack)
        given = {"seen": scene.seen, "ctx.aux_x": ctx.aux_x, "ctx.aux_y": ctx.aux_y}
        with tempfile.TemporaryDirectory() as folder, chdir(folder), name_errors("run", attack):
            answer = self.watch.call("run", partial(attack.run, scene.seen, ctx), given)
        self.watch.compare(before, attributes(attack, Attack))
        return check_answer(answer, scene, attack.recovers)


def attack_cases(
    build: Callable[[Mapping[str, Any]], Attack], settings: Mapping[str, Any], *, fast: bool
) -> Iterator[Case]:
    """All checks of an attack, which `build` makes anew from settings. fast: on the first round
    alone to which it applies, with fewer public samples."""
    trial = Trial(build=partial(build, settings), auxiliary=FEW if fast else AUXILIARY)
    yield from class_cases(type(trial.build()), settings)
    for scene in scenes():
        left_out = fast and trial.ran
        check = partial(skip, LEFT_OUT) if left_out else partial(check_run, trial, scene)
        yield f"runs on {scene.name}", check
    if len(trial.refusals) == len(_SCENES):
        scene = observe_round(Defense(), _TABLE, batch=2)
        yield f"runs on a table, {scene.name}", partial(check_run, trial, scene)
    if len(trial.refusals) > len(_SCENES):
        why = "the attack applies to none of the checked rounds, so nothing of it was run."
        yield "runs anywhere", partial(require, False, why)
    if not trial.ran:
        yield "everything else", partial(skip, "it needs a run that works")
        return
    yield "same seed, same answer", partial(check_repeats, trial)
    yield "budget", partial(check_budget, trial)
    yield from trial.watch.cases()


def check_run(trial: Trial, scene: Scene) -> str:
    """Whether the attack says that it does not apply, or gives an answer that can be scored."""
    attack = trial.build()
    with name_errors("applies", attack):
        reason = attack.applies(scene.seen)
    if reason is None:
        trial.ran.append((scene, trial.run(scene)))
        return ", ".join(sorted(attack.recovers))
    require(
        isinstance(reason, str) and bool(reason.strip()),
        f"applies returned {reason!r}, expected None or one clause that says why not.",
        "applies",
    )
    trial.refusals.append(scene)
    raise NotChecked(f"not applicable: {reason}")


def check_repeats(trial: Trial) -> str:
    """Whether the first run comes out again."""
    scene, first = trial.ran[0]
    again = trial.run(scene)
    for name in (entry.name for entry in fields(Reconstruction)):
        a, b = getattr(first, name), getattr(again, name)
        require(
            same(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b,
            f"two runs with one seed differ in {name}.",
            "run",
        )
    return "bit for bit"


def check_budget(trial: Trial) -> str:
    """Whether evaluations follow the budget.

    They are at most budget x starts. How many starts there are is the attack's own and may grow
    where a budget is small, so what fails is an attack that spends the same, and much, whatever the
    budget.
    """
    spending = [(s, a.evaluations) for s, a in trial.ran if a.evaluations]
    if not spending:
        raise NotChecked("the attack reports no gradient evaluations")
    scene, spent = spending[0]
    less = trial.run(scene, budget=1).evaluations
    seen = f"{less} at budget 1, {spent} at budget {BUDGET}"
    require(
        less != spent or spent <= 2 * BUDGET * scene.truth.y.numel(),
        f"the gradient evaluations do not follow the budget: {seen}.",
    )
    return f"gradient evaluations: {seen}"


def check_answer(answer: object, scene: Scene, recovers: frozenset[str]) -> Reconstruction:
    """The answer, if it holds what it should, in the right dtypes, shapes and ranges."""
    shape, classes = scene.network.shape, scene.network.classes
    if not isinstance(answer, Reconstruction):
        got = "None" if answer is None else f"a {type(answer).__name__}"
        raise Broken(f"run returned {got}, expected a Reconstruction.")
    try:
        checked = validate_answer(answer, (*scene.truth.y.shape, *shape), classes)
        check_values(checked, is_image=len(shape) == 3, beyond=1e-3)
    except ValueError as error:
        raise Broken(f"run gave what cannot be scored: {error}") from error
    for what, field_ in {"images": "images", "labels": "labels", "counts": "label_counts"}.items():
        given = getattr(answer, field_) is not None
        require(given or what not in recovers, f"run gave no {what}, which `recovers` promises.")
        require(what in recovers or not given, f"run gave {what}, which `recovers` does not name.")
    return answer
