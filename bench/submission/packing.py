"""`leakbench submit`: a folder that holds a plugin's rows and all that is needed to rerun them."""

from __future__ import annotations

import datetime
import json
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import __version__, models
from bench.errors import UserError
from bench.harness.environment import Environment
from bench.harness.keys import Code, Keys
from bench.harness.store import Store, staged
from bench.records import (
    RUN,
    AttackOutcome,
    Cell,
    NoResult,
    PlannedTraining,
    Run,
    TrainOutcome,
    canonical,
    settled,
    to_json,
)
from bench.records.submitted import MANIFEST, SCHEMA, SUBMISSION, PluginSource, Submission
from bench.registry import PluginKind, Registry, discover
from bench.report.files import Files
from bench.sandbox.conformance.plugins import check
from bench.submission.documents import write_manifest
from bench.submission.marks import marks
from bench.submission.page import page
from bench.submission.selection import Choice, check_suite, check_unchanged, choose

_EVERYONES = {"/tmp", "/var/tmp"}
"""Folders that tell nothing of a machine, so that sources may name them."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be submitted.

    Attributes:
        target: A name or FILE.py.
        run: Its result folder.
        attacks: Files of the author's own attacks.
        author: Who submits.
        out: Where the submission's folder is written.
        date: YYYY-MM-DD, today if None.
        data_dir: Where data sets of the run lie that are not embedded.
        replace: Whether an earlier submission gives way.
    """

    target: str
    run: Path
    attacks: Sequence[Path] = ()
    author: str = "anonymous"
    out: Path = Path("results/submissions")
    date: str | None = None
    data_dir: Path | None = None
    replace: bool = False


def submit(request: Request, *, tell: Callable[[str], None] = lambda text: None) -> Path:
    """Write the submission's folder and return it; `tell` is told what is being checked.

    Raises UserError saying why the run or the plugin cannot be submitted.
    """
    run = Run.read(request.run)
    day = _day(request.date)
    target = Path(request.target)
    files = [target] if request.target.endswith(".py") or target.is_file() else []
    files += list(request.attacks)
    registry = discover(tuple(f.resolve() for f in files))
    kind, name = _only(registry, request.target, run, is_file=bool(files) and target in files)
    folder = request.out / name
    if folder.exists() and not request.replace:
        raise UserError(f"{folder} exists already; give --replace to write it anew.")
    env = Environment(
        device=run.device or "cpu",
        data_dir=request.data_dir,
        plugins=tuple(f.resolve() for f in files),
    )
    keys = Keys(registry, env)
    check_suite(run)
    choice = choose(run, kind, name, registry)
    _check_data(choice)
    check_unchanged(choice, keys, kind)
    _check_attacks(registry, request.attacks, choice)
    failed = _check_finished(Store(request.run, run), choice, kind, name)
    tried = _settings(choice, kind, name)
    for settings in tried:
        tell(f"Checking {name} with {settings or 'its defaults'}.")
        findings = check(registry, kind, name, settings).findings
        wrong = next((f for f in findings if f.status == "failed"), None)
        if wrong is not None:
            raise UserError(f"{name} does not pass `leakbench check`: {wrong.name}: {wrong.reason}")
    submission = Submission(
        schema=SCHEMA,
        kind=kind,
        name=name,
        author=request.author,
        date=day,
        leakbench=__version__,
        command=_without_paths(run.command),
        settings=tried,
        plugins=_sources(registry, choice, files),
        failed_cells=failed,
        environment=_environment(run),
    )
    with staged(folder) as stage:
        _fill(stage, request.run, run, submission, choice, files)
        _refuse_private(stage, request, run)
    return folder


# --- what is refused ------------------------------------------------------------------------------


def _day(date: str | None) -> str:
    if date is None:
        return datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        return datetime.date.fromisoformat(date).isoformat()
    except ValueError as error:
        raise UserError(f"--date must be a day as YYYY-MM-DD, got '{date}'.") from error


