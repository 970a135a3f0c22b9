"""Split suites from the command line: what runs, what is refused, what does not apply."""

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
    suite = split(tiny, **{'["init", "final"]': '["init"]'})
    code, text = leakbench("run", suite, "--out", str(tmp_path / "out"), "--jobs", "0")
    assert code == 0, text
    assert "8 run, 0 cached, 0 failed" in text
    rows = json.loads((tmp_path / "out" / "leaderboard.json").read_text())
    undefended = next(r for r in rows if (r["defense"], r["checkpoint"]) == ("none", "init"))
    assert undefended["attacks"]["split_label"]["label_accuracy"]["mean"] == 1.0
    assert undefended["eps_record"] == "inf"


@pytest.mark.slow
def test_what_mixes_smashed_data_does_not_apply_without_any(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    reason = why_not_applicable(str(tiny(**{SPM: CUTMIX})), tmp_path / "out")
    assert reason == "no smashed data leaves the client"


@pytest.mark.slow
def test_what_mixes_patches_does_not_apply_to_vectors(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    suite = split(tiny, **{LENET: 'model = "mlp3"', 'cut = "block1"': 'cut = "hidden1"'})
    reason = why_not_applicable(suite, tmp_path / "out")
    assert reason.startswith("patches need smashed data of tokens")


def why_not_applicable(suite: str, out: Path) -> str:
    """The reason in dp_cutmix's record of a run in which nothing fails."""
    code, text = leakbench("run", suite, "--out", str(out), "--jobs", "0")
    assert code == 0, text
    assert "0 failed" in text
    records = [json.loads(p.read_text()) for p in (out / "records" / "train").glob("*.json")]
    (record,) = [r for r in records if r["inputs"]["defense"] == "dp_cutmix"]
    assert record["status"] == "not_applicable"
    return record["reason"]


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
    others = '[[defenses]]\nname = "none"\n'
    suite = split(tiny, **{"patches = 16": "patches = 9", others: ""})
    code, shown = leakbench("run", suite, "--out", str(tmp_path / "out"), "--jobs", "0")
    assert code == 1, shown
    assert "patches must be a square number whose root divides" in shown
