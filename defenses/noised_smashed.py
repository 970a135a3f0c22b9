"""What DP-CutMixSL and its noised rivals share: the clip, the noise, and what it proves.

Against the server only the noise and the share of values sent protect. What is proven is for
given client-held layers that treat samples one by one (no batch statistics in training).

Every release is Gaussian, so its Renyi divergence of order alpha is alpha * slope, and `slope`
is half the sum of (L2 sensitivity / std)^2 over what is released.
"""

import math
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

from torch import Tensor

from bench.api import (
    Client,
    Defense,
    Event,
    Facts,
    FloatOrInf,
    Gaussian,
    LabelNoise,
    Mechanism,
    Part,
    SmashedNoise,
    Unprotected,
)
from bench.privacy.gaussian import best_renyi_epsilon
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import gaussian_like

PAPER_SMASHED_SIZE, PAPER_LABEL_SIZE = 20, 10
"""D_s and D_y of Sec. 4. D_s = 20 contradicts its own D_s = N P^2 C at N = 64."""
ONE_HOT = 2.0
"""Squared L2 distance of two different one-hot labels."""


@dataclass(kw_only=True, eq=False)
class NoisedSmashed(Defense):
    """Base: settings and ledger of smashed data that is clipped and noised, and noised labels.

    Args:
        clip: Delta, width of the interval [low, low + clip] to which every value of the smashed
            data is clipped; inf: not clipped, and nothing is proven.
        smashed_std: Std of the noise on smashed data, 0 for none.
        label_std: Std of the noise on labels, 0 for none.
        low: 0 in the paper; -clip / 2 keeps the sign of activations that have one, at the same
            sensitivity.
        smashed_size: Values of one sample's smashed data (D_s), which the ledger needs.
    """

    requires = frozenset({"smashed"})
    zero_strength = MappingProxyType[str, Any](
        {"clip": math.inf, "smashed_std": 0.0, "label_std": 0.0}
    )
    clip: FloatOrInf
    smashed_std: Annotated[float, Limits("std of the noise", least=0)]
    label_std: Annotated[float, Limits("std of the noise", least=0)]
    low: float = 0.0
    smashed_size: Annotated[int | None, Limits("values of one sample's smashed data", least=1)] = (
        None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.clip > 0:
            raise ValueError(
                f"clip must be > 0 (width of the interval of one smashed value), got {self.clip}."
            )
        if not math.isfinite(self.low):
            raise ValueError(f"low must be finite (lower end of the interval), got {self.low}.")

    def clip_smashed(self, q: Tensor) -> Tensor:
        """Smashed data in [low, low + clip]."""
        if self.smashed_size is not None and q[0].numel() != self.smashed_size:
            raise ValueError(
                f"smashed_size must be {q[0].numel()}, the values of one sample of the smashed "
                f"data {list(q.shape)}, got {self.smashed_size}."
            )
        return q if math.isinf(self.clip) else q.clamp(self.low, self.low + self.clip)

    def smashed(self, q: Tensor, client: Client) -> Part:
        return Part(values=self.add_noise(self.clip_smashed(q), client))

    def add_noise(self, values: Tensor, client: Client) -> Tensor:
        """N_s added to every value."""
        if self.smashed_std == 0:
            return values
        return values + gaussian_like(values, std=self.smashed_std, rng=client.rng["defense"])

    def labels(self, y: Tensor, client: Client) -> Tensor:
        """Eq. 2: N_y added to every entry of the one-hot label."""
        if self.label_std == 0:
            return y
        return y + gaussian_like(y, std=self.label_std, rng=client.rng["defense"])

    # --- what is known and what is proven -----------------------------------------------------
    def mechanisms(self) -> tuple[Mechanism, ...]:
        out: list[Mechanism] = []
        clipped = not math.isinf(self.clip)
        if clipped or self.smashed_std:
            low, high = (self.low, self.low + self.clip) if clipped else (None, None)
            out.append(SmashedNoise(of="smashed", std=self.smashed_std, low=low, high=high))
        if self.label_std:
            out.append(LabelNoise(of="labels", std=self.label_std))
        return tuple(out)

    def bound(self, *, smashed: float, label: float) -> float:
        """The paper's bound over alpha; smashed, label: squared sensitivities over variances."""
        raise TypeError(f"{type(self).__name__} must define bound(smashed, label).")

    def worst_share(self, facts: Facts) -> float:
        """Largest share of its smashed data that a client sends in one upload."""
        return 1.0

    def claim(self, facts: Facts) -> tuple[float, float, str] | None:
        """The paper's bound for one upload at the best alpha, with D_s = smashed_size (where it
        is not set, the paper's 20) and D_y = 10; None without a clip or without any noise, where
        the paper claims nothing."""
        if math.isinf(self.clip) or self.smashed_std == self.label_std == 0:
            return None
        slope = self.slope_by_paper(self.smashed_size or PAPER_SMASHED_SIZE)
        return best_renyi_epsilon(slope, facts.delta)[0], facts.delta, "record"

    def slope_by_paper(self, smashed_size: int) -> float:
        """Slope of one upload by the paper, whose labels differ by D_y."""
        return self.bound(
            smashed=_signal(self.clip**2 * smashed_size, self.smashed_std),
            label=_signal(PAPER_LABEL_SIZE, self.label_std),
        )

    def server_slope(self, smashed_size: int, facts: Facts) -> float:
        """Slope of one upload as the server receives it. The client scales neither its noise nor
        its label by lambda: that the server does so later is post-processing and amplifies
        nothing."""
        smashed = _signal(self.clip**2 * smashed_size, self.smashed_std)
        return (self.worst_share(facts) * smashed + _signal(ONE_HOT, self.label_std)) / 2

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Smashed data and labels of one record over all its uploads, as the server sees them,
        given the client-held layers.

        The paper leaves those out: the client trains them on the raw samples, uploads them
        without noise, and passes all its later smashed data through them.
        """
        noise = partial(Gaussian, unit="record", count=record_uploads(facts))
        events: list[Event] = []
        if (why := self._no_proof()) is not None:
            events.append(Unprotected(what="the smashed data", why=why))
        else:
            assert self.smashed_size is not None
            width = self.clip * math.sqrt(self.worst_share(facts) * self.smashed_size)
            events.append(noise(sensitivity=width, std=self.smashed_std))
        if self.label_std == 0:
            events.append(Unprotected(what="the labels", why="they carry no noise"))
        else:
            events.append(noise(sensitivity=math.sqrt(ONE_HOT), std=self.label_std))
        update = Unprotected(
            what="the update of the client-held layers",
            why="it is computed from the raw samples and sent without noise, and it moves the "
            "later smashed data of the client's other samples",
        )
        return (*events, update)

    def _no_proof(self) -> str | None:
        if self.smashed_std == 0:
            return "it carries no noise"
        if math.isinf(self.clip):
            return "without a clip one record may move it without bound"
        if self.smashed_size is None:
            return "smashed_size is not set, so how far one record moves it is not known"
        return None

    def constants(self, facts: Facts) -> dict[str, float | str]:
        """Epsilons are at the run's delta and best alpha; rdp2 is the Renyi divergence of order
        2 of one upload, as in the paper's figures."""
        count = record_uploads(facts)
        out: dict[str, float | str] = {}
        if self.claim(facts) is not None:
            printed = self.slope_by_paper(PAPER_SMASHED_SIZE)
            out["rdp2_printed_paper_size"] = 2 * printed
            out["eps_printed_paper_size"] = best_renyi_epsilon(printed, facts.delta)[0]
        if self._no_proof() is None and self.label_std > 0:
            assert self.smashed_size is not None
            printed = self.slope_by_paper(self.smashed_size)
            slope = self.server_slope(self.smashed_size, facts)
            out["rdp2_printed"] = 2 * printed
            out["rdp2_server"] = 2 * slope
            out["eps_printed_one_upload"] = best_renyi_epsilon(printed, facts.delta)[0]
            out["eps_server_one_upload"] = best_renyi_epsilon(slope, facts.delta)[0]
            out["eps_server_all_uploads"] = best_renyi_epsilon(slope * count, facts.delta)[0]
        return out


def _signal(square: float, std: float) -> float:
    """Squared sensitivity over variance; infinite without noise."""
    return square / std**2 if std > 0 else math.inf


def record_uploads(facts: Facts) -> int:
    """Most uploads of one record over the run: once per pass over the client's data."""
    steps = facts.releases * facts.local_steps
    return -(-steps * min(facts.batch, facts.records) // facts.records)
