"""What a user can mend ends in one sentence and exit code 2; a bug shows its traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from bench import suite as suites
from bench.arguments import checked_arguments
from bench.cli import app
from bench.cli.options import plain_errors
from bench.data import load_dataset
from bench.errors import UserError
from bench.models import build
from bench.protocols.export import load_seen, load_truth
from bench.report import accounts
from bench.toolkit.memory import gpu_share
from bench.toolkit.processes import GPU_SHARE

PLUGIN = '''
from bench.api import Defense


class Picky(Defense):
    """Refuses some of its settings, and breaks on others."""

    def __init__(self, *, share: float = 0.5) -> None:
        if share > 1:
            raise ValueError(f"share must be <= 1, got {share}.")
        if share < 0:
            raise RuntimeError("a bug of the plugin")
'''
SUITE = """
name = "tiny"
version = 1
checkpoints = ["init"]
audit = 0
[protocol]
clients = 4
rounds = 1
local_steps = 1
[[tasks]]
dataset = "digits"
model = "logistic"
[[threats]]
victims = 2
[[defenses]]
name = "none"
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "picky.py").write_text(PLUGIN)
    (tmp_path / "tiny.toml").write_text(SUITE)
    (tmp_path / "broken.toml").write_text("name = ")
    (tmp_path / "empty").mkdir()
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "run.json").write_text("{")
    return tmp_path


def run_with(value: str) -> list[str]:
    return ["run", "HERE/tiny.toml", "--jobs", "0", "--out", "HERE/out", "--set", value]


BAD = {
    "an unknown suite": (["run", "quik"], "Did you mean 'quick'"),
    "a file that is no TOML": (["run", "HERE/broken.toml"], "is no valid TOML"),
    "a folder for a suite": (["run", "HERE/empty"], "no such suite file"),
    "a protocol's bad value": (run_with("protocol.lr=-1"), "protocol.lr: input should be greater"),
    "a task's bad value": (run_with("tasks.0.protocol.lr=-1"), "lr: input should be greater"),
    "a task's unknown key": (run_with("tasks.0.protocol.lrate=1"), "key 'tasks.0.protocol.lrate'"),
    "a rule between two keys": (run_with("threats.0.victims=9"), "observes 9 victims"),
    "an unknown data set": (run_with("tasks.0.dataset=digit"), "Did you mean 'digits'"),
    "a data set's setting of another type": (
        run_with("tasks.0.dataset_settings.size=big"), "setting size of dataset digits",
    ),
    "a data set's setting out of range": (run_with("tasks.0.dataset_settings.size=8"), ">= 11"),
    "a model's setting of another type": (
        run_with('tasks.0={dataset = "digits", model = "resnet18", model_settings.width = true}'),
        "setting width of model resnet18",
    ),
    "a model that cannot take the data": (
        run_with('tasks.0={dataset = "breast_cancer", model = "lenet"}'), "takes images",
    ),
    "a plugin's setting out of range": (["ledger", "spm", "--set", "epsilon=-1.0"], "epsilon must"),
    "a plugin's setting of another type": (
        ["ledger", "spm", "--set", "epsilon=much"], "setting epsilon of defense 'spm'",
    ),
    "a constructor that refuses a value": (
        ["ledger", "picky", "--plugin", "HERE/picky.py", "--set", "share=2.0"], "must be <= 1",
    ),
    "a missing fact": (["ledger", "none", "--facts", "rounds=10"], "needs parameters=N"),
    "a fact out of range": (["ledger", "none", "--facts", "parameters=0"], "must be >= 1"),
    "a setting beyond floating point": (
        ["ledger", "dp_sl", "--set", "clip=1e200", "--set", "smashed_std=1", "--set",
         "label_std=1"], "cannot be computed in floating point with clip=1e+200",
    ),
    "too few draws": (["audit", "none", "--draws", "1"], "draws must be >= 100"),
    "a folder without a run": (["report", "HERE/empty"], "run.json"),
    "a spoilt run": (["report", "HERE/spoilt"], "run.json"),
    "a plugin file that is not there": (["check", "HERE/none.py"], "HERE/none.py"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(what: str, here: Path) -> None:
    arguments, sentence = BAD[what]
    done = call(*(a.replace("HERE", str(here)) for a in arguments))
    lines = [t for t in done.stderr.splitlines() if not t.startswith("Runs ")]  # of --plugin
    assert done.exit_code == 2, done.output
    assert len(lines) == 1
    assert lines[0].startswith("leakbench: ")
    assert sentence.replace("HERE", str(here)) in lines[0]
    assert not done.stdout


def test_a_bug_keeps_its_traceback_and_exits_with_1(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(accounts, "account", broken)
    done = call("ledger", "none")
    assert done.exit_code == 1
    assert type(done.exception) is ValueError
    plugin = call("ledger", "picky", "--plugin", str(here / "picky.py"), "--set", "share=-1.0")
    assert plugin.exit_code == 1
    assert type(plugin.exception) is RuntimeError


def test_only_a_user_error_becomes_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, plain_errors():
        raise UserError("clients must be >= 1, got 0.")
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "leakbench: clients must be >= 1, got 0.\n"
    with pytest.raises(ValueError, match="a bug"), plain_errors():
        raise ValueError("a bug")


def test_functions_below_the_command_tell_bad_input_from_a_wrong_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("x", "0", "1.5"):
        monkeypatch.setenv(GPU_SHARE, value)
        with pytest.raises(UserError, match=r"must be a number in \(0, 1\]"):
            gpu_share()
    with pytest.raises(UserError, match="no complete export"):
        load_seen(tmp_path / "nowhere")
    (tmp_path / "spoilt.safetensors").write_text("{")
    for name in ("nowhere.safetensors", "spoilt.safetensors"):
        with pytest.raises(UserError, match="does not hold the truth"):
            load_truth(tmp_path / name)
    with pytest.raises(UserError, match="setting gray of dataset"):
        load_dataset(f"folder:{tmp_path}", seed=0, options={"gray": "no"})
    with pytest.raises(UserError, match="no such suite file"):
        suites.read_suite("nowhere.toml")
    network = build("logistic", shape=(1, 16, 16), classes=10)
    with pytest.raises(ValueError, match="has no stage") as wrong:
        network.run({}, torch.zeros(1, 1, 16, 16), last="nope")
    assert not isinstance(wrong.value, UserError)


def test_arguments_are_checked_against_annotations() -> None:
    def made(
        *, size: int, rate: float = 0.1, names: list[str] | None = None, seed: int = 0
    ) -> None:
        """Takes what a plugin may take."""

    def checked(**given: object) -> dict[str, object]:
        return checked_arguments(made, given, what="thing", where="x.toml", supplied=["seed"])

    assert checked(size=3, rate=1) == {"size": 3, "rate": 1}
    for given, sentence in (
        ({}, r"thing in x.toml needs the setting\(s\) size\."),
        ({"size": 1.5}, r"setting size of thing in x.toml: .*, got 1.5\."),
        ({"size": True}, r"setting size of thing in x.toml"),
        ({"size": 1, "names": "a"}, r"setting names of thing"),
        ({"size": 1, "seed": 2}, r"Unknown setting of thing 'seed' in x.toml"),
        ({"siz": 1}, r"Did you mean 'size'"),
    ):
        with pytest.raises(UserError, match=sentence):
            checked(**given)
