"""What Opacus does to a client's gradients, as leakbench knows it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bench.capturing.recording import Noised
from bench.contract.events import Gaussian
from bench.errors import UserError

if TYPE_CHECKING:
    from opacus.accountants.accountant import IAccountant
    from opacus.optimizers import DPOptimizer


def noised_by(
    optimizer: DPOptimizer, accountant: IAccountant | None = None, *, delta: float = 1e-5
) -> Noised:
    """Return the noise of an Opacus optimizer: clipped per-sample gradients and Gaussian noise on
    their sum.

    Call it after `optimizer.step()`, so that the accountant knows of that step.

    Args:
        optimizer: As `PrivacyEngine.make_private` returns it; flat clipping.
        accountant: Its `PrivacyEngine.accountant`: each entry of its history is an event for the
            ledger, and its epsilon, for adding or removing a record, is the claim.
        delta: At which epsilons are told.

    Raises:
        UserError: For an optimizer that clips in another way.
    """
    from opacus.optimizers import DPOptimizer

    if type(optimizer) is not DPOptimizer:
        raise UserError(
            f"noised_by knows Opacus' DPOptimizer with flat clipping, got "
            f"{type(optimizer).__name__}."
        )
    if not any(getattr(p, "summed_grad", None) is not None for p in optimizer.params):
        raise UserError("noised_by reads what the step did: call it after optimizer.step().")
    clip = float(optimizer.max_grad_norm)
    history = [] if accountant is None else accountant.history
    whole = optimizer.loss_reduction == "mean"
    return Noised(
        name="dp_sgd",
        settings={"noise_multiplier": float(optimizer.noise_multiplier), "clip_norm": clip},
        events=[
            # Replacing a record moves a clipped sum by up to twice the clip. Poisson sampling is
            # left out: its amplification is proven for adding or removing one.
            Gaussian(sensitivity=2 * clip, std=float(noise) * clip, unit="record", count=int(steps))
            for noise, _, steps in history
        ],
        claimed=_claim_epsilon(accountant, delta) if accountant is not None and history else None,
        unit="record (added or removed)",
        delta=delta,
        divisor=float(optimizer.expected_batch_size) if whole else 1.0,
    )


def _claim_epsilon(accountant: IAccountant, delta: float) -> float:
    """Return epsilon by the accountant, which without noise ends in an error of its own."""
    noiseless = any(float(noise) == 0 for noise, _, _ in accountant.history)
    return math.inf if noiseless else float(accountant.get_epsilon(delta))
