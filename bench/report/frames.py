"""The leaderboard and its records as pandas tables: figures for CSV and Python, and what each
medium shows, from which it only sets the cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.store import Store
from bench.metrics.intervals import Interval
from bench.metrics.named import FLOOR_SUFFIX, METRICS
from bench.records import AttackEntry, AttackRecord, Cell, Row, WorstCase
from bench.report import explain
from bench.report import overview as overviews
from bench.report.advice import advise
from bench.report.columns import columns_of, show_membership
from bench.report.costs import COSTS
from bench.report.entries import LEAK_METRICS
from bench.report.escaping import csv_cell
from bench.report.overview import Head, Overview, Verdict

if TYPE_CHECKING:
    from pandas import DataFrame

NARROW = (
    *("protocol", "dataset", "model", "checkpoint", "defense", "setting"),
    *("leakage", "leakage_lo", "leakage_hi", "accuracy_drop", "eps_record", "flags"),
)
"""Columns of `leaderboard` that are shown unless all are asked for."""
OPTIONAL = ("recognised", "membership")
"""Columns of the overview that are left out where nothing stands in them."""
_SAME = ("protocol", "dataset", "model", "checkpoint", "defense", "variant", "setting")
_OF_CELL = ("protocol", "dataset", "model", "checkpoint", "defense", "setting", "seed")


def mean_and_ends(name: str, value: Interval | None) -> dict[str, float | None]:
    """Return a mean and the ends of its interval by their names."""
    ends = (None, None, None) if value is None else (value.mean, value.lo, value.hi)
    return dict(zip((name, f"{name}_lo", f"{name}_hi"), ends, strict=True))


def _frame(lines: Iterable[Any], **settings: Any) -> DataFrame:
    """Return lines as a frame. pandas is imported only where one is made."""
    from pandas import DataFrame

    return DataFrame(list(lines), **settings)


def _named(thing: Any, *names: str) -> dict[str, Any]:
    """Return some attributes by their names; None of nothing."""
    return {name: None if thing is None else getattr(thing, name) for name in names}


def figures_of(row: Row) -> dict[str, Any]:
    """Return every figure of a row, unrounded, by its name in CSV and pandas."""
    return {
        **_named(row, *_SAME),
        **mean_and_ends("leakage", row.leak_interval),
        "tied_for_best": row.marks.best,
        "like_undefended": row.marks.undefended,
        "recognised": row.recognised and row.recognised.count,
        "recognised_of": row.recognised and row.recognised.of,
        "recognised_by_baseline": row.recognised and row.recognised.baseline,
        **_membership_figures(row),
        **mean_and_ends("accuracy_drop", row.accuracy_drop),
        **mean_and_ends("accuracy", row.accuracy),
        **mean_and_ends("personal_accuracy", row.personal_accuracy),
        **_named(row, "eps_claimed", "unit", "eps_record", "delta"),
        **_named(row.audit, "eps_audited", "eps_at_least", "verdict_claim", "verdict_proof"),
        **row.costs,
        **_case_figures("choice", row.choice),
        **_case_figures("worst", row.worst),
        "threat": row.threat,
        "observed": row.observed,
        "trained": row.protocol_settings.work,
        "seeds": " ".join(map(str, row.seeds)),
        "interval_over": row.interval_over,
        "suite": row.suite,
        "flags": "; ".join(map(explain.sentence, row.flags)),
    }


def _membership_figures(row: Row) -> dict[str, Any]:
    """Return nothing where the suite does not ask for membership inference."""
    figures = row.membership
    if figures is None:
        return {}
    return mean_and_ends("membership", figures.rate) | {
        "membership_at_0.001": figures.curve.get(0.001),
        "membership_bound": figures.bound,
    }


def _case_figures(name: str, case: WorstCase | None) -> dict[str, Any]:
    figures: dict[str, Any] = {f"{name}_attack": case and case.attack}
    for metric in LEAK_METRICS:
        interval = case.interval if case and case.metric == metric else None
        figures |= mean_and_ends(f"{name}_{metric}", interval)
    return figures


def _entry_figures(entry: AttackEntry) -> dict[str, Any]:
    """Return every figure of an attack's entry by its name in CSV and pandas."""
    figures = _named(entry, "status", "reason", "threat", "is_floor", "n", "failed")
    for metric in METRICS:
        figures |= mean_and_ends(metric, entry.scores.get(metric))
        for end in ("", FLOOR_SUFFIX):
            figures[f"{metric}_floor{end}"] = entry.floor.get(metric + end)
    return figures | {
        **_named(entry, "seconds", "gradient_evaluations"),
        "gain_at_twice_budget": entry.convergence and entry.convergence.gain,
        "notes": "; ".join(entry.notes),
    }


def to_csv(rows: Sequence[Row]) -> str:
    """Return a line per row and attack, with every figure, its interval and its baseline."""
    lines = []
    for row in rows:
        figures = figures_of(row)
        attacks = row.attacks.items()
        lines += [figures | {"attack": n} | _entry_figures(e) for n, e in attacks] or [figures]
    return csv_of(lines)


def csv_of(lines: Sequence[Mapping[Any, Any]]) -> str:
    """Return lines of figures as CSV that no spreadsheet takes for formulas."""
    frame = _frame([{k: csv_cell(v) for k, v in line.items()} for line in lines], dtype=object)
    return frame.to_csv(index=False, lineterminator="\n")


