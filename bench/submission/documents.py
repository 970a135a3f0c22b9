"""The documents of a submission folder: its README, the marks in it, and the manifest.

A mark says why rows should not be cited yet. README, `verify` and the site each make the marks anew
from the rows, so that nobody can leave them out. The manifest shows that all files are there,
unchanged, and no others.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from bench.errors import UserError
from bench.files import no_link, sha256
from bench.harness.plan import expand
from bench.names import count_of, is_file_name
from bench.records import RUN, FlagCode, Job, Row, Run
from bench.records.submitted import MANIFEST, SCHEMA, Submission, read_file, read_submission
from bench.report import frames
from bench.report.columns import columns_of
from bench.report.escaping import one_line
from bench.report.files import Files
from bench.report.text import fill, markdown_table
from bench.report.verdicts import has_use


def page(submission: Submission, rows: Sequence[Row], marks: Sequence[str]) -> str:
    """Markdown: what was submitted, its marks, a table of its rows, how to check them."""
    command = one_line(submission.command).strip()
    return fill(
        "submission.md", submission=submission, command=command, marks=marks, table=table(rows)
    )


def table(rows: Sequence[Row]) -> str:
    """One line per row, undefended ones among them: utility, epsilons, and what each attack
    recovered, as the leaderboard has them; and its flags."""
    wanted = ("defense", "accuracy", "leakage", "eps claimed", "eps proven", "flags")
    columns = columns_of(rows, whole=True)
    frame = frames.texts(frames.board(rows, whole=True))
    frame = frame[[c.name for c in columns if c.name in wanted or c.attack]]
    frame.insert(0, "table", [row.where for row in rows])
    return "\n".join(markdown_table(frame))


LEAST_SEEDS = 3
"""Trainings of each setting that are asked for: fewer tell nothing of other trainings."""
LEAST_VICTIMS = 4
"""Victims of each training that are asked for under every threat: from there on the intervals of
three seeds hold what they say (`tests/test_intervals.py`)."""


def marks(rows: Sequence[Row], run: Run, *, kind: str, name: str) -> list[str]:
    """A sentence per mark, none for rows that can be cited.

    Args:
        rows: Of the submission, the undefended ones among them.
        run: Theirs.
        kind: defense or attack.
        name: The plugin's.
    """
    own = [r for r in rows if kind == "attack" or r.defense == name]
    return [*_size(own, run), *_use(own, name)] if own else []


def marks_of(folder: Path) -> list[str]:
    """The same of a submission's folder; runs none of its code."""
    submission = read_submission(folder)
    rows, run = Files(folder).rows, Run.read(folder)
    return marks(rows, run, kind=submission.kind, name=submission.name)


def _size(own: Sequence[Row], run: Run) -> Iterator[str]:
    seeds = min(len(r.seeds) for r in own)
    if seeds < LEAST_SEEDS:
        few = count_of(seeds, "seed")
        yield f"{few} where {LEAST_SEEDS} are asked for: other trainings may differ."
    victims = min((t.victims for t in run.suite.threats if not t.recorded), default=LEAST_VICTIMS)
    if victims < LEAST_VICTIMS:
        yield f"{count_of(victims, 'victim')} per training where {LEAST_VICTIMS} are asked for."


def _use(own: Sequence[Row], name: str) -> Iterator[str]:
    control = [r for r in own if any(f.code == FlagCode.CONTROL_FAILED for f in r.flags)]
    for table in dict.fromkeys(r.where for r in control):
        yield f"Attacks do not work without a defense in {table}: a small leak says nothing there."
    useless = [r for r in own if not has_use(r) and r not in control]
    if len(useless) == len(own):
        yield f"No row of {name} is of use: each is at chance, diverged or without a result."
    elif useless:
        some = f"{len(useless)} of {len(own)} rows of {name}"
        yield f"{some} are at chance, diverged or without a result."


_FILES = re.compile(
    r"(README\.md|submission\.json|run\.json"
    r"|source/[^/]+\.py|records/(train|attack)/[0-9A-Za-z]+\.json)"
)
"""All that a submission may hold beside its manifest: code is read and hashed as source, so that
nothing compiled, and nothing that hides between other files, may be among it."""


def write_manifest(folder: Path) -> str:
    """The manifest of everything in the folder."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MANIFEST]
    files = {str(PurePosixPath(p.relative_to(folder))): sha256(p) for p in paths}
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
    """The path of a file that a manifest names. Raises UserError if it leaves the folder, or is a
    link."""
    parts = name.split("/")
    if not all(map(is_file_name, parts)):
        raise UserError(f"the manifest's path '{name}' leaves the submission's folder.")
    return no_link(folder, *parts)


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
