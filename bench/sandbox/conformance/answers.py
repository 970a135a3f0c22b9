"""What an attack may answer: dtypes, shapes, ranges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.contract.attack import Reconstruction
from bench.sandbox.conformance.findings import Broken


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be rebuilt.

    Attributes:
        victims: V.
        samples: K of each.
        shape: Of a sample.
        classes: C.
    """

    victims: int
    samples: int
    shape: tuple[int, ...]
    classes: int


def check_answer(answer: object, question: Question, recovers: frozenset[str]) -> Reconstruction:
    """An attack's answer, in which nothing is wrong.

    Raises:
        Broken: For the first thing that is.
    """
    if not isinstance(answer, Reconstruction):
        got = "None" if answer is None else f"a {type(answer).__name__}"
        raise Broken(
            f"run returned {got}, expected a Reconstruction.",
            "Return bench.api.Reconstruction(...).",
            "run",
        )
    for problem in _problems(answer, question, recovers):
        raise Broken(f"run {problem}.", "Answer as bench.api.Reconstruction says.", "run")
    return answer


def _problems(a: Reconstruction, q: Question, recovers: frozenset[str]) -> Iterator[str]:
    given = {"images": a.images, "labels": a.labels, "counts": a.label_counts}
    for what in sorted(recovers):
        if given[what] is None:
            yield f"gave no {what}, which `recovers` promises"
    for what, value in given.items():
        if value is not None and what not in recovers:
            yield f"gave {what}, which `recovers` does not name"
    wide = (q.victims, q.samples)
    yield from _tensor("images", a.images, (*wide, *q.shape), floating=True)
    yield from _tensor("labels", a.labels, wide, floating=False)
    yield from _tensor("label_counts", a.label_counts, (q.victims, q.classes), floating=False)
    yield from _tensor("loss", a.loss, (q.victims,), floating=True)
    yield from _tensor("failed", a.failed, (q.victims,), floating=None)
    usable = torch.ones(q.victims, dtype=torch.bool)
    if a.failed is not None:
        usable &= ~a.failed.bool()
    if a.images is not None:
        images = a.images[usable]
        if not bool(torch.isfinite(images).all()):
            yield "gave images with NaN or infinite values, and did not call these victims failed"
        elif len(q.shape) == 3 and images.numel():
            low, high = float(images.min()), float(images.max())
            if low < -1e-3 or high > 1 + 1e-3:
                yield f"gave images with values in [{low:.3g}, {high:.3g}], expected [0, 1]"
    if a.labels is not None and bool(((a.labels < 0) | (a.labels >= q.classes)).any()):
        yield f"gave labels outside of 0 to {q.classes - 1}"
    if a.label_counts is not None and bool((a.label_counts < 0).any()):
        yield "gave label counts below 0"
    if type(a.evaluations) is not int or a.evaluations < 0:
        yield f"reported {a.evaluations!r} gradient evaluations, expected a whole number >= 0"
    if not isinstance(a.notes, tuple) or not all(isinstance(n, str) for n in a.notes):
        yield "gave notes that are no tuple of texts"


def _tensor(
    what: str, value: Tensor | None, shape: tuple[int, ...], *, floating: bool | None
) -> Iterator[str]:
    """floating: False for int64, None for bool."""
    if value is None:
        return
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = list(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        yield f"gave {what} of shape {got}, expected {list(shape)}"
        return
    if floating is None:
        right, expected = value.dtype == torch.bool, "bool"
    elif floating:
        right, expected = value.is_floating_point(), "float"
    else:
        right, expected = value.dtype == torch.int64, "int64"
    if not right:
        yield f"gave {what} as {value.dtype}, expected {expected}"
    if value.device.type != "cpu":
        yield f"gave {what} on {value.device}, while it ran on the CPU"
