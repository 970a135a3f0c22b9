"""Joins result folders of one suite that were made in parts: on several machines, by --only, or of
other defenses."""

import filecmp
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench import records
from bench.errors import UserError
from bench.harness.plan import expand
from bench.harness.store import Store, stage_folder, write_whole
from bench.suite import DECIDES_NO_FIGURE, Suite

_DIFFERING = ("seeds", "defenses", *DECIDES_NO_FIGURE)
"""Keys of a suite in which its parts may differ. The records tell seeds and defenses apart."""
_VARIES = (
    *("seconds", "client_seconds", "workings", "memory"),
    *("versions", "traceback", "files", "hashes"),
    *("bytes_up", "bytes_down"),
)
"""Of a record: what may differ when the same figures are made twice: the clock's readings, and the
length of ciphertexts, whose randomness is fresh, with the files that say it."""
R = TypeVar("R", bound=records.TrainOutcome | records.AttackOutcome)
Part = tuple[Path, records.Run]


def merge(folders: Sequence[Path], out: Path) -> records.Run:
    """Write the union of result folders to an empty or new one, whole or not at all, and return its
    run.

    A record that failed gives way to one that did not. The order of the folders changes nothing.
    Artifacts are copied, so that a later run in one folder cannot reach another's.

    Raises:
        UserError: For folders of different suites or code, for records that contradict their run
            or each other, for a training or attack that was made twice with different figures, and
            for an `out` that is not empty.
    """
    if not folders:
        raise UserError("merge needs at least one result folder.")
    _check_empty(out)
    parts = [(folder, records.Run.read(folder)) for folder in folders]
    run = _join(parts)
    stores = [Store(*part) for part in parts]
    with stage_folder(out) as target:
        for training in run.trainings:
            _copy_all(training, stores, Store(target))
        records.check_together(run.trainings, Store(target, run).read)
        write_whole(target / records.RUN, records.to_json(run))
        _check_empty(out)
    return run


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty: give --out a new folder.")


# --- run.json -----------------------------------------------------------------------------------


def _join(parts: Sequence[Part]) -> records.Run:
    """One run. Raises UserError for parts that do not belong together."""
    for part in parts[1:]:
        _check_alike(parts[0], part)
    runs = [run for _, run in parts]
    each = [r.suite.seeds for r in runs]
    seeds = each[0] if all(s == each[0] for s in each) else sorted(set().union(*each))
    # In the order of the longest list, so that a board keeps its own beside a newcomer's.
    listed = sorted((r.suite.defenses for r in runs), key=lambda d: (-len(d), str(d)))
    named = [d for own in listed for d in own]
    defenses = [d for place, d in enumerate(named) if d not in named[:place]]
    joined = {"seeds": seeds, "timeout_s": max(r.suite.timeout_s for r in runs)}
    suite = runs[0].suite.model_copy(update=joined | {"defenses": defenses})
    commands = sorted({c for r in runs for c in r.commands or (r.command,)})
    names = dict.fromkeys(n for r in runs for n in r.versions)
    return records.Run(
        suite=suite,
        command=" && ".join(commands),
        commands=tuple(commands) if len(commands) > 1 else (),
        device=_both(r.device for r in runs),
        versions={n: _both(r.versions[n] for r in runs if n in r.versions) for n in names},
        plugins=tuple(sorted({p for r in runs for p in r.plugins})),
        code=_code(parts),
        trainings=_union(suite, parts),
    )


def _both(values: Iterable[str]) -> str:
    """ "cpu" and "cuda": "cpu, cuda"."""
    return ", ".join(sorted({name for value in values for name in value.split(", ")}))


def _check_alike(a: Part, b: Part) -> None:
    """Raise UserError if two parts are not of one suite and code."""
    (first, run), (second, other) = a, b
    mine, theirs = run.suite.model_dump(), other.suite.model_dump()
    for key in mine:
        if key not in _DIFFERING and mine[key] != theirs[key]:
            texts = [" ".join(json.dumps(s[key]).split()) for s in (mine, theirs)]
            excerpts = [t if len(t) <= 60 else f"{t[:57]}..." for t in texts]
            raise UserError(
                f"{first} and {second} are of different suites: {key} is {excerpts[0]} in one "
                f"and {excerpts[1]} in the other."
            )
    here, there = (r.versions.get("leakbench") for r in (run, other))
    if here != there:
        raise UserError(f"{first} was made by leakbench {here}, {second} by {there}.")


def _code(parts: Sequence[Part]) -> dict[str, str]:
    """Return the hash of all code that some part ran. Raises UserError where two parts ran
    different code of one name: any two, since not all run every defense."""
    hashes: dict[str, tuple[str, Path]] = {}
    for folder, run in parts:
        for name, digest in run.code.items():
            known, first = hashes.setdefault(name, (digest, folder))
            if known != digest:
                raise UserError(f"{first} and {folder} were made by different code of {name}.")
    return {name: hashes[name][0] for name in sorted(hashes)}


