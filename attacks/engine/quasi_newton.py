"""L-BFGS on a matcher's problems, in one precision or two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attacks.engine.lbfgs import Minimum, Phase, minimise
from attacks.engine.matching import Matcher
from attacks.engine.restarts import Problems

_ROUGH = 1e-11
"""Share of |observation|^2 down to which float32 resolves a squared distance."""


@dataclass(frozen=True, kw_only=True)
class QuasiNewton:
    """dtypes: one, or float32 and float64 to change over where float32 gets no further.
    matcher(dtype): the objective in that precision. evaluations: per problem."""

    matcher: Callable[[torch.dtype], Matcher]
    dtypes: Sequence[torch.dtype]
    evaluations: int
    history: int
    least_gain: float

    def __call__(self, problems: Problems) -> Minimum:
        phases = []
        for dtype in self.dtypes:
            matcher = self.matcher(dtype)
            stop = problems.stop
            if len(self.dtypes) > 1 and dtype == torch.float32:
                stop = stop.maximum(_ROUGH * matcher.square[problems.victims].to(stop))
            evaluate = matcher.evaluator(problems.victims, problems.held, framed=problems.framed)
            phases.append(Phase(evaluate=evaluate, stop=stop, dtype=dtype))
        return minimise(
            phases,
            problems.start,
            max_evaluations=self.evaluations,
            history=self.history,
            least_gain=self.least_gain,
            redraw=problems.redraw,
        )

    def bytes_each(self, numbers: int) -> int:
        matcher = self.matcher(self.dtypes[-1])
        width = torch.finfo(self.dtypes[-1]).bits // 8
        return width * (2 * self.history * numbers + matcher.working_numbers)
