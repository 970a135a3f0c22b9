"""Reference values of the papers' formulas, and functions that recompute them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


def reference_cases(paper: str, *, elsewhere: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The cases of a paper but those whose names begin as `elsewhere` says, tested elsewhere."""
    text = (Path(__file__).parent / f"{paper}.json").read_text()
    return [c for c in json.loads(text)["cases"] if not c["name"].startswith(elsewhere)]


def assert_reference(
    case: dict[str, Any], compute: Mapping[str, Callable[[Any], Any]], *, whole: bool = False
) -> None:
    """Recompute a case's values by the one function whose key its name begins with.

    whole: Whether the function computes nothing else.
    """
    (kind,) = [k for k in compute if case["name"].startswith(k)]
    computed = compute[kind](case["inputs"] | {"name": case["name"]})
    assert not whole or computed.keys() == case["expected"].keys()
    for key, expected in case["expected"].items():
        assert computed[key] == pytest.approx(expected, rel=case.get("tol", 1e-5), abs=0), key
