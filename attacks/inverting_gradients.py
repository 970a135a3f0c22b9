"""Inverting Gradients: cosine distance and total variation by signed Adam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attacks.engine.adam import Decay, descend
from attacks.engine.clients import column
from attacks.engine.encoding import Encoding
from attacks.engine.evidence import Evidence
from attacks.engine.labels import known_labels, read_labels
from attacks.engine.lbfgs import Evaluate, Minimum, Phase
from attacks.engine.matching import Matcher
from attacks.engine.observation import lawless, nothing_to_match
from attacks.engine.private import with_private_parts
from attacks.engine.restarts import STARTS, Labels, Problems, Start, Wave, solve
from attacks.engine.terms import Candidate, Compare, Misfit, Term, TotalVariation, roughness
from bench.api import Attack, Context, Reconstruction, Seen

_PRESETS: dict[str, dict[str, Any]] = {
    "strong": {"restarts": 1, "lr": 0.03, "total_variation": None, "start": "public"},
    "paper": {"restarts": 0, "lr": 0.1, "total_variation": 1e-4, "start": "normal"},
}
_SMOOTHNESS = 0.02
"""What total variation adds to the loss of an image as rough as public ones are."""
_FLAT = 1e-3
"""Public images smoother than this tell no unit of roughness."""
_FADES = (0.03, 0.003)
"""Distances below which total variation fades, of a victim's starts in turn: an exact upload is
matched to far below them. The earlier it fades, the sooner an image is exact; the later, the
better for one that the upload hardly tells. Under noise, which keeps the distance above, the
first serves all starts."""


class InvertingGradients(Attack):
    """Matches the direction of the upload, with smooth images preferred.

    Labels are granted, or read as by `idlg`; the update of several local steps is simulated.
    Images stay in [0, 1]. The budget is the number of steps (4800 in the paper).
    Departures (strong): a public start and further ones, of which that of least loss answers;
    total variation weighs in the unit of public images, about a thousand times the paper's weight,
    and fades where the upload is explained, so that an exact one is matched exactly; steps fall
    along a cosine. In both: batched starts; the point of least loss is kept, not the last; the
    upload is first made unbiased where the defense perturbs signs; pixels are not standardised,
    so that the paper's lr and weight act on another scale.
    Source: Geiping, Bauermeister, Droege, Moeller, arXiv:2003.14053, Eq. 4 and Sec. 5.

    Args:
        preset: `paper` or `strong`; the other settings replace its values.
        restarts: Further starts of every victim.
        lr: First step in units of the pixel range.
        total_variation: Weight of the mean absolute difference between neighbouring pixels. By
            default 1e-4 in the paper's objective; in the strong one 0.02 by that mean of public
            images, fading below a distance of 0.03 and 0.003 in turn.
        start: Of the first start (public, gray, uniform, normal; by default public of the strong,
            normal of the paper's objective); further ones are the next public or random.
        signed: Whether steps follow the sign of the objective's gradient.
    """

    recovers = frozenset({"images", "labels", "counts"})
    source = "Geiping et al., arXiv:2003.14053"

    def __init__(
        self,
        *,
        preset: Literal["strong", "paper"] = "strong",
        restarts: int | None = None,
        lr: float | None = None,
        total_variation: float | None = None,
        start: Start | None = None,
        signed: bool = True,
    ) -> None:
        if preset not in _PRESETS:
            raise ValueError(f"preset must be {' or '.join(_PRESETS)}, got '{preset}'.")
        given = {"restarts": restarts, "lr": lr, "total_variation": total_variation, "start": start}
        chosen = _PRESETS[preset] | {k: v for k, v in given.items() if v is not None}
        self.decay: Decay = "steps" if preset == "paper" else "cosine"
        self.restarts, self.lr, self.start = chosen["restarts"], chosen["lr"], chosen["start"]
        self.total_variation, self.signed = chosen["total_variation"], signed
        if self.restarts < 0:
            raise ValueError(f"restarts must be >= 0, got {self.restarts}.")
        if not self.lr > 0:
            raise ValueError(f"lr must be > 0 (pixel range per step), got {self.lr}.")
        if self.total_variation is not None and not self.total_variation >= 0:
            raise ValueError(f"total_variation must be >= 0, got {self.total_variation}.")
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got '{self.start}'.")

    def applies(self, seen: Seen) -> str | None:
        return nothing_to_match(seen) or lawless(seen)

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        seen = with_private_parts(seen, ctx)
        evidence = Evidence(seen, ctx, dtype=torch.float32, distance="cosine")
        encoding = Encoding(ctx, samples=evidence.clients.samples, dtype=evidence.dtype)
        matchers = self._matchers(evidence, encoding, ctx)
        granted = known_labels(seen, ctx.device)
        known = read_labels(evidence, ctx) if granted is None else Labels(fixed=granted)
        solution = solve(
            matchers[0],
            ctx,
            waves=[Wave(count=1 + self.restarts, start=self.start)],
            known=known,
            stop=torch.full_like(evidence.square, -torch.inf),
            optimiser=SignedAdam(
                matchers=matchers,
                steps=ctx.budget,
                lr=self.lr,
                decay=self.decay,
                signed=self.signed,
            ),
        )
        return solution.answer(matchers[0], known.notes)

    def _matchers(self, evidence: Evidence, encoding: Encoding, ctx: Context) -> list[Matcher]:
        """The objectives of a victim's starts in turn; the first judges all."""
        if not encoding.image:
            return [Matcher(evidence, encoding)]
        if self.total_variation is not None:
            smooth = [TotalVariation(self.total_variation)] if self.total_variation else []
            return [Matcher(evidence, encoding, beliefs=smooth)]
        usual = max(float(roughness(ctx.aux_x).mean()), _FLAT)
        found = []
        for below in _FADES[:1] if evidence.noisy else _FADES:
            matcher = Matcher(evidence, encoding)
            fading = LogarithmBelow(evidence.terms, below=below)
            matcher.terms = [fading, TotalVariation(_SMOOTHNESS / usual)]
            found.append(matcher)
        return found


class LogarithmBelow:
    """The sum L of some terms, or below * (1 + log(L / below)) where it is less than `below`.

    Its slope is continuous. Where L is small it grows as below / L, so that what is added to it
    weighs the less the better the terms are met.
    """

    def __init__(self, terms: Sequence[Term], *, below: float) -> None:
        self.terms, self.below = tuple(terms), below

    def against(self, victims: Tensor) -> Compare:
        compares = [term.against(victims) for term in self.terms]

        def compare(candidate: Candidate) -> Sequence[Misfit]:
            misfits = [misfit for each in compares for misfit in each(candidate)]
            total = torch.stack([m.loss for m in misfits]).sum(dim=0)
            share = (total / self.below).clamp(torch.finfo(total.dtype).eps, 1)
            lowered = torch.where(share < 1, self.below * (1 + share.log()), total)
            none = torch.zeros_like(lowered)
            return [
                Misfit(none if i else lowered, m.output, m.slope / column(share, m.slope))
                for i, m in enumerate(misfits)
            ]

        return compare


@dataclass(frozen=True, kw_only=True)
class SignedAdam:
    """Signed Adam on problems with held labels.

    Attributes:
        matchers: The objectives of a victim's starts in turn. The first judges all.
        steps: Of every problem.
        lr: First step length.
        decay: How it falls.
        signed: See `InvertingGradients`.
    """

    matchers: Sequence[Matcher]
    steps: int
    lr: float
    decay: Decay
    signed: bool

    def __call__(self, problems: Problems) -> Minimum:
        x = problems.start.to(self.matchers[0].encoding.dtype).clone()
        loss = x.new_full(x.shape[:1], torch.inf)
        evaluations = torch.zeros_like(problems.turn)
        for number, matcher in enumerate(self.matchers):
            rows = (problems.turn % len(self.matchers) == number).nonzero().squeeze(1)
            if len(rows):
                found = self._descend(matcher, problems, rows)
                x[rows], evaluations[rows] = found.x, found.evaluations
                loss[rows] = self._judged(problems, rows, found)
        return Minimum(
            x=x,
            loss=loss,
            evaluations=evaluations,
            reached=loss <= problems.stop.to(loss),
            diverged=~torch.isfinite(loss),
            redrawn=0,
        )

    def _descend(self, matcher: Matcher, problems: Problems, rows: Tensor) -> Minimum:
        image = matcher.encoding.image
        return descend(
            Phase(
                evaluate=_evaluator(matcher, problems, rows),
                stop=problems.stop[rows],
                dtype=matcher.encoding.dtype,
            ),
            problems.start[rows],
            steps=self.steps,
            lr=self.lr,
            decay=self.decay,
            signed=self.signed,
            low=0.0 if image else -torch.inf,
            high=1.0 if image else torch.inf,
        )

    def _judged(self, problems: Problems, rows: Tensor, found: Minimum) -> Tensor:
        """Losses by the first objective, infinite where the own one was."""
        judge = _evaluator(self.matchers[0], problems, rows)
        loss, _ = judge(found.x, torch.arange(len(rows), device=rows.device))
        return torch.where(found.diverged, torch.inf, loss)

    def bytes_each(self, numbers: int) -> int:
        return 4 * (8 * numbers + self.matchers[0].working_numbers)


def _evaluator(matcher: Matcher, problems: Problems, rows: Tensor) -> Evaluate:
    held = None if problems.held is None else problems.held[rows]
    return matcher.evaluator(problems.victims[rows], held)
