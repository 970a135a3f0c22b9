"""The one list of a leaderboard's columns: what each is called, computed from and shown as.

Terminal, Markdown, page and the page of a submission draw from it; `frames` has the figures
themselves, unrounded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bench.metrics.intervals import Interval
from bench.metrics.named import FLOOR_SUFFIX, METRICS, leak
from bench.records import AttackEntry, AuditSummary, Row, WorstCase
from bench.report import explain
from bench.report.tables import attack_metrics, idle

_SHADES = 9
"""Of leakage between the floor and a perfect copy."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a column shows of one row.

    Attributes:
        text: The figure.
        interval: Its ends.
        beside: What else stands there: unit, attack, other floors.
        mark: A warning.
        value: What the page sorts by, a number or "inf"; "" without a figure, which comes last.
        style: Class of the style sheet.
        reason: Why there is no figure.
    """

    text: str
    interval: str = ""
    beside: str = ""
    mark: str = ""
    value: str = ""
    style: str = ""
    reason: str = ""

    @property
    def small(self) -> str:
        """What the page sets in small print below the figure."""
        return f"{self.interval} {self.beside}".strip()

    @property
    def full(self) -> str:
        """All of it in one line of text."""
        return " ".join(filter(None, (self.text, self.interval, self.beside, self.mark)))


SPARED = "°"
"""Beside an attack's figure that holds earlier attacks' answers."""
NOTHING = Shown(text="–", style="none")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a leaderboard.

    Attributes:
        name: Its head in text.
        title: That on the page, by default the name.
        detail: The metric that it holds, or what else stands beside the title.
        note: Key of its explanation in `explain.COLUMNS`, by default its name.
        shown: What it shows of a row.
        attack: Whose figures it holds, "" of all others.
        needs: What one of a table's rows must have, so that the table has the column.
    """

    name: str
    title: str = ""
    detail: str = ""
    note: str = ""
    shown: Callable[[Row], Shown]
    attack: str = ""
    needs: Callable[[Row], object] = lambda row: True


# --- figures as text --------------------------------------------------------------------------


def figure(value: float, metric: str = "ssim", digits: int = 3) -> str:
    """Format a score with some decimals, 0.908; errors of records, which span decades, with as many
    significant digits: 4.1e-8."""
    if metric == "mse":
        return _trim_exponent(f"{value:.{digits}g}")
    return _format_fixed(value, digits)


def format_supported(value: Interval, seeds: Sequence[float], unit: float = 1.0) -> str:
    """Format a mean with its interval in the digits that the interval supports: 0.5 [0.3, 0.7]."""
    return " ".join(format_supported_parts(value, seeds, unit))


def format_supported_parts(
    value: Interval, seeds: Sequence[float], unit: float = 1.0
) -> tuple[str, str]:
    """A mean and its interval in the same number of decimals: one where the half width is .1 or
    more or there is one seed, two where it is .01 or more, else three. unit: 100 shows points, with
    two decimals less."""
    wide = value.half_width
    digits = 1 if len(seeds) == 1 or wide >= 0.0995 else 2 if wide >= 0.00995 else 3
    digits = max(0, digits - round(math.log10(unit)))
    ends = (unit * v for v in (value.mean, value.lo, value.hi))
    mean, lo, hi = (_format_fixed(v, digits).replace("-", "−") for v in ends)
    return mean, f"[{lo}, {hi}]"


def two_digits(value: float, metric: str) -> str:
    """0.52; of errors that would be 0.00 one digit, 7e-17: a narrow column holds no more."""
    if metric != "mse" or 0.01 <= value < 100:
        return f"{value:.2f}"
    return _trim_exponent(f"{value:.2g}" if value == 0 or value >= 100 else f"{value:.0e}")


def epsilon_text(value: float | None) -> str:
    """3.88e4."""
    return "–" if value is None else f"{value:.3g}".replace("e+0", "e")


def audit_text(audit: AuditSummary) -> str:
    """5.9+: what an audit certifies, and whether only its draws limit that."""
    return f"{audit.eps_audited:.2g}{'+' if audit.eps_at_least else ''}"


