"""`leakbench attack`, `export`, `score` and `merge`: views of your own run and for other tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options
from bench.cli.reports import publish
from bench.metrics.named import METRICS

if TYPE_CHECKING:
    from bench.capturing.attacking import Attacked, Captured, Tell
    from bench.outside.scores import Scored

Folder = Annotated[Path, typer.Argument(help="A result folder.")]
View = Annotated[int, typer.Option("--view", help="Of recorded rounds: which view, from 0.")]


def export(
    folder: Folder,
    cell: Annotated[
        str, typer.Argument(help="A key, the beginning of one, or digits/lenet/spm/dlg/final.")
    ],
    out: Annotated[Path, typer.Option(help="Name of the files, without an ending.")],
    view: View = 0,
    data_dir: options.DataDir = None,
    download: options.Download = False,
) -> None:
    """Write what the server saw in one cell, for attacks outside leakbench; never the truth."""
    with options.plain_errors():
        from bench.outside.exports import export as export_view

        env = options.choose_environment("cpu", data_dir, download, None)
        paths = export_view(folder, cell, out, env, view)
    options.say(f"{paths.tensors}: tensors that the server saw")
    options.say(f"{paths.text}: what they are, and public facts")
    options.say(f"{paths.public}: public samples that the threat grants")


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
    """Score outside attacks' answers to a cell, beside leakbench's own."""
    with options.plain_errors():
        from bench.outside.scores import score_files

        env = options.choose_environment("cpu", data_dir, download, None)
        scored = score_files(folder, cell, reconstructions, env, view)
    if as_json:
        options.print_json(scored)
    else:
        _print_scores(scored)


def _print_scores(scored: Scored) -> None:
    """Print the figures by metric, with leakbench's own and the floors."""
    from bench.report.columns import figure, show_interval

    lines = []
    for metric, beside in scored.beside.items():
        answers = [a for a in scored.answers if metric in a.figures]
        texts = [(a.file, show_interval(a.figures[metric], metric).full) for a in answers]
        others = (
            (f"own: {scored.attack}", beside["own"]),
            ("choice of all attacks", beside["choice"]),
            ("upper bound", beside["worst"]),
            ("floor", beside["floor"]),
            ("floor, told the labels", beside["floor_class_mean"]),
        )
        texts += [(name, figure(value, metric)) for name, value in others if value is not None]
        titles = [METRICS[metric].title, *[""] * len(texts)]
        lines += [(title, *text) for title, text in zip(titles, texts, strict=False)]
    heads = ("metric", "answer", "mean [95 % interval]")
    title = f"{scored.name}: {scored.victims} victims, {scored.samples} sample(s) each"
    options.print_table(heads, lines, figures=1, title=title)
    for answer in scored.answers:
        if answer.failed:
            note = f"{answer.failed} victim(s) failed: scored as the mean public image."
            options.say(f"{answer.file}: {note}")


def merge(
    folders: Annotated[list[Path], typer.Argument(help="Result folders of one suite.")],
    out: Annotated[Path, typer.Option(help="An empty or new folder.")],
) -> None:
    """Join result folders that were made in parts, and print the whole leaderboard."""
    with options.plain_errors():
        from bench.harness import merge as merging

        merged = merging.merge(folders, out)
        paths = publish(out, ("json", "csv", "md"))
    options.say(
        f"{len(merged.trainings)} trainings and {len(merged.cells)} cells of {len(folders)} "
        f"folder(s). Leaderboard: {paths[0].with_suffix('')}.{{json,csv,md}}"
    )


_SHOWN = ("ssim", "mse", "label_accuracy", "lnacc")
"""The metrics of the table; --json has all."""
_ATTACKED = 0.2
"""Leakage from which attacks have got through, also where they simulate another training."""


