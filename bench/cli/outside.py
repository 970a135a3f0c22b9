"""`leakbench export`, `score` and `merge`: results that leave, come back and come together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options
from bench.cli.reports import publish

if TYPE_CHECKING:
    from bench.outside.scores import Against, Scored

Folder = Annotated[Path, typer.Argument(help="A result folder.")]
View = Annotated[int, typer.Option("--view", help="Of recorded rounds: which view, from 0.")]


def export(
    folder: Folder,
    cell: Annotated[
        str, typer.Argument(help="A key, the beginning of one, or digits/lenet/spm/dlg/final.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Name of the files, without an ending.")],
    view: View = 0,
    data_dir: options.DataDir = None,
    download: options.Download = False,
) -> None:
    """Write what the server saw in one cell, for attacks outside leakbench; never the truth."""
    with options.plain_errors():
        from bench.outside.exports import export as export_view

        env = options.chosen_environment("cpu", data_dir, download, None)
        paths = export_view(folder, cell, out, env, view)
    for path, what in (
        (paths.tensors, "tensors that the server saw"),
        (paths.text, "what they are, and public facts"),
        (paths.public, "public samples that the threat grants"),
    ):
        options.say(f"{path}: {what}")


def score(
    folder: Folder,
    cell: Annotated[str, typer.Argument(help="As for export, or the exported FILE.")],
    reconstructions: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECONSTRUCTION...",
            help="FILE.safetensors or FILE.npz: images, labels, label_counts.",
        ),
    ],
    view: View = 0,
    as_json: options.AsJson = False,
    data_dir: options.DataDir = None,
    download: options.Download = False,
) -> None:
    """Score outside attacks' answers to a cell, and hold them against leakbench's own."""
    with options.plain_errors():
        from bench.outside.scores import score_files
        from bench.records import to_json

        env = options.chosen_environment("cpu", data_dir, download, None)
        scored = score_files(folder, cell, reconstructions, env, view)
    if as_json:
        typer.echo(to_json(scored))
    else:
        _print_scores(scored)


_RIVALS = {"own": "own", "choice": "choice", "worst": "upper bound"}


def _print_scores(scored: Scored) -> None:
    """Print the figures by metric, and which of leakbench's own these beat."""
    from rich.text import Text

    from bench.metrics.named import TITLES
    from bench.report.columns import figure, interval_text

    head = f"{scored.cell.name}: {scored.victims} victims, {scored.samples} sample(s) each"
    table = options.open_table(Text(head))
    table.add_column("metric")
    table.add_column("answer", overflow="fold")
    table.add_column(Text("mean [95 % interval]"), justify="right")
    row = {"choice": scored.row.choice, "worst": scored.row.worst}
    for metric, beside in scored.beside.items():
        lines = [
            (answer.file, interval_text(answer.figures[metric], metric))
            for answer in scored.answers
            if metric in answer.figures
        ]
        lines += [
            (f"the row's {_RIVALS[name]}: {case.attack}", interval_text(case.interval, metric))
            for name, case in row.items()
            if case is not None and case.metric == metric
        ]
        others = (
            (f"own: {scored.cell.label}", beside.own),
            ("floor", beside.floor),
            ("floor, told the labels", beside.floor_class_mean),
        )
        lines += [(name, figure(value, metric)) for name, value in others if value is not None]
        for number, (name, text) in enumerate(lines):
            table.add_row(TITLES.get(metric, metric) if number == 0 else "", Text(name), Text(text))
    options.console.print(table)
    against = options.open_table(Text("\nHow much more than leakbench's own, on the same victims"))
    for name in ("answer", "than", "by", "p", "verdict"):
        against.add_column(name, overflow="fold")
    for answer in scored.answers:
        for number, rival in enumerate(answer.against):
            metric = "" if rival.metric == "ssim" else f"{TITLES.get(rival.metric, rival.metric)} "
            sign = "+" if rival.beats else ""
            against.add_row(
                Text(answer.file if number == 0 else ""),
                Text(f"{_RIVALS[rival.rival]}: {rival.attack}"),
                Text(f"{metric}{sign}{interval_text(rival.difference, rival.metric)}"),
                f"{rival.p:.3g}",
                Text(_verdict(rival)),
            )
    if against.row_count:
        options.console.print(against)
    for answer in scored.answers:
        if answer.failed:
            note = f"{answer.failed} victim(s) failed: scored as the mean public image."
            options.console.print(Text(f"{answer.file}: {note}"))


def _verdict(against: Against) -> str:
    if not against.difference.mean:
        return "no more, no less"
    verdict = "beats it" if against.beats else "less"
    return verdict if against.separated else f"{verdict}, not separated"


def merge(
    folders: Annotated[list[Path], typer.Argument(help="Result folders of one suite.")],
    out: Annotated[Path, typer.Option("--out", help="An empty or new folder.")],
) -> None:
    """Join result folders that were made in parts, and print the whole leaderboard."""
    with options.plain_errors():
        import warnings

        from bench.harness import merge as merging

        merged = merging.merge(folders, out)
        for note in merging.notes(merged):
            warnings.warn(note, stacklevel=1)
        paths = publish(out, ("json", "csv", "md"))
    counts = f"{len(merged.trainings)} trainings and {len(merged.cells)} cells"
    options.say(
        f"{counts} of {len(folders)} folder(s). "
        f"Leaderboard: {paths[0].with_suffix('')}.{{json,csv,md}}"
    )
