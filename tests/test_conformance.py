"""`leakbench check`: how deliberately broken plugins are found, and the command."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from bench.cli import plugins
from bench.contract.defense import Client, Defense
from bench.contract.mechanisms import GaussianNoise
from bench.contract.messages import Part
from bench.registry import Registry
from bench.sandbox.conformance import defenses, process
from bench.sandbox.conformance.leaks import _alike
from bench.sandbox.conformance.playground import grounds, private_data
from bench.sandbox.conformance.plugins import check, check_plugins
from bench.sandbox.conformance.process import check_in_process
from bench.sandbox.conformance.proofs import check_audit
from bench.sandbox.findings import Broken, NotChecked
from bench.sandbox.noise import Pair, check_independence, checks_of
from bench.seeding import generator
from defenses.noise import GaussianUpdate
from tests.broken_plugins import (
    BROKEN_DEFENSES,
    HEAD,
    PROVES_ENOUGH,
    PROVES_TOO_MUCH,
    check_text,
    failures,
    outcome_of,
)

# --- defenses -------------------------------------------------------------------------------------

SLOW = {
    "proves by a Gaussian that is Laplace", "contradicts itself",
    "keeps other signs", "sends the labels", "lies about bits", "takes any number",
    "does something at zero strength", "halves its sensitivity", "clips elsewhere",
    "does not own its role", "has no annotation", "flips whole rows",
}  # fmt: skip
"""Kinds of mistakes of which another is found in the fast tests."""


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=pytest.mark.slow if w in SLOW else ()) for w in BROKEN_DEFENSES]
)
def test_a_broken_defense_is_found_with_its_hook(tmp_path: Path, what: str) -> None:
    name, hook, text = BROKEN_DEFENSES[what]
    wrong = failures(check_text(tmp_path, text, until=name))
    assert name in wrong, wrong
    assert wrong[name].hook == hook
    assert wrong[name].reason.endswith((".", ":"))
    assert wrong[name].change
    assert "Traceback" not in wrong[name].reason


QUICK = {
    "the largest, others zero", "the largest, others exact zeros",
    "rows of the classes that a client has", "an event for the pattern", "every second value",
}  # fmt: skip
"""Proofs that are checked in the fast tests."""


def quick_first(cases: Mapping[str, str]) -> list[Any]:
    return [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in cases]


@pytest.fixture
def one_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of the protocol alone on which proofs are checked."""
    monkeypatch.setattr(defenses, "grounds", lambda cut: grounds()[:1])


@pytest.mark.usefixtures("one_protocol")
@pytest.mark.parametrize("what", quick_first(PROVES_TOO_MUCH))
def test_a_proof_without_an_event_for_which_values_are_sent_is_refused(
    tmp_path: Path, what: str
) -> None:
    wrong = failures(check_text(tmp_path, PROVES_TOO_MUCH[what], fast=True))
    assert list(wrong) == ["which values are sent"]
    assert re.fullmatch(
        r"guarantee\(\) proves an epsilon of \S+ for a record, but which values are sent follows "
        r"from the data without noise: \d+ of \d+ values are always sent for one input and never "
        r"for another\.",
        wrong["which values are sent"].reason,
    )
    assert "Unprotected" in wrong["which values are sent"].change


@pytest.mark.usefixtures("one_protocol")
@pytest.mark.parametrize("what", quick_first(PROVES_ENOUGH))
def test_values_that_the_data_does_not_choose_and_declared_choices_pass(
    tmp_path: Path, what: str
) -> None:
    conformance = check_text(tmp_path, PROVES_ENOUGH[what], fast=True)
    assert not failures(conformance)
    (pattern,) = (f for f in conformance.findings if f.name == "which values are sent")
    assert pattern.status == ("skipped" if "event" in what else "passed")


class Alone(GaussianUpdate):
    """Uploads are made without whole rounds, which take longer."""

    requires = frozenset({"nothing"})


class FirstOpen(Alone):
    """Leaves the first value of every tensor without noise."""

    def _noise(self, values: Tensor, rng: torch.Generator) -> Tensor:
        noise = super()._noise(values, rng)
        noise.view(-1)[0] = 0.0
        return noise


def audited(cls: type[GaussianUpdate], **settings: float) -> str:
    def built(given: Mapping[str, Any]) -> Defense:
        return cls(**given)

    return check_audit(built(settings), settings, built)


def test_a_false_proof_that_is_vacuous_at_its_settings_is_refuted_at_the_strong_end() -> None:
    with pytest.raises(Broken, match=r"hooks at noise_multiplier=10 shows an epsilon of at least"):
        audited(FirstOpen, noise_multiplier=0.01, clip_norm=1.0)