def _format_fixed(value: float, digits: int) -> str:
    """Format with a fixed number of decimals, without a minus before zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def _trim_exponent(number: str) -> str:
    """Shorten an exponent: 4.1e-08 to 4.1e-8, 1e+03 to 1e3."""
    return number.replace("e+0", "e").replace("e-0", "e-")


# --- what is shown of a row -------------------------------------------------------------------


def show_interval(value: Interval | None, metric: str = "ssim") -> Shown:
    """A mean with its interval: 0.910 [0.88, 0.94]; of an MSE 4.1e-8 [3.9e-8, 4.4e-8]."""
    if value is None:
        return NOTHING
    lo, hi = (figure(end, metric, 2) for end in (value.lo, value.hi))
    mean, order = figure(value.mean, metric), f"{value.mean:.6g}"
    return Shown(text=mean, interval=f"[{lo}, {hi}]", value=order)


def _epsilon(value: float | None) -> Shown:
    return NOTHING if value is None else Shown(text=epsilon_text(value), value=f"{value:.6g}")


def _marks(row: Row) -> Shown:
    return Shown(text=row.marks.text, value=f"{row.marks.best - row.marks.undefended}")


def _show_claimed_epsilon(row: Row) -> Shown:
    violated = row.audit is not None and row.audit.verdict_claim == "violated"
    unit = f"/{row.unit}" if row.unit else ""
    return replace(_epsilon(row.eps_claimed), beside=unit, mark="!" if violated else "")


def _epsilon_bound(row: Row) -> Shown:
    """5.9+!: the audit's bound, whether the draws limit it, whether it refutes claim or proof."""
    if not row.audit:
        return NOTHING
    mark = "!" if is_refuted(row) else ""
    return Shown(text=audit_text(row.audit), mark=mark, value=f"{row.audit.eps_audited:.6g}")


def is_refuted(row: Row) -> bool:
    """Return whether the audit certifies more than is claimed or proven."""
    audit = row.audit
    return audit is not None and "violated" in (audit.verdict_claim, audit.verdict_proof)


def _attack(name: str, metric: str, row: Row) -> Shown:
    entry = row.attacks.get(name)
    score = None if entry is None else entry.scores.get(metric)
    if entry is None or (score is None and entry.status == "done"):  # it has other scores
        return NOTHING
    if score is None:
        style = "none" if entry.status in ("not_applicable", "pending") else "bad"
        status = "n/a" if entry.status == "not_applicable" else entry.status
        return Shown(text=status, style=style, reason=str(entry.reason))
    marks = {
        "(pending)": entry.status == "pending",
        SPARED: has_spared(entry),
        f"({entry.failed} failed)": entry.failed,
    }
    mark = " ".join(mark for mark, holds in marks.items() if holds)
    return replace(show_interval(score, metric), style=_shade(entry, score, metric), mark=mark)


def has_spared(entry: AttackEntry) -> bool:
    """Return whether victims that earlier attacks had reconstructed have those attacks' answers."""
    return any("victims were spared" in note for note in entry.notes)


def _shade(entry: AttackEntry, score: Interval, metric: str) -> str:
    """h1 to h9: the leak, between its floor and a perfect copy; nothing at or below the floor, and
    of floors."""
    if entry.is_floor:
        return "floor"
    floor = entry.floor.get(metric)
    return "" if floor is None else shade(leak(score.mean, floor, metric))


def shade(leaked: float) -> str:
    """Return the class of the style sheet for a leakage in [0, 1]: h1 to h9, "" for none."""
    step = min(math.ceil(leaked * _SHADES), _SHADES)
    return f"h{step}" if step > 0 else ""


def _floor(metrics: Mapping[str, str], row: Row) -> Shown:
    """0.26/0.66: no information / labels only. metrics: of the attacks whose floors are shown."""
    texts = {}
    for metric in dict.fromkeys(metrics.values()):
        entries = [row.attacks[n] for n, m in metrics.items() if m == metric and n in row.attacks]
        floors: Mapping[str, float] = next((e.floor for e in entries if e.floor), {})
        if metric in floors:
            given = (floors[metric], floors.get(metric + FLOOR_SUFFIX))
            texts[metric] = "/".join(two_digits(v, metric) for v in given if v is not None)
    if not texts:
        return NOTHING
    (first, text), *others = texts.items()
    return Shown(
        text=("" if first == "ssim" else f"{METRICS[first].title} ") + text,
        beside=", ".join(f"{METRICS[m].title} {t}" for m, t in others),
        value=text.split("/")[0],
    )