def _only(registry: Registry, target: str, run: Run, *, is_file: bool) -> tuple[PluginKind, str]:
    """The one plugin of the target. Of a file with several, the one that the run has."""
    if not is_file:
        kinds: list[PluginKind] = ["defense", "attack"]
        for kind in kinds:
            if (kind, target) in registry.usable:
                return kind, target
        registry.get("defense", target)  # says what is known
    origin = str(Path(target).resolve())
    for plugin in registry.broken:
        if plugin.origin == origin:
            raise UserError(f"'{plugin.name}' of {target} cannot be used: {plugin.broken}")
    mine = [p for p in registry.usable.values() if p.origin == origin]
    if len(mine) > 1:
        used = {t.job.defense for t in run.trainings} | {c.attack for c in run.cells}
        mine = [p for p in mine if p.name in used]
    if len(mine) != 1:
        names = ", ".join(p.name for p in mine) or "none of its plugins"
        raise UserError(f"the run has {names} of {target}; submit one plugin per file.")
    return mine[0].kind, mine[0].name


def _check_data(choice: Choice) -> None:
    for training in choice.own:
        if ":" in training.job.task.dataset:
            raise UserError(
                f"the data set '{training.job.task.dataset.partition(':')[0]}:...' lies on your "
                "machine alone, so nobody could verify its rows; submit a run on one that "
                "`leakbench list datasets` names."
            )
        model = training.job.task.model
        if models.file_of(model) is not None or models.is_handed(model):
            raise UserError(
                f"the model '{model}' lies on your machine alone, so nobody could verify its "
                "rows; submit a run on one that `leakbench list models` names."
            )


def _check_attacks(registry: Registry, attacks: Sequence[Path], choice: Choice) -> None:
    ran = {c.attack for t in choice.own for c in t.cells}
    for path in attacks:
        names = {
            p.name
            for p in registry.usable.values()
            if p.kind == "attack" and p.origin == str(path.resolve())
        }
        if not names & ran:
            raise UserError(f"the run has no column of an attack from {path.name}.")


def _check_finished(store: Store, choice: Choice, kind: str, name: str) -> list[str]:
    """Labels of the failed cells; without a record, or where a training failed, refuse."""
    failed = []
    for training in choice.all():
        what = f"{training.job.defense} (seed {training.job.seed})"
        record = store.read("train", training.key)
        if record is None:
            raise UserError(f"the run is not finished: the training of {what} has no record.")
        if not settled(record):
            raise UserError(f"the training of {what} {record.status}: {record.reason}")
        for cell in training.cells:
            scored = store.read("attack", cell.key)
            if scored is None:
                raise UserError(f"the run is not finished: {cell.label} on {what} has no record.")
            if not settled(scored):
                failed.append(f"{cell.label} at {cell.checkpoint} on {what}: {scored.status}")
    if not any(cells_of(t, kind, name) for t in choice.own):
        raise UserError(f"the run attacks no row of '{name}'; give its suite attacks.")
    return failed


def cells_of(training: PlannedTraining, kind: str, name: str) -> list[Cell]:
    """A training's cells that are the submission's own."""
    return [c for c in training.cells if kind == "defense" or c.attack == name]


def _settings(choice: Choice, kind: str, name: str) -> list[dict[str, Any]]:
    """Every setting of the plugin in the run, once."""
    found = {}
    for training in choice.own:
        jobs = [c.job for c in training.cells if c.attack == name]
        for settings in (j.settings for j in ([training.job] if kind == "defense" else jobs)):
            found[canonical(settings)] = dict(settings)
    return list(found.values())


# --- what is written ------------------------------------------------------------------------------


def _sources(registry: Registry, choice: Choice, files: Sequence[Path]) -> list[PluginSource]:
    """Every plugin of the submitted rows, with the hash of its source."""
    names: dict[tuple[PluginKind, str], None] = {}
    for training in choice.all():
        for part in training.job.defense.split("+"):
            names["defense", part] = None
        for cell in training.cells:
            names["attack", cell.attack] = None
    own = {str(f.resolve()): f"source/{f.name}" for f in files}
    code = Code(registry)
    found = []
    for kind, name in names:
        origin = registry.get(kind, name).origin
        found.append(
            PluginSource(
                kind=kind,
                name=name,
                file=own.get(origin),
                origin="a file" if origin in own else origin,
                sources=code.package(kind, name),
            )
        )
    return found


