"""Attacks on views that were captured or exported: `leakbench attack FILE...`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from traceback import format_exc
from typing import Any

import torch
from torch import Tensor, nn

from bench.capturing.explaining import explain_difference
from bench.contract.attack import Attack, Context, Reconstruction, Seen
from bench.data.partition import Dealing
from bench.errors import UserError
from bench.foreign import in_one_line
from bench.harness.shared import SharedWork
from bench.metrics.answers import tensors_of
from bench.metrics.floors import floors
from bench.metrics.named import leak
from bench.metrics.score import Scores, score
from bench.models import CONSTANT
from bench.outside.exports import check_labels, network_of, public_of, stem_of, truth_beside
from bench.protocols.export import load_seen, load_truth, save_tensors
from bench.protocols.observe import Truth
from bench.records import read_json
from bench.registry import discover, judge
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator
from bench.toolkit.precision import whole_float32

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What was seen of clients that began their rounds alike, with what belongs to it.

    Attributes:
        name: Of its first file.
        seen: Of all of them.
        public: Samples that the attacker has, and their labels.
        truth: The clients' samples, None where they are not given.
        about: What else its first file says.
    """

    name: str
    seen: Seen
    public: tuple[Tensor, Tensor]
    truth: Truth | None
    about: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """One attack on one view.

    Attributes:
        attack: Its name.
        view: What it attacked.
        reason: Why it does not apply or how it failed, else None.
        traceback: Of the error that ended it.
        unexplained: How what was seen is not what the true samples give under the told training,
            which attacks simulate; None where it is, or where the truth is not known.
        answer: What it rebuilt.
        scores: Against the truth, if that is known.
        floors: What needs no leak, by metric and victim.
        judged: How badly the answer explains what was seen [V], None where nothing tells that.
    """

    attack: str
    view: Captured
    reason: str | None = None
    traceback: str | None = None
    unexplained: str | None = None
    answer: Reconstruction | None = None
    scores: Scores | None = None
    floors: Mapping[str, list[float]]
    judged: Tensor | None = None

    def means(self) -> dict[str, float]:
        """Return the mean over the clients, by metric; empty without the truth."""
        by_metric = {} if self.scores is None else self.scores.values
        return {name: fmean(values) for name, values in by_metric.items()}

    def floor_means(self) -> dict[str, float]:
        """The same of what needs no leak."""
        return {name: fmean(values) for name, values in self.floors.items()}


def read_views(files: Sequence[Path], truths: Sequence[Path] | None = None) -> list[Captured]:
    """Read views from files; those of clients that began alike and did the same work are one view.

    Args:
        files: Of captures or exports, with or without ending.
        truths: The truth of each; by default FILE-truth.safetensors where that is.

    Raises:
        UserError: For a file that is missing or none.
    """
    if truths is not None and len(truths) != len(files):
        raise UserError(f"{len(files)} files were given, but {len(truths)} files of their truth.")
    views: list[Captured] = []
    for number, file in enumerate(files):
        base = stem_of(file)
        seen = load_seen(base)
        _check_finite(base, seen)
        place = truth_beside(base) if truths is None else truths[number]
        truth = load_truth(place) if truths is not None or place.is_file() else None
        if truth is not None:
            check_labels(place, truth.y, seen)
        about = read_json(base.with_name(f"{base.name}.json"), links=True)
        public = public_of(base, seen)
        view = Captured(name=base.name, seen=seen, public=public, truth=truth, about=about)
        twin = next((i for i, twin_view in enumerate(views) if _same_work(twin_view, view)), None)
        if twin is None:
            views.append(view)
        else:
            views[twin] = _join(views[twin], view)
    return views


def _check_finite(base: Path, seen: Seen) -> None:
    """Raise UserError for values that no attack can compare."""
    for release in seen.releases:
        statistics = {n: v for n, v in release.buffers.items() if not n.startswith(CONSTANT)}
        states = {"before": release.before, "const": release.const, "buffers": statistics}
        sent = {
            f"the {m.kind} of {m.sender}": {n: p.values[p.presence()] for n, p in m.parts.items()}
            for m in release.messages
        }
        for where, tensors in (states | sent).items():
            odd = next((n for n, value in tensors.items() if not value.isfinite().all()), None)
            if odd is not None:
                raise UserError(f"{base} holds values of {where}, '{odd}', that are not finite.")


