"""`leakbench verify`: rerun a sample of what others made, and compare."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.names import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.submission.figures import Comparison
    from bench.submission.staged import Rerun
    from bench.submission.verification import Opened

_VERDICTS = {"equal": "green", "within tolerance": "yellow", "differs": "bold red"}


def verify(
    folder: Annotated[Path, typer.Argument(help="A submission, or results with records.")],
    sample: Annotated[int, typer.Option("--sample", help="Cells to rerun.")] = 3,
    trainings: Annotated[
        int | None,
        typer.Option("--trainings", help="Trainings to rerun with all their cells, instead."),
    ] = None,
    only: options.Only = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sample.")] = 0,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Of means, where figures are not equal.")
    ] = 0.02,
    device: options.Device = "auto",
    data_dir: options.DataDir = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, max=1024, help="Worker processes; 0: none.")
    ] = 1,
    sandbox: Annotated[
        str,
        typer.Option("--sandbox", help="auto, bwrap or none: what keeps the code to itself."),
    ] = "auto",
    timeout: Annotated[
        float, typer.Option("--timeout", help="Most seconds of the whole rerun.")
    ] = 3600.0,
    yes: Annotated[bool, typer.Option("--yes", help="Run the submitted code unasked.")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Print every figure that was compared.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check the files of a submission or of results, rerun a random sample of its cells, and
    compare.

    This runs submitted code: it asks first, and isolates it with bubblewrap where that works.
    """
    with options.plain_errors():
        from bench.harness.runner import cell_label, label_of
        from bench.records.submitted import digest_of
        from bench.submission import staged, verification
        from bench.submission.isolation import isolation
        from bench.suite import parse_pairs

        code, opened, again = _open(folder)
        tell = partial(options.say, aside=as_json)
        staged.check_tolerance(tolerance)
        env = options.chosen_environment(device, data_dir, False, None)
        tell(
            f"The files of {opened.run.title} are as they were written, and no record contradicts "
            "another or its run."
        )
        pairs = parse_pairs(only or (), "--only")
        drawn = verification.sample(
            opened, seed=seed, count=sample, trainings=trainings, only=pairs
        )
        off = [c for c in again if c.verdict == "differs"]
        tell(
            f"{counted(len(again), 'figure')} computed again from facts of trainings and stored "
            f"reconstructions: {f'{len(off)} not as recorded' if off else 'all as recorded'}."
        )
        marks = _marks(folder, opened)
        for mark in marks:
            options.say(f"Mark: {mark}", aside=as_json, style="yellow")
        changed = verification.changed_code(opened, drawn)
        tell(
            f"Sample of {counted(len(drawn), 'cell')} out of "
            f"{len(verification.candidates(opened, pairs))}, seed {seed}. To rerun: "
            f"{counted(len(staged.trainings_of(drawn)), 'training')} and "
            f"{counted(len(drawn), 'attack')}."
        )
        # Drawn whole, a training is one line here and below, with all attacks on it.
        of_training = {cell_label(c.job): label_of(c.job.train) for c in drawn}
        lines = {} if trainings is None else of_training
        for name in dict.fromkeys(lines.get(what, what) for what in of_training):
            tell(f"  {name}")
        isolated = isolation(sandbox)
        what = f"the submitted code: {', '.join(code)}" if code else "no code but leakbench's"
        tell(f"This runs {what}, {isolated.sentence}.")
        if code and not options.confirmed("Run it?", yes=yes):
            tell("Nothing was run.")
            raise typer.Exit(2)

        def ended(text: str) -> None:
            if text.partition(": ")[2] not in lines:
                tell(f"  {text}", style="dim")

        made = staged.rerun(
            folder,
            drawn,
            isolation=isolated,
            env=env,
            tolerance=tolerance,
            workers=jobs,
            timeout_s=timeout,
            tell=ended,
        )
    told = _Told(
        made=replace(made, comparisons=[*off, *made.comparisons]),
        cells=len(drawn),
        bare=sum(c.figure == "status" and c.what in of_training for c in made.comparisons),
        changed=changed,
        same=verification.same_environment(opened, env.device) and not changed,
        tolerance=tolerance,
    )
    if as_json:
        about = {"digest": digest_of(folder), "device": env.device, "seed": seed}
        _tell_as_json(
            told, **about, marks=marks, sandbox="none" if isolated.bwrap is None else "bwrap"
        )
    else:
        _tell_as_text(told, lines, details=details)
    if told.differing or made.end:
        raise typer.Exit(1)


def _open(folder: Path) -> tuple[list[str], Opened, list[Comparison]]:
    """The submitted code's files, the folder, and figures that were computed again from what it
    holds, once all files are as they were written.

    Raises:
        typer.Exit: With code 1, once said: a file is not as it was written, or a record contradicts
            its run. That is a finding, not a mistake of the user.
        UserError: There is no such folder.
    """
    from bench.errors import UserError
    from bench.submission.verification import open_folder, recomputed_figures, sources

    try:
        code, opened = sources(folder), open_folder(folder)
        return code, opened, recomputed_figures(opened)
    except UserError as error:
        if not folder.is_dir():
            raise
        options.say(f"leakbench: {error}", aside=True, style="red")
        raise typer.Exit(1) from None


