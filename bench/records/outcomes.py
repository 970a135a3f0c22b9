"""What became of a training or an attack, as its record on disk holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from bench.contract.events import Facts
from bench.errors import UserError
from bench.names import FileName, file_name
from bench.privacy.entry import Entry
from bench.protocols.settings import Checkpoint
from bench.records.jobs import AttackJob, TrainJob
from bench.records.text import numbers

Kind = Literal["train", "attack"]
Status = Literal["done", "failed", "timeout", "not_applicable", "pending"]
Verdict = Literal["violated", "consistent", "not covered", "not audited", "no claim", "no proof"]
Count = Annotated[int, Field(ge=0, le=2**53)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
VictimScores = Mapping[str, list[float]]
"""Metric -> one figure per victim."""
LedgerEntry = Annotated[Entry, AfterValidator(lambda e: replace(e, constants=numbers(e.constants)))]
"""What the accountant says, its constants as numbers again where they are infinite."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What became of observing one checkpoint under one threat.

    Attributes:
        status: Whether there is something to attack.
        reason: Why not; of recorded rounds, also why some that took part are not among the victims.
        stem: What the names of its files begin with.
        views: Of recorded rounds, how many there are: one of all clients of a round that did alike.
            0: one, whose files have no number.
    """

    status: Literal["done", "not_applicable"]
    reason: str | None = None
    stem: Annotated[str, AfterValidator(lambda stem: stem and file_name(stem))] = ""
    views: Count = 0

    @staticmethod
    def view_stem(stem: str, number: int) -> str:
        """Return what the names of the files of one of several views begin with."""
        return f"{stem}-view-{number}"

    @property
    def stems(self) -> list[str]:
        """What the names of each view's files begin with."""
        return [self.view_stem(self.stem, n) for n in range(self.views)] or [self.stem]

    @property
    def truths(self) -> list[str]:
        """Names of the files with each view's private samples."""
        return [f"{stem}-truth.safetensors" for stem in self.stems]


@dataclass(frozen=True, kw_only=True)
class AuditSummary:
    """What the empirical audit of one release found.

    Attributes:
        draws: Per input of a pair.
        confidence: Chance that all bounds hold together.
        eps_audited: The true epsilon is at least this.
        eps_at_least: Whether the draws, not the defense, limit the bound.
        verdict_claim: Against the paper's claim.
        verdict_proof: Against what is proven.
    """

    draws: Count
    confidence: float
    eps_audited: float
    eps_at_least: bool
    verdict_claim: Verdict
    verdict_proof: Verdict
    status: Literal["done"] = "done"
    reason: None = None


@dataclass(frozen=True, kw_only=True)
class AuditFailure:
    """An audit that a hook of the defense did not survive."""

    reason: str
    status: Literal["failed"] = "failed"


