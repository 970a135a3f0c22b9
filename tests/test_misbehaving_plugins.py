"""Plugins that misbehave: they end alone, and cells beside them have the figures of a clean run."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError

from bench import foreign
from bench.foreign import Escaped, OverLimit, contain, foreign_code, forget, in_one_line, time_limit
from bench.harness import launch
from bench.harness.executors import local
from bench.harness.executors.local import Workers
from bench.harness.executors.task import Task, run_here
from bench.harness.store import Store
from bench.protocols import export
from bench.protocols.export import DiskFull, save_tensors
from bench.records import NoResult
from bench.registry import discover
from tests.runs import made, planned, timeless
from tests.small_folders import call


def process_state() -> dict[str, Any]:
    """All that is looked after but for global generators, by name."""
    state = foreign._process_state()
    return {name: read() for name, (read, _) in state.items() if "generator" not in name}


HEAD = """
import os, random, signal, sys, time, warnings
import numpy as np
import torch
from bench.api import Attack, Defense, Reconstruction

def answer(seen, ctx):
    x = torch.rand(len(seen.clients), 1, *ctx.network.shape, generator=ctx.rng)
    return Reconstruction(images=x)
"""

RAISED = {
    "exits": ("SystemExit: 0", "sys.exit(0)"),
    "interrupts": ("KeyboardInterrupt: ", "raise KeyboardInterrupt"),
    "closes": ("GeneratorExit: ", "raise GeneratorExit"),
    "base": ("BaseException: all", 'raise BaseException("all")'),
    "full": (
        "OSError: [Errno 28] No space left on device",
        'raise OSError(28, "No space left on device")',
    ),
    "unspeakable": (
        "Unspeakable: (its text cannot be read)",
        "raise type('Unspeakable', (Exception,), {'__str__': lambda self: 1 / 0})()",
    ),
}
"""Name of a plugin, what its record says, and what it does."""

CHANGES = {
    "float64": ("torch's default dtype", "torch.set_default_dtype(torch.float64)"),
    "meta": ("torch's default device", 'torch.set_default_device("meta")'),
    "no_grad": ("torch's grad mode", "torch.set_grad_enabled(False)"),
    "deterministic": ("deterministic algorithms", "torch.use_deterministic_algorithms(True)"),
}
"""The same of plugins that change what decides figures."""

QUIET = """
torch.set_num_threads(2)
torch.manual_seed(5); np.random.seed(5); random.seed(5)
os.chdir("/")
os.environ["LEAKBENCH_DATA"] = "/nowhere"; os.environ.pop("PATH", None)
sys.stdout.close(); sys.stdout = None; sys.stderr = None
"""
"""What a plugin may do without harm to others or to its own figures."""


def attack(name: str, what: str) -> str:
    body = "\n        ".join(["guess = answer(seen, ctx)", *what.split("\n"), "return guess"])
    head = f'\nclass {name}(Attack):\n    """Misbehaves."""\n    def run(self, seen, ctx):\n'
    return f"{head}        {body}\n"


def class_name(name: str) -> str:
    return "".join(part.title() for part in name.split("_"))


@pytest.fixture
def plugins(tmp_path: Path) -> tuple[Path, ...]:
    path = tmp_path / "misbehaving.py"
    ways = {n: what for n, (_, what) in (RAISED | CHANGES).items()} | {"quiet": QUIET.strip()}
    path.write_text(HEAD + "".join(attack(class_name(n), what) for n, what in ways.items()))
    return (path,)


def records(store: Store) -> dict[str, Any]:
    attacks = [json.loads(p.read_text()) for p in store.folder.glob("records/attack/*.json")]
    return {r["inputs"]["attack"]: timeless(r) for r in attacks}


@pytest.mark.parametrize(
    ("workers", "all_of_them"),
    [
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),  # a worker left behind is replaced
        (0, False),
    ],
)
def test_a_plugin_that_misbehaves_ends_alone_and_harms_no_cell_after_it(
    tiny: Callable[..., Path],
    plugins: tuple[Path, ...],
    tmp_path: Path,
    workers: int,
    all_of_them: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    raised = RAISED if all_of_them else {n: RAISED[n] for n in ("exits", "full")}
    changes = CHANGES if workers == 0 else {"float64": CHANGES["float64"]}
    names = [*raised, *changes, "quiet"]
    bad = "".join(f'[[attacks]]\nname = "{n}"\n\n' for n in names)
    # They come first, so that `ilrg` and `prior_only` run in the process that they leave behind.
    suite = tiny(**{'[[attacks]]\nname = "ilrg"': f'{bad}[[attacks]]\nname = "ilrg"'})
    places = {}
    for what, attacks in (("clean", ["ilrg", "prior_only"]), ("harmed", None)):
        only: dict[str, Any] = {"defense": "none", "checkpoint": "init"}
        plan, keys = planned(suite, plugins, **only, **({"attack": attacks} if attacks else {}))
        forget()  # nothing of the clean run helps the other
        places[what] = Store(tmp_path / what)
        before = process_state()
        report = made(plan, keys, places[what], launch.local(plan, keys.env, workers=workers))
        assert process_state() == before
    reasons = {label.split()[-3]: reason for label, reason in report.failures}
    assert reasons.keys() == {*raised, *changes}
    for name, (text, _) in raised.items():
        assert reasons[name] == f"failed: {text}"
    for name, (text, _) in changes.items():
        assert reasons[name].startswith("failed: changed ")
        assert text in reasons[name]
    after = records(places["harmed"])
    assert after["quiet"]["status"] == "done"
    for name, record in records(places["clean"]).items():
        assert after[name] == record
    assert capfd.readouterr().out == ""


DEFENSES = '''
class ExitsInUpload(Defense):
    """Ends its process."""
    def upload(self, messages, local, client):
        raise SystemExit(0)

class ExitsInAggregate(Defense):
    """Ends its process."""
    owns = frozenset({"aggregate"})
    def aggregate(self, server, messages):
        raise SystemExit(3)

class Talks(Defense):
    """Prints."""
    def upload(self, messages, local, client):
        print("what a client has:", client.id)
        os.system("echo from a shell")
        return messages
'''


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_defense_that_exits_fails_its_training_and_what_is_printed_goes_to_stderr(
    tiny: Callable[..., Path], tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    if workers:
        forkserver._forkserver._stop()  # they print where their server did when it began
    path = tmp_path / "exits.py"
    path.write_text(HEAD + DEFENSES)
    names = ("exits_in_upload", "exits_in_aggregate", "talks")
    suite = tiny(append="".join(f'\n[[defenses]]\nname = "{n}"\n' for n in names))
    plan, keys = planned(suite, (path,), defense=list(names), checkpoint="final", attack="ilrg")
    store = Store(tmp_path / "out")
    report = made(plan, keys, store, launch.local(plan, keys.env, workers=workers))
    reasons = {label.split("/")[3].partition("(")[0]: reason for label, reason in report.failures}
    assert reasons == {
        "exits_in_upload": "failed: SystemExit: 0",
        "exits_in_aggregate": "failed: SystemExit: 3",
    }
    printed = capfd.readouterr()
    assert "what a client has: client-0" in printed.err
    assert "what a client has" not in printed.out
    assert ("from a shell" in printed.out) == (workers == 0)  # no stdout of its own to turn aside


IMPORTS = {
    "exits": ("SystemExit: 0 (exits.py, line 1)", "raise SystemExit(0)"),
    "interrupts": ("KeyboardInterrupt:  (interrupts.py, line 2)", "\nraise KeyboardInterrupt"),
    "float64": ("torch's default dtype", "import torch; torch.set_default_dtype(torch.float64)"),
    "syntax": ("invalid syntax (syntax.py, line 1)", "def"),
    "divides": ("ZeroDivisionError: division by zero (divides.py, line 3)", "\n\n1 / 0"),
    "misses": ("ModuleNotFoundError: No module named 'no_such'", "import no_such"),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_file_that_misbehaves_when_imported_is_a_broken_plugin(tmp_path: Path, name: str) -> None:
    text, code = IMPORTS[name]
    path = tmp_path / f"{name}.py"
    path.write_text(code)
    before = process_state()
    plugins = discover((path,))
    assert process_state() == before
    assert [p.name for p in plugins.broken] == [name, name]  # as a defense and as an attack
    assert text in str(plugins.broken[0].broken)
    assert plugins.names("defense") == discover().names("defense")
    with pytest.raises(ValueError, match=f"'{name}' .* is broken: "):
        plugins.get("defense", name)


def test_list_and_plan_go_on_beside_a_plugin_that_exits_or_prints_at_import(
    tmp_path: Path, tiny: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "exits.py"
    path.write_text('print("here I am")\nraise SystemExit(0)')
    listed = call("list", "attacks", "--json", "--plugin", path)
    assert listed.exit_code == 0
    broken = {a["name"]: a["broken"] for a in json.loads(listed.stdout)["attacks"]}
    assert "SystemExit: 0 (exits.py, line 2)" in broken["exits"]
    assert broken["ilrg"] is None
    forget()  # that it was imported
    planned_too = call("plan", tiny(), "--plugin", path)
    assert planned_too.exit_code == 0
    assert "here I am" in planned_too.stderr


# --- Ctrl-C, limits and workers ------------------------------------------------------------------


def test_ctrl_c_stops_even_code_that_swallows_it_and_a_raised_one_does_not() -> None:
    # Where the tests run in a shell's background, Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(Escaped, match="KeyboardInterrupt"), contain():
        raise KeyboardInterrupt
    for swallow in (KeyboardInterrupt, BaseException):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt), contain(), contain():
            sleep_through(swallow)
    with contain():
        pass  # what was told before does not stop what follows
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def sleep_through(swallow: type[BaseException]) -> None:
    try:
        time.sleep(10)
    except swallow as error:
        raise ValueError("mine") from error


def test_foreign_exceptions_leave_as_exceptions_and_are_told_in_one_line() -> None:
    for error in (SystemExit("bye"), GeneratorExit(), BaseException("b"), asyncio_cancelled()):
        with pytest.raises(Escaped) as caught, contain():
            raise error
        assert caught.value.error is error
        assert in_one_line(caught.value).startswith(type(error).__name__)
    for usual in (ValueError("v"), StopIteration(), RecursionError()):
        with pytest.raises(type(usual)), contain():
            raise usual


def asyncio_cancelled() -> BaseException:
    from asyncio import CancelledError

    return CancelledError()


@dataclass(frozen=True)
class Loops:
    """Never ends; careful: what is raised in it is swallowed for a while."""

    artifacts: Path = Path("unused")

    def __call__(self) -> NoResult:
        began = time.monotonic()
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                if time.monotonic() - began > 0.5:
                    raise

    def prepare(self) -> None: ...


@dataclass(frozen=True)
class Quick:
    """Does nothing."""

    artifacts: Path = Path("unused")

    def __call__(self) -> NoResult:
        return NoResult(status="not_applicable", reason="nothing to do")

    def prepare(self) -> None: ...


@dataclass(frozen=True)
class SlowToPrepare(Quick):
    """Takes its time until it is ready."""

    def prepare(self) -> None:
        time.sleep(1.5)


def outcomes_of(executor: Any, *work: Any) -> list[NoResult]:
    tasks = deque(Task(label=str(i), work=w) for i, w in enumerate(work))
    outcomes = {task.label: ended.record for task, ended in executor(tasks)}
    return [outcomes[i] for i in sorted(outcomes)]


@pytest.mark.timeout(120, method="thread")  # the other way is the alarm clock, which is tested
def test_a_loop_in_this_process_ends_at_the_limit_and_the_next_job_runs() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    looped, after = outcomes_of(lambda tasks: run_here(tasks, 0.2), Loops(), Quick())
    assert (looped.status, looped.reason) == ("timeout", "over the limit of 0.2 s")
    assert after.status == "not_applicable"
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.timeout(120, method="thread")
def test_an_alarm_clock_that_somebody_uses_is_left_alone() -> None:
    with time_limit(60), time_limit(0.05), contain():
        time.sleep(0.2)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 50
    with pytest.raises(OverLimit), time_limit(0.05), contain():
        time.sleep(5)


def test_a_jobs_clock_starts_when_its_worker_has_imported_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Imports alone take longer than this limit."""
    (outcome,) = outcomes_of(Workers(count=1, timeout_s=1), SlowToPrepare())
    assert outcome.status == "not_applicable"
    monkeypatch.setattr(local, "GRACE_S", 0.5)
    (outcome,) = outcomes_of(Workers(count=1, timeout_s=0.5), SlowToPrepare())
    assert (outcome.status, outcome.reason) == ("timeout", "over the limit of 0.5 s")


