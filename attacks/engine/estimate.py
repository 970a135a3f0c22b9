"""A defense-aware point estimate of each client's gradient, for closed-form attacks."""

from __future__ import annotations

import torch

from attacks.engine.observation import ObservedUploads, kind_of, mechanisms_of, observe
from bench.api import Seen


def gradient_estimate(seen: Seen, *, dtype: torch.dtype = torch.float64) -> ObservedUploads:
    """Mean gradient of every victim as well as the public mechanisms allow, [V, ...] by name.

    Additive noise is unbiased and left, and so is a clip. Where what was sent is not the value
    itself (perturbed signs, drawn bits), the mechanism's own estimate is taken.
    """
    unlike = [m for m in mechanisms_of(seen) if not m.faithful]
    if not unlike:
        return observe(seen, "gradient", dtype=dtype)
    mechanism = unlike[-1]
    sent = observe(seen, kind_of(mechanism), dtype=dtype)
    step = float(seen.known["lr"]) * int(seen.known["local_steps"])
    values = {
        name: mechanism.gradient(value, base=seen.before[name].to(dtype), step=step)
        for name, value in sent.values.items()
    }
    return ObservedUploads(kind="gradient", values=values, present=sent.present)