def _environment(run: Run) -> dict[str, str]:
    """Versions, device and kind of machine; no names of hosts or users."""
    return dict(run.versions) | {
        "device": run.device or "cpu",
        "system": platform.system(),
        "machine": platform.machine(),
    }


def _without_paths(command: str) -> str:
    """A command, or those of a merged run, with the folders of this machine left out."""
    words = ["=".join(_last(p) for p in word.split("=")) for word in shlex.split(command)]
    return " ".join(word if word == "&&" else shlex.quote(word) for word in words)


def _last(text: str) -> str:
    """The last name of a path; other text as it is."""
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]


def _fill(
    stage: Path,
    result: Path,
    run: Run,
    submission: Submission,
    choice: Choice,
    files: Sequence[Path],
) -> None:
    if files:
        (stage / "source").mkdir()
    for file in files:
        shutil.copyfile(file, stage / "source" / file.name)
    part = replace(
        run,
        command=submission.command,
        commands=(),
        plugins=tuple(f"source/{f.name}" for f in files),
        trainings=tuple(choice.all()),
    )
    for kind, key in part.record_names:
        _copy(Store(result).read(kind, key), Store(stage).path(kind, key))
    _text(stage / RUN, to_json(part))
    made = Files(stage)
    _text(stage / SUBMISSION, json.dumps(submission.model_dump(by_alias=True), indent=1))
    told = marks(made.rows, part, kind=submission.kind, name=submission.name)
    _text(stage / "README.md", page(submission, made.rows, told))
    _text(stage / MANIFEST, write_manifest(stage))


def _copy(record: TrainOutcome | AttackOutcome | None, path: Path) -> None:
    if record is None:
        raise UserError(f"the record {path.stem} of the run was lost while it was read.")
    if isinstance(record, NoResult):
        # A traceback names files of this machine, and no figure comes from it.
        record = replace(record, traceback=None)
    path.parent.mkdir(parents=True, exist_ok=True)
    _text(path, to_json(record))


def _text(path: Path, text: str) -> None:
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def _private(request: Request, run: Run) -> set[str]:
    """Folders of the author's machine: where this runs, and what the run was made with and from."""
    files = [Path(request.target), *request.attacks, *map(Path, run.plugins)]
    places = [request.out, Path(sys.prefix), *(f.absolute().parent for f in files)]
    if request.data_dir is not None:
        places.append(request.data_dir)
    for command in (run.command, *run.commands):
        pieces = (piece for word in shlex.split(command) for piece in word.split("="))
        places += [Path(p) for p in pieces if Path(p).is_absolute()]
    # /data or /app tells nothing, and would be found in the middle of other paths.
    private = {p for p in _both(places) if len(p.parts) > 2 and p.parts[1] != "usr"}
    private |= {p for p in _both((Path.home(), Path.cwd(), request.run)) if len(p.parts) > 1}
    return {str(p) for p in private} - _EVERYONES


def _both(places: Iterable[Path]) -> set[Path]:
    """Each place as it is named, and where its links lead."""
    return {q for p in places for q in (p.absolute(), p.resolve())}


def _refuse_private(stage: Path, request: Request, run: Run) -> None:
    """Nothing of the author's machine may go out with the folder. Raises UserError."""
    private = sorted(_private(request, run))
    for path in sorted(stage.rglob("*")):
        if path.is_file():
            text = path.read_text(errors="replace", encoding="utf-8")
            for word in private:
                # JSON writes letters beyond ASCII as numbers.
                if word in text or json.dumps(word)[1:-1] in text:
                    raise UserError(
                        f"{path.relative_to(stage)} would name a folder of your machine "
                        f"('{word}'); take it out of the source or of the run, and try again."
                    )
