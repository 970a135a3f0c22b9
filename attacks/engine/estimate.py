"""A defense-aware point estimate of each client's gradient, for closed-form attacks."""

from __future__ import annotations

import torch
from torch import Tensor

from attacks.engine.observation import Observation, kind_of, mechanisms_of, observe
from bench.api import BernoulliMask, Seen, SignPerturbation


def gradient_estimate(seen: Seen, *, dtype: torch.dtype = torch.float64) -> Observation:
    """Mean gradient of every victim as well as the public mechanisms allow, [V, ...] by name.

    Additive noise is unbiased and left. Perturbed signs of weights are taken from the broadcast
    weights, which differ from the trained ones by a small step, and magnitudes are divided by
    their mean factor; perturbed signs of gradients are only made unbiased. A clip is left. Bits
    drawn from trained probabilities are an unbiased, if very noisy, view of them: to first order
    (theta - bit) / theta' is the scores' step.
    """
    masks = [m for m in mechanisms_of(seen) if isinstance(m, BernoulliMask)]
    if masks:
        return _from_bits(seen, masks[-1], dtype=dtype)
    signs = [m for m in mechanisms_of(seen) if isinstance(m, SignPerturbation)]
    if not signs:
        return observe(seen, "gradient", dtype=dtype)
    mechanism = signs[-1]
    seen_as = observe(seen, kind_of(mechanism), dtype=dtype)
    scale = -float(seen.known["lr"]) * int(seen.known["local_steps"])
    values: dict[str, Tensor] = {}
    for name, value in seen_as.values.items():
        if mechanism.of == "gradient":
            values[name] = value / (mechanism.mean_scale * (2 * mechanism.keep - 1))
            continue
        before = seen.before[name].to(dtype)
        weights = before.sign() * value.abs() / mechanism.mean_scale
        values[name] = (weights - before) / scale
    return Observation(kind="gradient", values=values, present=seen_as.present)


def _from_bits(seen: Seen, mechanism: BernoulliMask, *, dtype: torch.dtype) -> Observation:
    """Mean gradient of the scores, from bits drawn after training."""
    bits = observe(seen, "weights", dtype=dtype)
    step = float(seen.known["lr"]) * int(seen.known["local_steps"])
    values = {}
    for name, value in bits.values.items():
        theta = seen.before[name].to(dtype).clamp(mechanism.clip, 1 - mechanism.clip)
        values[name] = (theta - value) / (theta * (1 - theta) * step)
    return Observation(kind="gradient", values=values, present=bits.present)
