"""Refusals of a setting's value, one sentence each."""

from __future__ import annotations

import math
from typing import Any, get_args


def check_number(
    name: str, value: float, meaning: str = "", *,
    above: float | None = None, least: float | None = None,
    below: float | None = None, most: float | None = None,
) -> None:  # fmt: skip
    """Raise ValueError unless a setting is finite and within its limits.

    Args:
        name: Of the setting.
        value: What it was set to.
        meaning: What it stands for, which the sentence adds.
        above: What it must exceed; `least` is the least value itself, where that is allowed.
        least: See `above`.
        below: What it must stay below; `most` is the largest value itself, where that is allowed.
        most: See `below`.
    """
    low_fits = value > above if above is not None else least is None or value >= least
    high_fits = value < below if below is not None else most is None or value <= most
    if low_fits and high_fits and math.isfinite(value):
        return
    if below is None and most is None:
        limits = f"be > {above}" if above is not None else f"be >= {least}"
        limits += " and finite" if isinstance(value, float) else ""
    else:
        left = f"({above}" if above is not None else f"[{least}"
        right = f"{below})" if below is not None else f"{most}]"
        limits = f"lie in {left}, {right}"
    note = f" ({meaning})" if meaning else ""
    raise ValueError(f"{name} must {limits}{note}, got {value}.")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise ValueError unless a setting is one of the values of a `Literal`."""
    if value not in get_args(choices):
        *first, last = get_args(choices)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got '{value}'.")
