"""`leakbench submit`: a folder that holds a plugin's rows and all that is needed to rerun them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import __version__
from bench.errors import UserError
from bench.harness.environment import Environment
from bench.harness.keys import Code, Keys
from bench.harness.store import Store, to_json
from bench.registry import PluginKind, Registry, discover
from bench.report.leaderboard import read_run, rows
from bench.sandbox.conformance.plugins import check
from bench.submission.documents import (
    LEADERBOARD,
    MANIFEST,
    RUN,
    SCHEMA,
    SUBMISSION,
    Source,
    Submission,
    write_manifest,
)
from bench.submission.page import page
from bench.submission.selection import Choice, Recorded, check_unchanged, choose, recorded

_PUBLIC = ("schema", "suite", "device", "versions", "code")
"""What of a run.json goes out as it is."""
_EVERYONES = {"/tmp", "/var/tmp"}
"""Folders that tell nothing of a machine, so that sources may name them."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be submitted. target: a name or FILE.py. run: its result folder. attacks: files
    of the author's own attacks. data_dir: where data sets of the run lie that are not embedded.
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
    """Write the submission folder and return it.

    tell: is told what is being checked. Raises UserError with one sentence that says why the
    run or the plugin cannot be submitted.
    """
    run = read_run(request.run)
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
        device=str(run.get("device", "cpu")), data_dir=request.data_dir,
        plugins=tuple(f.resolve() for f in files),
    )  # fmt: skip
    keys = Keys(registry, env)
    _, trainings = recorded(run)
    choice = choose(trainings, kind, name, registry)
    _check_data(choice)
    check_unchanged(choice, keys, name, kind)
    _check_attacks(registry, request.attacks, choice)
    failed = _check_finished(Store(request.run), choice, kind, name)
    for settings in _settings(choice, kind, name):
        tell(f"Checking {name} with {settings or 'its defaults'}.")
        _check_conformance(registry, kind, name, settings)
    submission = Submission(
        schema=SCHEMA, kind=kind, name=name, author=request.author, date=day,
        leakbench=__version__, command=_without_paths(str(run.get("command", ""))),
        settings=_settings(choice, kind, name), plugins=_sources(registry, choice, files),
        failed_cells=failed, environment=_environment(run),
    )  # fmt: skip
    return _write(request, folder, run, submission, choice, files)


# --- what is refused ------------------------------------------------------------------------------


def _day(date: str | None) -> str:
    if date is None:
        return datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        return datetime.date.fromisoformat(date).isoformat()
    except ValueError as error:
        raise UserError(f"--date must be a day as YYYY-MM-DD, got '{date}'.") from error


def _only(
    registry: Registry, target: str, run: Mapping[str, Any], *, is_file: bool
) -> tuple[PluginKind, str]:
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
        trainings = run.get("trainings", [])
        used = {t["defense"] for t in trainings}
        used |= {c["attack"] for t in trainings for c in t["cells"]}
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


def _check_attacks(registry: Registry, attacks: Sequence[Path], choice: Choice) -> None:
    ran = {c.attack for t in choice.own for _, c in t.cells}
    for path in attacks:
        names = {p.name for p in registry.usable.values()
                 if p.kind == "attack" and p.origin == str(path.resolve())}  # fmt: skip
        if not names & ran:
            raise UserError(f"the run has no column of an attack from {path.name}.")


def _check_finished(store: Store, choice: Choice, kind: str, name: str) -> list[str]:
    """Labels of the failed cells; without a record, or where a training failed, refuse."""
    failed = []
    for training in choice.all():
        what = f"{training.job.defense} (seed {training.job.seed})"
        record = store.read("train", training.entry["key"])
        if record is None:
            raise UserError(f"the run is not finished: the training of {what} has no record.")
        if record["status"] not in ("done", "not_applicable"):
            raise UserError(f"the training of {what} {record['status']}: {record['reason']}")
        for entry, cell in training.cells:
            record = store.read("attack", entry["key"])
            if record is None:
                raise UserError(f"the run is not finished: {cell.label} on {what} has no record.")
            if record["status"] in ("failed", "timeout"):
                failed.append(f"{cell.label} at {cell.checkpoint} on {what}: {record['status']}")
    if not any(cells_of(t, kind, name) for t in choice.own):
        raise UserError(f"the run attacks no row of '{name}'; give its suite attacks.")
    return failed


def cells_of(training: Recorded, kind: str, name: str) -> list[Any]:
    """A training's cells that are the submission's own."""
    return [(e, c) for e, c in training.cells if kind == "defense" or c.attack == name]


def _settings(choice: Choice, kind: str, name: str) -> list[dict[str, Any]]:
    """Every setting of the plugin in the run, once."""
    found = {}
    for training in choice.own:
        mine = [training.job.settings] if kind == "defense" else [
            c.settings for _, c in training.cells if c.attack == name
        ]  # fmt: skip
        for settings in mine:
            found[to_json(settings)] = dict(settings)
    return list(found.values())


def _check_conformance(
    registry: Registry, kind: PluginKind, name: str, settings: Mapping[str, Any]
) -> None:
    result = check(registry, kind, name, settings)
    wrong = [f for f in result.findings if f.status == "failed"]
    if wrong:
        raise UserError(
            f"{name} does not pass `leakbench check`: {wrong[0].name}: {wrong[0].reason}"
        )


