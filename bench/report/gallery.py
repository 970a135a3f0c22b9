"""What an attacker rebuilds, in one look: a strip of pictures per defense, the truth above them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.records import Row
from bench.report.leaderboard import row_id
from bench.report.overview import Overview, overview
from bench.report.pictures import Pictures

MOST_WALLS = 6
"""Tables that are shown: a page that opens with more is no look."""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Pictures side by side. count: how many. attack: Who rebuilt them, "" for the truth."""

    name: str
    source: str
    count: int
    attack: str = ""
    leak: float | None = None


def walls(rows: Sequence[Row], pictures: Pictures) -> list[tuple[str, list[Strip]]]:
    """Return the title and strips, the truth first, of each table at its last round with pictures:
    each defense's least leaky setting, reconstructed by the attack that ranks it. Strips of victims
    other than the first strip's are left out."""
    final = [r for r in rows if r.checkpoint == "final"] or list(rows)
    summary = overview(final, 1.0)
    made = ((h.title, _strips(summary, i, pictures)) for i, h in enumerate(summary.heads))
    return [(title, strips) for title, strips in made if strips][:MOST_WALLS]


def _strips(summary: Overview, place: int, pictures: Pictures) -> list[Strip]:
    cells = {(c["row"], c["attack"]): c for c in pictures["cells"]}
    sprites, truth = pictures["sprites"], None
    strips: list[Strip] = []
    for line in summary.lines:
        row = line.verdicts[place].row
        case = None if row is None else row.ranking
        cell = None if row is None or case is None else cells.get((row_id(row), case.attack))
        if cell is None or row is None or case is None or truth not in (None, cell["truth"]):
            continue
        count = len(cell["scores"])
        if truth is None:
            truth = cell["truth"]
            strips.append(Strip(name="truth", source=sprites[truth], count=count))
        source = sprites[cell["images"]]
        strips.append(
            Strip(name=line.defense, source=source, count=count, attack=case.attack, leak=row.leak)
        )
    return strips