def _same_work(view: Captured, other: Captured) -> bool:
    """Return whether clients began at the same state and did the same work under the same
    defense."""
    a, b = view.seen, other.seen
    plain = ("protocol", "network", "known")
    if a.earlier or b.earlier or any(getattr(a, n) != getattr(b, n) for n in plain):
        return False
    if (view.truth is None) != (other.truth is None) or set(a.clients) & set(b.clients):
        return False
    return all(
        one.keys() == two.keys() and all(torch.equal(value, two[n]) for n, value in one.items())
        for one, two in ((a.before, b.before), (a.buffers, b.buffers), (a.const, b.const))
    )


def _join(view: Captured, other: Captured) -> Captured:
    seen = replace(
        view.seen,
        messages=(*view.seen.messages, *other.seen.messages),
        clients=(*view.seen.clients, *other.seen.clients),
    )
    truth = None
    if view.truth is not None and other.truth is not None:
        truth = Truth(
            x=torch.cat([view.truth.x, other.truth.x]), y=torch.cat([view.truth.y, other.truth.y])
        )
    return replace(view, seen=seen, truth=truth)


@whole_float32()
def attack_view(
    view: Captured,
    names: Sequence[str],
    *,
    settings: Mapping[str, Any] | None = None,
    model: str | nn.Module | None = None,
    budget: int = 200,
    seed: int = 0,
    device: str = "cpu",
    plugins: Sequence[Path] = (),
    tell: Tell = lambda name, done, among: None,
) -> list[Attacked]:
    """Attack a view with several attacks, and score them where the truth is known.

    Args:
        names: Of attacks; none for all that are installed.
        settings: Of the attack, where there is one.
        model: What makes the network, as a suite names it, or the network itself; None: as the
            view's file says.
        budget: Gradient evaluations per start.
        seed: Decides all that the attacks draw.
        device: Where to compute.
        plugins: Files that bring defenses and attacks.
        tell: Gets each attack's name before it runs, how many ran and how many there are.

    Raises:
        UserError: For an unknown attack or setting, or a model that is not the view's.
    """
    registry = discover(tuple(plugins))
    names = list(names) or registry.names("attack")
    if settings and len(names) != 1:
        raise UserError(f"settings are of one attack, but {len(names)} were asked for.")
    attacks = {name: registry.attack(name, settings or {}) for name in names}
    network, lowest = network_of(view.seen, view.public[0], model), _floors(view)
    known = view.seen.known["defense"]
    defense = registry.defense(known["name"], known["settings"])
    unlike, results = None, []
    if view.truth is not None and str(view.seen.known.get("threat")).startswith("captured"):
        unlike = explain_difference(
            view.seen, view.truth, network=network, defense=defense, device=device
        )
    place = (view.name, device, str(id(view)))
    shared = SharedWork(observation=place, seed=seed, stream=("view", view.name))
    for number, (name, attack) in enumerate(attacks.items()):
        tell(name, number, len(attacks))
        # Each draws from a stream of its own, whatever runs beside it.
        rng = generator(seed, "attack", name, view.name)
        rehearsals = Rehearsals(
            seen=view.seen, network=network, defense=defense, rng=rng, device=torch.device(device)
        )
        ctx = rehearsals.context(view.public, budget=budget, shared=shared)
        blank = Attacked(attack=name, view=view, floors=lowest, unexplained=unlike)
        try:
            results.append(_run_attack(blank, attack, ctx))
        except Exception as error:  # an attack's own error ends that attack alone
            reason = f"failed: {in_one_line(error, 300)}"
            results.append(replace(blank, reason=reason, traceback=format_exc()))
    return results


def _run_attack(blank: Attacked, attack: Attack, ctx: Context) -> Attacked:
    view = blank.view
    read = view.seen if attack.reads == "all" else replace(view.seen, earlier=())
    if (reason := attack.applies(read)) is not None:
        return replace(blank, reason=f"does not apply: {reason}")
    answer = attack.run(read, ctx)
    scores = None if view.truth is None else score(answer, **_scoring_facts(view, view.truth))
    judged = judge().losses(view.seen, ctx, answer)
    return replace(blank, answer=answer, scores=scores, judged=judged)


def _scoring_facts(view: Captured, truth: Truth) -> dict[str, Any]:
    """Return what scores are taken against."""
    return {
        "x": truth.x,
        "y": truth.y,
        "classes": int(view.seen.network["classes"]),
        "aux_x": view.public[0],
        "categorical": [tuple(pair) for pair in view.about.get("categorical", ())],
    }


