"""Line searches of many independent problems at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ARMIJO, _CURVATURE_CONDITION = 1e-4, 0.9
_SMALLEST_STEP = 1e-10
_PATIENT_TRIALS = 4


@dataclass(kw_only=True)
class LineSearch:
    """Line searches of A problems, [A] each: a strong Wolfe step by bracketing.

    Attributes:
        base, slope: Loss and slope where the search begins.
        step: The trial.
        low, low_loss, low_slope: The best point below the minimum along the direction.
        high, high_loss: A point beyond it, infinite until one was met.
        trials: So far.
    """

    base: Tensor
    slope: Tensor
    step: Tensor
    low: Tensor
    low_loss: Tensor
    low_slope: Tensor
    high: Tensor
    high_loss: Tensor
    trials: Tensor

    @staticmethod
    def begin(loss: Tensor, slope: Tensor) -> LineSearch:
        """From points of these losses, along directions of these slopes."""
        zero = torch.zeros_like(loss)
        return LineSearch(
            base=loss.clone(),
            slope=slope,
            step=zero + 1,
            low=zero,
            low_loss=loss.clone(),
            low_slope=slope,
            high=zero + torch.inf,
            high_loss=zero,
            trials=zero,
        )

    def take(self, rows: Tensor) -> LineSearch:
        """The searches of some of the problems."""
        return LineSearch(**{name: value[rows] for name, value in vars(self).items()})

    def renew(self, rows: Tensor, loss: Tensor, slope: Tensor) -> None:
        """Start over from the present point, for the problems `rows` (bool)."""
        for name, value in vars(LineSearch.begin(loss, slope)).items():
            setattr(self, name, torch.where(rows, value, getattr(self, name)))

    @property
    def stuck(self) -> Tensor:
        """No step of a length that matters is left."""
        return (self.high - self.low < _SMALLEST_STEP) | (self.step < _SMALLEST_STEP)

    def judge(self, loss: Tensor, slope: Tensor, finite: Tensor) -> Tensor:
        """Which trials to accept; the others get their next step."""
        enough = finite & (loss <= self.base + _ARMIJO * self.step * self.slope)
        enough &= (loss <= self.low_loss) | (self.low == 0)
        limit = _CURVATURE_CONDITION * self.slope.abs()
        self.trials = self.trials + 1
        # Rounding can hide the curvature condition near a minimum: a decrease must do then.
        accepted = enough & ((slope.abs() <= limit) | (self.trials >= _PATIENT_TRIALS))
        short = enough & (slope < -limit)
        self.low = torch.where(short, self.step, self.low)
        self.low_loss = torch.where(short, loss, self.low_loss)
        self.low_slope = torch.where(short, slope, self.low_slope)
        self.high = torch.where(short, self.high, self.step)
        self.high_loss = torch.where(short, self.high_loss, torch.where(finite, loss, torch.inf))
        width = self.high - self.low
        rise = self.high_loss - self.low_loss - self.low_slope * width
        parabola = -self.low_slope * width.square() / (2 * rise)
        usable = torch.isfinite(parabola) & (rise > 0)
        inside = torch.where(usable, parabola.clamp(0.1 * width, 0.9 * width), 0.5 * width)
        self.step = torch.where(torch.isinf(self.high), 2 * self.step, self.low + inside)
        return accepted
