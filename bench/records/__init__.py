"""What a run, a training's record, an attack's record, a row and a flag are.

Everything that reads or writes a result folder goes through these types: they are validated when a
file is read, and written by `to_json`. Older files load through one converter per schema.
"""

from __future__ import annotations

from bench.records.files import read_bytes, read_json, sound_text, to_json, to_line
from bench.records.flags import Flag, FlagCode, Level
from bench.records.jobs import (
    AttackJob,
    Cell,
    Job,
    PlannedTraining,
    TrainJob,
    attack_job,
    canonical,
    labels,
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
    Status,
    TrainOutcome,
    TrainRecord,
    Verdict,
    read_outcome,
    settled,
)
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
    rows_to_json,
)
from bench.records.run import RUN, SCHEMA, Run

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
    "read_bytes",
    "read_json",
    "read_outcome",
    "read_rows",
    "row_to_dict",
    "rows_to_json",
    "setting_text",
    "settled",
    "short",
    "sound_text",
    "to_json",
    "to_line",
]