# --- what is written ------------------------------------------------------------------------------


def _sources(registry: Registry, choice: Choice, files: Sequence[Path]) -> list[Source]:
    """Every plugin of the submitted rows, with the hash of its source."""
    names: dict[tuple[PluginKind, str], None] = {}
    for training in choice.all():
        for part in training.job.defense.split("+"):
            names["defense", part] = None
        for _, cell in training.cells:
            names["attack", cell.attack] = None
    own = {str(f.resolve()): f"source/{f.name}" for f in files}
    code = Code(registry)
    found = []
    for kind, name in names:
        origin = registry.get(kind, name).origin
        found.append(
            Source(
                kind=kind,
                name=name,
                file=own.get(origin),
                origin="a file" if origin in own else origin,
                sources=code.package(kind, name),
            )
        )
    return found


def _environment(run: Mapping[str, Any]) -> dict[str, str]:
    """Versions, device and kind of machine; no names of hosts or users."""
    versions = {str(k): str(v) for k, v in run.get("versions", {}).items()}
    return versions | {
        "device": str(run.get("device", "cpu")),
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


def _write(
    request: Request, folder: Path, run: Mapping[str, Any], submission: Submission,
    choice: Choice, files: Sequence[Path],
) -> Path:  # fmt: skip
    """The whole folder under another name, then renamed."""
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(dir=request.out, prefix=f".{submission.name}."))
    except OSError as error:
        raise UserError(f"cannot write to {request.out} ({error.strerror or error}).") from error
    try:
        _fill(stage, request.run, run, submission, choice, files)
        _refuse_private(stage, request, run)
        stage.chmod(0o755)
        if folder.exists():
            old = stage.with_name(stage.name + ".old")
            os.replace(folder, old)
            os.replace(stage, folder)
            shutil.rmtree(old)
        else:
            os.replace(stage, folder)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return folder


def _fill(
    stage: Path, result: Path, run: Mapping[str, Any], submission: Submission, choice: Choice,
    files: Sequence[Path],
) -> None:  # fmt: skip
    if files:
        (stage / "source").mkdir()
    for file in files:
        shutil.copyfile(file, stage / "source" / file.name)
    store, copy = Store(result), Store(stage)
    for training in choice.all():
        for kind, key in [("train", training.entry["key"]),
                          *(("attack", e["key"]) for e, _ in training.cells)]:  # fmt: skip
            path = copy.path(kind, key)  # type: ignore[arg-type]
            record = store.read(kind, key)  # type: ignore[arg-type]
            if record is None:
                raise UserError(f"the {kind} record {key} of the run was lost while it was read.")
            path.parent.mkdir(parents=True, exist_ok=True)
            # A traceback names files of this machine, and no figure comes from it.
            _text(path, to_json({k: v for k, v in record.items() if k != "traceback"}))
    part = {
        **{k: run[k] for k in _PUBLIC if k in run},
        "command": submission.command,
        "plugins": [f"source/{f.name}" for f in files],
        "trainings": [t.entry for t in choice.all()],
    }
    _text(stage / RUN, to_json(part))
    table = rows(stage)
    _text(stage / LEADERBOARD, to_json(table))
    _text(stage / SUBMISSION, json.dumps(submission.model_dump(by_alias=True), indent=1))
    _text(stage / "README.md", page(submission, table))
    _text(stage / MANIFEST, write_manifest(stage))


def _text(path: Path, text: str) -> None:
    path.write_text(text if text.endswith("\n") else text + "\n")


def _private(request: Request, run: Mapping[str, Any]) -> set[str]:
    """Folders of the author's machine: where this runs, and what the run was made with and from."""
    files = [Path(f) for f in (request.target, *request.attacks, *run.get("plugins", []))]
    places = [request.out, Path(sys.prefix), *(f.absolute().parent for f in files)]
    if request.data_dir is not None:
        places.append(request.data_dir)
    for command in (run.get("command", ""), *run.get("commands", [])):
        pieces = (piece for word in shlex.split(str(command)) for piece in word.split("="))
        places += [Path(p) for p in pieces if Path(p).is_absolute()]
    # /data or /app tells nothing, and would be found in the middle of other paths.
    private = {p for p in _both(places) if len(p.parts) > 2 and p.parts[1] != "usr"}
    private |= {p for p in _both((Path.home(), Path.cwd(), request.run)) if len(p.parts) > 1}
    return {str(p) for p in private} - _EVERYONES


def _both(places: Iterable[Path]) -> set[Path]:
    """Each place as it is named, and where its links lead."""
    return {q for p in places for q in (p.absolute(), p.resolve())}


def _refuse_private(stage: Path, request: Request, run: Mapping[str, Any]) -> None:
    """Nothing of the author's machine may go out with the folder. Raises UserError."""
    private = sorted(_private(request, run))
    for path in sorted(stage.rglob("*")):
        if path.is_file():
            text = path.read_text(errors="replace")
            for word in private:
                # JSON writes letters beyond ASCII as numbers.
                if word in text or json.dumps(word)[1:-1] in text:
                    raise UserError(
                        f"{path.relative_to(stage)} would name a folder of your machine "
                        f"('{word}'); take it out of the source or of the run, and try again."
                    )
