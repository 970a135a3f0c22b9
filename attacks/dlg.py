"""DLG: deep leakage from gradients, image and soft label optimised together."""

from __future__ import annotations

from typing import Literal

import torch

from attacks.engine.labels import granted_labels, rank_labels
from attacks.engine.matching import Matcher, noise_of, unusable
from attacks.engine.restarts import Labels, Settings, Start, solve
from bench.api import Attack, Context, Reconstruction, Seen


class DLG(Attack):
    """Matches the observed upload by L-BFGS on images and label logits.

    evaluations: gradient evaluations per start (0: the suite's budget). restarts: further
    starts of a victim that the first did not solve. history: curvature pairs. tolerance: solved
    at this share of |observation|^2. start: gray, uniform or normal (the paper's). precision:
    float64, float32, or auto: float64 where nothing is random, since float32 stalls near a
    tolerance of 1e-10, and float32 under noise, which no attack resolves that finely.
    Departures from the paper: gray start and relative stopping; restarts from a Gaussian prior
    of samples fitted on public data; the update of several local steps is simulated; under
    noise the objective is the likelihood of the defense's public mechanism with that prior, and
    label logits begin at the likeliest classes.
    Source: Zhu, Liu, Han, arXiv:1906.08935, Algorithm 1.
    """

    recovers = frozenset({"images", "labels", "counts"})
    source = "Zhu, Liu, Han, arXiv:1906.08935"

    def __init__(
        self,
        *,
        evaluations: int = 0,
        restarts: int = 2,
        history: int = 30,
        tolerance: float = 1e-10,
        start: Start = "gray",
        precision: Literal["auto", "float32", "float64"] = "auto",
    ) -> None:
        if precision not in ("auto", "float32", "float64"):
            raise ValueError(f"precision must be auto, float32 or float64, got '{precision}'.")
        self.precision = precision
        self.settings = Settings(
            evaluations=evaluations,
            restarts=restarts,
            history=history,
            tolerance=tolerance,
            start=start,
        )

    def applies(self, seen: Seen) -> str | None:
        return unusable(seen)

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        double = self.precision == "float64"
        if self.precision == "auto":
            double = noise_of(seen) is None
        matcher = Matcher(seen, ctx, dtype=torch.float64 if double else torch.float32)
        granted = granted_labels(seen, matcher)
        known = self._labels(matcher, ctx) if granted is None else Labels(fixed=granted)
        solution = solve(matcher, ctx, self.settings, known)
        images = solution.images
        if len(matcher.shape) == 3:
            images = images.clamp(0, 1)
        counts = torch.nn.functional.one_hot(solution.labels, matcher.classes).sum(dim=1)
        notes: tuple[str, ...] = ()
        if solution.solved is not None:
            notes += (f"{solution.solved} of {len(images)} victims solved to tolerance",)
        if solution.diverged:
            notes += (f"{solution.diverged} starts diverged",)
        return Reconstruction(
            images=images.float().cpu(),
            labels=solution.labels.cpu(),
            label_counts=counts.cpu(),
            loss=solution.loss.cpu(),
            failed=solution.failed.cpu(),
            evaluations=solution.evaluations,
            notes=notes,
        )

    def _labels(self, matcher: Matcher, ctx: Context) -> Labels:
        """What is known of labels that the threat does not grant."""
        if matcher.noise is None or matcher.samples > 1:
            return Labels()
        return Labels(ranking=rank_labels(matcher, ctx))
