"""`leakbench submit`: a folder that holds a plugin's rows and all that is needed to rerun them."""

import datetime
import json
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import __version__, models, records
from bench.errors import UserError
from bench.harness.environment import Environment
from bench.harness.environment import plugins_of as plugins_of_job
from bench.harness.keys import Code, Keys
from bench.harness.store import Store, stage_folder
from bench.records.submitted import MANIFEST, SCHEMA, SUBMISSION, PluginSource, Submission
from bench.registry import PluginKind, Registry, discover
from bench.report.files import Files
from bench.sandbox.conformance.plugins import check, is_file, plugins_of, plugins_of_file
from bench.submission.documents import check_suite, marks, page, write_manifest

Trainings = Sequence[records.PlannedTraining]
_EVERYONES = {"/tmp", "/var/tmp"}
"""Folders that tell nothing of a machine, so that sources may name them."""


def submit(
    target: str,
    run_folder: Path,
    *,
    attacks: Sequence[Path] = (),
    author: str = "anonymous",
    out: Path = Path("results/submissions"),
    data_dir: Path | None = None,
    replaces: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a submission's folder and return it.

    Args:
        target: A name or FILE.py.
        run_folder: Its result folder.
        attacks: Files of the author's own attacks.
        author: Who submits.
        out: Where the submission's folder is written.
        data_dir: Where data sets of the run lie that are not embedded.
        replaces: Whether an earlier submission gives way.
        tell: Is told what is being checked.

    Raises:
        UserError: Saying why the run or the plugin cannot be submitted.
    """
    run = records.Run.read(run_folder)
    files = [*([Path(target)] if is_file(target) else []), *attacks]
    paths = tuple(f.resolve() for f in files)
    registry = discover(paths)
    kind, name = _only(registry, target, run)
    folder = out / name
    if folder.exists() and not replaces:
        raise UserError(f"{folder} exists already; give --replace to write it anew.")
    env = Environment(device=run.device or "cpu", data_dir=data_dir, plugins=paths)
    check_suite(run)
    own, reference = choose(run, kind, name, registry)
    trainings = [*own, *(t for t in reference if t not in own)]
    for training in own:
        _check_data(training)
    check_unchanged(own, reference, Keys(registry, env), kind)
    columns = {c.attack for t in own for c in t.cells}
    for path in attacks:
        if not columns & {p.name for p in plugins_of_file(registry, path) if p.kind == "attack"}:
            raise UserError(f"the run has no column of an attack from {path.name}.")
    store = Store(run_folder, run)
    failed = list(_find_failed(store, trainings))
    cells = [c for t in own for c in cells_of(t, kind, name)]
    if not cells:
        raise UserError(f"the run attacks no row of '{name}'; give its suite attacks.")
    jobs: list[Any] = [one.job for one in (own if kind == "defense" else cells)]
    tried = {records.canonical(j.settings): dict(j.settings) for j in jobs}
    for settings in tried.values():
        tell(f"Checking {name} with {settings or 'its defaults'}.")
        findings = check(registry, kind, name, settings).findings
        wrong = next((f for f in findings if f.status == "failed"), None)
        if wrong is not None:
            raise UserError(f"{name} does not pass `leakbench check`: {wrong.name}: {wrong.reason}")
    machine = {"system": platform.system(), "machine": platform.machine()}
    submission = Submission(
        schema=SCHEMA,
        kind=kind,
        name=name,
        author=author,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        leakbench=__version__,
        command=_without_paths(run.command),
        settings=list(tried.values()),
        plugins=list(_sources(registry, trainings, files)),
        failed_cells=failed,
        # No names of hosts or users.
        environment=dict(run.versions) | {"device": run.device or "cpu"} | machine,
    )
    sources = tuple(f"source/{f.name}" for f in files)
    part = replace(
        run, command=submission.command, commands=(), plugins=sources, trainings=tuple(trainings)
    )
    places = [run_folder, out, *(f.absolute().parent for f in (*files, *map(Path, run.plugins)))]
    places += [data_dir] if data_dir is not None else []
    with stage_folder(folder) as stage:
        for file, source in zip(files, sources, strict=True):
            (stage / "source").mkdir(exist_ok=True)
            shutil.copyfile(file, stage / source)
        for record_kind, key in part.record_names:
            _copy(store.read(record_kind, key), Store(stage).path(record_kind, key))
        _text(stage / records.RUN, records.to_json(part))
        made = Files(stage)
        _text(stage / SUBMISSION, json.dumps(submission.model_dump(by_alias=True), indent=1))
        reasons = marks(made.rows, part, kind=kind, name=name)
        _text(stage / "README.md", page(submission, made.rows, reasons))
        _text(stage / MANIFEST, write_manifest(stage))
        _refuse_private(stage, _private(places, run))
    return folder


# --- what is chosen -------------------------------------------------------------------------------


def table_of(training: records.PlannedTraining) -> str:
    """Trainings with one text stand in the same tables."""
    job = training.job
    return records.canonical([job.task.model_dump(exclude={"protocol"}), job.protocol, job.seed])


def choose(
    run: records.Run, kind: str, name: str, registry: Registry
) -> tuple[Trainings, Trainings]:
    """The trainings of a defense, or with cells of an attack, and the undefended ones of the same
    tables.

    What ran under a defense from a file that is not given is none of an attack's submission.

    Raises:
        UserError: If the run lacks either, or names an attack whose file is not given.
    """
    usable = registry.usable
    trainings = [t for t in run.trainings if plugins_of_job(t.job) <= usable.keys()]
    if kind == "defense":
        own = [t for t in trainings if t.job.defense == name]
    else:
        own = [t for t in trainings if any(c.attack == name for c in t.cells)]
    if not own:
        raise UserError(
            f"the run has no row of {kind} '{name}'; run a suite that names it, with --plugin FILE."
        )
    plain = [t for t in trainings if registry.defense(t.job.defense, t.job.settings).is_reference]
    tables, mine = ({table_of(t) for t in these} for these in (plain, own))
    for training in own:
        if table_of(training) not in tables:
            raise UserError(
                f"the run has no undefended row (defense 'none') for {training.job.task.dataset}/"
                f"{training.job.task.model}, seed {training.job.seed}, to compare '{name}' with."
            )
    reference = [t for t in plain if table_of(t) in mine]
    for attack in {c.attack: None for t in (*own, *reference) for c in t.cells}:
        if ("attack", attack) not in usable:
            raise UserError(f"the run has the attack '{attack}'; give its file by --attack FILE.")
    return own, reference


def check_unchanged(own: Trainings, reference: Trainings, keys: Keys, kind: str) -> None:
    """Raises UserError if a record was made by other source than is here now."""
    for training in [t for t in reference if kind == "attack" or t not in own]:
        if keys.train(training.job) != training.key:
            raise UserError(
                "leakbench itself, its device or its data set's files are not those of the run; "
                "run the suite again with this version."
            )
    changed = "the source of '{}' has changed since the run; run the suite again."
    for training in own:
        if keys.train(training.job) != training.key:
            raise UserError(changed.format(training.job.defense))
        for cell in training.cells:
            if keys.attack(cell.job) != cell.key:
                raise UserError(changed.format(cell.attack))


# --- what is refused ------------------------------------------------------------------------------


def _only(registry: Registry, target: str, run: records.Run) -> tuple[PluginKind, str]:
    """The one plugin of the target. Of a file with several, the one that the run has."""
    plugins = plugins_of(registry, target)
    for kind, name in plugins:
        registry.get(kind, name)  # says that a+b is none
    if len(plugins) > 1:
        used = {t.job.defense for t in run.trainings} | {c.attack for c in run.cells}
        plugins = [(kind, name) for kind, name in plugins if name in used]
    if len(plugins) != 1:
        names = ", ".join(name for _, name in plugins) or "none of its plugins"
        raise UserError(f"the run has {names} of {target}; submit one plugin per file.")
    return plugins[0]


def _check_data(training: records.PlannedTraining) -> None:
    task = training.job.task
    if ":" in task.dataset:
        what, name = f"the data set '{task.dataset.partition(':')[0]}:...'", "datasets"
    elif models.named.file_of(task.model) is not None or models.named.is_handed(task.model):
        what, name = f"the model '{task.model}'", "models"
    else:
        return
    raise UserError(
        f"{what} lies on your machine alone, so nobody could verify its rows; submit a run on one "
        f"that `leakbench list {name}` names."
    )


def _find_failed(store: Store, trainings: Trainings) -> Iterator[str]:
    """Yield labels of the failed cells. Raises UserError without a record, or where a training
    failed."""
    for training in trainings:
        what = f"{training.job.defense} (seed {training.job.seed})"
        record = store.read("train", training.key)
        if record is None:
            raise UserError(f"the run is not finished: the training of {what} has no record.")
        if not records.is_settled(record):
            raise UserError(f"the training of {what} {record.status}: {record.reason}")
        for cell in training.cells:
            scored = store.read("attack", cell.key)
            if scored is None:
                raise UserError(f"the run is not finished: {cell.label} on {what} has no record.")
            if not records.is_settled(scored):
                yield f"{cell.label} at {cell.checkpoint} on {what}: {scored.status}"


def cells_of(training: records.PlannedTraining, kind: str, name: str) -> list[records.Cell]:
    """A training's cells that are the submission's own."""
    return [c for c in training.cells if kind == "defense" or c.attack == name]


# --- what is written ------------------------------------------------------------------------------


def _sources(
    registry: Registry, trainings: Trainings, files: Sequence[Path]
) -> Iterator[PluginSource]:
    """Yield every plugin of the submitted rows, with the hash of its source."""
    names: dict[tuple[PluginKind, str], None] = {}
    for training in trainings:
        names |= dict.fromkeys(("defense", part) for part in training.job.defense.split("+"))
        names |= dict.fromkeys(("attack", cell.attack) for cell in training.cells)
    own = {str(f.resolve()): f"source/{f.name}" for f in files}
    code = Code(registry)
    for kind, name in names:
        origin = registry.get(kind, name).origin
        yield PluginSource(
            kind=kind,
            name=name,
            file=own.get(origin),
            origin="a file" if origin in own else origin,
            sources=code.package(kind, name),
        )


def _without_paths(command: str) -> str:
    """A command, or those of a merged run, with the folders of this machine left out."""

    def last(text: str) -> str:
        return re.split(r"[/\\]", text.rstrip("/\\"))[-1]

    words = ["=".join(map(last, word.split("="))) for word in shlex.split(command)]
    return " ".join(word if word == "&&" else shlex.quote(word) for word in words)


def _copy(record: records.TrainOutcome | records.AttackOutcome | None, path: Path) -> None:
    if record is None:
        raise UserError(f"the record {path.stem} of the run was lost while it was read.")
    if isinstance(record, records.NoResult):
        # A traceback names files of this machine, and no figure comes from it.
        record = replace(record, traceback=None)
    path.parent.mkdir(parents=True, exist_ok=True)
    _text(path, records.to_json(record))


def _text(path: Path, text: str) -> None:
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def _private(places: Sequence[Path], run: records.Run) -> list[str]:
    """Folders of the author's machine: where this runs, and what the run was made with and from."""
    named = [*places, Path(sys.prefix)]
    for command in (run.command, *run.commands):
        pieces = (piece for word in shlex.split(command) for piece in word.split("="))
        named += [Path(p) for p in pieces if Path(p).is_absolute()]
    # /data or /app tells nothing, and would be found in the middle of other paths.
    private = {p for p in _both(named) if len(p.parts) > 2 and p.parts[1] != "usr"}
    private |= {p for p in _both((Path.home(), Path.cwd(), places[0])) if len(p.parts) > 1}
    return sorted({str(p) for p in private} - _EVERYONES)


def _both(places: Iterable[Path]) -> set[Path]:
    """Each place as it is named, and where its links lead."""
    return {q for p in places for q in (p.absolute(), p.resolve())}


def _refuse_private(stage: Path, private: Sequence[str]) -> None:
    """Nothing of the author's machine may go out with the folder. Raises UserError."""
    for path in sorted(p for p in stage.rglob("*") if p.is_file()):
        text = path.read_text(errors="replace", encoding="utf-8")
        for word in private:
            # JSON writes letters beyond ASCII as numbers.
            if word in text or json.dumps(word)[1:-1] in text:
                raise UserError(
                    f"{path.relative_to(stage)} would name a folder of your machine "
                    f"('{word}'); take it out of the source or of the run, and try again."
                )
