"""SME: several local steps matched as if they were few, from a state between both ends."""

from __future__ import annotations

from attacks.inverting_gradients import InvertingGradients
from bench.toolkit.settings import check_number


class SME(InvertingGradients):
    """Matches the direction of an update by few steps of all samples, with smooth images preferred.

    The published attack takes one step, at a learned point between the broadcast and where the
    client ended, in place of all local steps: its gradient points where the update does, whatever
    the order of the samples. More steps begin within that part of the way and follow it better.
    Else as `inverting_gradients`, which it equals where a client made one step.
    Departures: more than one step on request; start, total variation and steps of pixels as there.
    Source: Zhu, Yao, Blaschko, Surrogate Model Extension, ICML 2023.

    Args:
        steps: Of all samples, that replace the local steps; the paper's is 1.
        restarts: Further starts of every victim.
    """

    source = "Zhu, Yao, Blaschko, arXiv:2306.00127"

    def __init__(self, *, steps: int = 1, restarts: int = 1) -> None:
        check_number("steps", steps, least=1)
        super().__init__(restarts=restarts)
        self.steps = steps
