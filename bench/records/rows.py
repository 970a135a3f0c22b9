"""A leaderboard's rows: one per defense setting and checkpoint, seeds taken together."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import PureWindowsPath
from typing import Any, Literal

import numpy as np

from bench.metrics.intervals import Interval, interval_of
from bench.metrics.named import METRICS
from bench.protocols.settings import Checkpoint, ProtocolSettings
from bench.records.flags import Flag
from bench.records.jobs import setting_text
from bench.records.outcomes import AuditSummary, Status, Workings
from bench.records.text import to_line

ROW_SCHEMA = 3
"""Of a row in leaderboard.json."""
LEADERBOARD = "leaderboard.json"


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """What an attack gains from twice its budget where nothing defends.

    Attributes:
        gain: Mean SSIM over victims and seeds.
        budget: Gradient evaluations per start of the first run.
        converged: Whether the gain is small enough.
    """

    gain: float
    budget: int
    converged: bool


@dataclass(frozen=True, kw_only=True)
class DoubledScore:
    """SSIM of an attack at twice the budget, on undefended rows alone."""

    budget: int
    ssim: Interval | None


@dataclass(frozen=True, kw_only=True)
class AttackEntry:
    """One attack in a row.

    Attributes:
        status: Of its records together: that of the worst.
        reason: Why it is not done, None if it is.
        threat: Name of the threat that it ran under.
        is_floor: Whether it reads no message: shown beside the others, never ranked.
        n: Victims scored, over all seeds.
        failed: Victims without a usable answer.
        scores: Metric -> mean and interval; metrics without a figure are absent.
        floor: Means of what needs no leak; _class_mean: given the true label.
        seconds: Of all seeds, None where nothing finished.
        gradient_evaluations: Of all seeds, None where nothing finished.
        notes: What the attack says of its own run.
        budget: Gradient evaluations allowed per start; None where nothing finished.
        convergence: As measured on the undefended row of the table.
        doubled: The same attack at twice the budget, on undefended rows alone.
    """

    status: Status
    reason: str | None
    threat: str
    is_floor: bool
    n: int
    failed: int
    scores: Mapping[str, Interval] = field(default_factory=dict)
    floor: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    gradient_evaluations: int | None = None
    notes: tuple[str, ...] = ()
    budget: int | None = None
    convergence: Convergence | None = None
    doubled: DoubledScore | None = None

    def to_json_value(self) -> dict[str, Any]:
        """As a row in JSON holds it: every metric by its name, null without a figure."""
        flat: dict[str, Any] = {}
        for name, value in vars(self).items():
            flat |= {m: value.get(m) for m in METRICS} if name == "scores" else {name: value}
        return flat


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """The worst over attacks: per victim one attack's answer, then averaged.

    Attributes:
        attack: The one that is taken for most victims.
        metric: ssim, or mse of records.
        interval: Mean over victims.
    """

    attack: str
    metric: Literal["ssim", "mse"]
    interval: Interval

    def to_json_value(self) -> dict[str, Any]:
        """As a row in JSON holds it: the interval by its metric's name."""
        return {"attack": self.attack, "metric": self.metric, self.metric: self.interval}


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """How many of the selected reconstructions are recognised: of images the true one is the
    nearest among 1,000, of records every attribute is right.

    Attributes:
        count: Number of samples.
        of: Number of all.
        baseline: What the no-information baseline has of them.
    """

    count: int
    of: int
    baseline: int

    @property
    def text(self) -> str:
        """7/12, with the baseline's number where that is a twentieth or more: 7/12 (1); of many
        samples 58 %."""
        own, baseline = f"{self.count}/{self.of}", str(self.baseline)
        if self.of > 999:
            own, baseline = (f"{100 * n / self.of:.0f} %" for n in (self.count, self.baseline))
        return f"{own} ({baseline})" if self.baseline >= 0.05 * self.of else own


_MUCH_WORSE = 0.1
"""Leakage below the baseline that is doubted however wide its interval: attacks were misled."""