@pytest.mark.timeout(120, method="thread")
def test_a_worker_stops_a_loop_at_the_limit_itself_and_is_replaced() -> None:
    looped, after = outcomes_of(Workers(count=1, timeout_s=0.2), Loops(), Quick())
    assert (looped.status, looped.reason) == ("timeout", "over the limit of 0.2 s")
    assert after.status == "not_applicable"


def test_workers_are_reused_and_everything_is_answered() -> None:
    tasks = deque(Task(label=str(i), work=Quick()) for i in range(7))
    outcomes = list(Workers(count=2, timeout_s=60)(tasks))
    assert sorted(task.label for task, _ in outcomes) == list("0123456")
    assert all(ended.record.status == "not_applicable" for _, ended in outcomes)
    assert all(ended.record.memory["host"] > 1e7 for _, ended in outcomes)


def test_workers_take_gpus_in_turn_and_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(count=3, timeout_s=60, gpus=("0", "GPU-5"))
    environments = [workers.surroundings(i) for i in range(3)]
    assert [f["CUDA_VISIBLE_DEVICES"] for f in environments] == ["0", "GPU-5", "0"]
    assert [float(f["LEAKBENCH_GPU_SHARE"]) for f in environments] == [0.5, 1.0, 0.5]
    monkeypatch.setenv("LEAKBENCH_GPU_SHARE", "0.5")
    assert float(workers.surroundings(2)["LEAKBENCH_GPU_SHARE"]) == 0.25
    assert Workers(count=3, timeout_s=60).surroundings(0) == {}


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
)
def test_a_full_disk_is_one_that_leakbench_itself_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object) -> None:
        raise error

    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):  # another mishap stays what it is
        save_tensors({"x": torch.zeros(1)}, tmp_path / "file" / "x.safetensors")
    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(DiskFull, match=r"No space left on device|Disk quota exceeded"):
        save_tensors({"x": torch.zeros(1)}, tmp_path / "x.safetensors")


def test_what_is_printed_aside_cannot_be_closed(capsys: pytest.CaptureFixture[str]) -> None:
    with foreign_code():
        print("one")
        sys.stdout.close()
        print("two")
    print("three")
    assert capsys.readouterr() == ("three\n", "one\ntwo\n")


def test_the_working_directory_comes_back_where_a_plugin_removes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with foreign_code():
        (tmp_path / "own").mkdir()
        os.chdir(tmp_path / "own")
        (tmp_path / "own").rmdir()
    assert Path.cwd() == tmp_path
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with foreign_code():  # starts where there is no folder
        pass
    os.chdir(tmp_path)


def test_progress_is_drawn_on_stdout_while_a_job_runs(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    with foreign_code():
        console.print("3 of 9 done")
        print("of a plugin")
    assert capsys.readouterr() == ("3 of 9 done\n", "of a plugin\n")


def test_a_workers_warning_is_one_sentence() -> None:
    code = (
        "import warnings; from bench.toolkit.processes import prints_aside; prints_aside(); "
        "warnings.warn('so it is.')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "warning: so it is.\n")