def _case(name: str, row: Row) -> Shown:
    """A worst case. name: `choice` or `worst`."""
    case: WorstCase | None = getattr(row, name)
    if not case:
        return NOTHING
    figure = show_interval(case.interval, case.metric)
    label = "" if case.metric == "ssim" else f"{METRICS[case.metric].title} "
    return replace(
        figure,
        text=label + figure.text,
        beside=case.attack,
        style=_shade(row.attacks[case.attack], case.interval, case.metric),
    )


def _format_interval(row: Row, value: Interval | None, unit: float = 1.0) -> Shown:
    """A mean with its interval, in the digits that the interval supports. unit: 100 shows
    points."""
    if value is None:
        return NOTHING
    text, ends = format_supported_parts(value, row.seeds, unit)
    return Shown(text=text, interval=ends, value=f"{value.mean:.6g}")


def _show_recognised(row: Row) -> Shown:
    count = row.recognised
    return NOTHING if count is None else Shown(text=count.text, value=f"{count.count}")


def show_membership(row: Row) -> Shown:
    """0.53 [0.50, 0.56] ≤ 0.9: the share of members told at 1 % false positives, and the bound."""
    figures = row.membership
    if figures is None:
        return NOTHING
    if figures.rate is None:
        return Shown(text="n/a", style="none", reason=str(figures.reason))
    bound = "" if figures.bound is None else f"≤ {figures.bound:.2g}"
    return replace(show_interval(figures.rate), beside=bound)


def _show_flags(row: Row) -> Shown:
    return Shown(text="; ".join(map(explain.sentence, row.flags)))


# --- the columns ------------------------------------------------------------------------------


LEAKAGE = Column(name="leakage", shown=lambda row: _format_interval(row, row.leak_interval))
_COLUMNS = (
    Column(name="marks", shown=_marks),
    Column(name="defense", shown=lambda row: Shown(text=row.setting)),
    LEAKAGE,
    Column(name="recognised", shown=_show_recognised, needs=lambda row: row.recognised),
    Column(name="selected", shown=partial(_case, "choice"), needs=lambda row: row.choice),
    Column(name="upper bound", shown=partial(_case, "worst")),
    Column(name="membership", shown=show_membership, needs=lambda row: row.membership),
    Column(name="accuracy drop", shown=lambda row: _format_interval(row, row.accuracy_drop, 100)),
    Column(name="accuracy", shown=lambda row: show_interval(row.accuracy)),
    Column(
        name="personal accuracy",
        title="own accuracy",
        shown=lambda row: show_interval(row.personal_accuracy),
        needs=lambda row: row.personalised,
    ),
    Column(name="eps claimed", title="ε claimed", shown=_show_claimed_epsilon),
    Column(name="eps proven", title="ε proven", shown=lambda row: _epsilon(row.eps_record)),
    Column(name="eps audited", title="ε audited", shown=_epsilon_bound),
)
"""Before those of the attacks."""


def columns_of(rows: Sequence[Row], *, whole: bool = False) -> list[Column]:
    """The columns that a table of these rows shows, in their order; whole: with columns of attacks
    that apply to no row."""
    unused = {} if whole else idle(rows)
    metrics = {n: m for n, m in attack_metrics(rows).items() if n not in unused}
    return [
        *(column for column in _COLUMNS if any(map(column.needs, rows))),
        Column(name="floor", shown=partial(_floor, metrics)),
        *(_attack_column(rows, name, metric) for name, metric in metrics.items()),
        Column(name="flags", shown=_show_flags),
    ]


def _attack_column(rows: Sequence[Row], name: str, metric: str) -> Column:
    is_floor = any(r.attacks[name].is_floor for r in rows if name in r.attacks)
    title = METRICS[metric].title
    return Column(
        name=f"{name} {title}",
        title=name,
        detail=f"{title}, a floor" if is_floor else title,
        note=metric,
        shown=partial(_attack, name, metric),
        attack=name,
    )
