"""`leakbench export`, `score` and `merge`: results that leave, come back and come together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli import options
from bench.cli.reports import publish

Folder = Annotated[Path, typer.Argument(help="A result folder.")]


def export(
    folder: Folder,
    cell: Annotated[
        str, typer.Argument(help="A key, the beginning of one, or digits/lenet/spm/dlg/final.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Name of the files, without an ending.")],
    data_dir: options.DataDir = None,
    download: options.Download = False,
) -> None:
    """Write what the server saw in one cell, for attacks outside leakbench; never the truth."""
    with options.plain_errors():
        from bench import outside

        paths = outside.export(
            folder, cell, out, options.chosen_environment("cpu", data_dir, download, None)
        )
    for path, what in (
        (paths.tensors, "tensors that the server saw"),
        (paths.text, "what they are, and public facts"),
        (paths.public, "public samples that the threat grants"),
    ):
        options.say(f"{path}: {what}")


def score(
    folder: Folder,
    cell: Annotated[str, typer.Argument(help="As for export, or the exported FILE.")],
    reconstruction: Annotated[
        Path, typer.Argument(help="FILE.safetensors or FILE.npz: images, labels, label_counts.")
    ],
    as_json: options.AsJson = False,
    data_dir: options.DataDir = None,
    download: options.Download = False,
) -> None:
    """Score an outside attack's reconstruction exactly as leakbench's own attacks are."""
    with options.plain_errors():
        from bench import outside
        from bench.records import to_json

        env = options.chosen_environment("cpu", data_dir, download, None)
        found = outside.score_file(folder, cell, reconstruction, env)
    if as_json:
        typer.echo(to_json(found.to_dict()))
        return
    from rich.text import Text

    title = f"{found.cell.name}: {found.victims} victims, {found.samples} sample(s) each"
    table = options.open_table(Text(title))
    table.add_column("metric")
    for head in ("mean [95 % interval]", "floor", "told labels", f"own {found.cell.label}"):
        table.add_column(Text(head), justify="right")
    for name, figure in found.figures.items():
        low = [figure.floor, figure.floor_class_mean, figure.own]
        i = figure.interval
        table.add_row(
            name,
            Text(f"{i.mean:.4f} [{i.lo:.4f}, {i.hi:.4f}]"),
            *("-" if v is None else f"{v:.4f}" for v in low),
        )
    options.console.print(table)
    if found.failed:
        options.console.print(f"{found.failed} victim(s) failed: scored as the mean public image.")


def merge(
    folders: Annotated[list[Path], typer.Argument(help="Result folders of one suite.")],
    out: Annotated[Path, typer.Option("--out", help="An empty or new folder.")],
) -> None:
    """Join result folders that were made in parts, and print the whole leaderboard."""
    with options.plain_errors():
        import warnings

        from bench.harness import merge as merging

        made = merging.merge(folders, out)
        for note in made.notes:
            warnings.warn(note, stacklevel=1)
        paths = publish(out, ("json", "csv", "md"))
    options.say(
        f"{made.trainings} trainings and {made.cells} cells of {len(folders)} folder(s). "
        f"Leaderboard: {paths[0].with_suffix('')}.{{json,csv,md}}"
    )