def _marks(folder: Path, opened: Opened) -> list[str]:
    """What to know of a submission."""
    from bench.submission.marks import marks_of

    return [] if opened.submission is None else marks_of(folder)


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What a rerun came to.

    Attributes:
        made: Every figure that was compared, and how the run went.
        cells: How many were drawn.
        bare: Of these, how many gave no figures, only a status.
        changed: The trainings and attacks whose code is not that of the run.
        same: Whether versions, device and code are those of the run.
        tolerance: Of means, where figures are not equal.
    """

    made: Rerun
    cells: int
    bare: int
    changed: Sequence[str]
    same: bool
    tolerance: float

    @property
    def differing(self) -> int:
        """Figures beyond the tolerance."""
        return sum(c.verdict == "differs" for c in self.made.comparisons)

    @property
    def near(self) -> int:
        """Figures within the tolerance that are not equal."""
        return sum(c.verdict == "within tolerance" for c in self.made.comparisons)

    @property
    def passed(self) -> bool:
        return not (self.differing or self.made.end) and self.bare < self.cells


def _tell_as_json(told: _Told, **about: Any) -> None:
    """about: of what, with what, where."""
    from bench.harness.environment import versions

    answer = {
        **about,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "passed": told.passed,
        "same_environment": told.same,
        "changed_code": told.changed,
        "tolerance": told.tolerance,
        "cells": told.cells,
        "cells_with_figures": told.cells - told.bare,
        "differing": told.differing,
        "within_tolerance": told.near,
        "end": told.made.end,
        "comparisons": [asdict(c) for c in told.made.comparisons],
    }
    typer.echo(json.dumps(answer, indent=1))


def _tell_as_text(told: _Told, lines: Mapping[str, str], *, details: bool) -> None:
    """The figures as `_show_comparisons` has them, what to know of them, and the verdict."""
    made = told.made
    _show_comparisons(made.comparisons, lines, details=details)
    for name in told.changed:
        options.say(f"Note: the code of {name} is not that of the run.", style="yellow")
    options.say(
        f"Versions, device and code are {'those' if told.same else 'not those'} of the run: "
        f"{'equal figures are expected' if told.same else 'figures may differ by rounding'}; means "
        f"may differ by {told.tolerance:g} (relative beyond 1, and of squared errors)."
    )
    if told.same and told.near:
        options.say(
            f"Note: {counted(told.near, 'figure')} not bit-equal although versions, device and "
            "code are the same. Another kind of processor, a GPU or, of bytes, fresh ciphertexts "
            "explain that; otherwise ask how the figures were made."
        )
    if told.bare:
        options.say(
            f"Note: {told.bare} of {counted(told.cells, 'sampled cell')} gave no figures to "
            "compare, only a status; a larger --sample compares more."
        )
    if made.end:
        options.say(made.end, style="bold red")
    options.say("Not verified." if made.end else _conclusion(told))


def _conclusion(told: _Told) -> str:
    if told.differing:
        return f"{told.differing} of {counted(len(told.made.comparisons), 'figure')} differ."
    if not told.passed:
        return "Nothing differs, but no score was compared: nothing is verified but the statuses."
    return (
        f"Verified within the tolerance ({told.near} not bit-equal)." if told.near else "Verified."
    )


_SHOWN = 12
"""Figures that are shown one by one, unless all are asked for."""


def _show_comparisons(
    found: Sequence[Comparison], lines: Mapping[str, str], *, details: bool
) -> None:
    """A line per training and attack, or that of `lines` which it belongs to; below it the figures
    that differ, or all (`details`)."""
    from collections import Counter

    from rich.text import Text

    counts: dict[str, Counter[str]] = {}
    for entry in found:
        counts.setdefault(lines.get(entry.what, entry.what), Counter())[entry.verdict] += 1
    table = options.open_table()
    table.add_column("rerun", overflow="fold")
    for heading in ("equal", "close", "off"):  # the verdicts, shorter
        table.add_column(heading, justify="right")
    for what, verdicts in counts.items():
        shown = (
            Text(str(verdicts[v] or "-"), style=style if verdicts[v] else "")
            for v, style in _VERDICTS.items()
        )
        table.add_row(Text(what), *shown)
    options.console.print(table)
    chosen = [c for c in found if details or c.verdict == "differs"]
    single = options.open_table()
    for name in ("of", "figure", "before", "rerun", "verdict"):
        single.add_column(name, overflow="fold")
    for entry in chosen if details else chosen[:_SHOWN]:
        told = map(Text, (entry.what, entry.figure, entry.submitted, entry.rerun))
        single.add_row(*told, Text(entry.verdict, style=_VERDICTS[entry.verdict]))
    if chosen:
        options.console.print()
        options.console.print(single)
    if len(chosen) > _SHOWN and not details:
        options.say(f"and {len(chosen) - _SHOWN} more that differ: add --details.")
