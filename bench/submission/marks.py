"""Why a submission's rows should not be cited yet: they are too few, or of too little use.

A submission is not refused for it: it can be a start. But its README, `verify` and whoever lists it
say so, and each takes it from the rows anew, so that nobody can leave it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.names import counted
from bench.records import FlagCode, Row, Run
from bench.records.submitted import read_submission
from bench.report.files import Files
from bench.report.verdicts import has_use

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
        few = counted(seeds, "seed")
        yield f"{few} where {LEAST_SEEDS} are asked for: other trainings may differ."
    victims = min((t.victims for t in run.suite.threats if not t.recorded), default=LEAST_VICTIMS)
    if victims < LEAST_VICTIMS:
        yield f"{counted(victims, 'victim')} per training where {LEAST_VICTIMS} are asked for."


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
