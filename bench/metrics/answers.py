"""Which answers of an attack can be scored, and how they lie on disk."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bench.contract.attack import Reconstruction

FIELDS = ("images", "labels", "label_counts", "failed")
"""What of an answer is scored."""


def validate_answer(answer: Reconstruction, shape: tuple[int, ...], classes: int) -> Reconstruction:
    """Check an answer and return it on the CPU.

    Args:
        answer: An attack's answer.
        shape: Of the private samples [V, K, ...].
        classes: Their number.

    Raises:
        ValueError: For a tensor of the wrong shape, dtype or range.
    """
    victims, samples = shape[:2]
    shapes: Mapping[str, tuple[int, ...]] = {
        "images": shape,
        "labels": (victims, samples),
        "label_counts": (victims, classes),
        "failed": (victims,),
    }
    given = {n: _check_shape(getattr(answer, n), shapes[n], n) for n in FIELDS}
    counts, labels = given["label_counts"], given["labels"]
    if counts is not None and (counts.is_floating_point() or bool((counts < 0).any())):
        raise ValueError("label_counts must be integers >= 0.")
    if labels is not None and bool(((labels < 0) | (labels >= classes)).any()):
        raise ValueError(
            f"labels must lie in 0..{classes - 1}, got {int(labels.min())} to {int(labels.max())}."
        )
    return replace(answer, **given)  # type: ignore[arg-type]


def _check_shape(value: Tensor | None, shape: tuple[int, ...], what: str) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the attack's {what} must be a tensor {list(shape)}, got {got}.")
    return value.detach().cpu()


def check_values(answer: Reconstruction, *, is_image: bool, beyond: float) -> None:
    """Raise ValueError for values that scoring would convert, or count as no answer: numbers of the
    wrong kind, and images that are not finite or leave [0, 1].

    answer: As `validate_answer` returns it. beyond: By how much an image may leave [0, 1], where
    scoring cuts it off.
    """
    for name in ("labels", "label_counts"):
        value: Tensor | None = getattr(answer, name)
        if value is not None and (value.is_floating_point() or value.dtype == torch.bool):
            raise ValueError(f"{name} must be whole numbers, got {value.dtype}.")
    images, failed = answer.images, answer.failed
    if failed is not None and failed.dtype != torch.bool:
        raise ValueError(f"failed must be bool [{len(failed)}], got {failed.dtype}.")
    if images is None:
        return
    if not images.is_floating_point():
        hint = " of bytes divided by 255" if images.dtype == torch.uint8 else ""
        raise ValueError(f"images must be floating-point numbers{hint}, got {images.dtype}.")
    bad = ~torch.isfinite(images).flatten(1).all(dim=1)
    if failed is not None:
        bad, images = bad & ~failed, images[~failed]
    if bool(bad.any()):
        which = ", ".join(map(str, bad.nonzero().flatten().tolist()))
        raise ValueError(
            f"images of victim(s) {which} hold NaN or infinities; mark victims without an answer "
            "in a bool array 'failed'."
        )
    if is_image and images.numel():
        low, high = float(images.min()), float(images.max())
        if low < -beyond or high > 1 + beyond:
            raise ValueError(f"images must lie in [0, 1], got values from {low:.4g} to {high:.4g}.")


def tensors_of(answer: Reconstruction) -> dict[str, Tensor]:
    """Return copies of an answer's scored tensors, by name."""
    return {n: v.detach().cpu().clone() for n in FIELDS if (v := getattr(answer, n)) is not None}


def merge(answers: Mapping[int, Reconstruction], own: Reconstruction) -> Reconstruction:
    """Merge answers about all victims: of some victims a row of another answer, of the others
    `own`.

    A field that one of them lacks is None.

    Args:
        answers: Place of a victim -> the answer that is taken of it, about all victims.
        own: About the other victims, in their order.
    """
    if not answers:
        return own
    count = len(next(iter(tensors_of(next(iter(answers.values()))).values())))
    own_rows = iter(range(count))
    rows = [(answers[v], v) if v in answers else (own, next(own_rows)) for v in range(count)]
    fields: dict[str, Tensor | None] = {}
    for name in FIELDS:
        given = [(getattr(answer, name), row) for answer, row in rows]
        values = [value[row] for value, row in given if value is not None]
        if name == "failed":
            values = [torch.tensor(False) if v is None else v[row] for v, row in given]
        fields[name] = torch.stack(values) if len(values) == count else None
    return replace(own, **fields)  # type: ignore[arg-type]


def answer_of(tensors: Mapping[str, Tensor]) -> Reconstruction:
    """Return the answer of what `tensors_of` gave."""
    given = {n: tensors[n] for n in FIELDS if n in tensors}
    return Reconstruction(**given)  # type: ignore[arg-type]