def test_a_proof_that_no_draws_can_refute_is_not_testable() -> None:
    said = audited(Alone, noise_multiplier=0.01, clip_norm=1.0)
    tested, untested = said.split("; ")
    assert tested.startswith("consistent at noise_multiplier=10, epsilon of one release >= ")
    assert re.fullmatch(
        r"not testable: 500 draws refute no proof above 2\.7\d?, and it says 2\.085e\+04", untested
    )

    class AtOne(Alone):
        strength = None

    with pytest.raises(NotChecked, match=r"^not testable: 500 draws refute no proof above 2\.7"):
        audited(AtOne, noise_multiplier=0.01, clip_norm=1.0)
    assert audited(AtOne, noise_multiplier=4.0, clip_norm=1.0).startswith("consistent, epsilon")


def noise_finding(noise: Tensor, *, std: float, size: float) -> tuple[str, str]:
    """Status and reason where `noise` [uploads, values] is added to values of that size."""
    signs = torch.ones(noise.shape[1])
    signs[::2] = -1
    pairs = [
        Pair(given={"w": Part(values=size * signs)}, sent={"w": Part(values=size * signs + n)})
        for n in noise
    ]
    ((_, check_noise),) = checks_of((GaussianNoise(of="update", std=std),), lambda of: pairs)
    return outcome_of(check_noise)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, "test noise"))


@pytest.mark.parametrize("std", [1e-5, 1e-4, 2e-4, 1e-3])
def test_noise_that_rounding_hides_is_never_passed(std: float) -> None:
    honest = noise_finding(std * drawn(60, 384), std=std, size=0.5)
    nothing = noise_finding(torch.zeros(60, 384), std=std, size=0.5)
    assert honest[0] == "skipped"
    assert "cannot be told from rounding" in honest[1]
    assert nothing[0] == ("skipped" if std < 5e-5 else "failed")


def test_independent_draws_pass_and_those_that_hang_together_do_not() -> None:
    free = drawn(60, 384)
    assert noise_finding(0.1 * free, std=0.1, size=0.5)[0] == "passed"
    rows = free[:, ::24].repeat_interleave(24, dim=1)
    columns = free[:, :24].repeat(1, 16)
    pairs = torch.stack([free[:30], -free[:30]], dim=1).flatten(0, 1)
    far = torch.cat([free[:30], free[:30]])
    sums = (free - free.roll(1, dims=0)) / 2**0.5
    for noise, which in (
        (rows, "neighbouring draws"), (columns, "draws 24 values apart"),
        (pairs, "draws 384 values apart"), (far, "draws 11520 values apart"),
        (sums, "draws 384 values apart"),
    ):  # fmt: skip
        # Few distinct draws have a level of their own, which is not what is tested here.
        status, reason = noise_finding(0.1 * noise / noise.std(), std=0.1, size=0.5)
        assert status == "failed"
        assert f"declared independent, but {which} have a correlation" in reason


def test_honest_draws_of_every_law_are_hardly_ever_called_dependent() -> None:
    rng = generator(1, "test noise")
    for number in range(100):
        normal = torch.randn(5000, generator=rng)
        heavy = torch.empty(5000).exponential_(generator=rng) * normal.sign()
        rare = (torch.rand(23_000, generator=rng) < 0.05).double()
        for rest in (normal, heavy, rare, normal[: 10 + number]):
            check_independence(rest, "noise")  # raises nothing


@pytest.mark.parametrize("scale", [255, 1_000_000, -1000])
def test_private_samples_are_found_as_whole_numbers_and_masks_are_let_pass(scale: int) -> None:
    x, y = private_data(1)[0]
    client = Client(id="client-0", x=x, y=y, rng={})
    sent = x[2:4] * scale
    assert _alike(sent.long(), client)
    assert _alike(sent.abs().clamp(max=255).byte(), client) == (scale == 255)
    for mask in (x[:3] > 0.5, x[:3] > 2, torch.ones(3, 256, dtype=torch.int64), drawn(3, 256)):
        assert not _alike(mask, client)


@pytest.mark.usefixtures("one_protocol")
def test_stacked_mechanisms_are_left_to_the_checks_of_each(registry: Registry) -> None:
    settings = {"none.a": 1}
    with pytest.raises(ValueError, match="setting"):
        check(registry, "defense", "none+spm", settings)
    settings = {"gaussian.noise_multiplier": 0.1, "gaussian.clip_norm": 1.0, "spm.epsilon": 1.0}
    conformance = check(registry, "defense", "gaussian+spm", settings)
    assert not failures(conformance)
    stacked = [f for f in conformance.findings if "one after another" in f.reason]
    assert [f.status for f in stacked] == ["skipped"] * 3


