"""`leakbench new`, `check`, `submit` and `verify`: from an idea to a row that others can rerun."""

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
    from collections.abc import Sequence

    from bench.sandbox.conformance.findings import Conformance
    from bench.submission.figures import Comparison

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim"}
_VERDICTS = {"equal": "green", "within tolerance": "yellow", "differs": "bold red"}

Target = Annotated[str, typer.Argument(help="A plugin's name, or FILE.py.")]
Checked = Annotated[str, typer.Argument(help="A name, FILE.py, or a model FILE.py:Net.")]


def new(
    kind: Annotated[str, typer.Argument(help="defense or attack.")],
    name: Annotated[str, typer.Argument(help="Its name, in snake_case.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where to write.")] = Path(),
) -> None:
    """Write a small working defense or attack, and its test, to start from."""
    with options.plain_errors():
        from bench.submission.authoring import next_commands, write_new

        plugin, test = write_new(kind, name, folder)
    lines = [*(f"Written: {p}" for p in (plugin, test)), "Next:"]
    options.say("\n".join([*lines, *(f"    {c}" for c in next_commands(kind, plugin, test))]))


def check(
    target: Checked,
    set_: options.DefenseSet = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Leave out what takes longest, while you write it.")
    ] = False,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="On whose samples a model is tried.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Most seconds for the check of one plugin.")
    ] = 600.0,
    as_json: options.AsJson = False,
) -> None:
    """Play a defense or attack in tiny rounds, or try a model, and say where it breaks.

    The plugin runs in a process of its own, in an empty temporary folder.
    """
    with options.plain_errors():
        from bench import suite
        from bench.records import to_json
        from bench.sandbox.conformance.apart import Check, check_apart

        found = []
        settings = suite.parse_pairs(set_ or (), "--set")
        options.announce(options.file_in(target))
        request = Check(target=target, settings=settings, fast=fast, dataset=dataset)
        for conformance in check_apart(request, timeout_s=timeout):
            found.append(conformance)
            if not as_json:
                _show(conformance)
        if as_json:
            typer.echo(to_json([c.to_dict() for c in found]))
    if not all(c.passed for c in found):
        raise typer.Exit(1)


def _show(conformance: Conformance) -> None:
    from rich.text import Text

    given = ", ".join(f"{k}={v}" for k, v in conformance.settings.items())
    title = f"{conformance.kind} {conformance.name}{' ' if given else ''}{given}"
    table = options.open_table(Text(title))
    for name in ("", "check", "what was found"):
        table.add_column(name, overflow="fold")
    for finding in conformance.findings:
        found = Text(finding.reason)
        if finding.status == "failed":
            found.append(f"\n-> {finding.change}", style="bold")
            if finding.hook:
                found.append(f" (hook {finding.hook})", style="dim")
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(status, Text(finding.name), found)
    options.console.print(table)
    counts = {s: sum(f.status == s for f in conformance.findings) for s in _STYLES}
    options.console.print(
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped in "
        f"{conformance.seconds:.0f} s.\n",
        highlight=False,
    )


def submit(
    target: Target,
    run: Annotated[Path, typer.Option("--run", help="The result folder with its rows.")],
    attack: Annotated[
        list[Path] | None, typer.Option("--attack", help="FILE.py of your own attack in that run.")
    ] = None,
    author: Annotated[str, typer.Option("--author", help="Who submits.")] = "anonymous",
    out: Annotated[Path, typer.Option("--out")] = Path("results/submissions"),
    date: Annotated[str | None, typer.Option("--date", help="YYYY-MM-DD; default today.")] = None,
    data_dir: options.DataDir = None,
    replace: Annotated[bool, typer.Option("--replace", help="Write it anew.")] = False,
) -> None:
    """Pack a plugin's source, rows and records into a folder that others can verify."""
    with options.plain_errors():
        from bench.submission.marks import marks_of
        from bench.submission.packing import Request, submit

        options.announce([*options.file_in(target), *(attack or ())])
        request = Request(
            target=target,
            run=run,
            attacks=tuple(attack or ()),
            author=author,
            out=out,
            date=date,
            data_dir=data_dir.resolve() if data_dir else None,
            replace=replace,
        )
        folder = submit(request, tell=options.say)
        options.say(f"Written: {folder}")
        for mark in marks_of(folder):
            options.say(f"Mark: {mark}", style="yellow")
        options.say(f"Next: leakbench verify {folder}")


