"""The command line: what a user types and reads."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import bench
from bench.cli.runs import quote_command
from bench.registry import Registry
from tests.conftest import RAISING
from tests.small_folders import leakbench


def test_run_plan_and_report_work_together(tiny: Callable[..., Path], tmp_path: Path) -> None:
    suite, out = str(tiny(**{'["init", "final"]': '["init"]'})), str(tmp_path / "out")
    code, text = leakbench("plan", suite, "--out", out)
    assert code == 0
    assert "3 trainings (0 cached), 6 attack cells (0 cached)." in text
    code, text = leakbench("run", suite, "--out", out, "--jobs", "0")
    assert code == 0, text
    assert "9 run, 0 cached, 0 failed" in text
    assert "among those that cost at most 5 points of accuracy" in text
    assert f"Every row and attack: leakbench report {out} --details" in text
    code, text = leakbench("report", out, "--details", "--loss", "10")
    assert code == 0
    assert "among those that cost at most 10 points of accuracy" in text
    assert re.search(r"spm .{0,80}epsilon=0\.5", text)
    code, text = leakbench("report", out, "--loss", "101")
    assert (code, "less than or equal to 100" in text) == (2, True)
    code, text = leakbench("plan", suite, "--out", out)
    assert "3 trainings (3 cached), 6 attack cells (6 cached)." in text
    code, text = leakbench("report", out, "--format", "md,tex")
    assert code == 0
    assert "leaderboard.md" in text
    overview = tmp_path / "out" / "overview.tex"
    assert overview.read_text().count("among those that cost at most 5 points") == 1
    assert leakbench("report", out, "--format", "tex", "--loss", "10")[0] == 0
    assert overview.read_text().count("among those that cost at most 10 points") == 1
    rows = json.loads((tmp_path / "out" / "leaderboard.json").read_text())
    assert len(rows) == 3


def test_the_version_is_printed_and_is_that_of_the_citation_and_the_changes() -> None:
    code, text = leakbench("--version")
    assert (code, text) == (0, f"leakbench {bench.__version__}")
    root = Path(__file__).parents[1]
    assert f"version: {bench.__version__}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## {bench.__version__} (" in (root / "CHANGELOG.md").read_text()


def test_list_shows_everything_as_text_and_json(tmp_path: Path, registry: Registry) -> None:
    code, text = leakbench("list")
    assert code == 0
    for name in ("spm", "ilrg", "photos", "resnet18", "quick", "folder:PATH"):
        assert name in text
    code, text = leakbench("list", "defenses", "--json")
    listed = {e["name"] for e in json.loads(text)["defenses"]}
    assert listed == set(registry.names("defense")) >= {"none", "spm", "dp_cutmix"}
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_the_kind")
    code, text = leakbench("list", "defenses", "--plugin", str(broken))
    assert code == 0
    assert "broken: " in text
    assert "nothing_of_the_kind" in text


def test_ledger_prints_claim_proof_and_constants() -> None:
    arguments = ("ledger", "spm", "--set", "epsilon=0.3", "--facts", "parameters=203530,rounds=50")
    code, text = leakbench(*arguments)
    assert code == 0
    assert "The paper claims epsilon 0.3 for one coordinate" in text
    assert "Nothing is proven about how well the server can tell" in text
    assert "The magnitude of every uploaded value: no DP" in text
    code, text = leakbench(*arguments, "--json")
    document = json.loads(text)
    assert document["eps_record"] == "inf"
    assert document["constants"]["bias_factor"] == pytest.approx(0.574443, rel=1e-5)
    assert document["constants"]["variance_factor"] == pytest.approx(17.2797, rel=1e-5)
    code, text = leakbench(
        "ledger", "gaussian", "--set", "noise_multiplier=8", "--set", "clip_norm=1",
        "--facts", "parameters=10,rounds=20,participation=0.5,participations=10", "--json",
    )  # fmt: skip
    document = json.loads(text)
    assert 0 < document["eps_claimed"] < document["eps_record"] < 10


def test_the_recorded_command_names_no_folder_of_this_machine() -> None:
    arguments = ["run", "quick", "--data-dir", "/home/me", "--set", "seeds=[1]", "--out=/x/y"]
    assert quote_command(arguments) == ["leakbench", "run", "quick", "--set", "seeds=[1]"]


def test_a_failed_cell_ends_with_exit_code_1(tiny: Callable[..., Path], tmp_path: Path) -> None:
    plugin = tmp_path / "raising.py"
    plugin.write_text(RAISING)
    suite = tiny(append='\n[[attacks]]\nname = "raising"\n')
    code, text = leakbench(
        "run", str(suite), "--out", str(tmp_path / "out"), "--jobs", "0",
        "--plugin", str(plugin), "--only", "defense=none", "--only", "checkpoint=init",
    )  # fmt: skip
    assert code == 1
    assert "RuntimeError: boom" in text
    assert "4 run, 0 cached, 1 failed" in text


def test_the_docs_plugin_example_runs(tiny: Callable[..., Path], tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "api" / "index.md").read_text()
    code_block = page.split("```python\n")[1].split("```")[0]
    assert "class MyNoise" in code_block
    assert len(code_block.strip().splitlines()) <= 40
    plugin = tmp_path / "my_noise.py"
    plugin.write_text(code_block)
    suite = tiny(append='\n[[defenses]]\nname = "my_noise"\nsettings = { std = 0.01 }\n')
    code, text = leakbench(
        "run", str(suite), "--out", str(tmp_path / "out"), "--jobs", "0",
        "--plugin", str(plugin), "--only", "defense=my_noise", "--only", "checkpoint=init",
    )  # fmt: skip
    assert code == 0, text
    rows = json.loads((tmp_path / "out" / "leaderboard.json").read_text())
    assert rows[0]["eps_record"] == "inf"


@pytest.mark.slow
def test_a_reader_who_goes_away_ends_nothing_with_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen([sys.executable, "-m", "bench.cli", "list", "suites"], stdout=writer,
                          stderr=subprocess.PIPE) as command:  # fmt: skip
        os.close(writer)
        _, errors = command.communicate()
    assert (command.returncode, errors) == (0, b"")


def test_a_warning_of_a_plugin_is_one_plain_sentence() -> None:
    code, text = leakbench("ledger", "ms_pafl", "--set", "epsilon=10")
    assert code == 0
    assert "warning: epsilon 10 is beyond Lemma 1" in text
    assert "UserWarning" not in text
