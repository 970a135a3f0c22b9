"""DLG: deep leakage from gradients, image and soft label optimised together."""

from __future__ import annotations

from typing import Literal

import torch

from attacks.engine.matching import Matcher, unusable
from attacks.engine.restarts import Settings, Solution, Start, solve
from bench.api import Attack, Context, Reconstruction, Seen


class DLG(Attack):
    """Matches the observed upload by L-BFGS on images and label logits.

    evaluations: gradient evaluations per start (0: the suite's budget). restarts: random starts
    after a first one that did not solve the victim. history: curvature pairs. tolerance: solved
    at this share of |observation|^2. start: gray, uniform or normal (the paper's). precision:
    float64 (preset: float32 stalls near tolerances of 1e-10) or float32.
    Departures from the paper: gray start and relative stopping, the update of several local
    steps is simulated, and under noise the objective is the likelihood of the defense's public
    mechanism with a smoothness prior fitted on public data.
    Source: Zhu, Liu, Han, arXiv:1906.08935, Algorithm 1.
    """

    recovers = frozenset({"images", "labels", "counts"})
    source = "Zhu, Liu, Han, arXiv:1906.08935"

    def __init__(
        self,
        *,
        evaluations: int = 0,
        restarts: int = 3,
        history: int = 30,
        tolerance: float = 1e-10,
        start: Start = "gray",
        precision: Literal["float32", "float64"] = "float64",
    ) -> None:
        if precision not in ("float32", "float64"):
            raise ValueError(f"precision must be float32 or float64, got '{precision}'.")
        self.dtype = torch.float64 if precision == "float64" else torch.float32
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
        matcher = Matcher(seen, ctx, dtype=self.dtype)
        granted = seen.known.get("truth_labels")
        if granted is not None:
            return self._with_labels(matcher, ctx, torch.tensor(granted))
        solution = solve(matcher, ctx, self.settings, labels=None)
        labels = matcher.labels_in(solution.z).argmax(dim=-1)
        return self._answer(matcher, solution, labels)

    def _with_labels(
        self, matcher: Matcher, ctx: Context, labels: torch.Tensor
    ) -> Reconstruction:
        """labels: int64 [V, K], held fixed while the images are optimised."""
        labels = labels.to(matcher.device)
        fixed = torch.nn.functional.one_hot(labels, matcher.classes).to(matcher.dtype)
        return self._answer(matcher, solve(matcher, ctx, self.settings, labels=fixed), labels)

    def _answer(
        self, matcher: Matcher, solution: Solution, labels: torch.Tensor
    ) -> Reconstruction:
        images = matcher.images_in(solution.z)
        if len(matcher.shape) == 3:
            images = images.clamp(0, 1)
        counts = torch.nn.functional.one_hot(labels, matcher.classes).sum(dim=1)
        notes = (f"{solution.solved} of {len(labels)} victims solved to tolerance",)
        if solution.replaced:
            notes += (f"{solution.replaced} diverged starts drawn again",)
        return Reconstruction(
            images=images.float().cpu(),
            labels=labels.cpu(),
            label_counts=counts.cpu(),
            loss=solution.loss.cpu(),
            failed=solution.failed.cpu(),
            evaluations=solution.evaluations,
            notes=notes,
        )
