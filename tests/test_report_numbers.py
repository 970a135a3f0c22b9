"""Numbers of rows and plots where seeds failed, errors count, or epsilon is zero."""

import math
from typing import Any

import numpy as np
import pytest

from bench.metrics.named import leak
from bench.records import FlagCode
from bench.records.rows import Convergence
from bench.report import entries, verdicts
from tests.conftest import require
from tests.made_records import attacked, trained
from tests.made_rows import attack, interval, leaks, row, worst


def worst_case(records: Any, metric: Any, *, by_truth: bool) -> Any:
    case = entries.worst_case({"server": records}, metric, by_truth=by_truth)
    return None if case is None else case[0]


def answered(values: list[float], metric: str = "ssim", **more: Any) -> Any:
    return attacked(values={metric: values}, **more)


def test_the_worst_case_compares_attacks_on_the_same_victims_of_the_same_seed() -> None:
    """One attack failed in the first seed: what it did in the second is not set against the
    other's first seed, and no seed is dropped."""
    records = {
        0: {"whole": answered([0.2, 0.4])},
        1: {"half": answered([0.1, 0.9]), "whole": answered([0.6, 0.7])},
    }
    case = require(worst_case(records, "ssim", by_truth=True))
    assert case.interval.mean == pytest.approx(np.mean([0.2, 0.4, 0.6, 0.9]))
    assert case.attack == "whole"  # worst for three of four victims


def test_the_attacker_chooses_by_judged_loss_and_never_by_the_truth() -> None:
    records = {
        0: {
            "a": answered([0.9, 0.1, 0.5], judged=[3.0, 1.0, math.nan]),
            "b": answered([0.2, 0.8, 0.3], judged=[2.0, 2.0, 9.0]),
            "unjudged": answered([1.0, 1.0, 1.0]),
            "floor": answered([0.3, 0.3, 0.3], judged=[5.0, 0.5, 10.0], is_floor=True),
        }
    }
    choice = require(worst_case(records, "ssim", by_truth=False))
    bound = require(worst_case(records, "ssim", by_truth=True))
    assert choice.interval.mean == pytest.approx(np.mean([0.2, 0.3, 0.3]))
    assert choice.attack == "b"  # chosen for two of three victims
    assert bound.interval.mean == 1.0
    assert bound.attack == "unjudged"


def test_the_attacker_chooses_the_attack_that_is_best_in_all_other_seeds() -> None:
    """By other seeds' truth, never by the seed's own."""

    def seed(alone: float, judged: float) -> Any:
        return {
            "judged": answered([judged] * 2, judged=[0.0, 0.0], floors={"ssim": [0.2, 0.2]}),
            "alone": answered([alone] * 2, judged=[1.0, 1.0], floors={"ssim": [0.2, 0.2]}),
        }

    def chosen(*seeds: Any) -> float:
        case = require(worst_case(dict(enumerate(seeds)), "ssim", by_truth=False))
        return float(case.interval.mean)

    better, worse = seed(0.8, 0.4), seed(0.4, 0.8)
    assert chosen(better) == pytest.approx(0.4)  # of one seed there is no other
    assert chosen(better, better) == pytest.approx(0.8)
    assert chosen(better, worse) == pytest.approx((0.4 + 0.4) / 2)
    assert chosen(better, better, worse) == pytest.approx((0.4 + 0.4 + 0.4) / 3)
    assert chosen(better, better, seed(0.41, 0.4)) == pytest.approx((0.8 + 0.8 + 0.41) / 3)
    assert chosen(*[seed(0.43, 0.4)] * 3) == pytest.approx(0.4)  # not clearly


def test_the_leak_is_the_way_from_the_floor_to_a_perfect_copy() -> None:
    assert leak(0.6, 0.2, "ssim") == pytest.approx(0.5)
    assert leak(0.1, 0.2, "ssim") == 0.0
    assert leak(1.0, 1.0, "lnacc") == 0.0
    assert leak(0.5, 2.0, "mse") == pytest.approx(0.75)
    assert leak(3.0, 2.0, "mse") == 0.0
    assert leak(0.0, 2.0, "mse") == 1.0
    chosen = row(ssim=0.6, choice=worst(interval(0.4)))
    assert chosen.leak == pytest.approx(0.25)  # of the choice, floor 0.2
    assert row(ssim=0.6).leak == pytest.approx(0.5)  # of the upper bound
    assert row(worst=None).leak is None


@pytest.mark.parametrize(
    ("score", "gain", "floor", "cut"),
    [(0.4, 0.15, 0.2, True),  # a leak of .44, where the row shows .38
     (0.4, 0.15, 0.5, False),  # a larger score than the row's, but of other victims: .1
     (0.1, 0.05, 0.2, False)],
)  # fmt: skip
def test_an_attack_was_cut_short_where_its_gain_leaks_more_than_the_row(
    score: float, gain: float, floor: float, cut: bool
) -> None:
    grown = Convergence(gain=gain, budget=5, converged=False)
    slow = attack(score, convergence=grown, floor={"ssim": floor})
    shown = row(attacks={"dlg": attack(0.5), "slow": slow})
    able = trained(correct=90, test_samples=100, class_chance=0.1)
    codes = [f.code for f in verdicts.flags_of(shown, [able])]
    assert (FlagCode.CUT_SHORT in codes) == cut


@pytest.mark.parametrize(
    ("means", "below"),
    [
        ((0.1, 0.0, 0.1), False),
        ((-0.03, 0.02, -0.01), False),
        ((-0.1, -0.08, -0.09), True),
        ((-0.5, 0.1, -0.1), True),
    ],
)
def test_answers_are_below_the_baseline_where_chance_does_not_explain_it(
    means: tuple[float, ...], below: bool
) -> None:
    shown = row(leaks=leaks(*means), seeds=(0, 1, 2))
    able = trained(correct=90, test_samples=100, class_chance=0.1)
    codes = [f.code for f in verdicts.flags_of(shown, [able])]
    assert (FlagCode.BELOW_FLOOR in codes) == below
