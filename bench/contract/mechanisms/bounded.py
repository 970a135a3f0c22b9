"""Random values for values on a bounded interval: two points, or uniform in a window.

Units are those of the interval: v in [-1, 1] is a value after clipping to [centre - radius,
centre + radius]. E = e^epsilon.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bench.contract.mechanisms.base import Base, Mechanism, Prepared, as_row
from bench.contract.mechanisms.signs import softplus


@dataclass(frozen=True, kw_only=True)
class _Interval(Mechanism):
    """Values are clipped one by one to an interval, which is what softness rounds the edges of.

    Attributes:
        epsilon: Budget of one value.
        radius: Half the interval's width; its centre is 0.
    """

    epsilon: float
    radius: float

    @property
    def variance(self) -> float:
        """Of what is sent for the centre, the most of all values for two points."""
        return self.radius**2 * self.unit_variance

    @property
    def proof(self) -> tuple[str, float] | None:
        return "RandomisedResponse", 1 / (1 + math.exp(-self.epsilon))

    @property
    def unit_variance(self) -> float:
        """Variance of what is sent for v = 0."""
        raise NotImplementedError

    def interval(self, broadcast: Tensor) -> tuple[float, float]:
        """(centre, radius) for one tensor, from what is public: its broadcast values."""
        return 0.0, self.radius

    def _intervals(self, base: Base, like: Tensor) -> tuple[Tensor, Tensor]:
        """(centre, radius) of every value of rows [P, ...]."""
        row = as_row(base, like, self._row)
        if row is None:
            row = self._row(like[0])
        row = row.to(like)
        return row[:, 0].view_as(like[0]), row[:, 1].view_as(like[0])

    def _row(self, broadcast: Tensor) -> Tensor:
        both = torch.tensor(self.interval(broadcast), dtype=torch.float64)
        return both.expand(broadcast.numel(), 2)

    def apply(self, values: Tensor) -> Tensor:
        return values.clamp(-self.radius, self.radius)

    def sample(self, values: Tensor, rng: torch.Generator, *, base: Base = None) -> Tensor:
        centre, radius = self._intervals(base, values.double())
        v = ((values.double() - centre) / radius).clamp(-1, 1)
        return (centre + radius * self._release(v, rng)).to(values)

    def _release(self, v: Tensor, rng: torch.Generator) -> Tensor:
        raise NotImplementedError

    def softness(self, heat: float = 0.0) -> float:
        return 0.1

    def prepared(self, seen: Tensor, softness: float = 0.0, *, base: Base = None) -> Prepared:
        centre, radius = (t.expand_as(seen) for t in self._intervals(base, seen))
        law = partial(self._misfit, softness=softness)
        return Prepared(law, ((seen - centre) / radius, centre, radius))

    def _misfit(
        self, sent: Tensor, z: Tensor, centre: Tensor, radius: Tensor, *, softness: float
    ) -> tuple[Tensor, Tensor]:
        v, inside = _clip((sent - centre) / radius, softness)
        loss, slope = self._unit_misfit(v, z, softness)
        return loss, slope * inside / radius

    def _unit_misfit(self, v: Tensor, z: Tensor, softness: float) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def gradient_variance(
        self, estimate: Tensor, *, base: Tensor, step: float, decided: bool = False
    ) -> Tensor | float:
        factor = 1.0 if self.of == "gradient" else 1 / step
        return (self.interval(base)[1] * factor) ** 2 * self.unit_variance


def _clip(v: Tensor, softness: float) -> tuple[Tensor, Tensor]:
    """v clipped to [-1, 1], with edges rounded within `softness`, and its derivative."""
    if softness == 0:
        return v.clamp(-1, 1), (v.abs() <= 1).to(v)
    up, down = (v + 1) / softness, (v - 1) / softness
    return (softness * (softplus(up) - softplus(down)) - 1, torch.sigmoid(up) - torch.sigmoid(down))


@dataclass(frozen=True, kw_only=True)
class TwoPoint(_Interval):
    """+-(E+1)/(E-1), the plus sign with probability 1/2 + v/2 (E-1)/(E+1).

    Attributes:
        count: Clients of whose values the mean is seen, which tells how many of them sent the
            plus sign. All of them are taken to have the mean value, so that the number is
            binomial: the widest law of that mean (Hoeffding 1956), and nearly the true one, since
            clients' values differ by little of the interval.

    Source: Duchi, Jordan, Wainwright, arXiv:1302.3203, in one dimension.
    """

    count: int = 1

    @property
    def unit_variance(self) -> float:
        return math.tanh(self.epsilon / 2) ** -2 / self.count

    def of_mean(self, count: int) -> Mechanism:
        return replace(self, count=self.count * count)

    def _release(self, v: Tensor, rng: torch.Generator) -> Tensor:
        slope = math.tanh(self.epsilon / 2)
        total = torch.zeros_like(v)
        for _ in range(self.count):
            plus = torch.rand(v.shape, generator=rng, dtype=v.dtype) < (1 + slope * v) / 2
            total += torch.where(plus, 1 / slope, -1 / slope)
        return total / self.count

    def _unit_misfit(self, v: Tensor, z: Tensor, softness: float) -> tuple[Tensor, Tensor]:
        slope = math.tanh(self.epsilon / 2)
        least = 2 / (1 + math.exp(min(self.epsilon, 80.0)))
        if self.count == 1:
            towards = slope * z.sign()
            chance = (1 + towards * v).clamp_min(least)
            return math.log(2) - chance.log(), -towards / chance
        up = (self.count * (1 + slope * z) / 2).round().clamp(0, self.count)
        down = self.count - up
        plus, minus = ((1 + s * v).clamp_min(least) for s in (slope, -slope))
        loss = self.count * math.log(2) - up * plus.log() - down * minus.log()
        return loss, slope * (down / minus - up / plus)


@dataclass(frozen=True, kw_only=True)
class AdaptiveTwoPoint(TwoPoint):
    """`TwoPoint` around each broadcast tensor's mean c, as wide as its values spread.

    The radius is slack * max |w - c| over the broadcast values w, within [floor, radius].

    Attributes:
        slack: Radius over the largest distance of a broadcast value from the mean.
        floor: Least radius.
    """

    slack: float
    floor: float

    def interval(self, broadcast: Tensor) -> tuple[float, float]:
        wide = broadcast.detach().double()
        centre = float(wide.mean())
        spread = float((wide - centre).abs().max())
        return centre, min(max(self.slack * spread, self.floor), self.radius)

    def apply(self, values: Tensor) -> Tensor:
        return values  # the interval is known with the broadcast alone

    def _intervals(self, base: Base, like: Tensor) -> tuple[Tensor, Tensor]:
        if base is None:
            raise ValueError("the interval follows from the broadcast values, but got none.")
        return super()._intervals(base, like)


@dataclass(frozen=True, kw_only=True)
class Piecewise(_Interval):
    """Uniform in a window of width C - 1 around (C+1)/2 v, E times as likely as elsewhere in
    [-C, C]; C = (e^{epsilon/2}+1) / (e^{epsilon/2}-1). What is drawn is sent times `scale`.

    Attributes:
        scale: Above 1 where only some values are sent, drawn whatever the values are: all values
            over those sent. Then this is the law of a value that was sent.

    Source: Wang et al., arXiv:1907.00782, Algorithm 2; Algorithm 4 for the scale.
    """

    scale: float = 1.0

    @property
    def faithful(self) -> bool:  # type: ignore[override]
        return self.scale == 1

    @property
    def variance(self) -> float:
        return self.scale**2 * super().variance

    def estimate(self, seen: Tensor, *, base: Tensor | None = None) -> Tensor:
        return seen / self.scale

    @property
    def edge(self) -> float:
        """C, beyond which nothing is sent."""
        return 1 / math.tanh(self.epsilon / 4)

    @property
    def unit_variance(self) -> float:
        small, rest = math.exp(-self.epsilon / 2), -math.expm1(-self.epsilon / 2)
        return small * (1 + 3 * small) / (3 * rest * rest)

    def _window(self, v: Tensor) -> tuple[Tensor, float]:
        """(middle, half its width) of the likelier values."""
        small, rest = math.exp(-self.epsilon / 2), -math.expm1(-self.epsilon / 2)
        return v / rest, small / rest

    def _release(self, v: Tensor, rng: torch.Generator) -> Tensor:
        near, place = (torch.rand(v.shape, generator=rng, dtype=v.dtype) for _ in range(2))
        middle, half = self._window(v)
        inside = middle + half * (2 * place - 1)
        outside = place * 2 * (self.edge - half) - self.edge
        outside = torch.where(outside < middle - half, outside, outside + 2 * half)
        drawn = torch.where(near < 1 / (1 + math.exp(-self.epsilon / 2)), inside, outside)
        return drawn * self.scale

    def _unit_misfit(self, v: Tensor, z: Tensor, softness: float) -> tuple[Tensor, Tensor]:
        """softness: width over which the window's edges are smeared, in units of its own."""
        (middle, half), z = self._window(v), z / self.scale
        if softness == 0:
            away = (z - middle).abs() > half * (1 + 1e-6) + 1e-6 * self.edge
            possible = z.abs() <= self.edge * (1 + 1e-5)
            loss = torch.where(possible, self.epsilon * away.to(v), math.inf)
            return loss, torch.zeros_like(v)
        scale = 2 * half * softness
        up, down = (z - middle + half) / scale, (z - middle - half) / scale
        # sigmoid(up) - sigmoid(down) = sigmoid(up) sigmoid(-down) (1 - e^{down - up})
        shape = math.log(-math.expm1(-1 / softness)) + math.log(-math.expm1(-self.epsilon))
        window = logsigmoid(up) + logsigmoid(-down) + shape
        least = torch.full_like(window, -self.epsilon)
        loss = -torch.logaddexp(window, least)
        pull = (torch.sigmoid(-up) - torch.sigmoid(down)) / scale
        return loss, (window + loss).exp() * pull / -math.expm1(-self.epsilon / 2)
