"""Audit of a defense setting: certified lower bounds on epsilon against its claim and its proof.

One release, or those of several rounds, is played through the real hooks for pairs of neighbouring
inputs. A bound above the claim refutes the claim; one above the ledger's epsilon would be a mistake
in a proof or in code. A bound below says only that these pairs, statistics and draws show no more.
A claim is read as covering every channel on which the defense acts, and none that it leaves alone;
a record is replaced, as in the ledger, and a client is added or removed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from bench.contract.defense import Defense
from bench.contract.events import Facts
from bench.errors import UserError
from bench.metrics.distinguish import separate
from bench.privacy.ledger import account
from bench.protocols.settings import LEAST_DRAWS, MOST_DRAWS
from bench.sandbox.hooked import guard
from bench.sandbox.neighbours import NeighbourPair, Skipped, neighbours
from bench.seeding import derive_seed

Verdict = Literal["violated", "consistent", "not covered", "not audited", "no claim", "no proof"]
DRAWS, CONFIDENCE, PARAMETERS = 4000, 0.95, 16
_MOST_VALUES = 10**8
"""That are drawn of a pair."""


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """What one pair showed.

    Attributes:
        units: For which the inputs are neighbours.
        statistic: By which the outputs were told apart.
        eps_lower: Certified epsilon at the run's delta, for the proof.
        at_least: The draws are the limit, since the rare event never happened.
        cap: The largest epsilon that so many draws can show.
        eps_record: The ledger's epsilon for a record.
        verdict_proof: Of the comparison with it.
        claim: The claimed epsilon, None where it is for another unit or channel.
        claim_delta: Its delta.
        eps_lower_claim: Certified epsilon at that delta.
        delta_at_claim: What delta the claim's epsilon needs at least.
        verdict_claim: Of the comparison with the claim.
    """

    pair: str
    channel: str
    units: tuple[str, ...]
    what: str
    statistic: str
    draws: int
    eps_lower: float
    at_least: bool
    cap: float
    eps_record: float
    verdict_proof: Verdict
    claim: float | None
    claim_delta: float | None
    eps_lower_claim: float | None
    delta_at_claim: float | None
    verdict_claim: Verdict


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Findings of all pairs, right together with chance at least `confidence`.

    Attributes:
        draws: Per input of a pair.
        rounds: Releases of a draw.
        confidence: That no finding is wrong.
        parameters: Coordinates of the audited tensors.
        delta: At which the proof is compared.
        claim_unit: What the paper's claim is for, None without one.
        eps_audited: The largest bound for replacing one record, channels that the defense leaves
            alone among them.
        eps_at_least: Whether draws are its limit.
        verdict_claim: Of all pairs together.
        verdict_proof: Of all pairs together.
        skipped: Channels without a pair.
    """

    draws: int
    rounds: int
    confidence: float
    seed: int
    parameters: int
    delta: float
    claim_unit: str | None
    eps_audited: float
    eps_at_least: bool
    verdict_claim: Verdict
    verdict_proof: Verdict
    pairs: tuple[AuditFinding, ...]
    skipped: tuple[Skipped, ...]