def leaderboard(rows: Sequence[Row]) -> DataFrame:
    """One line per row, flat: all of `figures_of`, then each attack's means as ATTACK_METRIC;
    intervals end in _lo, _hi."""
    return _frame(
        figures_of(row)
        | {f"{n}_{m}": s.mean for n, e in row.attacks.items() for m, s in e.scores.items()}
        for row in rows
    )


def overview(rows: Sequence[Row], loss: float) -> DataFrame:
    """Return one line per defense and table: the least leaky setting within the accuracy drop, its
    leakage and its costs; where there is none, why."""
    return _frame(
        _verdict_line(line.defense, head, verdict)
        for summary in overviews.by_protocol(rows, loss)
        for line in summary.lines
        for head, verdict in zip(summary.heads, line.verdicts, strict=True)
    )


def best(rows: Sequence[Row], loss: float) -> DataFrame:
    """Return one line per table: the defense that leaks least, its leakage and costs, and what is
    said of it."""
    lines = []
    for summary in overviews.by_protocol(rows, loss):
        for advice in advise(summary):
            line = _verdict_line(advice.defense, advice.head, advice.verdict or Verdict())
            del line["why"]
            lines.append(line | {"said": " ".join(advice.sentences)})
    return _frame(lines)


def _verdict_line(defense: str | None, head: Head, verdict: Verdict) -> dict[str, Any]:
    row = verdict.row
    return {
        "defense": defense,
        "table": head.title,
        **mean_and_ends("leakage", None if row is None else row.leak_interval),
        "leakage": verdict.leak,
        "tied_for_best": verdict.marks.best,
        "like_undefended": verdict.marks.undefended,
        "setting": row and row.setting,
        **mean_and_ends("accuracy_drop", verdict.drop),
        "accuracy_drop_may_exceed_limit": verdict.over,
        **{name: verdict.costs.get(name) for name in COSTS},
        "eps_record": row and row.eps_record,
        "eps_audited": row.audit.eps_audited if row and row.audit else None,
        "why": verdict.why,
    }


def board(rows: Sequence[Row], *, whole: bool = False) -> DataFrame:
    """Return what one table shows: a line per row, and by `Column` a `Shown`. whole: with columns
    of attacks that apply to no row."""
    columns = columns_of(rows, whole=whole)
    lines = ([column.shown(row) for column in columns] for row in rows)
    return _frame(lines, columns=columns, dtype=object)


def texts(frame: DataFrame) -> DataFrame:
    """Return columns of `board` as text, by their names."""
    return frame.map(lambda shown: shown.full).rename(columns=lambda column: column.name)


def ranking_texts(ran: Sequence[tuple[str, Verdict]]) -> DataFrame:
    """Return one table of an overview as text, a line per defense of `overview.ranked`: what the
    terminal and papers show, without columns that hold nothing."""
    lines = [
        {
            "defense": name,
            "setting": v.row.setting if v.row and v.row.settings else "",
            "leakage": v.leakage,
            "signs": v.signs,
            "recognised": v.recognised,
            "membership": show_membership(v.row).text if v.row else "–",
            "accuracy drop": v.drop_text,
            **{cost.title: overviews.times(v.costs.get(key)) for key, cost in COSTS.items()},
            "epsilon": overviews.epsilon_words(v.row.eps_record if v.row else None),
        }
        for name, v in ran
    ]
    frame = _frame(lines)
    return frame[[name for name in frame if set(frame[name]) != {"–"} or name not in OPTIONAL]]


def overview_texts(summary: Overview, title: Callable[[Head], str]) -> DataFrame:
    """Return an overview as text: its defenses by tables, then their costs and settings. title:
    what to call a table."""
    lines = [
        [line.defense, *(v.text for v in line.verdicts), *line.costs, ", ".join(line.settings)]
        for line in summary.lines
    ]
    columns = ["defense", *map(title, summary.heads), *overviews.column_notes(), "settings"]
    return _frame(lines, columns=columns)


def attacks(rows: Sequence[Row]) -> DataFrame:
    """One line per row and attack: every metric with interval and floors, status and reason."""
    return _frame(
        _named(row, *_SAME) | {"attack": name} | _entry_figures(entry)
        for row in rows
        for name, entry in row.attacks.items()
    )


def victims(store: Store, cells: Iterable[Cell]) -> DataFrame:
    """One line per finished cell and victim: every metric and, ending in _floor, what needs no
    leak."""
    lines = []
    for cell in cells:
        record = store.read("attack", cell.key)
        if not isinstance(record, AttackRecord):
            continue
        same = _named(cell, *_OF_CELL) | {"attack": cell.label, "threat": cell.threat}
        for victim in range(record.victims):
            line = {**same, "victim": victim}
            line |= {k: v[victim] for k, v in record.values.items()}
            line |= {
                f"{metric}_floor{k.removeprefix(metric)}": v[victim]
                for k, v in record.floors.items()
                if (metric := k.removesuffix(FLOOR_SUFFIX)) in record.values
            }
            if record.judged is not None:
                line["judged"] = record.judged[victim]
            lines.append(line | {"key": cell.key})
    return _frame(lines)
