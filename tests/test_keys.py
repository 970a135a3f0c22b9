"""What re-keys a record: an edit of what its job executes, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness.keys import ATTACKING, TRAINING, Code
from bench.harness.sources import Sources
from bench.registry import Registry, discover, judge
from tests.conftest import TINY, changed

ROOT = Path(__file__).parents[1]
Plugins = dict[str, dict[str, Any]]
PACKAGES = ("bench", "attacks", "defenses")
DEFENSES = ("none", "spm", "selective_shield", "gaussian+spm")
ATTACKS = ("prior_only", "dlg", "ridge")

SUITE = TINY.partition("[[defenses]]")[0].replace('["init", "final"]', '["final"]')

KEYS = """
import json, sys
from bench import suite
from bench.harness import keys, launch, plan
from bench.harness.environment import Environment
from bench.registry import discover

made = plan.expand(suite.load(sys.argv[1]))
registry = discover()
for _ in sys.stdin:  # one line per edit
    computed = keys.Keys(registry, Environment())
    print(json.dumps(
        {j.defense: computed.train(j) for j in made.trainings}
        | {f"{c.train.defense}/{c.attack}": computed.attack(c) for c in made.cells}
    ), flush=True)
"""


def suite_of(folder: Path, defenses: Plugins, attacks: Plugins, text: str = SUITE) -> Path:
    for kind, plugins in (("defenses", defenses), ("attacks", attacks)):
        for name, settings in plugins.items():
            inline = ", ".join(f'"{k}" = {json.dumps(v)}' for k, v in settings.items())
            text += f'\n[[{kind}]]\nname = "{name}"\nsettings = {{ {inline} }}\n'
    path = folder / "suite.toml"
    path.write_text(text)
    return path


class Tree:
    """A copy of the product whose files are edited, and a process that keys its jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for package in PACKAGES:
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, folder / package, ignore=skipped)
        suite = suite_of(folder, {d: {} for d in DEFENSES}, {a: {} for a in ATTACKS})
        self.process = subprocess.Popen(
            [sys.executable, "-c", KEYS, suite],
            cwd=folder,
            text=True,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.before = self.keys()

    def keys(self) -> dict[str, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def rekeyed(self, *files: str, edit: Callable[[str], str]) -> set[str]:
        """Jobs whose key is another one while the files are edited."""
        texts = {self.folder / file: (self.folder / file).read_text() for file in files}
        for path, text in texts.items():
            assert edit(text) != text, path
            path.write_text(edit(text))
        try:
            after = self.keys()
        finally:
            for path, text in texts.items():
                path.write_text(text)
        assert after.keys() == self.before.keys()
        return {job for job, key in after.items() if key != self.before[job]}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    made = Tree(tmp_path_factory.mktemp("tree"))
    yield made
    made.process.kill()
    made.process.communicate()


def files_of(folder: str) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in sorted((ROOT / folder).rglob("*.py"))]


def with_a_comment(text: str) -> str:
    lines = [
        line + "  # said aside"
        if line.startswith(("def ", "class ", "import ")) and line.endswith((":", "s"))
        else line
        for line in text.split("\n")
    ]
    return "\n".join(["# A comment.", "", *lines])


def with_other_docstrings(text: str) -> str:
    return re.sub(r'^( *)"""(?=\w)', r'\1"""In other words: ', text, flags=re.MULTILINE)


def with_more_code(text: str) -> str:
    return text + "\n\ndef added(x: int) -> int:\n    return x + 1\n"


TRAININGS = set(DEFENSES)
CELLS = {f"{d}/{a}" for d in DEFENSES for a in ATTACKS}


def jobs_of(*defenses: str) -> set[str]:
    """Their trainings and all attacks on these."""
    return {job for job in TRAININGS | CELLS if job.split("/")[0] in defenses}


def attacks_by(*attacks: str) -> set[str]:
    return {cell for cell in CELLS if cell.split("/")[1] in attacks}


def test_every_job_has_a_key_of_its_own(tree: Tree) -> None:
    assert tree.before.keys() == TRAININGS | CELLS
    assert len(set(tree.before.values())) == len(tree.before)


def test_training_and_attacking_are_apart() -> None:
    sources = Sources(set(PACKAGES))
    assert ATTACKING not in sources.reach(TRAINING)
    assert TRAINING not in sources.reach(ATTACKING)


@pytest.mark.parametrize("edit", [with_a_comment, with_other_docstrings])
@pytest.mark.parametrize("folder", ["bench/protocols", "attacks/engine", "defenses"])
def test_a_comment_or_a_docstring_rekeys_nothing(
    tree: Tree, folder: str, edit: Callable[[str], str]
) -> None:
    files = [f for f in files_of(folder) if edit((ROOT / f).read_text()) != (ROOT / f).read_text()]
    assert len(files) > 5
    assert tree.rekeyed(*files, edit=edit) == set()


NO_JOBS = (
    *("bench/report", "bench/cli", "bench/submission", "bench/harness/executors"),
    *("bench/sandbox/conformance", "bench/__init__.py", "bench/suite.py", "bench/results.py"),
    *("bench/harness/forecast.py", "bench/harness/plan.py", "bench/harness/runner.py"),
    *("bench/harness/store.py", "bench/harness/keys.py", "bench/harness/sources.py"),
    *("bench/metrics/paired.py", "bench/metrics/score.py", "bench/harness/scoring.py"),
    *("defenses/standalone.py", "attacks/split_label.py"),
)
"""What only plans, runs, scores (answers are scored again, no attack is) or shows, and plugins of
no job here."""


@pytest.mark.parametrize(
    ("place", "rekeyed"),
    [
        *((place, set()) for place in NO_JOBS),
        ("bench/harness/train.py", TRAININGS | CELLS),
        ("bench/protocols/federation.py", TRAININGS | CELLS),
        ("bench/contract/messages.py", TRAININGS | CELLS),
        ("bench/harness/attack.py", CELLS),
        ("bench/toolkit/images.py", CELLS),
        ("defenses/spm.py", jobs_of("spm", "gaussian+spm")),
        ("defenses/noise.py", jobs_of("gaussian+spm")),
        ("defenses/selective_shield.py", jobs_of("selective_shield")),
        ("defenses/encrypted_zone.py", jobs_of("selective_shield")),
        ("attacks/prior_only.py", attacks_by("prior_only")),
        ("attacks/ridge.py", attacks_by("ridge")),
        ("attacks/engine/inverter.py", attacks_by("ridge")),
        # The judge weighs every attack's answer, and minimises where it looks for private parts.
        ("attacks/judge.py", CELLS),
        ("attacks/engine/optimisers.py", CELLS),
    ],
)
def test_an_edit_rekeys_the_jobs_that_execute_it_and_no_others(
    tree: Tree, place: str, rekeyed: set[str]
) -> None:
    files = [place] if place.endswith(".py") else files_of(place)
    assert tree.rekeyed(*files, edit=with_more_code) == rekeyed


def test_an_edit_of_a_function_that_a_training_calls_rekeys_it(tree: Tree) -> None:
    mean = tree.rekeyed(
        "bench/toolkit/aggregation.py",
        edit=lambda text: text.replace("clamp_min(1)", "clamp_min(2)"),
    )
    assert mean == TRAININGS | CELLS
    # Of these defenses and attacks, one alone takes gradients of single samples.
    single = tree.rekeyed(
        "bench/toolkit/per_sample.py", edit=lambda text: text.replace("[None]", "[None, ...]")
    )
    assert single == jobs_of("selective_shield")


def test_a_name_more_in_the_front_for_plugins_rekeys_nothing(tree: Tree) -> None:
    more = "from bench.contract.compose import Composed\n"
    assert tree.rekeyed("bench/api.py", edit=lambda text: text + more) == set()


# --- the walk itself ------------------------------------------------------------------------------


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> Sources:
    """A package `walked` of the given modules; a `__` in a name stands for a dot."""
    for name, text in files.items():
        path = folder / "walked" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for place in (folder / "walked").rglob("*/"):
        (place / "__init__.py").touch()
    (folder / "walked" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    return Sources({"walked"})


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("import walked.b", {"b"}),
        ("import walked.b as c", {"b"}),
        ("from walked import b", {"b"}),
        ("from walked.b import x", {"b"}),
        ("from . import b", {"b"}),
        ("from .b import x", {"b"}),
        ("from .inner.d import x", {"inner.d", "b"}),
        ("from walked.front import x", {"b"}),
        ("from walked.front import y", {"c"}),
        ("from walked.front import *", {"b", "c"}),
        ("import walked.front", {"b", "c"}),
        ("from walked import front", {"b", "c"}),
        ("def f():\n    try:\n        import walked.b\n    finally:\n        pass", {"b"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import walked.b", set()),
        (
            "import typing\nif typing.TYPE_CHECKING:\n import walked.b\nelse:\n import walked.c",
            {"c"},
        ),
        ("import json, torch", set()),
        ("import walked.missing", set()),
    ],
)
def test_imports_are_followed_wherever_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reached: set[str]
) -> None:
    inner = "from ..b import x\nx += 1"
    front = "from walked.b import x\nfrom walked.c import y\n__all__ = ['x', 'y']"
    sources = package(
        tmp_path,
        monkeypatch,
        a=f"{text}\nx = 1\n",
        b="x = 1",
        c="y = 1",
        inner__d=inner,
        front=front,
    )
    assert sources.reach("walked.a").keys() == {"walked.a", *(f"walked.{m}" for m in reached)}


def test_a_packages_own_module_counts_where_it_executes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = package(tmp_path, monkeypatch, a="import walked.inner.d", inner__d="")
    assert "walked.inner" not in sources.reach("walked.a")
    (tmp_path / "walked" / "inner" / "__init__.py").write_text("import torch\ntorch.seed()\n")
    assert "walked.inner" in Sources({"walked"}).reach("walked.a")


def test_a_file_is_hashed_with_what_it_imports_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path, beside = tmp_path / "mine.py", tmp_path / "beside_mine.py"
    beside.write_text("AMOUNT = 1.0\n")
    path.write_text(
        "from bench.api import Defense\nfrom beside_mine import AMOUNT\n\n\n"
        "class MyNoise(Defense):\n    amount = AMOUNT\n"
    )

    def hashed() -> tuple[str, str]:
        code = Code(discover((path,)))
        return code.plugin("defense", "my_noise"), code.package("defense", "my_noise")

    before = hashed()
    beside.write_text("AMOUNT = 1.0  # as before\n")
    assert hashed() == before
    beside.write_text("AMOUNT = 2.0\n")
    assert all(new != old for new, old in zip(hashed(), before, strict=True))


def test_where_a_file_lies_does_not_tell_in_its_hash(tmp_path: Path) -> None:
    text = "from bench.api import Defense\n\nclass MyNoise(Defense):\n    pass\n"
    hashes = set()
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine.py").write_text(text)
        hashes.add(Code(discover((tmp_path / place / "mine.py",))).plugin("defense", "my_noise"))
    assert len(hashes) == 1


# --- the walk misses nothing that is executed -----------------------------------------------------

EXECUTED = """
import json, sys, threading
from pathlib import Path
from bench import suite
from bench.harness import plan
from bench.harness.attack import Attacking
from bench.harness.environment import Environment, registry_for
from bench.harness.train import Training

called = set()

def on_call(frame, event, argument):
    if frame.f_code.co_name != "<module>":
        called.add(frame.f_code.co_filename)

def traced(work):
    called.clear()
    threading.settrace(on_call)
    sys.settrace(on_call)
    try:
        record = work()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return record, sorted(called)

env, out = Environment(), Path(sys.argv[1])
registry_for(())  # so that what loading all plugins executes is not seen as part of one's job
made = [plan.expand(suite.load(path)) for path in sys.argv[2:]]
cells = [cell for one in made for cell in one.cells]
for place, job in enumerate(job for one in made for job in one.trainings):
    folder = out / str(place)
    folder.mkdir()
    record, files = traced(Training(job=job, env=env, artifacts=folder))
    print(json.dumps([record.status, job.defense, None, files]))
    for cell in cells:
        if cell.train is job:
            work = Attacking(
                job=cell, env=env, trained=record, observed=folder, artifacts=folder / "out"
            )
            result, files = traced(work)
            print(json.dumps([result.status, job.defense, cell.attack, files]))
"""

FEDERATED = {
    "none": {},
    "spm": {"epsilon": 2.0},
    "gaussian+spm": {"gaussian.noise_multiplier": 0.1, "gaussian.clip_norm": 1.0, "spm.epsilon": 2},
    "selective_shield": {"tau": 0.05, "rho": 0.5, "noise_multiplier": 0.02, "clip_norm": 1.0},
    "ms_pafl": {"epsilon": 10000.0, "noise": "analytic", "clip_norm": 10.0, "check_in": 1.0},
    "dp_sgd": {"noise_multiplier": 0.1, "clip_norm": 1.0},
}
SPLIT = {
    "none": {},
    "pm_sfl": {"lr_scale": 1000.0},
    "dp_cutmix": {
        "patches": 16,
        "group": 2,
        "clip": 4.0,
        "low": -2.0,
        "smashed_std": 0.1,
        "label_std": 0.1,
    },
}
AS_SPLIT = {'name = "fedavg"': 'name = "splitfed"\ncut = "embed"', "mlp_spm": "vit_small"}
TRACED: list[tuple[Plugins, Plugins, dict[str, str]]] = [
    (FEDERATED, {a: {} for a in ("idlg", "inverting_gradients", "analytic", "ilrg")}, {}),
    (SPLIT, {a: {} for a in ("dlg", "split_label", "prior_only")}, AS_SPLIT),
    ({"none": {}}, {a: {"rows": 16} for a in ("ridge", "decoder")}, AS_SPLIT),
    ({"gaussian": FEDERATED["dp_sgd"]}, {}, {"audit = 0": "audit = 100"}),
]


@pytest.mark.slow
def test_all_that_a_job_executes_is_in_its_key(tmp_path: Path, registry: Registry) -> None:
    suites = []
    for place, (defenses, attacks, changes) in enumerate(TRACED):
        text, folder = changed(SUITE, changes), tmp_path / str(place)
        folder.mkdir()
        suites.append(suite_of(folder, defenses, attacks, text))
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", EXECUTED, tmp_path / "out", *suites],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    sources = Sources(set(PACKAGES))

    def keyed(kind: Any, name: str) -> set[str]:
        classes = [registry.get(kind, part).cls for part in name.split("+")]
        return {m for c in classes if c is not None for m in sources.reach(c.__module__)}

    judging = set(sources.reach(type(judge()).__module__))
    finished = set()
    for line in done.stdout.splitlines():
        status, defense, attack, files = json.loads(line)
        allowed = set(sources.reach(TRAINING)) | keyed("defense", defense)
        if attack is not None:
            allowed |= set(sources.reach(ATTACKING)) | keyed("attack", attack) | judging
        executed = {m for m in map(module_of, files) if m is not None}
        # An attack is judged by the module that its key holds, a training by none.
        assert (type(judge()).__module__ in executed) == (attack is not None and status == "done")
        assert executed <= allowed, f"{defense}, {attack}: {executed - allowed}"
        if status == "done":
            finished.add(attack or defense)
            assert any(m.startswith("bench.protocols.") for m in executed)
    assert finished == {name for ds, attacks, _ in TRACED for name in (*ds, *attacks)}


def module_of(file: str) -> str | None:
    """The module of a file of the product; None for one of a library."""
    path = Path(file)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in PACKAGES:
        return None
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
