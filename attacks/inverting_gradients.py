"""Inverting Gradients: cosine distance and total variation by signed Adam."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.evidence import Evidence, releases_of
from attacks.engine.labels import read_labels
from attacks.engine.matching import Matcher, build_matcher
from attacks.engine.observation import lawless, nothing_to_match, parse_view
from attacks.engine.optimisers import Decay, Evaluate, Minimum, Phase, descend
from attacks.engine.orders import link
from attacks.engine.posterior import answer_by_posterior
from attacks.engine.private import with_private_parts
from attacks.engine.restarts import Problems, Start, Wave, solve
from attacks.engine.terms import MIDWAY, roughness, total_variation
from bench.api import Attack, Context, Reconstruction, Seen
from bench.toolkit.settings import check_number

Preset = Literal["strong", "paper"]
_PRESETS: dict[str, dict[str, Any]] = {
    "strong": {"restarts": 1, "lr": 0.03, "total_variation": None, "start": "public"},
    "paper": {"restarts": 0, "lr": 0.1, "total_variation": 1e-4, "start": "normal"},
}
_SMOOTHNESS = 0.02
"""What total variation adds to the loss of an image as rough as public ones are."""
_FLAT = 1e-3
"""Public images smoother than this tell no unit of roughness."""
_FADES = (0.03, 0.003)
"""Distances below which total variation fades, of a victim's starts in turn; the first judges all.
An exact upload is matched to far below them, a noisy one does not come near. The earlier it fades,
the sooner an image is exact; the later, the better for one that the upload hardly tells."""
_SHIFT = 0.1
"""Step of where replaced steps begin, beside that of pixels."""


class InvertingGradients(Attack):
    """Matches the direction of the upload, with smooth images preferred.

    Labels are granted, or read as by `idlg`; the update of several local steps is simulated.
    Images stay in [0, 1]. The budget is the number of steps (4800 in the paper).
    Departures (strong): a public start and further ones, of which that of least loss answers; total
    variation weighs in the unit of public images, about a thousand times the paper's weight, and
    fades where the upload is explained, so that an exact one is matched exactly; steps fall along a
    cosine; under noise the answer is most like draws from the posterior. In both: batched starts;
    the point of least loss is kept, not the last; the upload is first made unbiased where the
    defense perturbs signs; pixels are not standardised, so that the paper's lr and weight act on
    another scale.
    Source: Geiping, Bauermeister, Droege, Moeller, arXiv:2003.14053, Eq. 4 and Sec. 5.

    Args:
        preset: `paper` or `strong`; the other settings replace its values.
        restarts: Further starts of every victim.
        lr: First step in units of the pixel range.
        total_variation: Weight of the mean absolute difference between neighbouring pixels. By
            default 1e-4 in the paper's objective; in the strong one 0.02 by that mean of public
            images, fading below a distance of 0.03 and 0.003 in turn.
        start: Of the first start (public, gray, normal; by default public of the strong,
            normal of the paper's objective); further ones are the next public or random.
    """

    steps: int | None = None
    """Of all samples, that replace local steps (see `Evidence`)."""
    recovers = frozenset({"images", "labels", "counts"})
    reads = "all"
    source = "Geiping et al., arXiv:2003.14053"

    def __init__(
        self,
        *,
        preset: Preset = "strong",
        restarts: int | None = None,
        lr: float | None = None,
        total_variation: float | None = None,
        start: Start | None = None,
    ) -> None:
        given = {"restarts": restarts, "lr": lr, "total_variation": total_variation, "start": start}
        chosen = _PRESETS[preset] | {k: v for k, v in given.items() if v is not None}
        self.preset = preset
        self.decay: Decay = "steps" if preset == "paper" else "cosine"
        self.restarts, self.lr, self.start = chosen["restarts"], chosen["lr"], chosen["start"]
        self.total_variation = chosen["total_variation"]
        check_number("restarts", self.restarts, least=0)
        check_number("lr", self.lr, "pixel range per step", above=0)
        if self.total_variation is not None:
            check_number("total_variation", self.total_variation, least=0)

    def applies(self, seen: Seen) -> str | None:
        release = parse_view(seen)[-1]
        return nothing_to_match(release) or lawless(release)

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        releases = with_private_parts(link(parse_view(seen), ctx, apart=False), ctx)
        evidence = Evidence(releases, ctx, dtype=torch.float32, distance="cosine", steps=self.steps)
        shifts = int(any(one.steps is not None for one in releases_of(evidence)))
        encoding = Encoding(ctx, samples=evidence.clients.samples, dtype=evidence.dtype, own=shifts)
        given, fading = self.total_variation, None
        if given is None and encoding.image:
            fading = _SMOOTHNESS / max(float(roughness(ctx.aux_x).mean()), _FLAT)
        smooth = [total_variation(given)] if given and encoding.image else []
        matcher = Matcher(evidence, encoding, beliefs=smooth)
        known = read_labels(evidence, ctx)
        optimiser = SignedAdam(
            matcher=matcher, fading=fading, steps=ctx.budget, lr=self.lr, decay=self.decay
        )
        wave = Wave(matcher=matcher, optimiser=optimiser, count=1 + self.restarts, start=self.start)
        solution = solve(
            ctx, waves=[wave], known=known, stop=torch.full_like(evidence.square, -torch.inf)
        )
        likelihood = (
            build_matcher(seen, ctx) if self.preset == "strong" and evidence.noisy else None
        )
        if likelihood is not None:
            answer_by_posterior(likelihood, solution, ctx)
        return solution.answer(matcher, known.notes)


class SME(InvertingGradients):
    """Matches the direction of an update by few steps of all samples, with smooth images preferred.

    The published attack takes one step, at a learned point between the broadcast and where the
    client ended, in place of all local steps: its gradient points where the update does, whatever
    the order of the samples. More steps begin within that part of the way and follow it better.
    Else as `inverting_gradients`, which it equals where a client made one step.
    Departures: more than one step on request; start, total variation and steps of pixels as there.
    Source: Zhu, Yao, Blaschko, Surrogate Model Extension, ICML 2023.

    Args:
        steps: Of all samples, that replace the local steps; the paper's is 1.
        restarts: Further starts of every victim.
    """

    source = "Zhu, Yao, Blaschko, arXiv:2306.00127"

    def __init__(self, *, steps: int = 1, restarts: int = 1) -> None:
        check_number("steps", steps, least=1)
        super().__init__(restarts=restarts)
        self.steps = steps


def fade_variation(
    evaluate: Evaluate, encoding: Encoding, *, weight: float, below: Tensor
) -> Evaluate:
    """Losses L with total variation that fades where they are small: b (1 + log(L / b)) stands for
    L < b, so that the slope of L grows as b / L, and what is added weighs the less.

    below: b of every problem, [P].
    """

    def evaluate_faded(z: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = evaluate(z, problems)
        here = below[problems]
        share = (loss / here).clamp(torch.finfo(loss.dtype).eps, 1)
        lowered = torch.where(share < 1, here * (1 + share.log()), loss)
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            rough = roughness(encoding.images(z, None))
            slope = torch.autograd.grad(rough.sum(), z)[0]
        return lowered + weight * rough.detach(), gradient / share[:, None] + weight * slope

    return evaluate_faded


@dataclass(frozen=True, kw_only=True)
class SignedAdam:
    """Signed Adam on a matcher's problems with held labels.

    Attributes:
        matcher: The objective.
        fading: Weight of total variation that is added and fades, or None.
        steps: Of every problem.
        lr: First step length.
        decay: How it falls.
    """

    matcher: Matcher
    fading: float | None
    steps: int
    lr: float
    decay: Decay

    def __call__(self, problems: Problems) -> Minimum:
        encoding = self.matcher.encoding
        plain = evaluate = self.matcher.evaluator(problems.victims, problems.held)
        fades = torch.tensor(_FADES, dtype=encoding.dtype, device=problems.turn.device)
        below = fades[problems.turn % len(fades)]
        if self.fading is not None:
            evaluate = fade_variation(plain, encoding, weight=self.fading, below=below)
        start = problems.start
        rates: float | Tensor = self.lr
        if encoding.own:
            start = torch.cat([start, start.new_full((len(start), encoding.own), MIDWAY)], dim=1)
            rates = torch.full_like(start[0], self.lr)
            rates[encoding.pixels :] *= _SHIFT
        minimum = descend(
            Phase(evaluate=evaluate, stop=problems.stop, dtype=encoding.dtype),
            start,
            steps=self.steps,
            lr=rates,
            decay=self.decay,
            signed=True,
            low=0.0 if encoding.image else -torch.inf,
            high=1.0 if encoding.image else torch.inf,
        )
        if self.fading is None:
            return minimum
        # Starts of a victim are compared by one objective.
        first = fades[:1].expand_as(below)
        judge = fade_variation(plain, encoding, weight=self.fading, below=first)
        loss, _ = judge(minimum.x, torch.arange(len(below), device=below.device))
        return replace(minimum, loss=torch.where(minimum.loss.isfinite(), loss, torch.inf))

    def bytes_each(self, numbers: int) -> int:
        return 4 * (8 * numbers + self.matcher.working_numbers)
