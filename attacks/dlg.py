"""DLG: deep leakage from gradients, image and soft label optimised together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from attacks.engine.labels import known_labels, likely_labels, read_labels
from attacks.engine.matching import Layers, Matcher
from attacks.engine.observation import nothing_to_match
from attacks.engine.quasi_newton import QuasiNewton
from attacks.engine.restarts import STARTS, Labels, Start, Wave, solve
from bench.api import Attack, Context, Reconstruction, Seen

Preset = Literal["strong", "paper"]
Precision = Literal["auto", "float32", "float64"]
_PRESETS: dict[str, dict[str, Any]] = {
    "strong": {"restarts": 2, "history": 30, "start": "public", "precision": "auto"},
    "paper": {"restarts": 0, "history": 100, "start": "normal", "precision": "float32"},
}

_TRAPPED = 1e-4
"""Share of |observation|^2 above which a start is taken to have met a local minimum; below, it
was only cut short by its budget, and others would be too."""


class DLG(Attack):
    """Matches what was seen by L-BFGS on images and label logits.

    preset: `paper` (normal start and logits, history 100, float32, no restart) or `strong`; the
    other settings replace its values. restarts: further starts of a victim that the first did
    not solve. history: curvature pairs. tolerance: solved at this share of |observation|^2.
    start: public (the public sample that explains the upload best), gray, uniform or normal;
    under noise `strong` starts around the public mean instead. precision: auto is float32 and
    then float64 from where float32 gets no further; under noise, which no attack resolves so
    finely, float32. layers: `even`, or `relative`: every tensor's distance in units of its own
    observed norm. bounds: keep images in [0, 1] by a change of variables. draws: of a defense's
    random weights over which the distance to smashed data is averaged; 0: their mean stands for
    them, and what it leaves unexplained counts as noise (the stronger of the two).
    Departures from the paper (strong): public starts, restarts for victims in a local minimum,
    label logits that begin at the likeliest classes, and under noise a Gaussian prior of samples
    fitted on public data. In both: relative stopping and a line search; the update of several
    local steps is simulated; under noise the objective is the likelihood of the defense's public
    mechanism; smashed data that was seen is matched jointly.
    Source: Zhu, Liu, Han, arXiv:1906.08935, Algorithm 1.
    """

    recovers = frozenset({"images", "labels", "counts"})
    source = "Zhu, Liu, Han, arXiv:1906.08935"

    def __init__(
        self,
        *,
        preset: Preset = "strong",
        restarts: int | None = None,
        history: int | None = None,
        tolerance: float = 1e-14,
        start: Start | None = None,
        precision: Precision | None = None,
        layers: Layers = "even",
        bounds: bool = False,
        draws: int = 0,
    ) -> None:
        if preset not in _PRESETS:
            raise ValueError(f"preset must be {' or '.join(_PRESETS)}, got '{preset}'.")
        given = {"restarts": restarts, "history": history, "start": start, "precision": precision}
        chosen = _PRESETS[preset] | {k: v for k, v in given.items() if v is not None}
        self.preset, self.layers, self.bounds, self.tolerance = preset, layers, bounds, tolerance
        self.restarts, self.history = chosen["restarts"], chosen["history"]
        self.start, self.precision = chosen["start"], chosen["precision"]
        self.draws = draws
        for name, value, least in (
            ("restarts", self.restarts, 0), ("history", self.history, 1), ("draws", draws, 0),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}.")
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance must lie in (0, 1), got {tolerance}.")
        for name, value, allowed in (
            ("start", self.start, STARTS),
            ("precision", self.precision, ("auto", "float32", "float64")),
            ("layers", layers, ("even", "relative")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got '{value}'.")

    def applies(self, seen: Seen) -> str | None:
        return nothing_to_match(seen)

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        @cache
        def matcher_in(dtype: torch.dtype) -> Matcher:
            return Matcher(
                seen, ctx, dtype=dtype, layers=self.layers, bounded=self.bounds, draws=self.draws
            )

        matcher = matcher_in(torch.float64 if self.precision == "float64" else torch.float32)
        noisy = matcher.noisy
        optimiser = QuasiNewton(
            matcher=matcher_in,
            dtypes=self._dtypes(noisy=noisy),
            evaluations=ctx.budget,
            history=self.history,
            least_gain=1e-5 if noisy else 1e-7,
        )
        granted = known_labels(seen, matcher)
        known = self._labels(matcher, ctx) if granted is None else Labels(fixed=granted)
        # Under noise no loss is "solved": the likelihood has no known minimum.
        stop = torch.full_like(matcher.square, -torch.inf)
        if not noisy:
            stop = self.tolerance * matcher.square
        solution = solve(
            matcher, ctx, waves=self._waves(matcher.square, noisy=noisy), known=known, stop=stop,
            optimiser=optimiser,
        )  # fmt: skip
        notes = [*known.notes]
        if not noisy:
            notes.append(f"{solution.solved} of {matcher.victims} victims solved to tolerance")
        if solution.redrawn:
            notes.append(f"{solution.redrawn} starts diverged and were replaced")
        return solution.answer(matcher, notes)

    def _dtypes(self, *, noisy: bool) -> Sequence[torch.dtype]:
        if self.precision == "auto":
            return (torch.float32,) if noisy else (torch.float32, torch.float64)
        return (torch.float64,) if self.precision == "float64" else (torch.float32,)

    def _waves(self, square: Tensor, *, noisy: bool) -> list[Wave]:
        if self.preset == "paper":
            return [Wave(count=1 + self.restarts, start=self.start, noisy_logits=True)]
        if noisy:
            return [Wave(count=1 + self.restarts, framed=True)]
        first = [Wave(count=1, start=self.start)]
        again = [Wave(count=self.restarts, start=self.start, above=_TRAPPED * square)]
        return first + (again if self.restarts else [])

    def _labels(self, matcher: Matcher, ctx: Context) -> Labels:
        """What is known of labels that the threat does not grant."""
        if matcher.returned is not None:
            return read_labels(matcher, ctx)  # the objective no longer depends on them
        if matcher.observation is None or matcher.samples > 1 or self.preset == "paper":
            return Labels()
        return likely_labels(matcher, ctx)
