"""PM-SFL with noise: the variants of Theorems 2 and 3, which `defenses/pm_sfl.py` builds up to.

The plugin `pm_sfl` is this class: with noise `none`, its default, it is the paper's method.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from bench.api import (
    BernoulliMask,
    Client,
    Clip,
    Event,
    Facts,
    Gaussian,
    Laplace,
    LaplaceNoise,
    Loss,
    Mechanism,
    Part,
    RandomisedResponse,
    Round,
    State,
    Strength,
    Unprotected,
)
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.privacy.ledger import record_epsilon
from bench.toolkit.per_sample import clipped_to, per_sample_gradients
from bench.toolkit.settings import Limits, check_number
from bench.toolkit.vectors import clip_rows_l1, gaussian_like, laplace_like
from defenses.pm_sfl import PMSFL

Noise = Literal["none", "local", "mask", "smashed"]

_NOISE = "noise."


@dataclass(kw_only=True, eq=False)
class NoisedPMSFL(PMSFL):
    """Trained random masks over frozen weights, uploaded as sampled bits; noised if asked for.

    Args:
        clip: See `PMSFL`, like all settings up to `growth_rounds`.
        variant: `corrected` or `printed`: the score gradient's, and that of noise `mask`.
        lr_scale: See `PMSFL`.
        optimizer: See `PMSFL`; noise `local` takes `sgd` alone, since what its noise adds to
            scores is known in closed form there.
        personal: See `PMSFL`.
        agreement_rounds: See `PMSFL`.
        growth_rounds: See `PMSFL`.
        masks: See `PMSFL`.
        noise: none; `local`, on every score gradient (Theorem 3a); `mask`, on theta before the
            upload is drawn (Theorem 3b): printed, of Eq. 69's std before the clip, corrected,
            after a clip and sqrt(d) times as strong; `smashed`, Laplace on smashed data
            (Theorem 2).
        epsilon: The theorem's budget, > 0; none without noise.
        delta: The theorem's delta, in (0, 1).
        local_steps: R of Theorem 3a, >= 1.
        clip_norm: L2 norm of one sample's score gradient (`local`) or L1 norm of its smashed
            data (`smashed`), > 0.

    Source: PM-SFL, Theorems 2 and 3.
    """

    noise: Noise = "none"
    epsilon: float | None = None
    delta: Annotated[float, Limits(above=0, below=1)] = 1e-5
    local_steps: Annotated[int, Limits("R of Theorem 3a", least=1)] = 1
    clip_norm: Annotated[float, Limits("norm of one sample", above=0)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise == "local" and self.optimizer != "sgd":
            raise ValueError(
                f"noise 'local' is for optimizer sgd, got {self.optimizer}: attackers could not be "
                "told what the noise adds to a score that Adam moves."
            )
        if self.noise == "none" and self.epsilon is not None:
            raise ValueError(f"epsilon needs a noise (local, mask or smashed), got {self.epsilon}.")
        self.budget = math.inf if self.epsilon is None else self.epsilon
        if self.noise != "none":
            if self.epsilon is None:
                raise ValueError(f"epsilon must be > 0 (budget of noise '{self.noise}'), got None.")
            check_number("epsilon", self.budget, f"budget of noise '{self.noise}'", above=0)
            by_budget = Strength(setting="epsilon", weak=1e6, strong=0.01)
            self.strength = by_budget  # type: ignore[assignment]
        if self.noise == "local":
            self.owns = self.owns | {"gradient"}
        if self.noise == "smashed":
            self.requires = self.requires | {"smashed"}

    # --- Theorem 2: smashed data --------------------------------------------------------------
    @property
    def smashed_scale(self) -> float:
        """Laplace scale per value: the range's L1 width over epsilon (Theorem 2's Delta_f, taken
        after the mask, where its Lemma 2 holds)."""
        return 2 * self.clip_norm / self.budget

    def smashed(self, q: Tensor, client: Client) -> Part:
        """Under noise `smashed`: each sample's part clipped to L1 norm clip_norm, plus Laplace
        noise."""
        if self.noise != "smashed":
            return super().smashed(q, client)
        clipped = clip_rows_l1(q, norm=self.clip_norm)
        noise = laplace_like(q.detach(), scale=self.smashed_scale, rng=client.rng["defense"])
        return Part(values=clipped + noise)

    # --- Theorem 3a: score gradients ------------------------------------------------------------
    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        drawn = dict(super().draw(variables, const, rng))
        if self.noise == "local":
            masked = {n: v for n, v in variables.items() if n in const}
            drawn |= {_NOISE + n: gaussian_like(v, std=1.0, rng=rng) for n, v in masked.items()}
        return drawn

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        """Under noise `local`: mean of per-sample score gradients clipped to clip_norm, plus
        Gaussian noise (Eq. 12, 13), both taken before `lr_scale`; otherwise the plain gradient.
        """
        if self.noise != "local":
            return super().gradient(loss, variables, x, y, draw)

        each = per_sample_gradients(loss, variables, x, y)
        noise = {n: draw[_NOISE + n] for n in each if _NOISE + n in draw}
        norm = self.lr_scale * self.clip_norm
        clipped, lengths = clipped_to({n: each[n] for n in noise or each}, norm=norm)
        std = self._step_multiplier() * norm / len(lengths)
        mean = {n: clipped[n] if n in clipped else g.mean(dim=0) for n, g in each.items()}
        return {n: g + std * noise[n] if n in noise else g for n, g in mean.items()}

    def _step_multiplier(self) -> float:
        """Std over Gamma / |Q| for R local steps (Eq. 63)."""
        return math.sqrt(2 * self.local_steps * math.log(1 / self.delta)) / self.budget

    # --- Theorem 3b: probabilities --------------------------------------------------------------
    def _release(self, scores: State, client: Client) -> dict[str, Tensor]:
        """Under noise `mask`: theta with Gaussian noise, clipped."""
        thetas = super()._release(scores, client)
        if self.noise != "mask":
            return thetas
        low, high = self.clip, 1 - self.clip
        std = self._mask_std(sum(s.numel() for s in scores.values()))
        noised = {}
        for name, theta in thetas.items():
            exact = theta if self.variant == "printed" else theta.clamp(low, high)
            noise = gaussian_like(theta, std=std, rng=client.rng["defense"])
            noised[name] = (exact + noise).clamp(low, high)
        return noised

    def _mask_std(self, d: int) -> float:
        """Eq. 69, whose sensitivity 1 - 2c is that of one coordinate; sqrt(d) is ours."""
        std = (1 - 2 * self.clip) * math.sqrt(2 * math.log(1.25 / self.delta)) / self.budget
        return std if self.variant == "printed" else std * math.sqrt(d)

    # --- what is known and what is proven -------------------------------------------------------
    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        """Noise on smashed data, and bits. That samples were clipped is in `gradient`."""
        if self.noise != "smashed":
            return (self.bits(round),)
        clip = Clip(of="smashed", norm=self.clip_norm, order=1)
        return (clip, LaplaceNoise(of="smashed", scale=self.smashed_scale), self.bits(round))

    def bits(self, round: Round) -> BernoulliMask:
        """Bits of noised probabilities. Noise `local` counts as what a round's steps add to every
        score; how it turns the gradients of later steps is in no law."""
        bits = super().bits(round)
        if self.noise == "local":
            step = round.lr * self.lr_scale * self._step_multiplier() * self.clip_norm / round.batch
            return replace(bits, score_std=step * math.sqrt(round.local_steps))
        if self.noise == "mask":
            std = self._mask_std(sum(round.constants.values()) or round.parameters)
            corrected = self.variant == "corrected"
            return replace(bits, theta_std=std, theta_clipped=corrected)
        return bits

    def claim(self, facts: Facts) -> tuple[float, float, str] | None:
        """Theorem 2 or 3 for one release, Theorem 3 with Sec. 5's closing bound; none of them
        is about the method without noise."""
        if self.noise == "none":
            return None
        if self.noise == "smashed":
            gain = amplification_gain(self.budget, c=self.clip, d=self.count_masked(facts))
            return self.budget - gain, 0.0, "record"
        return min(self.budget, self._closing_bound(facts)), self.delta, "record"

    def _closing_bound(self, facts: Facts) -> float:
        """Pure epsilon of a mask of bits whose chances lie in [c, 1 - c] (Sec. 5's closing)."""
        return self.count_masked(facts) * bernoulli_epsilon(self.clip)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        """Replacing one record, over all releases; smashed data only under noise `smashed`."""
        pattern = Unprotected(
            what="the pattern of personalised masks",
            why="it is computed from the changes of theta before any noise",
        )
        steps = facts.releases * facts.local_steps
        match self.noise:
            case "none":
                return super().guarantee(facts)
            case "smashed":
                width, scale = 2 * self.clip_norm, self.smashed_scale
                noise = Laplace(sensitivity=width, scale=scale, unit="record", count=steps)
                return (noise, *super().guarantee(facts))
            case "local":
                # A record may be in every batch; replacing it moves a mean gradient by 2 Gamma /
                # |Q|. Masks and their personal pattern are drawn from the noised scores:
                # post-processing.
                unit = self.clip_norm / facts.batch
                std = self._step_multiplier() * unit
                steps_noise = Gaussian(sensitivity=2 * unit, std=std, unit="record", count=steps)
                return (steps_noise, *self.of_head(facts))
            case "mask":
                kept = [pattern] if self.personal else []
                return (self._bits(facts), *kept, *self.of_head(facts))

    def _bits(self, facts: Facts) -> Event:
        """The better of the noise on theta and of sampling bits whose chances lie in [c, 1 - c]."""
        bits = RandomisedResponse(
            epsilon=bernoulli_epsilon(self.clip),
            coordinates=self.count_masked(facts),
            covers="mask bits",
            unit="record",
            count=facts.releases,
        )
        noise = self._theta_noise(facts)
        by_noise, by_bits = (record_epsilon((event,), facts.delta) for event in (noise, bits))
        return noise if by_noise <= by_bits else bits

    def _theta_noise(self, facts: Facts) -> Gaussian:
        """L2 sensitivity: sqrt(d) times the range of one coordinate when the noise is added."""
        width = 1.0 if self.variant == "printed" else 1 - 2 * self.clip
        masked = self.count_masked(facts)
        moves, std = math.sqrt(masked) * width, self._mask_std(masked)
        return Gaussian(sensitivity=moves, std=std, unit="record", count=facts.releases)

    def constants(self, facts: Facts) -> dict[str, float | str]:
        constants = super().constants(facts)
        match self.noise:
            case "local":
                add, replace = self._step_epsilons()
                constants |= {
                    "noise_std": self._step_multiplier() * self.clip_norm / facts.batch,
                    "eps_one_round_add_remove": add,
                    "eps_one_round_replace": replace,
                }
            case "mask":
                constants |= {
                    "noise_std": self._mask_std(self.count_masked(facts)),
                    "eps_one_round": self._mask_epsilon(facts),
                }
            case "smashed":
                constants |= {
                    "noise_scale": self.smashed_scale,
                    "eps_smashed_all_rounds": facts.releases * facts.local_steps * self.budget,
                }
        return constants

    def _step_epsilons(self) -> tuple[float, float]:
        """Exact epsilon of a round's R steps for adding or removing a record, which moves a mean
        gradient by Gamma / |Q|, and for replacing one, which moves it by twice that."""
        mu = math.sqrt(self.local_steps) / self._step_multiplier()
        add, replace = (exact_gaussian_epsilon(mu=k * mu, delta=self.delta) for k in (1, 2))
        return add, replace

    def _mask_epsilon(self, facts: Facts) -> float:
        """Exact epsilon of the noise on one round's theta."""
        noise = self._theta_noise(facts)
        return exact_gaussian_epsilon(mu=noise.sensitivity / noise.std, delta=self.delta)


def amplification_gain(epsilon: float, *, c: float, d: int) -> float:
    """What Theorem 2's eps_amp = ln((1 - c^d) e^eps + c^d) is below eps.

    Computed as -log1p(-c^d (1 - e^-eps)), since 1 - c^d rounds to 1 from d = 16 on at c = .1.
    """
    return -math.log1p(-math.exp(d * math.log(c) + math.log(-math.expm1(-epsilon))))


def bernoulli_epsilon(c: float) -> float:
    """Pure epsilon of one bit whose probability lies in [c, 1 - c]: ln((1 - c) / c)."""
    return math.log((1 - c) / c)