@dataclass(frozen=True, kw_only=True)
class Leaks:
    """Normalised leakage of a row's victims.

    Attributes:
        threat: Under which they were attacked: the one that leaks most.
        floor: Mean of the no-information baseline over them.
        recognised: Of their samples; None in records from before that was measured.
        victims: Seed -> per victim (score - its baseline) / (perfect score - floor): 0 is no
            better than the baseline, 1 a perfect copy, below 0 worse than the baseline.
    """

    threat: str
    floor: float
    victims: Mapping[int, tuple[float, ...]]
    recognised: Recognised | None = None

    @cached_property
    def outcomes(self) -> dict[int, np.ndarray]:
        """Seed -> leakage per victim, as arrays."""
        return {seed: np.array(values) for seed, values in self.victims.items()}

    @cached_property
    def interval(self) -> Interval:
        """Return the mean over victims with its 95 % interval, in [0, 1]."""
        raw = interval_of(list(self.outcomes.values()), (0.0, 1.0))
        assert raw is not None  # there is a victim
        mean, lo, hi = (min(max(v, 0.0), 1.0) for v in (raw.mean, raw.lo, raw.hi))
        return Interval(mean=mean, lo=lo, hi=hi)

    @property
    def below_baseline(self) -> bool:
        """Whether the victims' mean is worse than the baseline's by much, or by more than chance:
        where nothing leaks, every second mean is a little below 0."""
        raw = interval_of(list(self.outcomes.values()))
        return raw is not None and (raw.hi < -1e-9 or raw.mean < -_MUCH_WORSE)


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What the test over a row's table does not rule out.

    Attributes:
        best: That the row leaks no more than the best one.
        undefended: That it leaks no less than the undefended one.
    """

    best: bool = False
    undefended: bool = False

    @property
    def text(self) -> str:
        """`*` and `=`, see `bench.report.explain.MARKS`."""
        return f"{'*' if self.best else ''}{'=' if self.undefended else ''}"


@dataclass(frozen=True, kw_only=True)
class LedgerWords:
    """What the epsilons of a row protect and what not, and one reason per mechanism event."""

    words: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CourseFigures:
    """A setting after some rounds of its trainings.

    Attributes:
        rounds: Played by then.
        accuracy: Of the common model; None where there is none.
        personal_accuracy: Of the clients' own networks.
        eps_claimed: By the paper's own formula.
        eps_record: Proven, infinite without a proof.
    """

    rounds: int
    accuracy: Interval | None
    personal_accuracy: Interval | None
    eps_claimed: float | None
    eps_record: float


@dataclass(frozen=True, kw_only=True)
class MembershipFigures:
    """Membership inference on the trainings of a row.

    Attributes:
        rate: Share of members told at 1 % false positives; None where it was not measured.
        bound: Most of them that the proven epsilon allows; None where that is 1 or more.
        curve: Share of false positives -> true positives, mean over seeds.
        reason: Why it was not measured.
    """

    rate: Interval | None
    bound: float | None = None
    curve: Mapping[float, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One defense setting at one checkpoint.

    Attributes:
        suite: quick v5.
        protocol: Its name.
        protocol_settings: All that it trains with.
        dataset: Its name.
        dataset_settings: By name; empty in older files.
        model: Its name.
        model_settings: By name; empty in older files.
        defense: Its name.
        variant: Which form of the defense ran.
        settings: The defense's, by name.
        checkpoint: When the attacked round was observed.
        threat: A line on every threat.
        seeds: Those taken together: whose training is done, or all where none is.
        accuracy: Of the common model; None where there is none.
        personal_accuracy: Of the clients' own networks.
        personalised: Whether those differ from the common model.
        eps_claimed: By the paper's own formula, None where it claims nothing.
        eps_record: Proven for one training record over the whole run, infinite without a proof.
        ledger: What the epsilons mean, None without a finished training.
        audit: The one that found most, None where none was made.
        delta: Of the epsilons.
        unit: Of the claim.
        costs: Of its trainings, see `bench.report.costs`.
        attacks: By their columns.
        worst: Per victim the answer that leaks most by the truth: an upper bound. None without a
            figure.
        choice: Per victim the answer of least judged loss, as the attacker chooses; None where no
            record holds judged losses, as older ones.
        observed: What work the observed rounds hold: batch and steps.
        course: Accuracy and epsilons over the rounds, where the suite asks for them.
        workings: Of uploads and time, means over seeds; None in older files.
        flags: What to know before trusting the row.
        leaks: What `leak` is the mean of, None without a figure.
        marks: By the test over its table, see `bench.report.marks`.
        accuracy_drop: Below the undefended row of its table; None without one.
        accuracies: Seed -> accuracy of the common model.
        personal_accuracies: Seed -> mean accuracy of the clients' own networks.
        test_samples: On which those were measured; of several test sets the smallest.
        membership: In rounds of the training, where the suite asks for it.
    """

    suite: str
    protocol: str
    protocol_settings: ProtocolSettings
    dataset: str
    model: str
    defense: str
    variant: str
    settings: Mapping[str, Any]
    checkpoint: Checkpoint
    threat: str = ""
    seeds: tuple[int, ...]
    accuracy: Interval | None = None
    eps_claimed: float | None = None
    eps_record: float | None = None
    delta: float
    unit: str | None = None
    costs: Mapping[str, float | None] = field(default_factory=dict)
    attacks: Mapping[str, AttackEntry] = field(default_factory=dict)
    worst: WorstCase | None = None
    flags: tuple[Flag, ...] = ()
    dataset_settings: Mapping[str, Any] = field(default_factory=dict)
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    personal_accuracy: Interval | None = None
    personalised: bool = False
    ledger: LedgerWords | None = None
    audit: AuditSummary | None = None
    choice: WorstCase | None = None
    observed: str = ""
    course: tuple[CourseFigures, ...] = ()
    workings: Workings | None = None
    leaks: Leaks | None = None
    marks: Marks = Marks()
    accuracy_drop: Interval | None = None
    accuracies: Mapping[int, float] = field(default_factory=dict)
    personal_accuracies: Mapping[int, float] = field(default_factory=dict)
    test_samples: int = 0
    membership: MembershipFigures | None = None

    @property
    def ranking(self) -> WorstCase | None:
        """What the row is ranked by: the attacker's choice, or the upper bound without one."""
        return self.choice or self.worst

    @property
    def leak(self) -> float | None:
        """Normalised leakage, the mean over victims in [0, 1]; None without a figure."""
        return None if self.leaks is None else self.leaks.interval.mean

    @property
    def leak_interval(self) -> Interval | None:
        """The same with its 95 % interval."""
        return None if self.leaks is None else self.leaks.interval

    @property
    def recognised(self) -> Recognised | None:
        """Of the victims' samples; None where that was not measured."""
        return None if self.leaks is None else self.leaks.recognised

    @property
    def interval_over(self) -> str:
        """What the row's intervals are over: with one seed the victims of one training."""
        return "victims" if len(self.seeds) == 1 else "seeds and victims"

    @property
    def data(self) -> str:
        """The data set as titles have it: of a folder or file its last part, folder:faces."""
        kind, colon, path = self.dataset.partition(":")
        return f"{kind}:{PureWindowsPath(path).name}" if colon else kind

    @property
    def where(self) -> str:
        """The table that it stands in, in a few words: fedavg digits lenet final."""
        return f"{self.protocol} {self.data} {self.model} {self.checkpoint}"

    @property
    def setting(self) -> str:
        """spm(epsilon=1.5, variant=printed)."""
        return setting_text(self.defense, self.settings)


_FIRST = ("suite", "protocol", "protocol_settings", "dataset", "dataset_settings", "model")
"""Of a row in JSON: what stands before its other fields."""


def row_to_dict(row: Row, sentence: Callable[[Flag], str]) -> dict[str, Any]:
    """Return a row as leaderboard.json holds it, each cost by its name; `sentence` makes the `text`
    beside each flag's code."""
    flags = [
        {
            "code": f.code,
            "subject": f.subject,
            "level": f.code.level,
            "values": f.values,
            "text": sentence(f),
        }
        for f in row.flags
    ]
    names = dict.fromkeys((*_FIRST, *(f.name for f in fields(row))))
    absent = ("costs",) if row.membership else ("costs", "membership")
    values = {n: getattr(row, n) for n in names if n not in absent}
    own = {"leakage": row.leak_interval, "flags": flags}
    return {"schema": ROW_SCHEMA, **values, **row.costs, **own}


def rows_to_json(rows: Iterable[Row], sentence: Callable[[Flag], str]) -> str:
    """leaderboard.json: strict JSON, a row per line; `sentence` as for `row_to_dict`."""
    lines = ",\n".join(to_line(row_to_dict(row, sentence)) for row in rows)
    return f"[\n{lines}\n]\n"
