"""Rows of leaderboard tables against each other: which pairs, and by which names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.errors import UserError
from bench.metrics.named import METRICS
from bench.names import did_you_mean
from bench.records import short
from bench.report.choosing import check_wanted
from bench.report.contenders import Contest
from bench.report.pairs import Contender, RowComparison, compare
from bench.suite import parse_value


def two_rows(
    found: Sequence[Contest],
    one: str,
    two: str,
    *,
    attack: str | None = None,
    metric: str | None = None,
) -> list[tuple[Contest, RowComparison]]:
    """The rows of two names, compared in every table that holds both.

    A name is a defense, `spm(epsilon=1.5, variant=printed)` as the leaderboard prints it, or
    `spm:epsilon=1.5`; of the settings only as many are needed as make it unique. Raises UserError
    for names that fit no row, several, or rows of different tables alone.
    """
    _check_names(found, attack, metric)
    everything = [c for table in found for c in table.rows]
    for text in (one, two):
        if not any(_fits(c, text) for c in everything):
            names = dict.fromkeys(c.row.defense for c in everything)
            inner = dict.fromkeys(c.name for c in everything if c.row.defense == _parts(text)[0])
            raise UserError(did_you_mean("row", text, list(inner or names)))
    out = []
    for table in found:
        matches = [[c for c in table.rows if _fits(c, text)] for text in (one, two)]
        if not all(matches):
            continue
        for text, fitting in zip((one, two), matches, strict=True):
            if len(fitting) > 1:
                raise UserError(
                    f"'{text}' fits {len(fitting)} rows of {table.title}; give the setting: "
                    f"{', '.join(c.name for c in fitting)}."
                )
        first, second = matches[0][0], matches[1][0]
        if first is second:
            raise UserError(f"'{one}' and '{two}' are the same row, {first.name}.")
        out.append((table, compare(first, second, attack=attack, metric=metric)))
    if not out:
        raise UserError(
            f"no table holds both '{one}' and '{two}'; rows of different tables have other victims."
        )
    return out


def _check_names(found: Sequence[Contest], attack: str | None, metric: str | None) -> None:
    known = {n for t in found for c in t.rows for by in c.cells.values() for n in by}
    check_wanted("attack", attack, known)
    check_wanted("metric", metric, METRICS)


def _parts(text: str) -> tuple[str, dict[str, str]]:
    """Defense and settings of `spm(epsilon=1.5)` or `spm:epsilon=1.5`."""
    name, _, inner = text.strip().removesuffix(")").replace("(", ":", 1).partition(":")
    pairs = [p for p in re.split(r",(?![^\[{]*[\]}])", inner) if p.strip()]
    return name.strip(), {k.strip(): v.strip() for k, _, v in (p.partition("=") for p in pairs)}


def _fits(row: Contender, text: str) -> bool:
    name, wanted = _parts(text)
    settings = row.row.settings
    return row.row.defense == name and all(
        k in settings and (short(settings[k]) == v or parse_value(v) == settings[k])
        for k, v in wanted.items()
    )
