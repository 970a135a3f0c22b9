"""Numbers of rows and plots where seeds failed, errors count, or epsilon is zero."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from bench.report import boards, charts, entries, figures
from tests.made_rows import attack, interval, row, worst


def worst_case(found: Any, metric: str) -> Any:
    waiting = entries.Intervals()
    cases = entries.worst_cases(found, metric, waiting)
    waiting.fill()
    return entries.worst_of(cases)


def test_the_worst_case_compares_attacks_on_the_same_victims_of_the_same_seed() -> None:
    """One attack failed in the first seed: what it did in the second is not set against the
    other's first seed, and no seed is dropped."""
    found: dict[str, Any] = {
        "server": {
            "half": {1: np.array([0.1, 0.9])},
            "whole": {0: np.array([0.2, 0.4]), 1: np.array([0.6, 0.7])},
        }
    }
    case = worst_case(found, "ssim")
    assert case is not None
    assert case.interval.mean == pytest.approx(np.mean([0.2, 0.4, 0.6, 0.9]))
    assert case.attack == "whole"  # worst for three of four victims


def test_a_worst_case_of_errors_takes_the_least_of_each_victim() -> None:
    found = {"server": {"a": {0: np.array([0.5, 0.1])}, "b": {0: np.array([0.2, 0.3])}}}
    case = worst_case(found, "mse")
    assert case is not None
    assert case.interval.mean == pytest.approx(np.mean([0.2, 0.1]))


def record(name: str, rank: int, error: float, accuracy: float, floor: float = 1.0) -> Any:
    entry = attack(
        None, status="done", reason=None, mse=interval(error, error / 2), floor={"mse": floor}
    )
    found = worst(interval(error, error / 2), "mse", "analytic")
    return row(name, rank, accuracy=interval(accuracy), attacks={"analytic": entry}, worst=found)


def drawing(name: str, *rows: Any) -> tuple[str, charts.View]:
    (board,) = boards.boards(rows)
    view = next(v for v in charts.views(board) if v.name == name)
    return str(view.drawing), view


def points(text: str) -> list[tuple[float, float]]:
    found = re.findall(r'class="pt [^"]*"[^>]*transform="translate\(([\d.]+) ([\d.]+)\)', text)
    return [(float(x), float(y)) for x, y in found]


def test_the_front_of_errors_promises_no_accuracy_that_a_safer_setting_lacks() -> None:
    rows = [record("a", 1, 1.0, 0.6), record("b", 2, 0.1, 0.8), record("c", 3, 0.01, 0.9)]
    text, _ = drawing("leak", *rows)
    (path,) = re.findall(r'<path class="fr" d="M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H([\d.]+)', text)
    start, height, then, higher, last = map(float, path)
    assert start > then > last  # from the safest, at the right, to the left
    assert height > higher  # and upwards: y grows downwards


def test_a_floor_beyond_all_points_has_room_on_the_axis() -> None:
    rows = [record("a", 1, 0.01, 0.9, floor=0.95), record("b", 2, 0.09, 0.9, floor=0.95)]
    text, _ = drawing("leak", *rows)
    (floor,) = re.findall(r'<rect class="fl" x="([\d.]+)"', text)
    assert float(floor) > max(x for x, _ in points(text)) + 20
    assert ">1</text>" in text  # the axis goes on to the decade of the floor


def test_an_epsilon_of_zero_is_shown_at_the_edge_and_said_so() -> None:
    rows = [row("standalone", 1, eps_record=0.0), row("noise", 2, eps_record=8.0)]
    text, view = drawing("proven", *rows)
    assert any("ε = 0 stands at the left edge" in n for n in view.notes)
    assert len(set(points(text))) == 2
    figure = figures.epsilon(rows)
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    shown = [x for line in axes.get_lines() for x in np.atleast_1d(line.get_xdata())]
    assert all(low <= x <= high for x in shown)
    legend = [t.get_text().replace("\n", " ") for a in figure.axes for t in a.texts]
    legend += [t.get_text().replace("\n", " ") for g in figure.legends for t in g.get_texts()]
    assert any("epsilon 0, at the left edge" in t for t in legend), legend


def test_a_papers_front_leaves_out_what_only_clients_own_networks_reach() -> None:
    own = row("own", 1, 0.1, accuracy=None, personal_accuracy=interval(0.99), personalised=True)
    rows = [own, row("none", 2, 0.9, accuracy=interval(0.7))]
    (front,) = [
        line for line in figures.pareto(rows).axes[0].get_lines() if line.get_label() == "front"
    ]
    assert set(np.atleast_1d(front.get_ydata())) == {0.7}
