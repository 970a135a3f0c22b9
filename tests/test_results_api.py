"""The Python API gives what the command line gives, as tables and objects."""

import json
import math
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench
from bench.harness.store import Store
from bench.metrics.named import FLOOR_SUFFIX
from bench.records import AttackRecord
from bench.results import Results
from tests.conftest import RAISING, TINY
from tests.small_folders import leakbench

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def results(tiny_made: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The tiny suite, finished, and an attack on images that optimises."""
    suite = tomllib.loads(TINY)
    # Of a budget that solves nothing, so that it runs twice where nothing defends.
    suite["attacks"].append({"name": "dlg", "checkpoints": ["init"], "budget": 2})
    out = shutil.copytree(tiny_made, tmp_path_factory.mktemp("api") / "run")
    return bench.run(suite, out=out, jobs=0, progress=False)


@pytest.mark.parametrize(
    "code",
    [
        "import sys, bench.report.files, bench.report.html, bench.report.terminal; "
        "assert not {'torch', 'scipy', 'pandas', 'matplotlib'} & set(sys.modules); "
        "import bench, bench.cli, bench.sandbox.conformance.process; "
        "assert not {'torch', 'pandas', 'matplotlib', 'bench.results'} & set(sys.modules)",
        pytest.param(
            "import sys, bench; assert callable(bench.run) and callable(bench.load); "
            "import bench.results; assert bench.Results is bench.results.Results; "
            "assert 'pandas' not in sys.modules and 'matplotlib' not in sys.modules",
            marks=pytest.mark.slow,  # the import of torch
        ),
    ],
    ids=["reports", "results"],
)
def test_importing_bench_or_its_reports_brings_no_torch_pandas_or_matplotlib(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert {"run", "load", "Results"} <= set(dir(bench))
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = bench.rum


def test_a_run_takes_every_override_and_makes_the_records_that_its_command_makes(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, out = tiny(), tmp_path / "out"
    monkeypatch.setattr(torch, "set_num_threads", (threads := []).append)
    made = bench.run(
        suite, jobs=0, out=out, progress=False,
        only={"defense": "spm", "checkpoint": "init", "seed": 0},
        overrides={
            "description": 'a "quoted" text', "seeds": [0, 1], "delta": 1e-6,
            "threats.0.labels": True, "defenses.1.settings": {"epsilon": [3.0]},
            "protocol.lr": 0.2,
        },
    )  # fmt: skip
    assert made.failures == []
    assert threads == [1, torch.get_num_threads()]  # one as in workers, then as before
    monkeypatch.undo()
    run = json.loads((out / "run.json").read_text())
    assert run["command"].startswith("leakbench run ")
    assert " --only defense=spm --only checkpoint=init --only seed=0 --set " in run["command"]
    assert run["command"].endswith(" --set protocol.lr=0.2")
    options = shlex.split(run["command"])[3:]
    _, text = leakbench("plan", suite, *options, "--out", out)
    assert "1 trainings (1 cached), 2 attack cells (2 cached)." in text
    taken = run["suite"]
    assert taken["description"] == 'a "quoted" text'
    assert (taken["seeds"], taken["delta"], taken["threats"][0]["labels"]) == ([0, 1], 1e-6, True)
    assert [r["settings"] for r in made.rows] == [{"epsilon": 3.0}]
    assert json.loads((out / "leaderboard.json").read_text()) == made.rows
    assert (out / "leaderboard.csv").is_file()
    assert (out / "leaderboard.md").is_file()


def test_a_shard_is_a_part_with_a_folder_and_a_command_of_its_own(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tiny()
    monkeypatch.chdir(tmp_path)
    made = bench.run(suite, only={"checkpoint": "init"}, shard=(2, 2), jobs=0, progress=False)
    assert made.folder.name == "tiny-2-of-2"
    run = json.loads((made.folder / "run.json").read_text())
    assert [t["settings"] for t in run["trainings"]] == [{"epsilon": 0.5}]  # the second of three
    assert run["command"].endswith(" --only checkpoint=init --shard 2/2")


def test_the_leaderboard_frame_holds_every_figure_of_the_json(results: Results) -> None:
    rows = json.loads((results.folder / "leaderboard.json").read_text())
    frame = results.leaderboard(wide=True)
    assert len(frame) == len(rows) == 6
    assert frame.columns[0] == "protocol"
    for (_, line), row in zip(frame.iterrows(), rows, strict=True):
        for name in ("protocol", "dataset", "model", "checkpoint", "defense", "variant"):
            assert line[name] == row[name]
        assert (line["tied_for_best"], line["like_undefended"]) == (
            row["marks"]["best"], row["marks"]["undefended"],
        )  # fmt: skip
        assert line["leakage_lo"] <= line["leakage"] == row["leakage"]["mean"]
        assert line["accuracy"] == row["accuracy"]["mean"]
        assert (line["accuracy_lo"], line["accuracy_hi"]) == (
            row["accuracy"]["lo"], row["accuracy"]["hi"],
        )  # fmt: skip
        assert line["eps_record"] == float(row["eps_record"])
        claimed = row["eps_claimed"]
        assert math.isnan(line["eps_claimed"]) if claimed is None else (
            line["eps_claimed"] == float(claimed))  # fmt: skip
        if row["worst"] is not None:
            assert line["worst_ssim"] == row["worst"]["ssim"]["mean"]
            assert line["worst_attack"] == row["worst"]["attack"]
        assert line["flags"] == "; ".join(f["text"] for f in row["flags"])
        for attack, entry in row["attacks"].items():
            for metric in ("ssim", "mse", "lnacc", "label_accuracy"):
                if entry[metric] is not None:
                    assert line[f"{attack}_{metric}"] == entry[metric]["mean"]
    assert frame["eps_record"].dtype == float
    assert math.isinf(frame["eps_record"].max())
    only = results.leaderboard(checkpoint="init", defense="spm", dataset="digits")
    assert len(only) == 2
    assert set(only["setting"]) == {"spm(epsilon=0.5)", "spm(epsilon=2)"}


def test_the_attack_frame_holds_every_entry_of_the_json(results: Results) -> None:
    rows = json.loads((results.folder / "leaderboard.json").read_text())
    frame = results.attacks()
    entries = [(r, n, e) for r in rows for n, e in r["attacks"].items()]
    assert len(frame) == len(entries)
    for (_, line), (row, name, entry) in zip(frame.iterrows(), entries, strict=True):
        assert (line["defense"], line["attack"]) == (row["defense"], name)
        assert (line["status"], line["n"], line["failed"]) == (
            entry["status"], entry["n"], entry["failed"],
        )  # fmt: skip
        for metric in ("ssim", "mse", "psnr", "success", "leacc", "lnacc", "irec"):
            figures = entry[metric] or {"mean": None, "lo": None, "hi": None}
            for column, value in (
                (metric, figures["mean"]), (f"{metric}_lo", figures["lo"]),
                (f"{metric}_hi", figures["hi"]), (f"{metric}_floor", entry["floor"].get(metric)),
            ):  # fmt: skip
                assert math.isnan(line[column]) if value is None else line[column] == value
    assert frame["ssim_floor" + FLOOR_SUFFIX].notna().any()
    measured = frame[(frame["attack"] == "dlg")]["gain_at_twice_budget"]
    assert measured.notna().all()


def test_the_victim_frame_averages_to_the_attack_frame(results: Results) -> None:
    victims = results.victims(attack="dlg")
    assert len(victims) == 3 * 2
    means = victims.groupby("setting")["ssim"].mean()
    floors = victims.groupby("setting")["ssim_floor"].mean()
    board = results.attacks(checkpoint="init").query("attack == 'dlg'").set_index("setting")
    for name in means.index:
        assert means[name] == pytest.approx(board.loc[name, "ssim"], abs=1e-12)
        assert floors[name] == pytest.approx(board.loc[name, "ssim_floor"], abs=1e-12)
    record = Store(results.folder).read("attack", victims["key"].iloc[0])
    assert isinstance(record, AttackRecord)
    assert victims["ssim"].iloc[0] == record.values["ssim"][0]


def test_failures_are_named_with_their_reasons_and_progress_is_shown_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "raising.py"
    plugin.write_text(RAISING)
    suite = tomllib.loads(TINY)
    suite["attacks"] = [{"name": "raising"}]
    made = bench.run(
        suite, only={"defense": "none", "checkpoint": "init"}, jobs=0, out=tmp_path / "out",
        plugins=[plugin], progress=True,
    )  # fmt: skip
    assert "2 of 2 done, 1 failed" in capsys.readouterr().out
    assert made.failures == [
        ("digits/mlp_spm/none/raising/init/seed=0", "failed: RuntimeError: boom")
    ]
    assert "1 failed" in repr(made)


def test_a_folder_loads_again_and_shows_itself(results: Results) -> None:
    again = bench.load(str(results.folder))
    assert again.rows == results.rows
    assert repr(again).startswith(
        "Results(tiny v1: 3 trainings, 15 cells, 0 failed, unverified, in "
    )
    assert "<table" in again._repr_html_()
    assert "<td>spm</td>" in again._repr_html_()
    assert "points of accuracy" in again._repr_html_()


def test_names_in_a_leaderboard_are_escaped_in_notebooks(results: Results) -> None:
    loaded = bench.load(results.folder)
    loaded._files.rows = [replace(r, defense="<script> this & that") for r in loaded._files.rows]
    shown = loaded._repr_html_()
    assert "&lt;script&gt; this &amp; that" in shown
    assert "<script>" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"suite": "quik"}, "Did you mean 'quick'"),
        ({"suite": 3}, "suite must be a name, a TOML file or a dict, got int"),
        ({"suite": {"name": "x", "version": 1}}, "the suite: the key 'protocol' is missing."),
        ({"suite": "quick", "jobs": -1}, "jobs must be a whole number >= 0, got -1"),
        ({"suite": "quick", "shard": (3, 2)}, "shard 3/2 does not exist"),
        ({"suite": "quick", "only": {"defence": "spm"}}, "Did you mean 'defense'"),
        ({"suite": "quick", "overrides": {"budget": 0}}, "got 0"),
        ({"suite": "quick", "overrides": {"threats.0.aux": None}}, "threats.0.aux cannot be None"),
        ({"suite": "quick", "plugins": [dict]}, "the class dict: save it to a file"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bench.run(**{"out": tmp_path / "out", "jobs": 0, "progress": False, **arguments})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_overrides_of_a_dict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="change the dict itself"):
        bench.run(tomllib.loads(TINY), overrides={"budget": 3}, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda r: bench.load("/no/such/folder"), "is no result folder"),
        (lambda r: r.leaderboard(defense="smp"), "Did you mean 'spm'"),
        (lambda r: r.attacks(checkpoint="last"), "Known: final, init"),
        (lambda r: r.victims(attack="dgl"), "Did you mean 'dlg'"),
        (lambda r: r.victims(attack="dlg", checkpoint="final"), "no cell of"),
        (lambda r: r.plot_pareto(dataset="mnist"), "Unknown dataset 'mnist'"),
        (lambda r: r.pictures(attack="ilrg"), "rebuilds no images"),
        (lambda r: r.pictures(settings={"epsilon": 9}), "there are none, spm(epsilon=0.5)"),
        (lambda r: r.pictures(attack="dlg", victims=0), "victims must be a whole number >= 1"),
        (lambda r: r.pictures(attack="dlg", width="wide"), "width must be column or page"),
    ],
)
def test_a_filter_that_matches_nothing_says_what_there_is(
    results: Results, ask: Callable[[Results], object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ask(results)


def test_results_draw_figures(results: Results) -> None:
    grid = results.pictures(attack="dlg", victims=2)
    assert len(grid.axes) == 4  # the private line and three settings
    (strip,) = grid.axes[0].images
    assert strip.get_array().shape[:2] == (16, 2 * (16 + 2))  # two images, white beside each
    assert results.plot_pareto(checkpoint="init").axes


SCRIPT = """
import tomllib
from dataclasses import replace
import bench
{guard}bench.run(tomllib.loads({tiny!r}), out={out!r}, jobs=1, progress=False,
{space}         only={{"defense": "none", "checkpoint": "init", "attack": "prior_only"}})
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_without_a_main_guard_is_told_so(
    tmp_path: Path, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers would import it again and start workers of their own."""

    def reached(*arguments: object, **named: object) -> None:
        raise RuntimeError("workers start here")

    monkeypatch.setattr("bench.harness.runner.run", reached)
    script, out = tmp_path / "script.py", tmp_path / "out"
    guard = 'if __name__ == "__main__":\n    ' if guarded else ""
    script.write_text(SCRIPT.format(guard=guard, space="    ", tiny=TINY, out=str(out)))
    error = RuntimeError if guarded else ValueError
    message = "workers start here" if guarded else "which import this script again: call it under"
    with pytest.raises(error, match=message):
        runpy.run_path(str(script), run_name="__main__")
    assert not out.exists()


def test_a_plugin_edited_between_two_runs_of_one_process_runs_as_edited(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite, plugin = tiny(), tmp_path / "told.py"
    text = (
        "import torch\nfrom bench.api import Attack, Reconstruction\n\n"
        "class Told(Attack):\n"
        "    def run(self, seen, ctx):\n"
        "        counts = torch.zeros(len(seen.clients), ctx.network.classes, dtype=torch.int64)\n"
        "        return Reconstruction(label_counts=counts, notes=('NOTE',))\n"
    )
    suite.write_text(suite.read_text() + '\n[[attacks]]\nname = "told"\n')
    only = {"defense": "none", "attack": "told", "checkpoint": "init"}
    for note in ("first", "second"):
        plugin.write_text(text.replace("NOTE", note))
        made = bench.run(suite, only=only, jobs=0,
                         plugins=[plugin], out=tmp_path / "out", progress=False)  # fmt: skip
        assert {n for r in made.rows for n in r["attacks"]["told"]["notes"]} == {note}
