"""Running, resuming, failing: records are whole, nothing is lost or made twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench import jobs, runner
from bench import suite as suites
from bench.cli import _publish
from bench.executors import Task, run_in_workers
from bench.report import leaderboard
from bench.runner import Keys
from bench.store import SCHEMA, Store, read_record, to_json, write_whole

SCHEMA_FILE = Path(leaderboard.__file__).with_name("schema.json")
Run = Callable[..., tuple[Store, runner.Report]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def go(
        suite: Path, *, out: str = "out", plugins: tuple[Path, ...] = (), workers: int = 0,
        only: dict[str, Any] | None = None, fresh: bool = False,
    ) -> tuple[Store, runner.Report]:  # fmt: skip
        env = jobs.Environment(plugins=plugins)
        registry = jobs.plugins(plugins)
        plan = suites.expand(suites.load(str(suite)), only)
        runner.check(plan, registry, env)
        store = Store(tmp_path / out)
        store.prepare()
        report = runner.run(
            plan, store, Keys(registry, env), workers=workers, fresh=fresh, command=["test"]
        )
        return store, report

    return go


def figures(store: Store) -> list[dict[str, Any]]:
    """Leaderboard rows without the clock's readings."""
    rows = leaderboard.rows(store.folder)
    for row in rows:
        row.pop("client_seconds")
        for entry in row["attacks"].values():
            entry.pop("seconds")
    return rows


def test_a_run_fills_the_leaderboard_and_a_second_one_repeats_nothing(
    run: Run, tiny: Callable[..., Path]
) -> None:
    store, report = run(tiny())
    assert (report.ran, report.cached, report.failures) == (15, 0, [])
    rows = leaderboard.rows(store.folder)
    jsonschema.validate(json.loads(to_json(rows)), json.loads(SCHEMA_FILE.read_text()))
    assert len(rows) == 6
    undefended = next(r for r in rows if (r["defense"], r["checkpoint"]) == ("none", "init"))
    assert undefended["eps_record"] == "inf"
    assert undefended["attacks"]["ilrg"]["lnacc"]["mean"] == 1.0
    stamp = {p: p.stat().st_mtime_ns for p in store.folder.rglob("*.json") if p.name != "run.json"}
    _, again = run(tiny())
    assert (again.ran, again.cached) == (0, 15)
    assert all(p.stat().st_mtime_ns == t for p, t in stamp.items())


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


BAD = '''
import torch
from bench.api import Attack, Defense, Reconstruction

class Raises(Attack):
    """Raises."""
    def run(self, seen, ctx):
        raise RuntimeError("boom")

class WrongShape(Attack):
    """Returns nonsense."""
    def run(self, seen, ctx):
        return Reconstruction(images=torch.zeros(1))

class NotANumber(Attack):
    """Returns NaN."""
    def run(self, seen, ctx):
        shape = (len(seen.clients), 1, *ctx.network.shape)
        return Reconstruction(images=torch.full(shape, float("nan")))

class Forgetful(Attack):
    """Returns nothing."""
    def run(self, seen, ctx):
        return None

class Refuses(Defense):
    """Raises in a hook."""
    def upload(self, messages, local, client):
        raise RuntimeError("no upload")

class Explodes(Defense):
    """Uploads NaN."""
    def upload(self, messages, local, client):
        return [m.with_parts({n: type(p)(values=p.values * float("nan"))
                              for n, p in m.parts.items()}) for m in messages]

class Dies(Attack):
    """Takes its process with it."""
    def run(self, seen, ctx):
        import os
        os.kill(os.getpid(), 9)

class Sleeps(Attack):
    """Never ends."""
    def run(self, seen, ctx):
        import time
        time.sleep(600)
'''


@pytest.fixture
def bad(tmp_path: Path) -> tuple[Path, ...]:
    path = tmp_path / "bad_plugins.py"
    path.write_text(BAD)
    return (path,)


