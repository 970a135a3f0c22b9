"""How badly a noise-free upload explains an observed one, under the public mechanism."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.api import (
    BernoulliMask,
    GaussianNoise,
    LaplaceNoise,
    Mechanism,
    SignPerturbation,
)


class Likelihood:
    """Per coordinate, how badly a noise-free value explains an observed one.

    Without noise the squared distance, else the negative log-likelihood under the mechanism.
    `prepare` turns observed values into constants once, `misfit` compares many times.
    """

    def __init__(self, noise: Mechanism | None) -> None:
        self.noise = noise

    def prepare(self, value: Tensor) -> tuple[Tensor, ...]:
        if not isinstance(self.noise, SignPerturbation):
            return (value,)
        # The magnitude |v| t is taken as Gaussian around |v| E[t]; where it is constant
        # (sign_rr) a thousandth stands for the spread, so that the objective stays smooth.
        magnitude = value.abs() / self.noise.mean_scale
        inverse = 1 / (magnitude * max(self.noise.relative_std, 1e-3)).clamp_min(1e-12)
        return inverse, magnitude * value.sign() * inverse

    def misfit(self, sent: Tensor, prepared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """(misfit, its derivative by `sent`), elementwise. The derivative is written out: a
        fifth of an evaluation would go into differentiating this."""
        match self.noise:
            case GaussianNoise(std=std):
                rest = (sent - prepared[0]) / std**2
                return rest.square() * (std**2 / 2), rest
            case LaplaceNoise(scale=scale):
                # |r| / scale, rounded within a tenth of the scale so that L-BFGS can follow.
                rest, soft = sent - prepared[0], 0.1 * scale
                length = (rest.square() + soft**2).sqrt()
                return (length - soft) / scale, rest / (length * scale)
            case BernoulliMask():
                # -log P(bit) for a bit that is 1 with probability sigmoid(sent).
                return _softplus(sent) - prepared[0] * sent, torch.sigmoid(sent) - prepared[0]
            case SignPerturbation(keep=keep):
                # -log(p exp(-(u-c)^2/2) + (1-p) exp(-(u+c)^2/2)), u and c in units of the
                # spread; a value whose sign is known from elsewhere (a weight near its
                # broadcast) picks its own branch. Where p is 1 to rounding only one is left.
                inverse, centre = prepared
                rest = sent * inverse - centre
                kept = rest.square() / 2 - math.log(keep)
                if keep >= 1:
                    return kept, rest * inverse
                odds = math.log1p(-keep) - math.log(keep) - 2 * (rest + centre) * centre
                flipped = torch.sigmoid(odds)
                return kept - _softplus(odds), (rest + 2 * centre * flipped) * inverse
            case _:
                rest = sent - prepared[0]
                return rest.square(), 2 * rest


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) by one sigmoid and one log, half the time of the library's on a CPU."""
    return x.clamp_min(0) - torch.sigmoid(x.abs()).log()