def attack(
    files: Annotated[list[Path], typer.Argument(help="Of bench.capture or leakbench export.")],
    names: Annotated[
        list[str] | None, typer.Option("--attack", help="An attack; default all of them.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the one attack.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="What makes the network, such as FILE.py:Net.")
    ] = None,
    truth: Annotated[
        list[Path] | None, typer.Option(help="Of each FILE; by default FILE-truth.safetensors.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write what each attack rebuilt: OUT-ATTACK.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, max=10**9, help="Evaluations per start.")] = 200,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: a tenth of the evaluations.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Decides what the attacks draw.")] = 0,
    device: options.Device = "auto",
    plugin: options.PluginFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Attack what was captured of your own run, and score it where the truth is known."""
    with options.plain_errors():
        from bench.capturing import attacking

        env = options.choose_environment(device, None, False, plugin)
        options.announce(options.file_in(model or ""))
        listed, failed = [], False
        for view in attacking.read_views(files, truth):
            with _progress(view) as tell:
                attacked = attacking.attack_view(
                    view,
                    names or (),
                    settings=options.pairs_of(set_, "--set"),
                    model=model,
                    budget=max(1, budget // 10) if quick else budget,
                    seed=seed,
                    device=env.device,
                    plugins=env.plugins,
                    tell=tell,
                )
            for result in attacked:
                if out is not None and result.answer is not None:
                    attacking.save_answer(result, out)
            if not as_json:
                _show(view, attacked)
                if quick:
                    options.say("A first look: without --quick attacks may rebuild more.")
            for result in attacked:
                if result.traceback is not None:
                    failed = True
                    options.say(result.traceback, aside=True)
            listed.append(attacking.to_dict(view, attacked))
    if as_json:
        options.print_json(listed)
    if failed:
        raise typer.Exit(1)


@contextmanager
def _progress(view: Captured) -> Iterator[Tell]:
    """Show on stderr which attack runs, how many are done and how long the rest may take."""
    from rich.progress import Progress

    with Progress(console=options.errors, transient=True) as bar:
        task = bar.add_task(view.name, total=None)

        def tell(name: str, done: int, among: int) -> None:
            bar.update(task, description=f"{view.name}: {name}", completed=done, total=among)
            if not options.errors.is_terminal:
                options.say(f"{view.name}: {name} ({done + 1} of {among})", aside=True)

        yield tell


def _show(view: Captured, attacked: list[Attacked]) -> None:
    """Print a line per attack, the floor last, and below them the attacker-selected
    reconstruction."""
    from bench.capturing.attacking import choose_answers, least_leak_of
    from bench.contract.messages import UPLOAD_KINDS
    from bench.names import count_of
    from bench.report.columns import figure

    victims, samples = len(view.seen.clients), int(view.seen.known["samples"])
    each = f"{count_of(samples, 'sample')}{' each' if victims > 1 else ''}"
    kind = " and ".join(sorted({m.kind for m in view.seen.messages if m.kind in UPLOAD_KINDS}))
    shape = "x".join(map(str, view.seen.network["shape"]))
    options.say(f"{view.name}: {count_of(victims, 'client')}, {each} of {shape}, sent as {kind}")
    values = {result.attack: result.means() for result in attacked}
    metrics = [m for m in _SHOWN if any(m in means for means in values.values())]
    heads = [METRICS[metric].title.replace("_", " ") for metric in metrics]
    heads += [] if view.truth is None else ["leakage"]
    lines = []
    for result in attacked:
        means = values[result.attack]
        cells = [figure(means[m], m) if m in means else "" for m in metrics]
        if view.truth is not None:
            cells.append(_leakage(least_leak_of(result), known=result.unexplained is None))
        if result.reason is None:
            lines.append([result.attack, *cells])
    if view.truth is not None:
        floor = attacked[0].floor_means() if attacked else {}
        cells = [figure(floor[m], m) if m in floor else "" for m in metrics]
        lines.append(["needs no leak", *cells, "0"])
    options.print_table(("attack", *heads), lines, figures=len(heads))
    if best := [name for name in choose_answers(attacked) if name is not None]:
        most = max(set(best), key=best.count)
        share = "" if victims == 1 else f" for {best.count(most)} of {victims} clients"
        options.say(
            f"An attacker who does not know the truth would take {most}{share}: it explains best "
            "what was seen."
        )
    if view.truth is None:
        options.say(
            "No truth is given, so nothing is scored: --truth FILE, or --out to look at it."
        )
    for result in attacked:
        if result.reason is not None:
            options.say(f"{result.attack} {result.reason}.")
    if attacked and attacked[0].unexplained is not None:
        options.say(f"Not attacked as it was trained: {attacked[0].unexplained}", style="yellow")
    for line in _privacy(view):
        options.say(line)


def _leakage(leak: float | None, *, known: bool) -> str:
    """A table's cell; known: whether the attacks simulate the training that was recorded."""
    if leak is None:
        return ""
    if known:
        return f"{leak:.2f}"
    return "not attacked" if leak < _ATTACKED else f"≥ {leak:.2f}"


def _privacy(view: Captured) -> Iterator[str]:
    """Yield the ledger's sentences on the run so far."""
    privacy = view.about.get("privacy")
    if privacy is None:
        return
    proven, delta = float(privacy["eps_record"]), privacy["delta"]
    yield f"Proven for replacing a record: epsilon {proven:.4g} at delta {delta:g}."
    if (claimed := privacy["eps_claimed"]) is not None:
        yield f"By the library's accountant: epsilon {float(claimed):.3g} per {privacy['unit']}."
    yield from privacy["reasons"]
