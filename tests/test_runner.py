"""Running and resuming: nothing is made twice, the same seed gives the same figures."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema

from bench.harness.executors.task import SCORES, Task, next_of
from bench.harness.store import Store
from bench.records import Run as WholeRun
from bench.report import leaderboard
from bench.report.text import markdown
from tests.board import SCHEMA_FILE, board, written
from tests.conftest import Run


def figures(store: Store) -> list[dict[str, Any]]:
    """Leaderboard rows without the clock's readings."""
    rows = board(store.folder)
    for row in rows:
        row.pop("client_seconds")
        row.pop("workings")
        for entry in row["attacks"].values():
            entry.pop("seconds")
    return rows


def test_a_run_fills_the_leaderboard_and_a_second_one_repeats_nothing(
    run: Run, tiny: Callable[..., Path]
) -> None:
    store, report = run(tiny())
    assert (report.ran, report.cached, report.failures) == (15, 0, [])
    rows = board(store.folder)
    jsonschema.validate(
        written(store.folder),
        json.loads(SCHEMA_FILE.read_text()),
    )
    assert len(rows) == 6
    undefended = next(r for r in rows if (r["defense"], r["checkpoint"]) == ("none", "init"))
    assert undefended["eps_record"] == "inf"
    assert undefended["attacks"]["ilrg"]["lnacc"]["mean"] == 1.0
    stamp = {p: p.stat().st_mtime_ns for p in store.folder.rglob("*.json") if p.name != "run.json"}
    _, again = run(tiny())
    assert (again.ran, again.cached) == (0, 15)
    assert all(p.stat().st_mtime_ns == t for p, t in stamp.items())


def test_records_are_ordered_by_their_error_and_audits_join_the_board(
    run: Run, tiny: Callable[..., Path]
) -> None:
    """No SSIM for tables: the least error of any attack per victim, the larger the safer. Of two
    victims no test tells rows apart."""
    suite = tiny(
        **{
            'dataset = "digits"': 'dataset = "breast_cancer"',
            'model = "mlp_spm"': 'model = "logistic"',
            "audit = 0": "audit = 400",
            'name = "spm"\nsettings = { epsilon = [0.5, 2.0] }':
                'name = "gaussian"\nsettings = { noise_multiplier = 1.0, clip_norm = 1.0 }',
            'name = "ilrg"': 'name = "analytic"',
        }
    )  # fmt: skip
    store, report = run(suite, only={"checkpoint": "init"})
    assert report.failures == []
    rows = board(store.folder)
    jsonschema.validate(
        written(store.folder),
        json.loads(SCHEMA_FILE.read_text()),
    )
    by_name = {r["defense"]: r for r in rows}
    none, noised = by_name["none"], by_name["gaussian"]
    assert [r["defense"] for r in rows] == ["gaussian", "none"]
    # No star: its answers are below the baseline.
    assert noised["marks"] == {"best": False, "undefended": True}
    assert none["leakage"]["mean"] > 0.99 > noised["leakage"]["mean"]
    assert none["worst"]["metric"] == "mse"
    assert none["worst"]["mse"]["mean"] < 1e-6 < noised["worst"]["mse"]["mean"]
    assert none["audit"]["eps_at_least"]
    assert none["audit"]["verdict_claim"] == "no claim"
    assert noised["audit"]["verdict_proof"] == "consistent"
    assert 0 < noised["audit"]["eps_audited"] < noised["eps_record"]
    text = markdown(leaderboard.rows(store.folder), WholeRun.read(store.folder))
    assert "eps audited" in text
    assert re.search(r"\| MSE \d\.?\d*e-\d+ \[", text)  # the undefended row's, to its own scale


def test_the_same_seed_gives_the_same_figures_here_and_in_workers(
    run: Run, tiny: Callable[..., Path]
) -> None:
    one, _ = run(tiny(), out="a")
    two, report = run(tiny(), out="b", workers=2)
    assert report.failures == []
    assert figures(one) == figures(two)


def test_a_run_continues_where_it_stopped(run: Run, tiny: Callable[..., Path]) -> None:
    store, _ = run(tiny())
    before = figures(store)
    victims = sorted((store.folder / "records" / "attack").iterdir())[:5]
    for path in victims[:4]:
        path.unlink()
    victims[4].write_text(victims[4].read_text()[:40])  # cut short by a crash
    _, report = run(tiny())
    assert (report.ran, report.cached) == (5, 10)
    assert figures(store) == before


def test_a_change_of_settings_or_seed_makes_new_records(
    run: Run, tiny: Callable[..., Path]
) -> None:
    run(tiny())
    _, report = run(tiny(**{"version = 1": "version = 1\nseeds = [1]"}))
    assert report.cached == 0


def test_a_worker_takes_tasks_of_its_own_group_first_and_else_of_one_that_nobody_has() -> None:
    def task(number: int, group: str, room: str = "a") -> Task:
        return Task(id=number, label="", work=None, group=group, room=room)  # type: ignore[arg-type]

    def taken(own: str, others: str, *, scores: bool = False) -> int | None:
        found = next_of(tasks, ("a", own), [("a", other) for other in others], scores)
        return None if found is None else found.id

    tasks = deque(task(i, group) for i, group in enumerate("ab"))
    assert taken("b", "") == 1  # its own, though the first would do
    tasks = deque(task(i, group) for i, group in enumerate("aabbac"))
    assert taken("b", "a") == 2  # its own
    assert taken("", "ab") == 5  # of no other worker
    assert taken("", "ab") == 0  # the first, for want of one
    assert [t.id for t in tasks] == [1, 3, 4]
    tasks = deque([task(0, "a", SCORES), task(1, "a")])
    assert taken("a", "") == 1  # no worker takes a score
    assert taken("a", "") is None
    assert taken("a", "", scores=True) == 0
