"""Compressed values: only the largest are sent, or all are rounded, to a fixed grid or to one that
each tensor's own values span."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bench.contract.mechanisms.base import TINY, Base, Mechanism, Prepared, sizes_of

RESIDUAL = 0.5
"""Standard deviation of what earlier rounds left, in units of the least value that was sent.
Residuals are what was too small to be sent, so that none is above 1 and most are far below."""

SOFTEST = 1e-3
"""Noise that stands for none where a descent ends, in the same unit; it begins with 1."""


@dataclass(frozen=True, kw_only=True)
class Sparsified(Mechanism):
    """Only the values of largest magnitude are sent, each cut to an interval; the others are 0.

    What was seen of rows [P, ...] is 0 where nothing was sent. The least magnitude of a row that
    was sent uncut bounds those that were not sent.

    Attributes:
        clip: Largest magnitude that is sent, None: any.
        residual: Whether what earlier rounds did not send was added before.
    """

    clip: float | None = None
    residual: bool = False
    tells_interval = True
    vague = True
    anneals = True
    reads_absent = True

    @property
    def random(self) -> bool:
        """With a residual, which only the client knows, equal values are sent differently."""
        return self.residual

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.residual

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        if self.residual:
            return super().sample(values, rng, base=base)
        return values if self.clip is None else values.clamp(-self.clip, self.clip)

    def softness(self, heat: float = 0.0) -> float:
        return SOFTEST ** (1 - heat)

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """Which values can have become what was seen: the value itself where it was sent, all
        beyond where it was cut, all small enough ones where it was not sent.

        softness: Normal noise of so many times the least magnitude that was sent is taken to
            stand beside exact values, and logistic noise beside intervals; 0: the squared distance
            to the interval. With a residual, its likelihood, whatever the softness.
        """
        size = seen.abs()
        sent = size > 0
        # float32 rounds what is sent, and a round trip through weights rounds it once more.
        cut = size >= (math.inf if self.clip is None else self.clip * (1 - 1e-5))

        def least(which: Tensor) -> Tensor:
            smallest = torch.where(which, size, torch.inf).flatten(1).amin(dim=1)
            return smallest.view(-1, *[1] * (seen.ndim - 1)).expand_as(seen)

        # Of values that all were cut, none tells from which size on they were sent.
        bound = least(sent & ~cut)
        low = torch.where(sent, torch.where(cut & (seen < 0), -torch.inf, seen), -bound)
        high = torch.where(sent, torch.where(cut & (seen > 0), torch.inf, seen), bound)
        if softness == 0 and not self.residual:
            return Prepared(outside, (low, high))
        unit = least(sent)
        unit = torch.where(unit.isinf(), 1.0, unit)  # nothing was sent, and nothing compares
        return Prepared(
            _interval_under_noise, (low, high, unit * (RESIDUAL if self.residual else softness))
        )


def outside(sent: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance to the interval [low, high], and its derivative."""
    rest = sent - sent.clamp(low, high)
    return rest.square(), 2 * rest


def _interval_under_noise(
    sent: Tensor, low: Tensor, high: Tensor, std: Tensor
) -> tuple[Tensor, Tensor]:
    """Of values known to lie in [low, high] after normal noise: its density where both are one,
    else the chance of the interval, by logistic noise of the same variance, whose tails do not
    underflow."""
    rest = (sent - low) / std
    known = low == high
    scale = std * (math.sqrt(3) / math.pi)
    up, down = (sent - low) / scale, (sent - high) / scale
    loss = -logsigmoid(up) - logsigmoid(-down)
    slope = (torch.sigmoid(down) - torch.sigmoid(-up)) / scale
    return torch.where(known, rest.square() / 2, loss), torch.where(known, rest / std, slope)


SOFTNESS = 0.1
"""Of a law of grids, in units of a grid's step."""