def _union(suite: Suite, parts: Sequence[Part]) -> tuple[records.PlannedTraining, ...]:
    """Return all trainings with all their cells, in a whole run's order."""
    jobs: dict[str, records.TrainJob] = {}
    cells: dict[str, dict[str, records.Cell]] = {}
    keys: dict[records.Job, tuple[str, Path]] = {}

    def check_key(job: records.TrainJob | records.AttackJob, key: str, folder: Path) -> None:
        known, first = keys.setdefault(job, (key, folder))
        if known != key:
            raise UserError(
                f"{job.name} was made twice, in {first} and {folder}, under different keys "
                f"({known} and {key}): other code, settings, data or device."
            )

    for folder, run in parts:
        for training in run.trainings:
            key, job = training.key, training.job
            check_key(job, key, folder)
            if jobs.setdefault(key, job) != job:
                raise UserError(f"training {key} has different inputs in {folder}.")
            mine = cells.setdefault(key, {})
            for cell in training.cells:
                check_key(cell.job, cell.key, folder)
                mine[cell.key] = cell
    places = {job: place for place, job in enumerate(expand(suite).trainings)}
    columns = list(records.labels(suite))

    def place(cell: records.Cell) -> tuple[int, int]:
        return suite.checkpoints.index(cell.checkpoint), columns.index(cell.label)

    return tuple(
        records.PlannedTraining(
            key=key, job=jobs[key], cells=tuple(sorted(cells[key].values(), key=place))
        )
        for key in sorted(jobs, key=lambda k: (places.get(jobs[k], len(places)), jobs[k].text))
    )


# --- records and artifacts ------------------------------------------------------------------


def _copy_all(training: records.PlannedTraining, stores: Sequence[Store], target: Store) -> None:
    """Copy the records of a training and of every attack on it that stay, with their files.

    Attacks on a training that failed in one folder and is done in another are left out: a run
    there makes them anew.
    """
    trained = [(s, r) for s in stores if (r := s.read("train", training.key)) is not None]
    kept = [s for s, r in trained if records.is_settled(r)]
    _copy("train", training.key, _pick(trained), target)
    for cell in training.cells:
        tried = kept or stores
        pairs = [(s, a) for s in tried if (a := s.read("attack", cell.key)) is not None]
        _copy("attack", cell.key, _pick(pairs) if kept else pairs, target, compare=bool(kept))


def _pick(pairs: list[tuple[Store, R]]) -> list[tuple[Store, R]]:
    """Return the settled records, or all if none is settled."""
    return [(s, r) for s, r in pairs if records.is_settled(r)] or pairs


def _copy(
    kind: records.Kind,
    key: str,
    pairs: list[tuple[Store, R]],
    target: Store,
    *,
    compare: bool = True,
) -> None:
    """Copy the record that stays, one with its files where there is one, and its files. compare:
    whether settled records must have equal figures."""
    if not pairs:
        return
    pairs = sorted(pairs, key=lambda f: (not f[0].artifacts(key).is_dir(), records.canonical(f[1])))
    first, record = pairs[0]
    figures = _figures(records.plain(record))
    same = [first]
    for store, twin in pairs[1:]:
        others = _figures(records.plain(twin))
        if others == figures:
            if twin.hashes == record.hashes:
                same.append(store)
        elif compare and records.is_settled(record):
            name = "training" if kind == "train" else "attack"
            place = next(p for p in sorted({*figures, *others}) if figures.get(p) != others.get(p))
            values = f"{figures.get(place)!r} and {others.get(place)!r}"
            raise UserError(
                f"{name} {key} has different figures in {first.folder} and {store.folder} "
                f"({place}: {values[:200]})."
            )
    write_whole(target.path(kind, key), records.to_json(record))
    for store in same:
        _copy_artifacts(store.artifacts(key), target.artifacts(key), record)


def _copy_artifacts(source: Path, target: Path, record: records.Record) -> None:
    """Add a folder's files. Raises UserError for a file that is there with other content, and
    for anything that is not what the record lists."""
    if not source.is_dir():
        return
    records.check_kept(source, record)
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        copy = target / path.name
        if not copy.exists():
            shutil.copyfile(path, copy)
        elif not filecmp.cmp(path, copy, shallow=False):
            raise UserError(f"{path} differs from the same artifact of another folder.")


def _figures(value: Any, place: str = "") -> dict[str, Any]:
    """Return all of a record but for what varies, by its place: values.ssim.0."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {place: value}
    inner = ((f"{place}.{name}".lstrip("."), v) for name, v in value.items() if name not in _VARIES)
    return {where: figure for name, v in inner for where, figure in _figures(v, name).items()}
