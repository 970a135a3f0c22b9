"""The files of a submission folder: that they are all there, unchanged, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath

from bench.errors import UserError
from bench.files import sha256
from bench.harness.plan import expand
from bench.names import is_file_name
from bench.records import RUN, Job, Run
from bench.records.submitted import MANIFEST, SCHEMA, read_file

_FILES = re.compile(
    r"(README\.md|submission\.json|run\.json"
    r"|source/[^/]+\.py|records/(train|attack)/[0-9A-Za-z]+\.json)"
)
"""All that a submission may hold beside its manifest: code is read and hashed as source, so that
nothing compiled, and nothing that hides between other files, may be among it."""


def write_manifest(folder: Path) -> str:
    """The manifest of everything in the folder."""
    files = {
        str(PurePosixPath(p.relative_to(folder))): sha256(p)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != MANIFEST
    }
    return json.dumps({"schema": SCHEMA, "files": files}, indent=1)


def check_files(folder: Path) -> None:
    """Raises UserError with the first file that is changed, missing, too many, outside, or of a
    kind that no submission holds."""
    manifest = read_file(folder / MANIFEST)
    listed = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(listed, dict) or manifest.get("schema") != SCHEMA:
        raise UserError(f"{folder / MANIFEST} lists no files of schema {SCHEMA}.")
    for name, expected in listed.items():
        path = inside(folder, name)
        if not _FILES.fullmatch(name):
            raise UserError(
                f"the manifest lists '{name}', which is no file of a submission: it may hold .py "
                "files in source/, records, run.json, submission.json, README.md."
            )
        if not path.is_file():
            raise UserError(f"{name} is in the manifest but not in {folder}.")
        if sha256(path) != expected:
            raise UserError(f"{name} was changed after the submission was made.")
    for path in sorted(folder.rglob("*")):
        name = str(PurePosixPath(path.relative_to(folder)))
        if path.is_symlink():
            raise UserError(f"{name} is a link, which a submission may not hold.")
        if path.is_dir():
            if not any(other.startswith(f"{name}/") for other in listed):
                raise UserError(f"the folder {name} in {folder} holds no file of the manifest.")
        elif name != MANIFEST and name not in listed:
            raise UserError(f"{name} is in {folder} but not in the manifest.")


def inside(folder: Path, name: str) -> Path:
    """The path of a file that a manifest names. Raises UserError if it leaves the folder."""
    path = folder / PurePosixPath(name)
    if (
        not all(map(is_file_name, name.split("/")))
        or not path.resolve().is_relative_to(folder.resolve())
        or any(
            p.is_symlink()
            for p in [path, *path.parents]
            if p.is_relative_to(folder) and p != folder
        )
    ):
        raise UserError(f"the manifest's path '{name}' leaves the submission's folder.")
    return path


def check_suite(run: Run) -> None:
    """Raises UserError if a run has a training or cell that its own suite does not name."""
    plan = expand(run.suite)
    named: set[Job] = {*plan.trainings, *plan.cells}
    for training in run.trainings:
        jobs: dict[Job, str] = {training.job: f"training of '{training.job.defense}'"}
        jobs |= {c.job: f"cell {c.label} {c.checkpoint} {c.threat}" for c in training.cells}
        for what in (what for job, what in jobs.items() if job not in named):
            raise UserError(
                f"{RUN} has a {what} that its suite does not name; run the suite again."
            )
