"""The marks of a table's rows, all by one test: overview, tables and `compare` agree."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from bench.metrics.paired import Difference, differences
from bench.records import FlagCode, Marks, Row
from bench.report.verdicts import accuracy_drop, find_undefended, has_use, understated_leakage

UNDONE = {
    FlagCode.TRAINING_FAILED: "failed",
    FlagCode.TRAINING_TIMEOUT: "failed",
    FlagCode.ATTACK_FAILED: "failed",
    FlagCode.ATTACK_TIMEOUT: "failed",
    FlagCode.ATTACK_PENDING: "pending",
}
"""Flags of a missing training or attack, and what stands where no attack on any setting is done, by
the first of them."""
SAME_FLOOR = 1e-6
"""Difference up to which two baselines are of the same victims: they depend on those alone."""


def with_marks(table: Sequence[Row]) -> list[Row]:
    """Return a table's rows with their marks and accuracy drops."""
    by_place, bare = marks(table), find_undefended(table)
    rows = []
    for i, row in enumerate(table):
        drop = None if bare is None else accuracy_drop(row, bare)
        rows.append(replace(row, marks=by_place.get(i, Marks()), accuracy_drop=drop))
    return rows


def marks(table: Sequence[Row], candidates: Iterable[int] | None = None) -> dict[int, Marks]:
    """Return the marks of some rows of a table, by their places; rows without use have none.

    Args:
        table: All its rows, over which p-values are adjusted.
        candidates: Places of the rows that can be best; by default all.
    """
    among = range(len(table)) if candidates is None else candidates
    places = [i for i in among if has_use(table[i]) and table[i].leaks is not None]
    bare = find_undefended(table)
    base = next((i for i, r in enumerate(table) if r is bare and r.leaks and has_use(r)), None)
    trusted = [i for i in places if is_trusted(table[i])]
    best = min(trusted, key=lambda i: table[i].leak or 0.0) if len(trusted) > 1 else None
    of_best = {} if best is None else row_differences(table, best)
    of_bare = {} if base is None else row_differences(table, base)
    by_place = {}
    for i in places:
        less = of_bare.get(i)
        tied = False
        if best is not None and i in trusted:
            # One pair is tested once: the best row against the undefended one.
            worse = of_bare.get(best) if i == base else of_best.get(i)
            tied = i == best or (worse is not None and not worse.separated)
        alike = less is not None and not (less.separated and less.interval.mean < 0)
        by_place[i] = Marks(best=tied, undefended=alike)
    return by_place


def row_differences(
    table: Sequence[Row], reference: int, also: Iterable[int] = ()
) -> dict[int, Difference | None]:
    """Compare the normalised leakage of a table's rows with that of one of them.

    Args:
        table: Its rows; those without use are left out.
        reference: Place of the row with which the others are compared.
        also: Places of rows that are compared though they have no use.

    Returns:
        By its place each compared row's difference, None for the reference.
    """
    kept = {
        i: row.leaks
        for i, row in enumerate(table)
        if row.leaks is not None and (has_use(row) or i in (reference, *also))
    }
    base = kept[reference]
    same = [
        leak.threat == base.threat and bool(np.isclose(leak.floor, base.floor, rtol=SAME_FLOOR))
        for leak in kept.values()
    ]
    outcomes = [leak.outcomes for leak in kept.values()]
    compared = differences(outcomes, list(kept).index(reference), same)
    return dict(zip(kept, compared, strict=True))


def is_trusted(row: Row) -> bool:
    """Return whether no flag says that the row leaks more than it shows, or that an attack on it or
    a training is missing: such a row is never marked as best."""
    doubted = any(f.code in (FlagCode.BELOW_FLOOR, *UNDONE) for f in row.flags)
    return not doubted and understated_leakage(row) is None
