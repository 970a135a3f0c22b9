"""Joins result folders of one suite that were made in parts: on several machines, or by --only."""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import suite as suites
from bench.errors import UserError
from bench.harness.plan import expand
from bench.harness.store import Kind, Store, to_json, write_whole
from bench.report.cells import checked_key
from bench.report.leaderboard import read_run
from bench.report.tables import setting

Run = dict[str, Any]
Record = dict[str, Any]
_DECIDES_NO_NUMBER = ("seeds", "timeout_s")
"""Of a suite: what its parts may differ in. Seeds are told apart by the records."""
_CLOCK = ("seconds", "client_seconds", "memory", "versions", "traceback")
"""Of a record: what differs when the same figures are made twice."""
_SETTLED = ("done", "not_applicable")
_KNOWN = ("schema", "suite", "command", "commands", "device", "versions", "plugins", "code",
          "trainings")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What a merged folder holds. notes: what a reader of its figures must know."""

    trainings: int
    cells: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Part:
    folder: Path
    run: Run


def merge(folders: Sequence[Path], out: Path) -> Merged:
    """Write the union of result folders to `out`, which must be empty or new; whole or not at all.

    A record that failed gives way to one that did not. The order of the folders changes nothing.
    Artifacts are copied, so that a later run in one folder cannot reach another's. Raises
    ValueError for folders of different suites, code or schema, for a training or cell that was
    made twice with different figures, and for an `out` that is not empty.
    """
    if not folders:
        raise UserError("merge needs at least one result folder.")
    _check_empty(out)
    parts = [_Part(folder=f, run=_checked(read_run(f), f)) for f in folders]
    run = _joined(parts)
    chosen = _Chosen(parts)
    target = _new_folder(out)
    try:
        cells = 0
        for training in run["trainings"]:
            chosen.copy_training(training["key"], target)
            cells += len(training["cells"])
            for cell in training["cells"]:
                chosen.copy_attack(training["key"], cell["key"], target)
        write_whole(target / "run.json", to_json(run))
        if out.exists():
            out.rmdir()
        target.chmod(0o755)
        target.rename(out)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return Merged(trainings=len(run["trainings"]), cells=cells, notes=_notes(run))


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty: give --out a new folder.")


def _new_folder(out: Path) -> Path:
    """A folder beside `out`, to become it by one rename."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror or error}).") from error


def _checked(run: Any, folder: Path) -> Run:
    """A run.json whose trainings and keys can be used. Raises UserError if they cannot."""
    needed = ("schema", "suite", "command", "device", "versions", "trainings")
    if not isinstance(run, dict) or any(k not in run for k in needed):
        raise UserError(f"{folder}/run.json lacks one of {', '.join(needed)}.")
    for training in run["trainings"]:
        checked_key(training["key"])
        for cell in training["cells"]:
            checked_key(cell["key"])
    return run


# --- run.json -----------------------------------------------------------------------------------


def _joined(parts: Sequence[_Part]) -> Run:
    """One run.json. Raises UserError for parts that do not belong together."""
    first = parts[0].run
    for part in parts[1:]:
        _check_alike(parts[0], part)
    runs = [p.run for p in parts]
    seeds = [r["suite"]["seeds"] for r in runs]
    commands = {c for r in runs for c in r.get("commands", [r["command"]])}
    run: Run = {
        "schema": first["schema"],
        "suite": first["suite"]
        | {
            "seeds": seeds[0] if all(s == seeds[0] for s in seeds) else sorted(set().union(*seeds)),
            "timeout_s": max(r["suite"]["timeout_s"] for r in runs),
        },
        "command": " && ".join(sorted(commands)),
    }
    if len(commands) > 1:
        run["commands"] = sorted(commands)
    run["device"] = _both([r["device"] for r in runs])
    names = sorted({n for r in runs for n in r["versions"]}) if _differ(runs, "versions") else (
        first["versions"])  # fmt: skip
    run["versions"] = {n: _both([r["versions"][n] for r in runs if n in r["versions"]])
                       for n in names}  # fmt: skip
    plugins = [r.get("plugins", []) for r in runs]
    same = all(p == plugins[0] for p in plugins)
    run["plugins"] = plugins[0] if same else sorted({p for found in plugins for p in found})
    if any("code" in r for r in runs):
        run["code"] = dict(
            sorted({k: v for r in runs for k, v in r.get("code", {}).items()}.items())
        )
    run |= {k: v for k, v in first.items() if k not in _KNOWN}
    run["trainings"] = _union(run["suite"], parts)
    return run


