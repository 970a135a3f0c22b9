"""`leakbench check` of attacks, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.cli import plugins
from bench.registry import Registry, discover
from bench.sandbox.conformance.plugins import check
from bench.sandbox.conformance.process import check_in_process
from tests.broken_plugins import BROKEN_DEFENSES, HEAD, check_text, failures

# --- attacks --------------------------------------------------------------------------------

ZEROS = "torch.zeros(2, 10, dtype=torch.int64)"


def broken_attack(doc: str, run: str, *, recovers: str = "counts", head: str = "") -> str:
    """An attack by its docstring and what it does."""
    body = "".join(f"        {line}\n" for line in run.split("\n"))
    return f"""
{head}
class Broken(Attack):
    '''{doc}'''
    recovers = frozenset({{"{recovers}"}})
    def run(self, seen, ctx):
{body}"""


def applying(reason: str) -> str:
    text = broken_attack("Applies where it likes.", f"return Reconstruction(label_counts={ZEROS})")
    return f"{text}    def applies(self, seen):\n        return {reason}\n"


FIRST = "runs on fedavg, lenet, batch 1"
BROKEN_ATTACKS = {
    "gives NaN": (FIRST, broken_attack(
        "Gives no numbers.", recovers="images", run="shape = (2, 1, *ctx.network.shape)\n"
        'return Reconstruction(images=torch.full(shape, float("nan")))')),
    "has the wrong shape": (FIRST, broken_attack(
        "Forgets the samples.", recovers="labels",
        run="return Reconstruction(labels=torch.zeros(len(seen.clients), dtype=torch.int64))")),
    "promises more than it gives": (FIRST, broken_attack(
        "Gives nothing.", "return Reconstruction()", recovers="images")),
    "changes what was seen": ("arguments untouched", broken_attack(
        "Changes the broadcast.", "next(iter(seen.before.values())).add_(1.0)\n"
        f"return Reconstruction(label_counts={ZEROS})")),
    "uses the global generator": ("global generators untouched", broken_attack(
        "Guesses by luck.", "return Reconstruction(label_counts=torch.randint(9, (2, 10)))")),
    "is different in every run": ("same seed, same answer", broken_attack(
        "Guesses by turns.", "COUNT[0] += 1\n"
        "return Reconstruction(label_counts=torch.full((2, 10), COUNT[0]))", head="COUNT = [0]")),
    "ignores its budget": ("budget", broken_attack(
        "Spends what it likes.",
        f"return Reconstruction(label_counts={ZEROS}, evaluations=1000)")),
    "reads a file": (FIRST, broken_attack(
        "Looks for the truth beside it.", 'open("init-server-truth.safetensors")')),
    "never applies": ("runs anywhere", applying('"not today"')),
    "gives no reason": (FIRST, applying("False")),
}  # fmt: skip
"""Check and source of an attack by its mistake."""


@pytest.mark.parametrize("what", BROKEN_ATTACKS)
def test_a_broken_attack_is_found(tmp_path: Path, what: str) -> None:
    name, text = BROKEN_ATTACKS[what]
    wrong = failures(check_text(tmp_path, text, fast=True))
    assert name in wrong, wrong
    assert wrong[name].change


# --- command --------------------------------------------------------------------------------

APP = typer.Typer()

APP.command()(plugins.check)

APP.command()(plugins.new)  # two commands, so that names are needed

run = CliRunner()


@pytest.mark.slow
def test_the_command_tells_failures_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(HEAD + BROKEN_DEFENSES["crashes"][2])
    result = run.invoke(APP, ["check", str(path), "--fast"], env={"COLUMNS": "160"})
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stdout
    assert "hook upload" in result.stdout


@pytest.mark.slow
def test_the_command_tells_failures_as_json(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(HEAD + BROKEN_DEFENSES["crashes"][2])
    result = run.invoke(APP, ["check", str(path), "--fast", "--json"])
    assert result.exit_code == 1
    (document,) = json.loads(result.stdout)
    assert document["passed"] is False
    assert {f["status"] for f in document["findings"]} == {"passed", "failed", "skipped"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gausian"], "Did you mean 'gaussian'"),
        (["gaussian"], "needs the setting(s)"),
        (["spm", "--set", "epsilon=-1"], "epsilon must lie in"),
        (["nothing.py"], "no such plugin file"),
    ],
)
def test_bad_input_of_check_gets_one_sentence(arguments: list[str], message: str) -> None:
    result = run.invoke(APP, ["check", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_file_that_does_not_load_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_the_kind")
    result = run.invoke(APP, ["check", str(path)])
    assert result.exit_code == 2
    assert "nothing_of_the_kind" in result.stderr


def test_global_generators_are_left_as_they_were(registry: Registry) -> None:
    before = torch.get_rng_state()
    check(registry, "attack", "prior_only", {})
    assert torch.equal(before, torch.get_rng_state())


def test_a_fast_check_runs_on_one_round_and_says_what_it_left_out() -> None:
    found = check(discover(), "attack", "prior_only", {}, fast=True).findings
    ran = [f for f in found if f.name.startswith("runs on ")]
    assert [f.status for f in ran] == ["passed"] + ["skipped"] * (len(ran) - 1)
    assert {f.reason for f in ran[1:]} == {"left out by --fast"}


# --- misbehaviour ---------------------------------------------------------------------------------

LOOPS = '''
class Loops(Defense):
    """Never comes back from a hook."""
    def upload(self, messages, local, client):
        while True:
            pass
'''
MISBEHAVING = '''
import os

class Talks(Attack):
    """Prints, writes, moves and ends in another precision."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        print("I", "talk")
        with open("notes.txt", "w") as file:
            file.write("x")
        torch.set_default_dtype(torch.float64)
        os.chdir("/")
        return Reconstruction(label_counts=torch.zeros(2, 10, dtype=torch.int64))