def test_a_failing_cell_is_recorded_and_the_run_goes_on(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    attacks = "".join(
        f'\n[[attacks]]\nname = "{n}"\n'
        for n in ("raises", "wrong_shape", "not_a_number", "forgetful")
    )
    store, report = run(tiny(append=attacks), plugins=bad, only={"defense": "none"})
    reasons = {label.split()[-3]: reason for label, reason in report.failures}
    assert reasons["raises"] == "failed: RuntimeError: boom"
    assert "images must be a tensor [2, 1, 1, 16, 16], got [1]" in reasons["wrong_shape"]
    assert "must return a Reconstruction, got NoneType" in reasons["forgetful"]
    assert set(reasons) == {"raises", "wrong_shape", "forgetful"}
    row = leaderboard.rows(store.folder)[0]
    assert row["attacks"]["ilrg"]["status"] == "done"
    nan = row["attacks"]["not_a_number"]
    assert (nan["status"], nan["failed"], nan["n"]) == ("done", 2, 2)
    assert nan["ssim"]["mean"] == pytest.approx(nan["floor"]["ssim"])
    assert row["attacks"]["raises"]["ssim"] is None
    assert row["attacks"]["raises"]["failed"] == 2
    assert "raises failed" in row["flags"]
    _, again = run(tiny(append=attacks), plugins=bad, only={"defense": "none"})
    assert again.ran == 6  # failures are tried again, the rest is cached


def test_a_diverged_training_is_a_result_with_its_attacks_not_applicable(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    suite = tiny(append='\n[[defenses]]\nname = "explodes"\n')
    store, report = run(suite, plugins=bad, only={"defense": "explodes", "attack": "prior_only"})
    assert report.failures == []
    rows = {r["checkpoint"]: r for r in leaderboard.rows(store.folder)}
    final = rows["final"]["attacks"]["prior_only"]
    assert final["status"] == "not_applicable"
    assert "training diverged (weights not finite after round 1)" in final["reason"]
    assert any(f.startswith("diverged") for f in rows["final"]["flags"])
    assert rows["final"]["rank"] is None
    assert rows["init"]["attacks"]["prior_only"]["status"] == "done"
    assert 0 <= rows["final"]["accuracy"]["mean"] <= 0.2


def test_participation_samples_clients_and_the_ledger_counts_real_uploads(
    run: Run, tiny: Callable[..., Path]
) -> None:
    suite = tiny(**{"rounds = 1": "rounds = 6\nparticipation = 0.34"})
    store, _ = run(suite, only={"defense": "none", "checkpoint": "final"})
    (path,) = (store.folder / "records" / "train").iterdir()
    record = json.loads(path.read_text())
    assert record["rounds_played"] == 6
    # One of three clients per round: six uploads in all, the busiest client made two to six.
    assert 2 <= record["facts"]["participations"] <= 6
    assert record["bytes_up"] == 4 * record["parameters"]


def test_a_defense_that_raises_fails_its_training_and_nothing_else(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    suite = tiny(append='\n[[defenses]]\nname = "refuses"\n')
    store, report = run(suite, plugins=bad, only={"checkpoint": "init"})
    ((label, reason),) = report.failures
    assert "refuses" in label
    assert reason == "failed: RuntimeError: no upload"
    rows = {r["defense"]: r for r in leaderboard.rows(store.folder)}
    assert rows["none"]["attacks"]["ilrg"]["status"] == "done"
    assert rows["refuses"]["attacks"]["ilrg"]["status"] == "not_applicable"
    assert rows["refuses"]["accuracy"] is None
    assert rows["refuses"]["flags"] == ["training failed: RuntimeError: no upload"]
    document = json.loads(to_json(list(rows.values())))
    jsonschema.validate(document, json.loads(SCHEMA_FILE.read_text()))


def test_a_dying_worker_and_a_hanging_cell_end_alone(
    run: Run, tiny: Callable[..., Path], bad: tuple[Path, ...]
) -> None:
    suite = tiny(
        append='\n[[attacks]]\nname = "dies"\n\n[[attacks]]\nname = "sleeps"\n',
        **{"budget = 5": "budget = 5\ntimeout_s = 25"},
    )
    only = {"defense": "none", "checkpoint": "init"}
    store, report = run(suite, plugins=bad, only=only, workers=2)
    reasons = {label.split()[-3]: reason for label, reason in report.failures}
    assert reasons == {
        "dies": "failed: the worker process was killed by signal 9",
        "sleeps": "timeout: over the limit of 25 s",
    }
    row = leaderboard.rows(store.folder)[0]
    assert row["attacks"]["ilrg"]["status"] == "done"
    assert row["attacks"]["sleeps"]["status"] == "timeout"


def test_a_killed_driver_leaves_whole_records_and_the_next_run_finishes(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite, out = tiny(), tmp_path / "killed"
    command = [
        sys.executable,
        "-m",
        "bench.cli",
        "run",
        str(suite),
        "--out",
        str(out),
        "--jobs",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(out.glob("records/attack/*.json"))) < 2:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = list(out.glob("records/*/*.json"))
    assert len(done) >= 2
    assert all(read_record(p) is not None for p in done)
    stamps = {p: p.stat().st_mtime_ns for p in done}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert all(p.stat().st_mtime_ns == t for p, t in stamps.items())
    assert len(list(out.glob("records/*/*.json"))) == 15


def test_two_drivers_on_one_folder_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.prepare()
    with (
        store.locked(),
        pytest.raises(ValueError, match="another leakbench run is writing"),
        Store(tmp_path).locked(),
    ):
        pass


def test_files_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new" * 1000)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_records_of_every_schema_version_are_still_read() -> None:
    folder = Path(__file__).parent / "records"
    for version in range(1, SCHEMA + 1):
        for kind in ("train", "attack"):
            record = read_record(folder / f"v{version}-{kind}.json")
            assert record is not None
            assert record["schema"] == version
            assert record["status"] == "done"


def test_infinities_become_text_so_that_any_json_reader_takes_them() -> None:
    text = to_json({"a": float("inf"), "b": [float("nan"), -float("inf")]})
    assert json.loads(text) == {"a": "inf", "b": ["nan", "-inf"]}


def test_reports_come_in_three_formats(run: Run, tiny: Callable[..., Path]) -> None:
    store, _ = run(tiny(), only={"checkpoint": "init"})
    paths = {p.suffix: p.read_text() for p in _publish(store.folder, ("md", "csv", "json"))}
    assert "| # | defense | accuracy |" in paths[".md"]
    assert "Command: `test`" in paths[".md"]
    lines = paths[".csv"].splitlines()
    assert len(lines) == 1 + 3 * 2
    assert len({len(line.split(",")) for line in lines[:1]}) == 1
    assert len(json.loads(paths[".json"])) == 3


def _boom() -> dict[str, Any]:
    return {"status": "done"}


def test_workers_are_reused_and_everything_is_answered() -> None:
    tasks = [Task(id=i, label=str(i), function=_boom, arguments=()) for i in range(7)]
    outcomes = list(run_in_workers(tasks, jobs=2, threads=1, timeout_s=60))
    assert sorted(o.task.id for o in outcomes) == list(range(7))
    assert all(o.record == {"status": "done"} for o in outcomes)