def _differ(runs: Sequence[Run], key: str) -> bool:
    return any(r[key] != runs[0][key] for r in runs)


def _both(values: Sequence[str]) -> str:
    """ "cpu" and "cuda": "cpu, cuda"."""
    return ", ".join(sorted({one for value in values for one in value.split(", ")}))


def _check_alike(a: _Part, b: _Part) -> None:
    """Raises UserError if two parts are not of one suite, code and schema."""
    if a.run["schema"] != b.run["schema"]:
        raise UserError(f"{a.folder} has records of schema {a.run['schema']}, {b.folder} of "
                         f"{b.run['schema']}.")  # fmt: skip
    mine, theirs = a.run["suite"], b.run["suite"]
    for key in dict.fromkeys([*mine, *theirs]):
        if key not in _DECIDES_NO_NUMBER and mine.get(key) != theirs.get(key):
            texts = [" ".join(json.dumps(s.get(key)).split()) for s in (mine, theirs)]
            shown = [t if len(t) <= 60 else f"{t[:57]}..." for t in texts]
            raise UserError(f"{a.folder} and {b.folder} are of different suites: {key} is "
                             f"{shown[0]} in one and {shown[1]} in the other.")  # fmt: skip
    here, there = (p.run["versions"].get("leakbench") for p in (a, b))
    if here != there:
        raise UserError(f"{a.folder} was made by leakbench {here}, {b.folder} by {there}.")
    for key in sorted({*a.run, *b.run} - set(_KNOWN)):
        if a.run.get(key) != b.run.get(key):
            raise UserError(f"{a.folder} and {b.folder} differ in '{key}' of run.json.")
    code, other = a.run.get("code", {}), b.run.get("code", {})
    for name in code.keys() & other.keys():
        if code[name] != other[name]:
            raise UserError(f"{a.folder} and {b.folder} were made by different code of {name}.")


def _union(suite: Mapping[str, Any], parts: Sequence[_Part]) -> list[Record]:
    """All trainings with all their cells, in the order in which a whole run lists them."""
    trainings: dict[str, Record] = {}
    cells: dict[str, dict[str, Record]] = {}
    made: dict[str, tuple[str, Path]] = {}
    for part in parts:
        for training in part.run["trainings"]:
            key = training["key"]
            inputs = {k: v for k, v in training.items() if k not in ("key", "cells")}
            other, folder = made.setdefault(_canonical(inputs), (key, part.folder))
            if other != key:
                raise UserError(
                    f"{_name(training)} was made twice, in {folder} and {part.folder}, under "
                    f"different keys ({other} and {key}): other code, data or device."
                )
            if trainings.setdefault(key, inputs) != inputs:
                raise UserError(f"training {key} has different inputs in {part.folder}.")
            mine = cells.setdefault(key, {})
            for cell in training["cells"]:
                _check_cell(mine, cell, training, part.folder)
                mine[cell["key"]] = cell
    places, order = _places(suite)

    def place(key: str) -> tuple[int, str]:
        text = _canonical(trainings[key])
        return (places.get(text, len(places)), text)

    def in_order(key: str) -> list[Record]:
        text = _canonical(trainings[key])
        return sorted(
            cells[key].values(),
            key=lambda c: (order.get((text, c["checkpoint"], c["label"]), len(order)), c["key"]),
        )

    return [
        {"key": key, **trainings[key], "cells": in_order(key)}
        for key in sorted(trainings, key=place)
    ]


def _check_cell(
    known: Mapping[str, Record], cell: Record, training: Record, folder: Path
) -> None:  # fmt: skip
    """Raises UserError if the same cell stands there under another key."""
    for other in known.values():
        same = all(other[k] == cell[k] for k in ("label", "checkpoint"))
        if same and other["key"] != cell["key"]:
            raise UserError(
                f"{_name(training)} {cell['label']} at {cell['checkpoint']} was made twice under "
                f"different keys ({other['key']} and, in {folder}, {cell['key']}): other code, "
                "settings or budget of the attack."
            )