def audit(
    defense: Defense,
    *,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    parameters: int = PARAMETERS,
    rounds: int = 1,
) -> Audit:
    """Audit a release of a defense setting, or the composition of several.

    With several rounds the same input is sent in each, as by a client whose gradient is a constant
    canary, and claim and proof are those for so many rounds: what composes badly is refuted by as
    many releases. The bound is one of composed mechanisms in the worst case, not of one training,
    as Steinke, Nasr, Jagielski, arXiv:2305.08846, has it, which is looser.

    Args:
        defense: It is copied; its hooks are the real ones.
        draws: Per input and pair, 100 to 10^6, and as many with those of all rounds.
        confidence: That no finding is wrong, over all pairs.
        parameters: Coordinates of the audited tensors, at least 2.
        rounds: Releases of a draw, at least 1.

    Raises:
        UserError: For numbers out of range.
        PluginFault: For a hook that raises, or returns what it may not; it names the hook, and
            file and line of an error.
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence must lie in (0, 1) (of all findings), got {confidence}.")
    _check_range("draws", draws, LEAST_DRAWS, MOST_DRAWS, "per input of a pair")
    _check_range("parameters", parameters, 2, _MOST_VALUES // draws, "audited coordinates")
    most = min(MOST_DRAWS, _MOST_VALUES // parameters) // draws
    _check_range("rounds", rounds, 1, most, f"releases of a draw, of {draws} draws")
    defense, base = guard(defense), derive_seed(seed, "audit")
    pairs, skipped = neighbours(defense, parameters=parameters, seed=base)
    each = 1 - (1 - confidence) / max(1, len(pairs))
    findings = tuple(_find(defense, p, draws, rounds, each, base) for p in pairs)
    facts = Facts(parameters=parameters, clients=defense.together, rounds=rounds)
    claim = defense.claim(facts)
    of_record = [f for f in findings if "record" in f.units]
    highest = max(of_record, key=lambda f: f.eps_lower, default=None)
    unproven = any(f.verdict_proof == "no proof" for f in findings)
    return Audit(
        draws=draws,
        rounds=rounds,
        confidence=confidence,
        seed=seed,
        parameters=parameters,
        delta=facts.delta,
        claim_unit=claim[2] if claim else None,
        eps_audited=highest.eps_lower if highest else 0.0,
        eps_at_least=highest is not None and highest.at_least,
        verdict_claim=_overall((f.verdict_claim for f in findings), "no claim", claim is None),
        verdict_proof=_overall((f.verdict_proof for f in findings), "no proof", unproven),
        pairs=findings,
        skipped=skipped,
    )


def _check_range(name: str, value: int, least: int, most: int, unit: str) -> None:
    if not least <= value <= most:
        bound = f">= {least}" if value < least else f"<= {most}"
        raise UserError(f"{name} must be {bound} ({unit}), got {value}.")


def _find(
    defense: Defense, pair: NeighbourPair, draws: int, rounds: int, confidence: float, seed: int
) -> AuditFinding:
    facts = replace(pair.facts, rounds=rounds)
    entry = account(defense, facts)
    applies = pair.covered and entry.unit in pair.units
    claim, claim_delta = (entry.eps_claimed, entry.claim_delta) if applies else (None, None)
    draws = max(LEAST_DRAWS, round(draws * pair.share))
    a, b = pair.outputs(draws, seed=seed, rounds=rounds)
    separation = separate(a, b, confidence=confidence, delta=max(facts.delta, claim_delta or 0.0))
    eps = separation.epsilon(facts.delta)
    eps_claim = None if claim is None else separation.epsilon(claim_delta or 0.0)
    verdict_claim = _compare(eps_claim, claim)
    return AuditFinding(
        pair=pair.name,
        channel=pair.channel,
        units=tuple(sorted(pair.units)),
        what=pair.what,
        statistic=separation.statistic,
        draws=draws,
        eps_lower=eps,
        at_least=separation.never and eps > 0,
        cap=separation.cap,
        eps_record=entry.eps_record,
        verdict_proof=_compare(
            eps if "record" in pair.units else None, entry.eps_record, unproven="no proof"
        ),
        claim=claim,
        claim_delta=claim_delta,
        eps_lower_claim=eps_claim,
        delta_at_claim=None if claim is None else separation.delta(claim),
        verdict_claim=verdict_claim if entry.eps_claimed is not None else "no claim",
    )


def _compare(eps: float | None, epsilon: float | None, unproven: Verdict = "consistent") -> Verdict:
    if eps is None or epsilon is None:
        return "not covered"
    if epsilon == float("inf"):
        return unproven
    return "violated" if eps > epsilon else "consistent"


def _overall(verdicts: Iterable[Verdict], nothing: Verdict, is_nothing: bool) -> Verdict:
    """`violated` if any pair is, `consistent` if any was compared."""
    every = set(verdicts)
    if "violated" in every:
        return "violated"
    if is_nothing:
        return nothing
    return "consistent" if "consistent" in every else "not audited"
