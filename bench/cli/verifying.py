"""`leakbench verify`: rerun a sample of what others made, and compare."""

from __future__ import annotations

import datetime
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options
from bench.names import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.submission.figures import Comparison

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
        from bench.errors import UserError
        from bench.harness.runner import cell_label, label_of
        from bench.submission import verification
        from bench.submission.isolation import isolation
        from bench.submission.marks import marks_of
        from bench.suite import parse_pairs

        try:
            code = verification.sources(folder)
        except UserError as error:
            if not folder.is_dir():
                raise
            # A submission that is not what was submitted is a finding, not a mistake of the user.
            options.say(f"leakbench: {error}", aside=True, style="red")
            raise typer.Exit(1) from None
        tell = partial(options.say, aside=as_json)
        tell("The files are as they were written.")
        verification.check_tolerance(tolerance)
        env = options.chosen_environment(device, data_dir, False, None)
        opened = verification.open_folder(folder)
        pairs = parse_pairs(only or (), "--only")
        drawn = verification.sample(
            opened, seed=seed, count=sample, trainings=trainings, only=pairs
        )
        marks = _notes(folder) if opened.submission is None else marks_of(folder)
        for mark in marks:
            options.say(f"Mark: {mark}", aside=as_json, style="yellow")
        changed = verification.changed_code(opened, drawn)
        trained = len(verification.trainings_of(drawn))
        tell(
            f"Sample of {counted(len(drawn), 'cell')} out of "
            f"{len(verification.candidates(opened, pairs))}, seed {seed}. To rerun: "
            f"{counted(trained, 'training')} and {counted(len(drawn), 'attack')}."
        )
        # Drawn whole, a training is one line here and below, with all attacks on it.
        of_training = {cell_label(c.job): label_of(c.job.train) for c in drawn}
        lines = {} if trainings is None else of_training
        for name in dict.fromkeys(lines.get(what, what) for what in of_training):
            tell(f"  {name}")
        isolated = isolation(sandbox)
        ran = ", ".join(code)
        what = f"the submitted code: {ran}" if ran else "no code but leakbench's"
        tell(f"This runs {what}, {isolated.sentence}.")
        if code and not options.confirmed("Run it?", yes=yes):
            tell("Nothing was run.")
            raise typer.Exit(2)

        def ended(text: str) -> None:
            if text.partition(": ")[2] not in lines:
                tell(f"  {text}", style="dim")

        made = verification.rerun(
            opened,
            drawn,
            isolation=isolated,
            env=env,
            tolerance=tolerance,
            workers=jobs,
            tell=ended,
        )
    found = made.comparisons
    same = verification.same_environment(opened, env.device) and not changed
    differing = sum(c.verdict == "differs" for c in found)
    near = sum(c.verdict == "within tolerance" for c in found)
    labels = {cell_label(c.job) for c in drawn}
    bare = sum(c.figure == "status" and c.what in labels for c in found)
    passed = not (differing or made.attempts or made.end or bare == len(drawn))
    if as_json:
        from dataclasses import asdict

        from bench.harness.environment import versions

        typer.echo(
            json.dumps(
                {
                    "manifest": verification.manifest_of(folder),
                    "date": datetime.date.today().isoformat(),
                    "device": env.device,
                    "versions": versions(),
                    "passed": passed,
                    "same_environment": same,
                    "changed_code": changed,
                    "seed": seed,
                    "tolerance": tolerance,
                    "cells": len(drawn),
                    "cells_with_figures": len(drawn) - bare,
                    "differing": differing,
                    "within_tolerance": near,
                    "marks": marks,
                    "sandbox": "none" if isolated.bwrap is None else "bwrap",
                    "attempts": [asdict(a) for a in made.attempts],
                    "end": made.end,
                    "comparisons": [asdict(c) for c in found],
                },
                indent=1,
            )
        )
    else:
        _show_comparisons(found, lines, details=details)
        expected = "equal figures are expected" if same else "figures may differ by rounding"
        for name in changed:
            options.say(f"Note: the code of {name} is not that of the run.", style="yellow")
        options.say(
            f"Versions, device and code are {'those' if same else 'not those'} of the run: "
            f"{expected}; means may differ by {tolerance:g} (relative beyond 1, and of squared "
            "errors)."
        )
        if same and near:
            options.say(
                f"Note: {counted(near, 'figure')} not bit-equal although versions, device and code "
                "are the same. Another kind of processor or a GPU explains that; otherwise ask how "
                "the figures were made."
            )
        if bare:
            options.say(
                f"Note: {bare} of {counted(len(drawn), 'sampled cell')} gave no "
                "figures to compare, only a status; a larger --sample compares more."
            )
        for attempt in made.attempts[:_SHOWN]:
            options.say(f"The submitted code tried to {attempt}", style="bold red")
        if len(made.attempts) > _SHOWN:
            options.say(f"and {len(made.attempts) - _SHOWN} more attempts: add --json.")
        if made.end:
            options.say(made.end, style="bold red")
        if made.attempts or made.end:
            options.say("Not verified.")
        else:
            options.say(_conclusion(differing, near, len(found), scored=bare < len(drawn)))
    if differing or made.attempts or made.end:
        raise typer.Exit(1)


def _notes(folder: Path) -> list[str]:
    """What to know of results whose leaderboard another version wrote."""
    from bench.submission.verification import follows

    if follows(folder):
        return []
    return ["leaderboard.json is not what this version of leakbench makes of the records."]


def _conclusion(differing: int, near: int, compared: int, *, scored: bool) -> str:
    """differing, near: figures beyond and within the tolerance. scored: whether a cell had any."""
    if differing:
        return f"{differing} of {counted(compared, 'figure')} differ."
    if not scored:
        return "Nothing differs, but no score was compared: nothing is verified but the statuses."
    return f"Verified within the tolerance ({near} not bit-equal)." if near else "Verified."


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
