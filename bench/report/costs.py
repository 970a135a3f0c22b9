"""What a training costs under a defense: an entry of `COSTS` is a column wherever costs are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich import filesize

from bench.records import Row, TrainRecord


@dataclass(frozen=True)
class CostPart:
    """A figure of a training, as a row has it, mean over seeds.

    Attributes:
        label: Beside it where a row is opened.
        read: The figure of one training, from its record; None where it was not measured.
        show: The figure as text.
    """

    label: str
    read: Callable[[TrainRecord], float | None]
    show: Callable[[float], str] = "{:.4g}".format


@dataclass(frozen=True, kw_only=True)
class CostColumn:
    """A cost of a defense. Overviews show it as a multiple of the undefended row's.

    Attributes:
        title: Its head; a terminal has room for the last word.
        note: What it means.
        parts: What it is the sum of, by their names in CSV, JSON and pandas.
    """

    title: str
    note: str
    parts: Mapping[str, CostPart]

    def of(self, row: Row) -> float | None:
        """Return the sum of a row's parts, None where one was not measured."""
        figures = [row.costs.get(name) for name in self.parts]
        known = [figure for figure in figures if figure is not None]
        return sum(known) if len(known) == len(figures) else None


def _show_bytes(value: float) -> str:
    return filesize.decimal(round(value))


COSTS: dict[str, CostColumn] = {
    "bytes": CostColumn(
        title="bytes",
        note="What is sent in a round, as a multiple of the undefended row's.",
        parts={
            "bytes_up": CostPart("sent up per round", lambda r: r.bytes_up, _show_bytes),
            "bytes_down": CostPart("sent down per round", lambda r: r.bytes_down, _show_bytes),
        },
    ),
    "client_seconds": CostColumn(
        title="client time",
        note="A client's seconds per round, as a multiple of the undefended row's, as measured.",
        parts={"client_seconds": CostPart("client seconds per round", lambda r: r.client_seconds)},
    ),
}
"""By their names in the overview's frame. A name stands for nothing else that a row has."""


def parts() -> dict[str, CostPart]:
    """Return the parts of all costs by name."""
    return {name: part for cost in COSTS.values() for name, part in cost.parts.items()}


def read_costs(trained: Sequence[TrainRecord]) -> dict[str, float | None]:
    """Return the mean of every part over some trainings, None where one did not measure it."""
    means: dict[str, float | None] = {}
    for name, part in parts().items():
        figures = [figure for r in trained if (figure := part.read(r)) is not None]
        whole = bool(figures) and len(figures) == len(trained)
        means[name] = float(np.mean(figures)) if whole else None
    return means