class Vanishes(Attack):
    """Takes its process with it."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        os._exit(3)

class Exits(Attack):
    """Would end the command as if all were well."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        raise SystemExit(0)
'''


@pytest.mark.slow
def test_a_plugin_that_loops_is_stopped_and_its_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "loops.py"
    path.write_text(HEAD + LOOPS)
    begin = path.read_text().split("\n").index("        while True:") + 1
    (found,) = check_in_process(str(path), {}, fast=True, timeout_s=15)
    assert (found.kind, found.name) == ("defense", "loops")
    wrong = failures(found)
    assert wrong.keys() == {"ends"}
    reason = "the check 'first rounds' did not end within 15 s: it was at loops.py, line"
    assert wrong["ends"].reason in {f"{reason} {n}, in upload." for n in (begin, begin + 1)}
    assert {f.name for f in found.findings if f.status == "passed"} >= {"docstring", "roles"}


@pytest.mark.slow
def test_a_plugin_that_dies_or_changes_its_process_is_found_and_the_others_are_checked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "misbehaving.py"
    path.write_text(HEAD + MISBEHAVING)
    line = {text.strip(): i for i, text in enumerate(path.read_text().split("\n"), start=1)}
    monkeypatch.chdir(tmp_path)
    wrong = {c.name: failures(c) for c in check_in_process("misbehaving.py", {}, fast=True)}
    assert list(wrong) == ["talks", "vanishes", "exits"]
    vanished = wrong["vanishes"]["ends"].reason
    assert vanished == (
        "the check 'runs on fedavg, lenet, batch 1' ended its process, which exited with 3."
    )
    assert wrong["exits"]["runs on fedavg, lenet, batch 1"].reason == (
        f"run raised SystemExit: 0 (misbehaving.py, line {line['raise SystemExit(0)']})."
    )
    talks = wrong["talks"]
    assert talks.keys() == {"process untouched"}
    assert "torch's default dtype (torch.float32 to" in talks["process untouched"].reason
    assert capfd.readouterr().out == ""
    assert list(tmp_path.iterdir()) == [path]


def test_an_import_that_never_ends_is_found_too(tmp_path: Path) -> None:
    path = tmp_path / "endless.py"
    path.write_text("import time\nprint('here')\ntime.sleep(1000)\n")
    result = run.invoke(APP, ["check", str(path), "--timeout", "1", "--json"])
    assert result.exit_code == 1
    (document,) = json.loads(result.stdout)
    (finding,) = document["findings"]
    assert finding["reason"] == (
        "its import did not end within 1 s: it was at endless.py, line 3, in <module>."
    )


@pytest.mark.parametrize("limit", ["0", "nan", "inf", "-1", "1e300"])
def test_a_limit_that_is_none_is_refused(limit: str) -> None:
    result = run.invoke(APP, ["check", "spm", "--timeout", limit])
    assert result.exit_code == 2
    assert "--timeout must be between 1 and 1e6 seconds" in result.stderr
