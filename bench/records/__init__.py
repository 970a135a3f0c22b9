"""What a run, a training's record, an attack's record, a row and a flag are.

Everything that reads or writes a result folder goes through these types: they are validated when a
file is read, and written by `to_json`. Older files load through one converter per schema.
"""

from __future__ import annotations

from bench.records.files import problem, read_bytes, read_json
from bench.records.flags import Flag, FlagCode, Level
from bench.records.jobs import (
    AttackJob,
    Cell,
    Job,
    PlannedTraining,
    TrainJob,
    canonical,
    setting_text,
    short,
)
from bench.records.outcomes import (
    AttackInputs,
    AttackOutcome,
    AttackRecord,
    AuditFailure,
    AuditSummary,
    DoubledRun,
    Kind,
    LedgerEntry,
    NoResult,
    Observation,
    Record,
    Status,
    TrainOutcome,
    TrainRecord,
    Verdict,
    settled,
)
from bench.records.reading import read_outcome
from bench.records.rows import (
    LEADERBOARD,
    AttackEntry,
    Convergence,
    DoubledScore,
    LedgerWords,
    Row,
    WorstCase,
    read_rows,
    row_to_dict,
    rows_of_json,
    rows_to_json,
)
from bench.records.run import RUN, SCHEMA, Run, attack_job, labels
from bench.records.text import plain, sound_text, to_json, to_line

__all__ = [
    "LEADERBOARD",
    "RUN",
    "SCHEMA",
    "AttackEntry",
    "AttackInputs",
    "AttackJob",
    "AttackOutcome",
    "AttackRecord",
    "AuditFailure",
    "AuditSummary",
    "Cell",
    "Convergence",
    "DoubledRun",
    "DoubledScore",
    "Flag",
    "FlagCode",
    "Job",
    "Kind",
    "LedgerEntry",
    "LedgerWords",
    "Level",
    "NoResult",
    "Observation",
    "PlannedTraining",
    "Record",
    "Row",
    "Run",
    "Status",
    "TrainJob",
    "TrainOutcome",
    "TrainRecord",
    "Verdict",
    "WorstCase",
    "attack_job",
    "canonical",
    "labels",
    "plain",
    "problem",
    "read_bytes",
    "read_json",
    "read_outcome",
    "read_rows",
    "row_to_dict",
    "rows_of_json",
    "rows_to_json",
    "setting_text",
    "settled",
    "short",
    "sound_text",
    "to_json",
    "to_line",
]