@dataclass(frozen=True, kw_only=True)
class FixedPoint(Mechanism):
    """Values cut to [-clip, clip] and rounded at random to multiples of a step above -clip.

    Attributes:
        clip: Largest magnitude.
        step: Distance of neighbouring values.
    """

    clip: float
    step: float

    def apply(self, values: Tensor) -> Tensor:
        return values.clamp(-self.clip, self.clip)

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        place = (self.apply(values).double() + self.clip) / self.step
        up = torch.rand(place.shape, generator=rng, dtype=torch.float64) < place - place.floor()
        return ((place.floor() + up) * self.step - self.clip).to(values)

    def softness(self, heat: float = 0.0) -> float:
        return SOFTNESS

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        step = torch.full_like(seen, self.step)
        return Prepared(partial(rounding_misfit, softness=softness), (seen, step))

    @property
    def spread(self) -> float:
        return self.step**2 / 6


def rounding_misfit(
    sent: Tensor, seen: Tensor, step: Tensor, *, softness: float
) -> tuple[Tensor, Tensor]:
    """-log of 1 - |sent - seen| / step, the chance that a value is rounded to what was seen.

    softness: within which of the end of its step the loss goes on along its tangent, and its tip
    is rounded, so that a descent can follow; 0: it is infinite beyond.
    """
    rest = (sent - seen) / step
    if softness == 0:
        away = rest.abs()
        inside = (1 - away).clamp_min(0)
        return -inside.log(), torch.where(away < 1, rest.sign() / (inside * step), 0.0)
    away = (rest.square() + softness**2).sqrt()
    inside = (1 + softness - away).clamp_min(softness)  # 1 at the tip
    excess = (away - 1).clamp_min(0)
    return -inside.log() + excess / softness, rest / (away * inside * step)