def test_a_crash_names_the_hook_and_the_error(tmp_path: Path) -> None:
    wrong = failures(check_text(tmp_path, BROKEN_DEFENSES["crashes"][2], until="runs under fedavg"))
    line = 1 + (HEAD + BROKEN_DEFENSES["crashes"][2]).split("\n").index("        return 1 / 0")
    assert wrong["runs under fedavg"].reason == (
        f"upload raised ZeroDivisionError: division by zero (broken.py, line {line})."
    )


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
    wrong = failures(check_text(tmp_path, text, fast=True, until=name))
    assert name in wrong, wrong
    assert wrong[name].change


# --- command --------------------------------------------------------------------------------

APP = typer.Typer()

APP.command()(plugins.check)

APP.command()(plugins.new)  # two commands, so that names are needed

run = CliRunner()


@pytest.mark.slow
def test_the_command_tells_failures_as_a_table_and_as_json(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(HEAD + BROKEN_DEFENSES["crashes"][2])
    result = run.invoke(APP, ["check", str(path), "--fast"], env={"COLUMNS": "160"})
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stdout
    assert "hook upload" in result.stdout
    result = run.invoke(APP, ["check", str(path), "--fast", "--json"])
    assert result.exit_code == 1
    (document,) = json.loads(result.stdout)
    assert document["passed"] is False
    assert {f["status"] for f in document["findings"]} == {"passed", "failed", "skipped"}


def check_here(target: str, settings: Any, *, timeout_s: float, **more: Any) -> Any:
    """As `check_in_process`, without a process; tests/test_user_errors.py has one."""
    return check_plugins(target, settings, **more)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gausian"], "Did you mean 'gaussian'"),
        (["gaussian"], "needs the setting(s)"),
        (["spm", "--set", "epsilon=-1"], "epsilon must lie in"),
        (["nothing.py"], "no such plugin file"),
        (["broken.py"], "nothing_of_the_kind"),
    ],
)
def test_bad_input_of_check_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("import nothing_of_the_kind")
    monkeypatch.setattr(process, "check_in_process", check_here)
    result = run.invoke(APP, ["check", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_fast_check_runs_on_one_round_says_what_it_left_out_and_leaves_global_generators(
    registry: Registry,
) -> None:
    before = torch.get_rng_state()
    findings = check(registry, "attack", "prior_only", {}, fast=True).findings
    assert torch.equal(before, torch.get_rng_state())
    ran = [f for f in findings if f.name.startswith("runs on ")]
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

class Exits(Attack):
    """Would end the command as if all were well."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        raise SystemExit(0)

class Vanishes(Attack):
    """Takes its process with it."""
    recovers = frozenset({"counts"})
    def run(self, seen, ctx):
        os._exit(3)
'''


@pytest.mark.slow
def test_a_plugin_that_loops_is_stopped_and_its_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "loops.py"
    path.write_text(HEAD + LOOPS)
    begin = path.read_text().split("\n").index("        while True:") + 1
    (conformance,) = check_in_process(str(path), {}, fast=True, timeout_s=15)
    assert (conformance.kind, conformance.name) == ("defense", "loops")
    wrong = failures(conformance)
    assert wrong.keys() == {"ends"}
    reason = "the check 'first rounds' did not end within 15 s: it was at loops.py, line"
    assert wrong["ends"].reason in {f"{reason} {n}, in upload." for n in (begin, begin + 1)}
    assert {f.name for f in conformance.findings if f.status == "passed"} >= {
        "docstring",
        "strength",
    }


@pytest.mark.slow
def test_a_plugin_that_dies_or_changes_its_process_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "misbehaving.py"
    path.write_text(HEAD + MISBEHAVING)
    line = {text.strip(): i for i, text in enumerate(path.read_text().split("\n"), start=1)}
    monkeypatch.chdir(tmp_path)
    wrong = {c.name: failures(c) for c in check_in_process("misbehaving.py", {}, fast=True)}
    assert list(wrong) == ["talks", "exits", "vanishes"]
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
    # Five seconds: on a busy machine the imports before it take one.
    path = tmp_path / "endless.py"
    path.write_text("import time\nprint('here')\ntime.sleep(1000)\n")
    result = run.invoke(APP, ["check", str(path), "--timeout", "5", "--json"])
    assert result.exit_code == 1
    (document,) = json.loads(result.stdout)
    (finding,) = document["findings"]
    assert finding["reason"] == (
        "its import did not end within 5 s: it was at endless.py, line 3, in <module>."
    )
