"""Running and resuming: nothing is made twice, the same seed gives the same figures."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.store import Store
from bench.records import Run as WholeRun
from bench.report import leaderboard
from bench.report.text import markdown
from tests.board import board
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


def test_records_are_ordered_by_their_error_and_audits_join_the_board(
    run: Run, tiny: Callable[..., Path]
) -> None:
    """No SSIM for tables: the least error of any attack per victim, the larger the safer. Of two
    victims no test tells rows apart."""
    suite = tiny(
        **{
            'dataset = "digits"': 'dataset = "breast_cancer"',
            'model = "mlp_spm"': 'model = "logistic"',
            "audit = 0": "audit = 200",
            'name = "spm"\nsettings = { epsilon = [0.5, 2.0] }':
                'name = "gaussian"\nsettings = { noise_multiplier = 1.0, clip_norm = 1.0 }',
            'name = "ilrg"': 'name = "analytic"',
        }
    )  # fmt: skip
    store, report = run(suite, only={"checkpoint": "init"})
    assert report.failures == []
    rows = board(store.folder)
    by_name = {r["defense"]: r for r in rows}
    none, noised = by_name["none"], by_name["gaussian"]
    assert [r["defense"] for r in rows] == ["gaussian", "none"]
    # Two victims' answers are below the baseline by no more than chance.
    assert noised["marks"] == {"best": True, "undefended": True}
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


def test_a_second_run_repeats_nothing_and_another_seed_everything(
    run: Run, tiny: Callable[..., Path], tiny_copy: Path
) -> None:
    stamps = {p: p.stat().st_mtime_ns for p in tiny_copy.rglob("*.json") if p.name != "run.json"}
    _, again = run(tiny())
    assert (again.ran, again.cached, again.failures) == (0, 15, [])
    assert all(p.stat().st_mtime_ns == t for p, t in stamps.items())
    _, other = run(tiny(**{"version = 1": "version = 1\nseeds = [1]"}), only={"defense": "none"})
    assert (other.ran, other.cached) == (5, 0)


def test_a_finished_run_fills_the_leaderboard(tiny_made: Path) -> None:
    rows = board(tiny_made)
    assert len(rows) == 6
    undefended = next(r for r in rows if (r["defense"], r["checkpoint"]) == ("none", "init"))
    assert undefended["eps_record"] == "inf"
    assert undefended["attacks"]["ilrg"]["lnacc"]["mean"] == 1.0


def test_the_same_seed_gives_the_same_figures_in_workers(
    run: Run, tiny: Callable[..., Path], tiny_made: Path
) -> None:
    workers, report = run(tiny(), only={"checkpoint": "init"}, workers=1)
    assert report.failures == []
    first = [row for row in figures(Store(tiny_made)) if row["checkpoint"] == "init"]
    assert first == figures(workers)


def test_a_run_continues_where_it_stopped(
    run: Run, tiny: Callable[..., Path], tiny_copy: Path
) -> None:
    before = figures(Store(tiny_copy))
    *lost, cut = sorted((tiny_copy / "records" / "attack").iterdir())[:5]
    for path in lost:
        path.unlink()
    cut.write_text(cut.read_text()[:40])  # as a crash leaves it
    store, report = run(tiny())
    assert (report.ran, report.cached) == (5, 10)
    assert figures(store) == before
