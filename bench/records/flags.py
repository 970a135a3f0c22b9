"""What a reader must know before trusting a row: codes, never sentences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Self

Level = Literal["bad", "warn", "info"]


class FlagCode(StrEnum):
    """Kinds of flags; in comments what `subject` and `values` are where they are not empty.

    Attributes:
        level: How much it weighs: bad figures, doubtful ones, or something to know.
        costs_rank: Whether nobody would deploy the row, or its leak says nothing: ranking it has no
            use.
    """

    level: Level
    costs_rank: bool

    def __new__(cls, value: str, level: Level = "bad", costs_rank: bool = False) -> Self:
        code = str.__new__(cls, value)
        code._value_, code.level, code.costs_rank = value, level, costs_rank
        return code

    TRAINING_FAILED = "training_failed"  # values: reason
    TRAINING_TIMEOUT = "training_timeout"  # values: reason
    TRAINING_NOT_APPLICABLE = "training_not_applicable", "info"  # values: reason
    DIVERGED = "diverged", "bad", True  # values: reason
    UNDECLARED = "undeclared", "bad", True  # values: reason, the first
    AT_CHANCE = "at_chance", "bad", True
    CLAIMED_NOT_PROVEN = "claimed_not_proven", "warn"
    CLAIM_UNIT = "claim_unit", "info"  # subject: the unit
    AUDIT_REFUTES_CLAIM = "audit_refutes_claim"  # values: epsilon, which is at least that
    AUDIT_REFUTES_PROOF = "audit_refutes_proof"  # values: epsilon, which is at least that
    AUDIT_FAILED = "audit_failed", "warn"  # values: reason
    CUT_SHORT = "cut_short", "warn"  # subject: the attack; values: gain, SSIM at twice its budget
    BELOW_FLOOR = "below_floor", "warn"  # subject: the attack
    WHOSE_UNKNOWN = "whose_unknown", "warn"  # subject: the attack; values: ssim, whoever's it is
    UNDERSTATED = "understated", "warn"  # subject: the attack; values: leak, its own
    FIRST_ROUND = "first_round", "warn"  # subject: the attack; values: leak, its own in that round
    ATTACK_FAILED = "attack_failed"  # subject: the attack
    ATTACK_TIMEOUT = "attack_timeout"  # subject: the attack
    ATTACK_PENDING = "attack_pending", "warn"  # subject: the attack
    BY_BOUND = "by_bound", "info"
    NOT_AS_PUBLISHED = "not_as_published", "warn"  # values: reason
    WEAK_ATTACK = "weak_attack", "warn"  # values: reason
    CONTROL_FAILED = "control_failed", "bad", True  # values: leak, of the undefended row


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of a row; its sentence is made where it is shown.

    Attributes:
        code: What kind of flag it is.
        subject: The attack or unit that it is about, empty where the code says all.
        values: What the sentence needs beside them, see `FlagCode`.
    """

    code: FlagCode
    subject: str = ""
    values: Mapping[str, float | str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.code, self.subject, tuple(sorted(self.values))))
