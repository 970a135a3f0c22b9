"""A line of the ledger, apart from its computation: reports need no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One defense setting's line in the ledger.

    Attributes:
        eps_claimed: By the paper's own formula, None where it claims nothing.
        unit: Of the claim.
        claim_delta: Of the claim.
        eps_record: Proven for one training record over the whole run, infinite without a proof.
        delta: Of the proof.
        constants: What the epsilons follow from.
        reasons: One sentence per mechanism event.
        words: Plain sentences on what is claimed and what is proven.
    """

    eps_claimed: float | None
    unit: str | None
    claim_delta: float | None
    eps_record: float
    delta: float
    constants: dict[str, float | str]
    reasons: tuple[str, ...]
    words: tuple[str, ...] = ()
