"""Limits of a plugin's settings: declared beside each, and refusals of one sentence."""

import math
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Limits:
    """What a number must lie within, finite, as the annotation of a setting:
    `clip_norm: Annotated[float, Limits("L2 norm of one client's update", above=0)]`.

    Attributes:
        meaning: What it stands for, which a refusal adds.
        above: What it must exceed; `least` is the least value itself, where that is allowed.
        least: See `above`.
        below: What it must stay below; `most` is the largest value itself, where that is allowed.
        most: See `below`.
    """

    meaning: str = ""
    _: KW_ONLY
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None

    def check(self, name: str, value: float) -> None:
        """Raise ValueError unless a setting's value is finite and within the limits."""
        above, least, below, most = self.above, self.least, self.below, self.most
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
        note = f" ({self.meaning})" if self.meaning else ""
        raise ValueError(f"{name} must {limits}{note}, got {value}.")


def check_number(name: str, value: float, meaning: str = "", **limits: float) -> None:
    """Raise ValueError unless a setting is finite and within `Limits`."""
    Limits(meaning, **limits).check(name, value)


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raise ValueError unless a setting is one of the values of a `Literal`."""
    if value not in get_args(choices):
        *first, last = get_args(choices)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got '{value}'.")


def check_settings(plugin: Any) -> None:
    """Raise ValueError unless the fields of a plugin that is a dataclass are within their `Limits`,
    or one of their `Literal`: a number, or each of a list; None and texts have no limits."""
    kinds = get_type_hints(type(plugin), include_extras=True)
    for name in (f.name for f in fields(plugin) if f.init):
        kind, value = kinds[name], getattr(plugin, name)
        if get_origin(kind) is Literal:
            check_choice(name, value, kind)
        values = value if isinstance(value, list | tuple) else (value,)
        for limits in getattr(kind, "__metadata__", ()):
            for one in values if isinstance(limits, Limits) else ():
                if one is not None and not isinstance(one, str):
                    limits.check(name, one)
