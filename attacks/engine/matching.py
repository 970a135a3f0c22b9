"""Matching: candidate images and labels whose messages would be what was seen.

`Matcher` adds terms (`terms`) and differentiates their sum by the candidates, which an optimiser
sees as vectors (`encoding`). It knows nothing of what the terms compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.engine.encoding import Encoding
from attacks.engine.evidence import Evidence
from attacks.engine.lbfgs import Evaluate
from attacks.engine.terms import Candidate, Compare, Misfit, Term


class Matcher:
    """The objective over candidate images and soft labels for the victims of one `Seen`.

    beliefs: What images look like, whatever was seen.
    """

    def __init__(
        self, evidence: Evidence, encoding: Encoding, *, beliefs: Sequence[Term] = ()
    ) -> None:
        self.evidence, self.encoding = evidence, encoding
        self.terms = [*evidence.terms, *beliefs]

    def evaluator(self, victims: Tensor, labels: Tensor | None = None) -> Evaluate:
        """The optimiser's view of P problems: vectors in, losses and gradients out.

        Args:
            victims: int64 [P], whose messages each problem matches.
            labels: int64 [P, K] that are held fixed, or None to optimise label logits that
                follow the images in the vector.
        """
        encoding = self.encoding
        bound = _Bound(self.terms, victims)

        def evaluate(z: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
            compares = bound.to(problems)
            held = None if labels is None else labels[problems]
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                loss, misfits = _total(compares, encoding.candidate(z, held))
            # The problems are independent, so one backward pass gives each its own gradient.
            outputs, slopes = [m.output for m in misfits], [m.slope for m in misfits]
            return loss, torch.autograd.grad(outputs, z, slopes)[0]

        return evaluate

    def losses(self, x: Tensor, y: Tensor, victims: Tensor) -> Tensor:
        """How badly candidates x [P, K, *shape], y [P, K, C] explain what was seen of the victims
        int64 [P]: [P], without any belief."""
        compares = [term.against(victims) for term in self.evidence.terms]
        return _total(compares, Candidate(x=x, y=y, vectors=x.flatten(1)))[0]

    @property
    def working_numbers(self) -> int:
        """Estimated numbers that one problem's evaluation holds: gradients and slopes, and
        activations as a multiple of the pixels."""
        variables = sum(v.numel() for v in self.evidence.clients.start.values())
        return 6 * variables + 256 * self.encoding.pixels


class _Bound:
    """Terms bound to the victims of the problems in work.

    It changes when problems leave alone, as `problems` being another object tells (see
    `Evaluate`): a GPU would stop at a comparison of values.
    """

    def __init__(self, terms: Sequence[Term], victims: Tensor) -> None:
        self.terms, self.victims = terms, victims
        self.problems: Tensor | None = None
        self.compares: Sequence[Compare] = ()

    def to(self, problems: Tensor) -> Sequence[Compare]:
        if self.problems is not problems:
            victims = self.victims[problems]
            self.problems, self.compares = problems, [t.against(victims) for t in self.terms]
        return self.compares


def _total(compares: Sequence[Compare], candidate: Candidate) -> tuple[Tensor, list[Misfit]]:
    """Losses [P], and the misfits that add up to them."""
    misfits = [misfit for compare in compares for misfit in compare(candidate)]
    return sum((m.loss for m in misfits[1:]), start=misfits[0].loss), misfits