def verify(
    folder: Annotated[Path, typer.Argument(help="A submission's folder.")],
    sample: Annotated[int, typer.Option("--sample", help="Cells to rerun.")] = 3,
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
    """Check a submission's files, rerun a random sample of its cells, and compare.

    This runs the submitted code: it asks first, and isolates it with bubblewrap where that works.
    """
    with options.plain_errors():
        from bench.errors import UserError
        from bench.harness.runner import cell_label
        from bench.submission import verification
        from bench.submission.isolation import isolation
        from bench.submission.marks import marks_of

        try:
            code = verification.sources(folder)
        except UserError as error:
            if not folder.is_dir():
                raise
            # A submission that is not what was submitted is a finding, not a mistake of the user.
            options.say(f"leakbench: {error}", aside=True, style="red")
            raise typer.Exit(1) from None
        tell = partial(options.say, aside=as_json)
        tell("The files are as they were submitted.")
        verification.check_tolerance(tolerance)
        env = options.chosen_environment(device, data_dir, False, None)
        opened = verification.open_submission(folder)
        marks = marks_of(folder)
        for mark in marks:
            options.say(f"Mark: {mark}", aside=as_json, style="yellow")
        drawn = verification.sample(opened, count=sample, seed=seed)
        trainings = len(verification.trainings_of(drawn))
        tell(
            f"Sample of {counted(len(drawn), 'cell')} out of "
            f"{len(verification.candidates(opened))}, seed {seed}. To rerun: "
            f"{counted(trainings, 'training')} and {counted(len(drawn), 'attack')}."
        )
        for cell in drawn:
            tell(f"  {cell_label(cell.job)}")
        isolated = isolation(sandbox)
        tell(
            f"This runs the submitted code: {', '.join(code) or 'none beside leakbench'}, "
            f"{isolated.sentence}."
        )
        if code and not options.confirmed("Run it?", yes=yes):
            tell("Nothing was run.")
            raise typer.Exit(2)
        made = verification.rerun(
            opened,
            drawn,
            isolation=isolated,
            env=env,
            tolerance=tolerance,
            workers=jobs,
            tell=lambda text: tell(f"  {text}", style="dim"),
        )
    found = made.comparisons
    same = verification.same_environment(opened, env.device)
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
        _show_comparisons(found, details=details)
        expected = "equal figures are expected" if same else "figures may differ by rounding"
        options.say(
            f"Versions and device are {'those' if same else 'not those'} of the submission: "
            f"{expected}; means may differ by {tolerance:g} (relative beyond 1, and of squared "
            "errors)."
        )
        if same and near:
            options.say(
                f"Note: {counted(near, 'figure')} not bit-equal although versions and device are "
                "the same. Another kind of processor or a GPU explains that; otherwise ask how "
                "the submitted figures were made."
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


def _conclusion(differing: int, near: int, compared: int, *, scored: bool) -> str:
    """differing, near: figures beyond and within the tolerance. scored: whether a cell had any."""
    if differing:
        return f"{differing} of {counted(compared, 'figure')} differ."
    if not scored:
        return "Nothing differs, but no score was compared: nothing is verified but the statuses."
    return f"Verified within the tolerance ({near} not bit-equal)." if near else "Verified."


_SHOWN = 12
"""Figures that are shown one by one, unless all are asked for."""


def _show_comparisons(found: Sequence[Comparison], *, details: bool) -> None:
    """A line per training and attack; below it the figures that differ, or all (`details`)."""
    from collections import Counter

    from rich.text import Text

    counts: dict[str, Counter[str]] = {}
    for entry in found:
        counts.setdefault(entry.what, Counter())[entry.verdict] += 1
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
    for name in ("of", "figure", "submitted", "rerun", "verdict"):
        single.add_column(name, overflow="fold")
    for entry in chosen if details else chosen[:_SHOWN]:
        told = map(Text, (entry.what, entry.figure, entry.submitted, entry.rerun))
        single.add_row(*told, Text(entry.verdict, style=_VERDICTS[entry.verdict]))
    if chosen:
        options.console.print()
        options.console.print(single)
    if len(chosen) > _SHOWN and not details:
        options.say(f"and {len(chosen) - _SHOWN} more that differ: add --details.")