def _floors(view: Captured) -> dict[str, list[float]]:
    """Return the baselines of clients whose samples are like the public ones: how they were dealt
    is not known."""
    if view.truth is None:
        return {}
    clients, samples = view.truth.y.shape
    facts = _scoring_facts(view, view.truth)
    dealing = Dealing(how="iid", clients=clients, least=samples)
    granted = "truth_labels" in view.seen.known
    return floors(**facts, aux_y=view.public[1], dealing=dealing, granted=granted)


def save_answer(attacked: Attacked, out: Path) -> Path:
    """Write an attack's reconstruction to OUT-ATTACK.safetensors: images, labels, label_counts,
    failed, as far as it answers."""
    assert attacked.answer is not None
    place = out.with_name(f"{out.name}-{attacked.attack}.safetensors")
    save_tensors(tensors_of(attacked.answer), place)
    return place


def leak_of(attacked: Attacked) -> float | None:
    """Return the leakage by SSIM, or by MSE of samples other than images: 0 is no better than
    guessing, 1 a perfect copy. None for an attack that reconstructs no samples, without the truth,
    and for a training that the attacks do not simulate (`unexplained`)."""
    return None if attacked.unexplained is not None else least_leak_of(attacked)


def least_leak_of(attacked: Attacked) -> float | None:
    """Return the leakage, also for a training that the attacks do not simulate: it leaks at least
    that."""
    means, lowest = attacked.means(), attacked.floor_means()
    metric = next((m for m in ("ssim", "mse") if m in means and m in lowest), None)
    return None if metric is None else leak(means[metric], lowest[metric], metric)


def to_dict(view: Captured, results: Sequence[Attacked]) -> dict[str, Any]:
    """Return plain values of a view and the attacks on it, as `--json` prints them."""
    return {
        "view": view.name,
        "clients": list(view.seen.clients),
        "samples": int(view.seen.known["samples"]),
        "privacy": view.about.get("privacy"),
        "chosen": choose_answers(results),
        "unexplained": results[0].unexplained if results else None,
        "attacks": [
            {
                "attack": result.attack,
                "reason": result.reason,
                "leak": leak_of(result),
                "leak_at_least": least_leak_of(result),
                "values": {} if result.scores is None else dict(result.scores.values),
                "floors": dict(result.floors),
                "judged": None if result.judged is None else result.judged.tolist(),
                "notes": [] if result.answer is None else list(result.answer.notes),
            }
            for result in results
        ],
    }


def choose_answers(results: Sequence[Attacked]) -> list[str | None]:
    """Return for each victim the attack whose answer explains best what was seen; the truth is not
    used."""
    judged = [(m.attack, m.judged) for m in results if m.judged is not None]
    if not judged:
        return [None] * len(results[0].view.seen.clients) if results else []
    best = torch.stack([losses for _, losses in judged]).argmin(dim=0).tolist()
    return [judged[i][0] for i in best]


def attack(
    files: str | Path | Sequence[str | Path],
    *names: str,
    settings: Mapping[str, Any] | None = None,
    model: str | nn.Module | None = None,
    truths: Sequence[str | Path] | None = None,
    budget: int = 200,
    seed: int = 0,
    device: str = "cpu",
    plugins: Sequence[str | Path] = (),
) -> list[Attacked]:
    """Attack what `bench.capture` or `leakbench export` wrote, as `leakbench attack` does.

    Clients that began at the same state and did the same work are attacked together.

    Args:
        files: One or several, with or without ending.
        names: Of attacks; none for all that are installed.
        settings: Of the attack, where there is one.
        model: What makes the network, as a suite names it, or the network itself; None: as the
            files say.
        truths: The truth of each file; by default FILE-truth.safetensors where that is.
        budget: Gradient evaluations per start.
        seed: Decides all that the attacks draw.
        device: Where to compute.
        plugins: Python files that bring defenses and attacks.

    Returns:
        One per view and attack.

    Raises:
        UserError: For bad files, names, settings or models, with one sentence.
    """
    given = [files] if isinstance(files, str | Path) else list(files)
    views = read_views(list(map(Path, given)), None if truths is None else list(map(Path, truths)))
    return [
        attacked
        for view in views
        for attacked in attack_view(
            view,
            names,
            settings=settings,
            model=model,
            budget=budget,
            seed=seed,
            device=device,
            plugins=tuple(map(Path, plugins)),
        )
    ]
