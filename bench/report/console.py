"""The terminal as commands write to it."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from bench.report.escaping import visible


class PlainConsole(Console):
    """A console that shows texts as they are: rich's markup in them is text, and so is whatever a
    terminal would obey; numbers get no colour."""

    def __init__(self, **settings: Any) -> None:
        if "ipykernel" in sys.modules:
            # Notebooks set FORCE_COLOR, for which rich writes a bar's escape codes into the cell.
            settings |= {"force_jupyter": False, "force_terminal": False}
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def on_broken_pipe(self) -> None:
        """The reader went away, as `head` does: what is still to be done is done unseen."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
