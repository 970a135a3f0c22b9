# ruff: noqa: F401 -- what is imported here is what the package hands on
"""What a run, a training's record, an attack's record, a row and a flag are.

Everything that reads or writes a result folder goes through these types: they are validated when a
file is read, and written by `to_json`.
"""

from bench.records.contradictions import check_attack, check_together, check_training
from bench.records.files import ARCHIVE, RECONSTRUCTION, check_kept, read_json, read_outcome, unpack
from bench.records.flags import Flag, FlagCode
from bench.records.jobs import AttackJob, Job, TrainJob, canonical, short
from bench.records.outcomes import (
    AttackOutcome,
    AttackRecord,
    AuditSummary,
    CoursePoint,
    DoneRecord,
    DoubledRun,
    Kind,
    NoResult,
    Record,
    TrainOutcome,
    TrainRecord,
    Workings,
    is_settled,
)
from bench.records.rows import AttackEntry, LedgerWords, Marks, Row, WorstCase
from bench.records.run import RUN, RUN_FILES, SCHEMA, Cell, PlannedTraining, Run, attack_job, labels
from bench.records.text import plain, sound_text, to_json