def _places(
    suite: Mapping[str, Any],
) -> tuple[dict[str, int], dict[tuple[str, str, str], int]]:
    """Place in the whole suite's plan of every training, by its inputs, and of every cell, by
    those, checkpoint and label."""
    plan = expand(suites.Suite.model_validate(suite))
    texts = {id(j): _canonical(json.loads(to_json(j.inputs()))) for j in plan.trainings}
    trainings = {texts[id(j)]: i for i, j in enumerate(plan.trainings)}
    cells = {(texts[id(c.train)], c.checkpoint, c.label): i for i, c in enumerate(plan.cells)}
    return trainings, {(text, str(at), label): i for (text, at, label), i in cells.items()}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _name(training: Mapping[str, Any]) -> str:
    task = training["task"]
    return (f"{task['dataset']}/{task['model']}/{setting(dict(training))}/"
            f"seed={training['seed']}")  # fmt: skip


def _notes(run: Run) -> tuple[str, ...]:
    """What differs between the parts, for whoever reads their figures side by side."""
    mixed = [f"{k} {v}" for k, v in run["versions"].items() if ", " in v]
    notes = []
    if ", " in run["device"]:
        notes.append(f"the parts ran on different devices ({run['device']}): figures of one "
                     "setting agree across devices only up to rounding.")  # fmt: skip
    if mixed:
        notes.append(f"the parts ran with different versions ({'; '.join(mixed)}).")
    return tuple(notes)


# --- records and artifacts ------------------------------------------------------------------


class _Chosen:
    """Of each key, the record that stays, and the folders whose artifacts belong to it."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.stores = [Store(p.folder) for p in parts]

    def copy_training(self, key: str, target: Path) -> None:
        found = self._records("train", key)
        self._copy("train", key, _settled(found) or found, target)

    def copy_attack(self, training: str, key: str, target: Path) -> None:
        """Attacks on a training that failed in one folder and is done in another are left out:
        a run there makes them anew."""
        trained = self._records("train", training)
        kept = {s.folder for s, _ in _settled(trained)}
        found = self._records("attack", key)
        if kept:
            found = [(s, r) for s, r in found if s.folder in kept]
            found = _settled(found) or found
        self._copy("attack", key, found, target, compare=bool(kept))

    def _records(self, kind: Kind, key: str) -> list[tuple[Store, Record]]:
        return [(s, r) for s in self.stores if (r := s.read(kind, key)) is not None]

    def _copy(
        self, kind: Kind, key: str, found: list[tuple[Store, Record]], target: Path, *,
        compare: bool = True,
    ) -> None:  # fmt: skip
        """Copy the record that stays. compare: whether settled ones must have equal figures."""
        if not found:
            return
        found = sorted(found, key=lambda f: _canonical(f[1]))
        first, record = found[0]
        for store, other in found[1:]:
            if compare and _settled(found) and _figures(other) != _figures(record):
                name = "training" if kind == "train" else "attack"
                raise UserError(
                    f"{name} {key} has different figures in {first.folder} and {store.folder} "
                    f"({_difference(_figures(record), _figures(other))})."
                )
        write_whole(Store(target).path(kind, key), to_json(record))
        for store, other in found:
            if _figures(other) == _figures(record):
                _copy_artifacts(store.artifacts(key), Store(target).artifacts(key))


def _settled(found: list[tuple[Store, Record]]) -> list[tuple[Store, Record]]:
    return [(s, r) for s, r in found if r["status"] in _SETTLED]


def _copy_artifacts(source: Path, target: Path) -> None:
    """Add a folder's files. Raises UserError for a file that is there with other content, and
    for anything that is no plain file."""
    if not source.is_dir():
        return
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise UserError(f"{path} is no plain file, which no run writes there.")
        copy = target / path.name
        if not copy.exists():
            shutil.copyfile(path, copy)
        elif not filecmp.cmp(path, copy, shallow=False):
            raise UserError(f"{path} differs from the same artifact of another folder.")


def _figures(value: Any) -> Any:
    """A record without the clock's readings."""
    if isinstance(value, Mapping):
        return {k: _figures(v) for k, v in value.items() if k not in _CLOCK}
    return value


def _difference(a: Any, b: Any, place: str = "") -> str:
    """The first place where two records differ, and what they hold there."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                return _difference(a.get(key), b.get(key), f"{place}.{key}" if place else key)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return _difference(x, y, f"{place}.{i}")
    return f"{place}: {a!r} and {b!r}"[:200]
