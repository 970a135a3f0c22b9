"""Public mechanisms: how what leaves a client is disturbed, as everybody may know (Kerckhoffs)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Base of the public descriptions of how an upload is disturbed.

    of: what it acts on.
    """

    of: Literal["weights", "update", "gradient", "smashed", "labels"]
    kinds: ClassVar[dict[str, type[Mechanism]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Mechanism.kinds[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **asdict(self)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Mechanism:
        """Inverse of `to_dict`. Raises ValueError for an unknown kind."""
        kind = Mechanism.kinds.get(data.get("kind", ""))
        if kind is None:
            raise ValueError(
                f"unknown mechanism '{data.get('kind')}'; known: {', '.join(Mechanism.kinds)}."
            )
        names = {f.name for f in fields(kind)}
        return kind(**{k: v for k, v in data.items() if k in names})


@dataclass(frozen=True, kw_only=True)
class Clip(Mechanism):
    """The whole vector is scaled down to norm `norm` of order `order` if it is longer."""

    norm: float
    order: int = 2


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Mechanism):
    """Independent N(0, std^2) per coordinate."""

    std: float


@dataclass(frozen=True, kw_only=True)
class LaplaceNoise(Mechanism):
    """Independent Laplace(scale) per coordinate."""

    scale: float


@dataclass(frozen=True, kw_only=True)
class SignPerturbation(Mechanism):
    """v -> |v| t with v's sign kept with probability `keep`, else flipped; t ~ U[low, high]."""

    keep: float
    low: float
    high: float

    @property
    def mean_scale(self) -> float:
        return (self.low + self.high) / 2

    @property
    def relative_std(self) -> float:
        """Standard deviation of t over its mean."""
        return (self.high - self.low) / 12**0.5 / self.mean_scale


@dataclass(frozen=True, kw_only=True)
class BernoulliMask(Mechanism):
    """Each value sent is a fresh Bernoulli(sigmoid(score)) bit, score being the trained variable.

    clip: c; training began from broadcast probabilities clipped to [c, 1 - c]. sampled: False
    where the probability itself is sent in place of the bit.
    """

    clip: float
    sampled: bool = True


@dataclass(frozen=True, kw_only=True)
class SmashedNoise(Mechanism):
    """Activations clipped to [low, high] (None: not clipped), then N(0, std^2) per value sent."""

    std: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class LabelNoise(Mechanism):
    """N(0, std^2) on every entry of a soft label."""

    std: float
