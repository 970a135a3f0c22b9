"""Rows at which several rounds are seen say where the first of them leaks more by itself."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.protocols.settings import ThreatSettings
from bench.records import FlagCode, Row
from bench.report import leaderboard
from bench.report.verdicts import understated_leakage, with_first_round
from tests import made_rows
from tests.conftest import TINY, Run
from tests.test_convergence import each_cell

RELEASE = ThreatSettings(name="release")
WHOLE = ThreatSettings(name="whole", rounds=3, victims=4)


def row(checkpoint: str, threat: str, *ssim: float) -> Row:
    """Of attacks a, b, ... that have these scores above a floor of .2, the largest chosen."""
    attacks = {n: made_rows.attack(s, threat=threat) for n, s in zip("ab", ssim, strict=False)}
    best = max(attacks, key=lambda n: attacks[n].scores["ssim"].mean)
    worst = made_rows.worst(made_rows.interval(max(ssim)), attack_=best)
    made = made_rows.row(checkpoint=checkpoint, attacks=attacks, worst=worst)
    return replace(made, choice=worst)


def flagged(*, first: Row, later: Row, threats: tuple[ThreatSettings, ...]) -> list[Any]:
    row_ = with_first_round(later, first, {t.name: t for t in threats})
    assert replace(row_, flags=()) == later
    return [(f.code, f.subject, pytest.approx(f.values["leak"])) for f in row_.flags]


@pytest.mark.parametrize(("later", "told"), [(0.5, True), (0.78, False), (0.95, False)])
def test_a_row_that_leaks_less_than_its_first_round_is_flagged(later: float, told: bool) -> None:
    """By more than .1 of the way from the floor to a perfect copy."""
    first, seen = row("init", "release", 0.4, 0.84), row("final", "whole", later)
    flags = flagged(first=first, later=seen, threats=(RELEASE, WHOLE))
    assert flags == [(FlagCode.FIRST_ROUND, "b", 0.8)] * told
    known = {t.name: t for t in (RELEASE, WHOLE)}
    assert understated_leakage(with_first_round(seen, first, known)) == (
        pytest.approx(0.8) if told else None
    )


@pytest.mark.parametrize(
    "threats",
    [
        (RELEASE, WHOLE.model_copy(update={"rounds": 1})),
        (RELEASE.model_copy(update={"rounds": 2}), WHOLE),
        (RELEASE.model_copy(update={"labels": True}), WHOLE),
        (RELEASE, WHOLE.model_copy(update={"batch": 2})),
    ],
    ids=["last round alone", "first state several times", "labels granted", "other batch"],
)
def test_only_what_was_seen_too_is_compared(threats: tuple[ThreatSettings, ...]) -> None:
    first, later = row("init", "release", 0.84), row("final", "whole", 0.5)
    assert flagged(first=first, later=later, threats=threats) == []


@pytest.mark.parametrize("missing", ["first", "later"])
def test_a_row_without_a_figure_is_left_as_it_is(missing: str) -> None:
    rows = {"first": row("init", "release", 0.84), "later": row("final", "whole", 0.5)}
    none = {"attacks": {"a": made_rows.attack(None, threat="release")}, "choice": None}
    rows[missing] = replace(rows[missing], worst=None, **none)
    assert flagged(**rows, threats=(RELEASE, WHOLE)) == []


@pytest.mark.slow
def test_rows_of_a_run_are_flagged_by_their_own_first_round(
    run: Run, tiny: Callable[..., Path]
) -> None:
    threats = '[[threats]]\nname = "release"\nvictims = 2\n'
    threats += '[[threats]]\nname = "whole"\nvictims = 2\nrounds = 2\n'
    attacks = '[[attacks]]\nname = "analytic"\ncheckpoints = ["init"]\n' + (
        '[[attacks]]\nname = "analytic"\nthreat = "whole"\ncheckpoints = ["final"]\n'
    )
    old = TINY[TINY.index("[[threats]]") : TINY.index("[[defenses]]")]
    text = {old: threats, TINY[TINY.index("[[attacks]]") :]: attacks, "rounds = 1": "rounds = 2"}
    store, report = run(tiny(**text))
    assert report.failures == []

    def invent(training: dict[str, Any], cell: dict[str, Any], record: dict[str, Any]) -> None:
        if record["status"] != "done":
            return
        weak = cell["checkpoint"] == "final" and training["settings"] == {"epsilon": 2.0}
        record["values"]["ssim"] = [0.3 if weak else 0.9] * record["victims"]
        record["floors"]["ssim"] = [0.1] * record["victims"]

    each_cell(store, invent)
    flags = [
        (r.setting, r.checkpoint, f.subject, f.values["leak"])
        for r in leaderboard.rows(store.folder)
        for f in r.flags
        if f.code is FlagCode.FIRST_ROUND
    ]
    assert flags == [("spm(epsilon=2)", "final", "analytic@release", pytest.approx(8 / 9))]
