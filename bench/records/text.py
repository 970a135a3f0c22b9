"""Values as strict JSON.

Numbers that are not finite are the texts "inf", "-inf" and "nan" in JSON and nowhere else:
`to_json` makes them, the types of `bench.records` read them back as floats.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel


def sound_text(text: str) -> str:
    """A text with halves of characters (lone surrogates) written out as their numbers."""
    return text.encode("utf-8", "backslashreplace").decode()


def to_json(value: Any) -> str:
    """A record, row, run or other value as strict JSON, indented.

    What has a `to_json_value` method is asked for it; infinities and NaN are the strings "inf",
    "-inf" and "nan".
    """
    return json.dumps(plain(value), indent=1, allow_nan=False)


def to_line(value: Any) -> str:
    """The same without line breaks."""
    return json.dumps(plain(value), allow_nan=False)


def plain(value: Any) -> Any:
    """A value as dictionaries, lists, texts and finite numbers."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "to_json_value"):
        return plain(value.to_json_value())
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return value


def numbers(value: Any) -> Any:
    """A dictionary read from JSON, its texts "inf", "-inf" and "nan" as the floats they are."""
    if not isinstance(value, Mapping):
        return value
    return {k: float(v) if v in ("inf", "-inf", "nan") else v for k, v in value.items()}
