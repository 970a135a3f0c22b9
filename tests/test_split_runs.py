"""Split suites from the command line: what runs, what is refused, what does not apply."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_cli import leakbench

SPLIT = """name = "splitfed"
cut = "block1"
clients = 3
rounds = 1
local_steps = 1
batch = 8
lr = 0.1
partition = "iid"
"""
FEDAVG = """name = "fedavg"
clients = 3
rounds = 1
local_steps = 1
batch = 8
lr = 0.1
"""
SPM = """name = "spm"
settings = { epsilon = [0.5, 2.0] }
"""
CUTMIX = """name = "dp_cutmix"
settings = { patches = 16, group = 2, clip = 1.0, smashed_std = 0.1, label_std = 0.1 }
"""
LENET = 'model = "lenet"'


def split(tiny: Callable[..., Path], **more: str) -> str:
    changes = {FEDAVG: SPLIT, SPM: CUTMIX, 'model = "mlp_spm"': LENET} | more
    return str(tiny(**changes, append='\n[[attacks]]\nname = "split_label"\n'))


def test_a_split_suite_runs(tiny: Callable[..., Path], tmp_path: Path) -> None:
    code, text = leakbench("run", split(tiny), "--out", str(tmp_path / "out"), "--jobs", "0")
    assert code == 0, text
    assert "14 run, 0 cached, 0 failed" in text
    rows = json.loads((tmp_path / "out" / "leaderboard.json").read_text())
    undefended = next(r for r in rows if (r["defense"], r["checkpoint"]) == ("none", "init"))
    assert undefended["attacks"]["split_label"]["label_accuracy"]["mean"] == 1.0
    assert undefended["eps_record"] == "inf"


def test_what_mixes_smashed_data_does_not_apply_without_any(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite = str(tiny(**{SPM: CUTMIX}))
    code, text = leakbench("run", suite, "--out", str(tmp_path / "out"), "--jobs", "0")
    assert code == 0, text
    (record,) = [
        json.loads(p.read_text())
        for p in (tmp_path / "out" / "records" / "train").glob("*.json")
        if "dp_cutmix" in p.read_text()
    ]
    assert record["status"] == "not_applicable"
    assert record["reason"] == "no smashed data leaves the client"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({'cut = "block1"': 'cut = "block9"'}, "cannot be cut after 'block9'"),
        ({'cut = "block1"': "cut = []"}, "splitfed needs a cut"),
        ({"group = 2": "group = 4"}, "dp_cutmix needs 4 clients in every round, but 3 of 3"),
        ({"group = 2": "group = 3"}, "needs 3 clients that take part together, but threat"),
        ({"patches = 16": "patches = 0"}, "patches"),
    ],
)
def test_bad_split_settings_get_one_sentence(
    tiny: Callable[..., Path], tmp_path: Path, change: dict[str, str], message: str
) -> None:
    path = Path(split(tiny))
    text = path.read_text()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    code, shown = leakbench("run", str(path), "--out", str(tmp_path / "out"), "--jobs", "0")
    assert code == 2, shown
    assert message in shown
    assert not (tmp_path / "out").exists()


def test_patches_that_do_not_divide_the_map_fail_with_a_sentence(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = Path(split(tiny))
    path.write_text(path.read_text().replace("patches = 16", "patches = 9"))
    code, shown = leakbench("run", str(path), "--out", str(tmp_path / "out"), "--jobs", "0")
    assert code == 1, shown
    assert "patches must be a square number whose root divides" in shown