@dataclass(frozen=True, kw_only=True)
class AttackInputs:
    """What decides an attack's outcome beside its training; see `AttackJob`."""

    attack: str
    settings: Mapping[str, Any]
    threat: str
    checkpoint: Checkpoint
    budget: int
    after: tuple[AttackInputs, ...] = ()

    @staticmethod
    def of(job: AttackJob) -> AttackInputs:
        """Return the inputs of an attack."""
        own = {k: v for k, v in job.inputs().items() if k != "after"}
        return AttackInputs(**own, after=tuple(map(AttackInputs.of, job.after)))

    def on(self, train: TrainJob) -> AttackJob:
        """The attack on that training. Raises KeyError if it lacks the threat."""
        own = {"train": train, "label": self.attack, "threat": train.threat(self.threat)}
        return AttackJob(**vars(self) | own | {"after": tuple(a.on(train) for a in self.after)})


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every record has.

    Attributes:
        schema: Of the file.
        key: The record's name.
        memory: Peak bytes of the process that ran it (`host`) and of tensors on its GPU (`device`).
        files: Name -> bytes of what the job left; None in older records, which do not say.
        hashes: Name -> sha256 of the same; None in older records.
    """

    schema: Literal[1] = 1
    key: str = ""
    memory: Mapping[str, int | None] = field(default_factory=dict)
    files: Mapping[FileName, Count] | None = None
    hashes: Mapping[FileName, Hash] | None = None


@dataclass(frozen=True, kw_only=True)
class NoResult(Record):
    """A training or attack without figures.

    Attributes:
        status: failed (an error, a dead worker), timeout, not_applicable, or pending (the run has
            not come to it; such a record is never written).
        reason: Why.
        traceback: Of an error.
        inputs: Of the job; None in older records.
        train: Key of an attack's training.
    """

    status: Literal["failed", "timeout", "not_applicable", "pending"]
    reason: str
    traceback: str | None = None
    inputs: TrainJob | AttackInputs | None = None
    train: str | None = None


@dataclass(frozen=True, kw_only=True)
class DoneRecord(Record):
    """What every record with figures has.

    Attributes:
        seconds: Of the job.
        device: Where it ran.
        versions: Of the packages that move numbers.
    """

    seconds: float
    device: str
    versions: Mapping[str, str]
    status: Literal["done"] = "done"
    reason: None = None


@dataclass(frozen=True, kw_only=True)
class CoursePoint:
    """A training after some of its rounds.

    Attributes:
        rounds: Played by then.
        correct: Right answers of the common model, None where there is no such model.
        personal_accuracies: As in the record.
        eps_claimed: What the paper's formula says of that many rounds.
        eps_record: What is proven of them.
    """

    rounds: Count
    correct: Count | None
    personal_accuracies: tuple[float | None, ...]
    eps_claimed: float | None
    eps_record: float


@dataclass(frozen=True, kw_only=True)
class Workings:
    """What uploads consisted of and where a round's time went; means over a run's rounds.

    Attributes:
        clear: Share of the coordinates that a client trains whose values it sent readable.
        sealed: Share that it sent encrypted.
        withheld: Share that it kept to itself.
        training: Seconds of all clients' local training.
        parties: Seconds of third parties, such as decryption.
        aggregation: Seconds of the server's aggregation, without third parties.
    """

    clear: float
    sealed: float
    withheld: float
    training: float
    parties: float
    aggregation: float


FALSE_POSITIVES = 0.01
"""The share of false positives at which tables show the true positives of membership inference."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """How well the server tells a client's training samples from samples that nobody trained on.

    Attributes:
        reason: Why it was not measured, None if it was.
        members: Pairs of a client and one of its own samples.
        others: Pairs of a client and a held-out sample.
        auc: Chance that a member scores higher than another sample.
        curve: Shares of false and true positives, in ascending order.
    """

    reason: str | None = None
    members: Count = 0
    others: Count = 0
    auc: float = 0.5
    curve: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        rising = all(list(shares) == sorted(shares) for shares in zip(*self.curve, strict=True))
        shares = [self.auc, *(share for point in self.curve for share in point)]
        measured = FALSE_POSITIVES in dict(self.curve) and self.members > 0 and self.others > 0
        if measured == bool(self.reason) or not (rising and all(0 <= s <= 1 for s in shares)):
            raise UserError("membership inference needs a rising curve of shares, or a reason.")


@dataclass(frozen=True, kw_only=True)
class TrainRecord(DoneRecord):
    """A training that is done.

    Attributes:
        variant: Which form of the defense ran.
        correct: Right answers of the common model, None where there is no such model.
        test_samples: Of the test set.
        class_chance: Share of the commonest class.
        diverged: How, None if it did not.
        rounds_played: Less than planned where it diverged.
        bytes_up: Per round, all clients.
        bytes_down: Per round, all clients.
        client_seconds: Per client and round.
        facts: What happened over the run, from which epsilon follows.
        ledger: Claim and proof.
        observations: Checkpoint -> threat -> what became of observing it.
        parameters: Of the network.
        personal_accuracy: Mean of the next; None in older records.
        personal_accuracies: Per client, None for one none of whose classes is tested.
        personal_chance: Of always guessing a client's commonest class.
        keeping_clients: How many withheld something.
        audit: Of one release; None if none was asked for.
        course: Accuracy and epsilon over the rounds; empty where the suite asks for none.
        workings: None in older records.
        undeclared: What of the messages is not as the defense declares, a clause each.
        membership: Membership inference; None where the suite asks for none.
        inputs: The job; None in older records.
    """

    variant: str
    correct: Count | None
    test_samples: Count
    class_chance: float
    diverged: str | None
    rounds_played: Count
    bytes_up: float
    bytes_down: float
    client_seconds: float
    facts: Facts
    ledger: LedgerEntry
    observations: Mapping[str, Mapping[str, Observation]]
    parameters: Count
    personal_accuracy: float | None = None
    personal_accuracies: tuple[float | None, ...] = ()
    personal_chance: float | None = None
    keeping_clients: Count = 0
    audit: AuditSummary | AuditFailure | None = None
    course: tuple[CoursePoint, ...] = ()
    workings: Workings | None = None
    undeclared: tuple[str, ...] = ()
    membership: Membership | None = None
    inputs: TrainJob | None = None

    def to_json_value(self) -> dict[str, Any]:
        """As its file holds it: without `membership` where the suite asks for none."""
        return {k: v for k, v in vars(self).items() if k != "membership" or v is not None}

    def __post_init__(self) -> None:
        for correct in (self.correct, *(point.correct for point in self.course)):
            if self.test_samples < 1 or (correct or 0) > self.test_samples:
                raise UserError(
                    f"{correct} right answers of {self.test_samples} test samples cannot be."
                )


CONVERGED = 0.02
"""Most SSIM that an attack may gain from twice its budget and still count as converged."""


@dataclass(frozen=True, kw_only=True)
class DoubledRun:
    """An attack once more, at twice its budget: whether it had converged."""

    budget: int
    values: VictimScores
    gradient_evaluations: Count
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AttackRecord(DoneRecord):
    """An attack that is done.

    Attributes:
        victims: How many were attacked.
        samples: Of each victim; of those of several views the most.
        failed: Victims without an answer, scored as the mean public image.
        is_floor: Whether the attack reads no message.
        values: Metric -> one figure per victim.
        floors: Metric -> per victim, what needs no leak; _class_mean: given the true label.
        gradient_evaluations: What it spent.
        notes: What the attack says of its own run.
        loss: The attack's own, per victim.
        judged: Per victim the answer's loss under the judge that all attacks on the observation
            have in common, lower is better; None in older records and without such an answer.
        budget: Gradient evaluations allowed per start; None in older records.
        doubled: The same at twice the budget, None where that was not run.
        views: Victims of each view of recorded rounds; empty where one round was observed.
        scoring: Hash of the code that scored it, "" before it is scored; None in older records.
        inputs: Of the job; None in older records.
        train: Key of its training.
    """

    victims: Count
    samples: Count
    failed: Count
    is_floor: bool
    values: VictimScores
    floors: VictimScores
    gradient_evaluations: Count
    notes: tuple[str, ...]
    loss: list[float] | None
    judged: list[float] | None = None
    budget: int | None = None
    doubled: DoubledRun | None = None
    views: tuple[Count, ...] = ()
    scoring: str | None = None
    inputs: AttackInputs | None = None
    train: str = ""

    @property
    def is_scored(self) -> bool:
        """Whether its answer has been held against the truth."""
        return self.scoring != ""

    def __post_init__(self) -> None:
        again = self.doubled.values if self.doubled else {}
        if again.keys() - self.values.keys():
            raise UserError("what was run at twice the budget has metrics that the attack has not.")
        judged = {} if self.judged is None else {"judged": self.judged}
        for scores in (self.values, self.floors, again, judged):
            for metric, figures in scores.items():
                if len(figures) != self.victims:
                    raise UserError(
                        f"{metric} has {len(figures)} figures for {self.victims} victims."
                    )

    def of_view(self, number: int) -> AttackRecord:
        """The record of one view's victims alone, who are all where one round was observed."""
        if not self.views:
            return self
        begins = sum(self.views[:number])
        ends = begins + self.views[number]

        def part(scores: VictimScores) -> VictimScores:
            return {name: list(figures[begins:ends]) for name, figures in scores.items()}

        return replace(
            self,
            victims=self.views[number],
            values=part(self.values),
            floors=part(self.floors),
            judged=self.judged and self.judged[begins:ends],
            loss=self.loss and self.loss[begins:ends],
            doubled=self.doubled and replace(self.doubled, values=part(self.doubled.values)),
            views=(),
        )


TrainOutcome: TypeAlias = TrainRecord | NoResult
AttackOutcome: TypeAlias = AttackRecord | NoResult


def is_settled(record: TrainOutcome | AttackOutcome | None) -> bool:
    """Return whether a job need not be made again: failures and time-outs are tried again."""
    return record is not None and record.status in ("done", "not_applicable")
