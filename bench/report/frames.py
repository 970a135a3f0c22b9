"""The leaderboard and its records as pandas tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from bench.harness.store import Store
from bench.metrics.named import FLOOR_SUFFIX
from bench.protocols.settings import rounds_before
from bench.records import AttackRecord, Cell, Row
from bench.report import overview as overviews
from bench.report.columns import ENTRY, three
from bench.report.tables import same_training
from bench.report.text import figures_of, lines_of

if TYPE_CHECKING:
    from pandas import DataFrame

_SAME = ("protocol", "dataset", "model", "checkpoint", "defense", "variant", "setting")
_OF_CELL = ("protocol", "dataset", "model", "checkpoint", "defense", "setting", "seed")
_COURSE: dict[str, Callable[[Any], Any]] = {
    **three("accuracy", attrgetter("accuracy")),
    **three("personal_accuracy", attrgetter("personal_accuracy")),
    "eps_claimed": attrgetter("eps_claimed"),
    "eps_record": attrgetter("eps_record"),
}
_LEAK = three("leakage", attrgetter("leak_interval"))


def leaderboard(rows: Sequence[Row]) -> DataFrame:
    """One line per row, flat: all of `columns.ROW`, then each attack's means as ATTACK_METRIC;
    intervals end in _lo, _hi."""
    from pandas import DataFrame

    return DataFrame([line_of(row) for row in rows])


def line_of(row: Row) -> dict[str, Any]:
    """A row's figures by their columns in `leaderboard`."""
    return figures_of(row) | {
        f"{name}_{metric}": score.mean
        for name, entry in row.attacks.items()
        for metric, score in entry.scores.items()
    }


def overview(rows: Sequence[Row], loss: float) -> DataFrame:
    """Return one line per defense and table: the least leaky setting within the accuracy drop, its
    leakage and its costs; where there is none, why."""
    from pandas import DataFrame

    return DataFrame(
        [
            _verdict_line(line, head, verdict)
            for summary in overviews.by_protocol(rows, loss)
            for line in summary.lines
            for head, verdict in zip(summary.heads, line.verdicts, strict=True)
        ]
    )


def _verdict_line(
    line: overviews.DefenseLine, head: overviews.Head, verdict: overviews.Verdict
) -> dict[str, Any]:
    row, leakage = verdict.row, verdict.row and verdict.row.leak_interval
    return {
        "defense": line.defense,
        "table": head.title,
        "leakage": verdict.leak,
        "leakage_lo": leakage and leakage.lo,
        "leakage_hi": leakage and leakage.hi,
        "tied_for_best": verdict.marks.best,
        "like_undefended": verdict.marks.undefended,
        "setting": row and row.setting,
        "accuracy_drop": verdict.drop and verdict.drop.mean,
        "accuracy_drop_lo": verdict.drop and verdict.drop.lo,
        "accuracy_drop_hi": verdict.drop and verdict.drop.hi,
        "accuracy_drop_may_exceed_limit": verdict.over,
        "bytes": verdict.bytes,
        "client_seconds": verdict.seconds,
        "eps_record": row and row.eps_record,
        "eps_audited": row.audit.eps_audited if row and row.audit else None,
        "why": verdict.why,
    }


def overview_tables(rows: Sequence[Row], loss: float) -> list[tuple[str, DataFrame]]:
    """Return the overview as text, by protocol: defenses by tables, and their costs."""
    from pandas import DataFrame

    frames = []
    for summary in overviews.by_protocol(rows, loss):
        heads = [" ".join(head.words) for head in summary.heads]
        frame = DataFrame(
            summary.cells, columns=["defense", *heads, *(cost.name for cost in overviews.COSTS)]
        )
        settings = [", ".join(line.settings) for line in summary.lines]
        frames.append((summary.protocol, frame.assign(settings=settings)))
    return frames


def course(rows: Sequence[Row]) -> DataFrame:
    """Return one line per setting and measured round."""
    from pandas import DataFrame

    lines: dict[tuple[str, int], dict[str, Any]] = {}

    def put(row: Row, rounds: int, figures: Mapping[str, Any]) -> None:
        same = {n: getattr(row, n) for n in ("protocol", "dataset", "model", "defense", "setting")}
        place = (same_training(row), rounds)
        lines.setdefault(place, {**same, "rounds": rounds}).update(figures)

    for row in rows:
        for point in row.course:
            put(row, point.rounds, {name: read(point) for name, read in _COURSE.items()})
    for row in rows:
        if row.leak_interval is not None:
            rounds = rounds_before(row.checkpoint, row.protocol_settings.rounds)
            put(row, rounds, {name: read(row) for name, read in _LEAK.items()})
    return DataFrame([lines[place] for place in sorted(lines)])


def attacks(rows: Sequence[Row]) -> DataFrame:
    """One line per row and attack: every metric with interval and floors, status and reason."""
    from pandas import DataFrame

    kept = [*_SAME, "attack", *ENTRY]
    return DataFrame([line for row in rows for line in lines_of(row)], columns=kept)


def victims(store: Store, cells: Iterable[Cell]) -> DataFrame:
    """One line per finished cell and victim: every metric and, ending in _floor, what needs no
    leak."""
    from pandas import DataFrame

    lines = []
    for cell in cells:
        record = store.read("attack", cell.key)
        if not isinstance(record, AttackRecord):
            continue
        same = {name: getattr(cell, name) for name in _OF_CELL}
        same |= {"attack": cell.label, "threat": cell.threat}
        for victim in range(record.victims):
            line = {**same, "victim": victim}
            line |= {k: v[victim] for k, v in record.values.items()}
            line |= {
                f"{k.removesuffix(FLOOR_SUFFIX)}_floor"
                f"{FLOOR_SUFFIX if k.endswith(FLOOR_SUFFIX) else ''}": v[victim]
                for k, v in record.floors.items()
                if k.removesuffix(FLOOR_SUFFIX) in record.values
            }
            if record.judged is not None:
                line["judged"] = record.judged[victim]
            lines.append(line | {"key": cell.key})
    return DataFrame(lines)