Rounding = Literal["qsgd", "sign", "int8", "stochastic", "nf4", "fp4"]
_TWELFTHS = (1 / 16, 2, 3, 4, 6, 8, 12)
CODES: Mapping[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*(-v / 12 for v in reversed(_TWELFTHS)), 0.0, *(v / 12 for v in _TWELFTHS)),
}
"""Values of bitsandbytes' 4-bit codes, as shares of a block's largest magnitude."""
BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Quantised(Mechanism):
    """Every value of a tensor is sent as one of a grid's, whose ends its own values tell.

    The tensors of rows [P, ...] are those of the broadcast values; without any, a row is one.

    Attributes:
        how: `qsgd`, a sign and one of 2^(bits - 1) - 1 steps up to the largest magnitude, rounded
            at random so that the mean is right; `stochastic`, one of 2^bits - 1 steps from the
            least to the largest value, rounded alike; `int8`, the nearest of 2^(bits - 1) - 1
            steps to either side; `sign`, the sign times the mean magnitude; `nf4` and `fp4`, the
            nearest of `CODES`, times the largest magnitude of 64 values of a tensor.
        bits: Of one value on the wire.
    """

    how: Rounding
    bits: int

    @property
    def random(self) -> bool:
        return self.how in ("qsgd", "stochastic")

    @property
    def tells_interval(self) -> bool:  # type: ignore[override]
        return not self.random

    @property
    def vague(self) -> bool:  # type: ignore[override]
        return self.how == "sign"

    @property
    def anneals(self) -> bool:  # type: ignore[override]
        return self.how == "sign"

    @property
    def in_blocks(self) -> bool:
        """Whether every `BLOCK` values of a tensor, sent or not, have a grid of their own."""
        return self.how in CODES

    @staticmethod
    def block_sizes(rows: Tensor) -> Tensor:
        """Largest magnitudes of every `BLOCK` values of rows [P, N], of the last ones too."""
        padded = torch.nn.functional.pad(rows.abs(), (0, -rows.shape[1] % BLOCK))
        return padded.view(len(rows), -1, BLOCK).amax(dim=2)

    @property
    def steps(self) -> int:
        """Of the grid, from 0 or from its lower end."""
        return 2**self.bits - 1 if self.how == "stochastic" else max(1, 2 ** (self.bits - 1) - 1)

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        wide = values.double()
        if self.how == "sign":
            size = _magnitudes(wide, torch.ones_like(wide), sizes_of(base, wide))
            return torch.where(wide < 0, -size, size).to(values)
        low, step = self._grids(wide, base)
        place = (wide - low) / step.clamp_min(TINY)
        if self.in_blocks:
            codes, _, index = self._nearest(place)
            return (codes[index] * step).to(values)
        if self.random:
            drawn = torch.rand(place.shape, generator=rng, dtype=torch.float64)
            place = place.floor() + (drawn < place - place.floor())
        place = place.round().clamp(0 if self.how == "stochastic" else -self.steps, self.steps)
        return (low + place * step).to(values)

    def _nearest(self, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The codes, the ends of the intervals that are rounded to them, and whose each share is
        in."""
        codes = torch.tensor(CODES[self.how]).to(shares)
        middles = (codes[1:] + codes[:-1]) / 2
        return codes, torch.cat([codes[:1], middles, codes[-1:]]), torch.bucketize(shares, middles)

    def _grids(self, values: Tensor, base: Base) -> tuple[Tensor, Tensor]:
        """(where the grid is 0, its step) for every value of rows, from noise-free values or from
        what was seen of them, which tells the same: the ends of a grid are on it."""
        sizes, lows, steps = sizes_of(base, values), [], []
        for piece in values.flatten(1).split(sizes, dim=1):
            low = torch.zeros_like(piece[:, :1])
            if piece.shape[1] == 0:
                step = low
            elif self.how == "stochastic":
                low = piece.amin(dim=1, keepdim=True)
                step = (piece.amax(dim=1, keepdim=True) - low) / self.steps
            elif self.in_blocks:
                step = self.block_sizes(piece).repeat_interleave(BLOCK, dim=1)[:, : piece.shape[1]]
            else:
                step = piece.abs().amax(dim=1, keepdim=True) / self.steps
            lows.append(low.expand_as(piece))
            steps.append(step.expand_as(piece))
        return torch.cat(lows, dim=1).view_as(values), torch.cat(steps, dim=1).view_as(values)

    def softness(self, heat: float = 0.0) -> float:
        return SOFTEST ** (1 - heat) if self.how == "sign" else SOFTNESS

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        """The chance of what was seen where it is random; of `int8`, `nf4` and `fp4` the squared
        distance to the interval that is rounded to it; of `sign` the chance of the sign beside
        logistic noise of `softness` times the mean magnitude, and of that mean beside its own:
        signs alone are right for ever smaller values.
        """
        if self.how == "sign":
            sizes = sizes_of(base, seen)
            sent = seen.ne(0).to(seen)
            law = partial(_sign, softness=softness, sizes=sizes)
            return Prepared(law, (seen.sign(), _magnitudes(seen, sent, sizes), sent))
        step = self._grids(seen, base)[1]
        if self.how == "int8":
            return Prepared(outside, (seen - step / 2, seen + step / 2))
        if self.in_blocks:
            _, ends, index = self._nearest(seen / step.clamp_min(TINY))
            return Prepared(outside, (ends[index] * step, ends[index + 1] * step))
        return Prepared(partial(rounding_misfit, softness=softness), (seen, step.clamp_min(TINY)))


def _magnitudes(rows: Tensor, sent: Tensor, sizes: Sequence[int]) -> Tensor:
    """For every value of rows [..., their shape] the mean magnitude of those of its tensor that are
    sent, where `sent` has 1 and else 0."""
    rows, sent = torch.broadcast_tensors(rows.abs(), sent)
    flat = (t.reshape(-1, sum(sizes)).split(list(sizes), dim=1) for t in (rows * sent, sent))
    means = []
    for size, count in zip(*flat, strict=True):
        mean = size.sum(dim=1, keepdim=True) / count.sum(dim=1, keepdim=True).clamp_min(1)
        means.append(mean.expand_as(size))
    return torch.cat(means, dim=1).view_as(rows)


def _sign(
    values: Tensor,
    sign: Tensor,
    size: Tensor,
    sent: Tensor,
    *,
    softness: float,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """sign, size: Of what was seen; sent: 1 where a value was. The mean magnitude of so many values
    counts as that many values do: each has an equal share of it."""
    if softness == 0:
        wrong = (values * sign < 0).to(values)
        return torch.where(wrong > 0, torch.inf, 0.0), torch.zeros_like(values)
    scale = softness * size.clamp_min(TINY)
    away = values * sign / scale
    rest = (_magnitudes(values, sent, sizes) - size) / scale * sent
    loss = rest.square() / 2 - logsigmoid(away)
    return loss, rest * values.sign() / scale - torch.sigmoid(-away) * sign / scale
