"""Plots as inline SVG: axes, points with intervals, labels that do not collide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from bench.metrics.intervals import Interval
from bench.report.escaping import html
from bench.report.plots import SIDES, Band, Scale, side_of

WIDTH, HEIGHT = 440, 330
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 46
SIDE = 58
"""Width of a column for points that have no place on a logarithmic axis."""
SHAPES = (
    "M0-5A5 5 0 1 1 0 5A5 5 0 1 1 0-5Z",
    "M-4.4-4.4H4.4V4.4H-4.4Z",
    "M0-5.8L5.4 4.2H-5.4Z",
    "M0-6L6 0L0 6L-6 0Z",
    "M0 5.8L5.4-4.2H-5.4Z",
    "M-1.8-5.4H1.8V-1.8H5.4V1.8H1.8V5.4H-1.8V1.8H-5.4V-1.8H-1.8Z",
    "M-5-2.6L-2.6-5L0-2.4L2.6-5L5-2.6L2.4 0L5 2.6L2.6 5L0 2.4L-2.6 5L-5 2.6L-2.4 0Z",
    "M-5-3H5V3H-5Z",
)
COLOURS = 8
Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""
_AROUND = (
    *((9, -6), (-9, -6), (9, 13), (-9, 13), (0, -13), (0, 20)),
    *((12, -20), (-12, -20), (12, 26), (-12, 26), (16, 40), (-16, 40)),
)
"""Where a point's label may stand, the best place first."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point as it is drawn.

    Attributes:
        aside: How far from the middle of a side column, as a share of its width.
        row: Place in the table of the row that it belongs to.
        group: Gives colour and shape.
        words: All that is to be read about it, parts separated by "; ".
        tag: Label beside it, where there is room.
        states: Classes of the style sheet: muted, hollow, front.
    """

    x: Interval
    y: Interval
    row: int
    group: int
    words: str
    aside: float = 0.0
    tag: str = ""
    states: tuple[str, ...] = ()


class Plot:
    """One plot; coordinates are user units of the view box."""

    def __init__(self, x: Scale, y: Scale, *, name: str, title: str, description: str) -> None:
        self.x, self.y = x, y
        self.name, self.title, self.description = name, title, description
        self._right = WIDTH - RIGHT - SIDE * len(x.sides)
        self._back: list[str] = []
        self._taken: list[Box] = []
        self._axes()

    def at(self, point: Mark) -> tuple[float, float]:
        return self.across(point.x.mean) + SIDE * point.aside, self.up(point.y.mean)

    def across(self, value: float) -> float:
        if side := side_of(value):
            return self._right + SIDE * (self.x.sides.index(side) + 0.5)
        return LEFT + self.x.share(value) * (self._right - LEFT)

    def up(self, value: float) -> float:
        return HEIGHT - BOTTOM - self.y.share(value) * (HEIGHT - BOTTOM - TOP)

    def floor(self, line: Band) -> None:
        """A floor, drawn behind the points."""
        width, height = self._right - LEFT, HEIGHT - BOTTOM - TOP
        if line.across:
            top, end = self.up(line.hi), self.up(line.lo)
            self._band(LEFT, top, width, end - top)
            self._name(
                line.label, [(self._right - 4, top - 3, "end"), (LEFT + 4, top - 3, "start")]
            )
            return
        start, end = self.across(line.lo), self.across(line.hi)
        self._band(start, TOP, end - start, height)
        foot = HEIGHT - BOTTOM - 5
        places = [(end + 4, foot, "start"), (end + 4, foot - 13, "start")]
        if start > LEFT + 80:
            places = [(start - 3, foot, "end"), *places]
        self._name(line.label, places)

    def _band(self, x: float, y: float, width: float, height: float) -> None:
        width, height = max(1.2, width), max(1.2, height)
        self._back.append(
            f'<rect class="fl" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        )

    def _name(self, text: str, places: Sequence[tuple[float, float, str]]) -> None:
        """A floor's label at the first place free of others, or the last of them; labels of
        points keep clear of it."""
        length = 5.4 * len(text)
        for x, y, anchor in places:
            left = x - length if anchor == "end" else x
            box = (left, y - 10, left + length, y + 2)
            if not any(_overlap(box, other) for other in self._taken):
                break
        self._text(x, y, text, "flt", anchor)
        self._taken.append(box)

    def front(self, points: Sequence[Mark]) -> None:
        """A step line through points sorted along x."""
        if len(points) < 2:
            return
        path = ""
        for point in points:
            x, y = self.at(point)
            path += f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f} {y:.1f}"
        self._back.append(f'<path class="fr" d="{path}"/>')

    def draw(self, points: Sequence[Mark], *, unnamed: frozenset[int] = frozenset()) -> Markup:
        """The whole SVG element. Points are focusable: the first by Tab, the others from there
        by arrow keys (the page's script).

        Args:
            points: In the order in which the arrow keys visit them.
            unnamed: Rows whose points get their words from an earlier plot, by that script.
        """
        marks = [
            self._mark(p, first=i == 0, named=p.row not in unnamed) for i, p in enumerate(points)
        ]
        self._taken += [(x - 6, y - 6, x + 6, y + 6) for x, y in map(self.at, points)]
        tags = [self._tag(p) for p in points if p.tag]
        ids = f"{self.name}-t {self.name}-d"
        return Markup(
            f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="group" '
            f'aria-labelledby="{self.name}-t"><g role="img" aria-labelledby="{ids}">'
            f'<title id="{self.name}-t">{html(self.title)}</title>'
            f'<desc id="{self.name}-d">{html(self.description)}</desc>'
            f"{''.join(self._back)}</g>{''.join(tags)}{''.join(marks)}</svg>"
        )

    def _axes(self) -> None:
        bottom = HEIGHT - BOTTOM
        for value, text in self.x.ticks():
            x = self.across(value)
            self._back.append(f'<path class="gr" d="M{x:.1f} {TOP}V{bottom}"/>')
            self._text(x, bottom + 14, text, "tk", "middle")
        for value, text in self.y.ticks():
            y = self.up(value)
            self._back.append(f'<path class="gr" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            self._text(LEFT - 5, y + 4, text, "tk", "end")
        for number, side in enumerate(self.x.sides):
            x = self._right + SIDE * number
            self._back.append(
                f'<rect class="sd" x="{x + 2:.1f}" y="{TOP}" width="{SIDE - 4}" '
                f'height="{bottom - TOP}"/>'
            )
            self._text(x + SIDE / 2, bottom + 14, SIDES[side], "tk", "middle")
        self._back.append(f'<path class="ax" d="M{LEFT} {TOP}V{bottom}H{self._right}"/>')
        self._text((LEFT + self._right) / 2, HEIGHT - 10, self.x.label, "lb", "middle")
        middle = (TOP + bottom) / 2
        self._back.append(
            f'<text class="lb" text-anchor="middle" '
            f'transform="translate(12 {middle:.1f}) rotate(-90)">{html(self.y.label)}</text>'
        )

    def _text(self, x: float, y: float, text: str, style: str, anchor: str) -> None:
        self._back.append(
            f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f"{html(text)}</text>"
        )

    def _mark(self, point: Mark, *, first: bool, named: bool) -> str:
        x, y = self.at(point)
        bars = ""
        if point.x.hi > point.x.lo:
            a, b = (self.across(v) - x for v in (point.x.lo, point.x.hi))
            bars += f"M{a:.1f} 0H{b:.1f}"
        if point.y.hi > point.y.lo:
            a, b = (self.up(v) - y for v in (point.y.lo, point.y.hi))
            bars += f"M0 {a:.1f}V{b:.1f}"
        states = "".join(f" {s}" for s in point.states)
        words = f' aria-label="{html(point.words)}"' if named else ""
        return (
            f'<g class="pt c{point.group % COLOURS}{states}" data-p="{point.row}" role="img" '
            f'tabindex="{0 if first else -1}"{words} transform="translate({x:.1f} {y:.1f})">'
            + (f'<path class="ci" d="{bars}"/>' if bars else "")
            + f'<path class="mk" d="{SHAPES[shape(point.group)]}"/></g>'
        )

    def _tag(self, point: Mark) -> str:
        """The point's label at the first free place around it, or nothing where all is full."""
        x, y = self.at(point)
        length = 5.9 * len(point.tag)
        for dx, dy in _AROUND:
            anchor = "middle" if dx == 0 else ("start" if dx > 0 else "end")
            left = x + dx - {"start": 0, "end": length, "middle": length / 2}[anchor]
            box = (left, y + dy - 9, left + length, y + dy + 3)
            inside = box[0] > LEFT and box[2] < WIDTH and box[1] > 0 and box[3] < HEIGHT - BOTTOM
            if inside and not any(_overlap(box, other) for other in self._taken):
                self._taken.append(box)
                return (
                    f'<text class="tg" aria-hidden="true" x="{x + dx:.1f}" y="{y + dy:.1f}" '
                    f'text-anchor="{anchor}">{html(point.tag)}</text>'
                )
        return ""


def shape(group: int) -> int:
    """Colours repeat after eight groups; then every shape has another colour."""
    return (group + group // COLOURS) % len(SHAPES)


def key(group: int) -> Markup:
    """A group's mark for the legend."""
    return Markup(
        f'<svg class="key" viewBox="-8 -8 16 16" aria-hidden="true">'
        f'<g class="pt c{group % COLOURS}"><path class="mk" d="{SHAPES[shape(group)]}"/></g></svg>'
    )


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
