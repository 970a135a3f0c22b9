"""What a reader must know before trusting a row: codes, never sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

Level = Literal["bad", "warn", "info"]


class FlagCode(StrEnum):
    """Kinds of flags; in comments what `subject` and `values` are where they are not empty."""

    TRAINING_FAILED = "training_failed"  # values: reason
    TRAINING_TIMEOUT = "training_timeout"  # values: reason
    TRAINING_NOT_APPLICABLE = "training_not_applicable"  # values: reason
    DIVERGED = "diverged"  # values: reason
    UNDECLARED = "undeclared"  # values: reason, the first
    AT_CHANCE = "at_chance"
    CLAIMED_NOT_PROVEN = "claimed_not_proven"
    CLAIM_UNIT = "claim_unit"  # subject: the unit
    AUDIT_REFUTES_CLAIM = "audit_refutes_claim"  # values: epsilon, which is at least that
    AUDIT_REFUTES_PROOF = "audit_refutes_proof"  # values: epsilon, which is at least that
    AUDIT_FAILED = "audit_failed"  # values: reason
    CUT_SHORT = "cut_short"  # subject: the attack; values: gain, SSIM at twice its budget
    BELOW_FLOOR = "below_floor"  # subject: the attack
    WHOSE_UNKNOWN = "whose_unknown"  # subject: the attack; values: ssim, whoever's image it is
    UNDERSTATED = "understated"  # subject: the attack; values: leak, its own
    FIRST_ROUND = "first_round"  # subject: the attack; values: leak, its own in that round
    ATTACK_FAILED = "attack_failed"  # subject: the attack
    ATTACK_TIMEOUT = "attack_timeout"  # subject: the attack
    ATTACK_PENDING = "attack_pending"  # subject: the attack
    BY_BOUND = "by_bound"
    NOT_AS_PUBLISHED = "not_as_published"  # values: reason
    CONTROL_FAILED = "control_failed"  # values: leak, of the undefended row


_LEVELS: Mapping[FlagCode, Level] = {
    FlagCode.TRAINING_NOT_APPLICABLE: "info",
    FlagCode.CLAIM_UNIT: "info",
    FlagCode.BY_BOUND: "info",
    FlagCode.CLAIMED_NOT_PROVEN: "warn",
    FlagCode.AUDIT_FAILED: "warn",
    FlagCode.ATTACK_PENDING: "warn",
    FlagCode.CUT_SHORT: "warn",
    FlagCode.BELOW_FLOOR: "warn",
    FlagCode.WHOSE_UNKNOWN: "warn",
    FlagCode.UNDERSTATED: "warn",
    FlagCode.FIRST_ROUND: "warn",
    FlagCode.NOT_AS_PUBLISHED: "warn",
}
"""Of all others: bad."""
_COST_RANK = {
    FlagCode.DIVERGED,
    FlagCode.UNDECLARED,
    FlagCode.AT_CHANCE,
    FlagCode.CONTROL_FAILED,
}


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

    @property
    def level(self) -> Level:
        """How much it weighs: bad figures, doubtful ones, or something to know."""
        return _LEVELS.get(self.code, "bad")

    @property
    def costs_rank(self) -> bool:
        """Whether nobody would deploy the row, or its leak says nothing: ranking it has no use."""
        return self.code in _COST_RANK
