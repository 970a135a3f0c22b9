"""`leakbench verify`: rerun a sample of what others made, and compare."""

from __future__ import annotations

import datetime
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.names import count_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.submission.figures import Comparison

_VERDICTS = {"equal": "green", "within tolerance": "yellow", "differs": "bold red"}


def verify(
    folder: Annotated[Path, typer.Argument(help="A submission, or results with records.")],
    sample: Annotated[int, typer.Option(min=1, help="Cells to rerun.")] = 3,
    trainings: Annotated[
        int | None, typer.Option(min=1, help="Trainings to rerun with all their cells, instead.")
    ] = None,
    only: options.Only = None,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="Of means, where figures are not equal.")
    ] = 0.02,
    device: options.Device = "auto",
    data_dir: options.DataDir = None,
    jobs: Annotated[int, typer.Option(min=0, max=1024, help="Worker processes; 0: none.")] = 1,
    sandbox: Annotated[
        str, typer.Option(help="auto, bwrap or none: what keeps the code to itself.")
    ] = "auto",
    timeout: Annotated[
        float, typer.Option(min=1, max=10**6, help="Most seconds of the whole rerun.")
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
        from bench.errors import UserError
        from bench.harness.environment import versions
        from bench.harness.runner import label_of
        from bench.records.submitted import digest_of
        from bench.submission import staged, verification
        from bench.submission.documents import marks_of
        from bench.submission.isolation import isolation

        try:
            opened = verification.open_folder(folder)
            again = verification.recompute(opened)
        except UserError as error:
            if not folder.is_dir():
                raise
            # A record that contradicts its run is a finding, not a mistake of the user.
            options.say(f"leakbench: {error}", aside=True, style="red")
            raise typer.Exit(1) from None
        code = opened.code
        tell = partial(options.say, aside=as_json)
        env = options.choose_environment(device, data_dir, False, None)
        tell(
            f"The files of {opened.run.title} are as they were written, and no record contradicts "
            "another or its run."
        )
        kept = options.pairs_of(only, "--only")
        cells = verification.sample(opened, seed=seed, count=sample, trainings=trainings, only=kept)
        off = [c for c in again if c.verdict == "differs"]
        tell(
            f"{count_of(len(again), 'figure')} computed again without a rerun: "
            f"{f'{len(off)} not as recorded' if off else 'all as recorded'}."
        )
        marks = [] if opened.submission is None else marks_of(folder)
        for mark in marks:
            tell(f"Mark: {mark}", style="yellow")
        tell(
            f"Sample of {count_of(len(cells), 'cell')} out of "
            f"{len(verification.candidates(opened, kept))}, seed {seed}. To rerun: "
            f"{count_of(len(staged.trainings_of(cells)), 'training')} and "
            f"{count_of(len(cells), 'attack')}."
        )
        names = [label_of(c.job) for c in cells]
        for name in names:
            tell(f"  {name}")
        changed = verification.find_changed_code(opened, cells)
        isolated = isolation(sandbox)
        what = f"the submitted code: {', '.join(code)}" if code else "no code but leakbench's"
        tell(f"This runs {what}, {isolated.sentence}.")
        if code and not options.confirm("Run it?", yes=yes):
            tell("Nothing was run.")
            raise typer.Exit(2)
        rerun, end = staged.rerun(
            folder,
            cells,
            isolation=isolated,
            env=env,
            tolerance=tolerance,
            workers=jobs,
            timeout_s=timeout,
            tell=partial(tell, style="dim"),
        )
    comparisons = [*off, *rerun]
    verdicts = Counter(c.verdict for c in comparisons)
    bare = sum(c.figure == "status" and c.what in names for c in rerun)
    failed = bool(verdicts["differs"] or end)
    facts = {
        "digest": digest_of(folder),
        "device": env.device,
        "seed": seed,
        "marks": marks,
        "sandbox": "none" if isolated.bwrap is None else "bwrap",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "passed": not failed and bare < len(cells),
        "same_environment": verification.same_environment(opened, env.device) and not changed,
        "changed_code": changed,
        "tolerance": tolerance,
        "cells": len(cells),
        "cells_with_figures": len(cells) - bare,
        "differing": verdicts["differs"],
        "within_tolerance": verdicts["within tolerance"],
        "end": end,
    }
    if as_json:
        options.print_json({**facts, "comparisons": comparisons})
    else:
        _show_comparisons(comparisons, details=details)
        _show_facts(facts, len(comparisons))
    if failed:
        raise typer.Exit(1)


def _show_facts(facts: Mapping[str, Any], figures: int) -> None:
    """Print a summary of the compared figures, and the verdict."""
    same, near, cells = facts["same_environment"], facts["within_tolerance"], facts["cells"]
    bare = cells - facts["cells_with_figures"]
    for name in facts["changed_code"]:
        options.say(f"Note: the code of {name} is not that of the run.", style="yellow")
    options.say(
        f"Versions, device and code are {'those' if same else 'not those'} of the run: "
        f"{'equal figures are expected' if same else 'figures may differ by rounding'}; means "
        f"may differ by {facts['tolerance']:g} (relative beyond 1, and of squared errors)."
    )
    if same and near:
        options.say(
            f"Note: {count_of(near, 'figure')} not bit-equal although versions, device and "
            "code are the same. Another kind of processor, a GPU or, of bytes, fresh ciphertexts "
            "explain that; otherwise ask how the figures were made."
        )
    if bare:
        options.say(
            f"Note: {bare} of {count_of(cells, 'sampled cell')} gave no figures to "
            "compare, only a status; a larger --sample compares more."
        )
    if facts["end"]:
        options.say(facts["end"], style="bold red")
        options.say("Not verified.")
    elif facts["differing"]:
        options.say(f"{facts['differing']} of {count_of(figures, 'figure')} differ.")
    elif not facts["passed"]:
        options.say(
            "Nothing differs, but no score was compared: nothing is verified but the statuses."
        )
    else:
        close = f" within the tolerance ({near} not bit-equal)" if near else ""
        options.say(f"Verified{close}.")


def _show_comparisons(comparisons: Sequence[Comparison], *, details: bool) -> None:
    """A line per training and attack; below them the figures that differ, or all (`details`)."""
    from rich.text import Text

    counts: Counter[tuple[str, str]] = Counter((c.what, c.verdict) for c in comparisons)
    lines: list[list[str | Text]] = []
    for what in dict.fromkeys(c.what for c in comparisons):
        numbers = [(counts[what, verdict], style) for verdict, style in _VERDICTS.items()]
        lines.append([what, *(Text(str(n or "-"), style if n else "") for n, style in numbers)])
    options.print_table(("rerun", "equal", "close", "off"), lines, figures=3)
    options.console.print()
    single = [
        (c.what, c.figure, c.submitted, c.rerun, Text(c.verdict, _VERDICTS[c.verdict]))
        for c in comparisons
        if details or c.verdict == "differs"
    ]
    options.print_table(("of", "figure", "before", "rerun", "verdict"), single)
