"""The `leakbench` command.

Exit code 0: all done or not applicable; 1: some failed; 2: bad input.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.api import Defense
    from bench.registry import Registry
    from bench.suite import Plan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="What privacy defenses for federated and split learning really protect.",
)
_LINUX = sys.platform == "linux"
console = Console()
errors = Console(stderr=True)

SuiteName = Annotated[str, typer.Argument(help="A shipped suite (see 'list suites') or FILE.toml.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="Keep cells with key=value; task=0 is the first.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Change a suite value: path.to.key=value.")
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of data sets (or LEAKBENCH_DATA).")
]
Download = Annotated[bool, typer.Option("--download", help="Let torchvision fetch data sets.")]
PluginFile = Annotated[
    list[Path] | None, typer.Option("--plugin", help="A Python file with a defense or attack.")
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Result folder; default leakbench-runs/SUITE.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = f"warning: {message}"
    errors.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Bad input ends with one sentence and exit code 2; a plugin's warning is one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except ValueError as error:
        errors.print(
            f"leakbench: {error}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        raise typer.Exit(2) from None


def _environment(
    device: str, data_dir: Path | None, download: bool, plugins: list[Path] | None
) -> Any:
    import torch

    from bench.jobs import Environment

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got '{device}'.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device that torch can use.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if data_dir is None and os.environ.get("LEAKBENCH_DATA"):
        data_dir = Path(os.environ["LEAKBENCH_DATA"])
    if data_dir is not None and not data_dir.is_dir() and not download:
        raise ValueError(f"no such data folder: {data_dir}.")
    return Environment(
        device=device,
        data_dir=data_dir.resolve() if data_dir else None,
        download=download,
        plugins=tuple(p.resolve() for p in plugins or ()),
    )


def _planned(
    suite: str, only: list[str] | None, overrides: list[str] | None, registry: Registry, env: Any
) -> Plan:
    from bench import runner
    from bench import suite as suites

    plan = suites.expand(
        suites.load(suite, overrides or ()), suites.parse_pairs(only or (), "--only")
    )
    runner.check(plan, registry, env)
    return plan


@app.command()
def run(
    suite: SuiteName,
    only: Only = None,
    set_: Set = None,
    device: Device = "auto",
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=0, help="Worker processes; 0: none, run here.")
    ] = None,
    out: Out = None,
    data_dir: DataDir = None,
    download: Download = False,
    plugin: PluginFile = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached results.")] = False,
) -> None:
    """Run a suite, continue where it stopped, and print its leaderboard."""
    with _plain_errors():
        from bench import runner
        from bench.jobs import plugins as discover
        from bench.store import Store

        env = _environment(device, data_dir, download, plugin)
        registry = discover(env.plugins)
        plan = _planned(suite, only, set_, registry, env)
        store = Store(out or Path("leakbench-runs") / plan.suite.name)
        store.prepare()
        keys = runner.Keys(registry, env)
        workers = _workers(env.device) if jobs is None else jobs
        if workers == 0:
            _one_thread()
        with store.locked(), _live(plan) as on_progress:
            try:
                report = runner.run(
                    plan,
                    store,
                    keys,
                    workers=workers,
                    fresh=fresh,
                    command=_recorded(sys.argv[1:]),
                    on_progress=on_progress,
                )
            except KeyboardInterrupt:
                errors.print("Stopped. What is finished is kept; run the same command to go on.")
                raise typer.Exit(130) from None
        paths = _publish(store.folder, ("json", "csv", "md"))
        for label, reason in report.failures:
            errors.print(f"{label}: {reason}", style="red", markup=False, highlight=False)
        console.print(
            f"{report.ran} run, {report.cached} cached, {len(report.failures)} failed. "
            f"Leaderboard: {paths[0].with_suffix('')}.{{json,csv,md}}",
            soft_wrap=True,
        )
    if report.failures:
        raise typer.Exit(1)


def _one_thread() -> None:
    """As in a worker, so that figures do not depend on --jobs."""
    import torch

    torch.set_num_threads(1)


def _recorded(arguments: list[str]) -> list[str]:
    """The command as a reader would repeat it: without what names this machine's folders or
    moves no number."""
    local = ("--out", "--data-dir", "--jobs")
    kept = []
    skip = False
    for argument in arguments:
        if (
            not skip
            and argument not in local
            and not argument.startswith(tuple(f"{o}=" for o in local))
        ):
            kept.append(argument)
        skip = argument in local
    return ["leakbench", *kept]


def _workers(device: str) -> int:
    """One worker on a GPU; on a CPU one single-threaded worker per core, up to four, since each
    takes about 0.9 GB."""
    if device != "cpu":
        return 1
    return max(1, min(4, len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count() or 1))


@contextmanager
def _live(plan: Plan) -> Iterator[Any]:
    """Progress with time left on a terminal, a line every tenth of the way elsewhere."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    view = Progress(
        TextColumn("[bold]{task.fields[suite]}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn(
            "{task.fields[label]}",
            style="dim",
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        expand=True,
    )
    total = len(plan.trainings) + len(plan.cells)
    last = 0
    with view:
        bar = view.add_task("", total=total, suite=plan.suite.name, failed=0, label="starting")

        def on_progress(progress: Any) -> None:
            nonlocal last
            view.update(bar, completed=progress.done, failed=progress.failed, label=progress.label)
            tenth = 10 * progress.done // progress.total
            if not console.is_terminal and tenth > last:
                last = tenth
                console.print(f"{progress.done} of {progress.total} done, {progress.failed} failed")

        yield on_progress


@app.command()
def plan(
    suite: SuiteName,
    only: Only = None,
    set_: Set = None,
    device: Device = "auto",
    out: Out = None,
    data_dir: DataDir = None,
    download: Download = False,
    plugin: PluginFile = None,
) -> None:
    """Show what would run, with counts and what is cached."""
    with _plain_errors():
        from rich.table import Table

        from bench import runner
        from bench.jobs import plugins as discover
        from bench.store import Store

        env = _environment(device, data_dir, download, plugin)
        registry = discover(env.plugins)
        made = _planned(suite, only, set_, registry, env)
        store = Store(out or Path("leakbench-runs") / made.suite.name)
        trainings, cells = runner.cached(made, store, runner.Keys(registry, env))
        table = Table(title=f"{made.suite.name} v{made.suite.version}", title_justify="left")
        for name in ("dataset", "model", "defense", "settings", "seed", "attack cells"):
            table.add_column(name)
        for job in made.trainings:
            settings = ", ".join(f"{k}={v}" for k, v in job.settings.items())
            mine = sum(c.train == job for c in made.cells)
            table.add_row(
                job.task.dataset, job.task.model, job.defense, settings, str(job.seed), str(mine)
            )
        console.print(table)
        console.print(
            f"{len(made.trainings)} trainings ({trainings} cached), "
            f"{len(made.cells)} attack cells ({cells} cached)."
        )


LISTS = ("defenses", "attacks", "datasets", "models", "suites")


@app.command("list")
def list_(
    what: Annotated[str | None, typer.Argument(help=", ".join(LISTS))] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    plugin: PluginFile = None,
) -> None:
    """List defenses, attacks, datasets, models and suites, broken plugins with their reason."""
    with _plain_errors():
        from bench.names import did_you_mean

        if what is not None and what not in LISTS:
            raise ValueError(did_you_mean("list", what, LISTS))
        listing = _listing(tuple(p.resolve() for p in plugin or ()))
        chosen = {k: v for k, v in listing.items() if what in (None, k)}
    if as_json:
        typer.echo(json.dumps(chosen, indent=1))
        return
    from rich.table import Table

    for name, entries in chosen.items():
        table = Table(title=name, title_justify="left", title_style="bold", show_header=False,
                      box=None, pad_edge=False)  # fmt: skip
        for entry in entries:
            note = entry["summary"]
            if entry["broken"]:
                note = f"[red]broken:[/red] {entry['broken']}"
            table.add_row(entry["name"], note, entry["settings"])
        console.print(table)
        console.print()


def _listing(files: tuple[Path, ...]) -> dict[str, list[dict[str, Any]]]:
    import inspect

    from bench import data, models, suite
    from bench.registry import discover

    registry = discover(files)

    def entry(
        name: str, what: Any, settings: Any = None, broken: str | None = None
    ) -> dict[str, Any]:
        doc = what if isinstance(what, str) else inspect.getdoc(getattr(what, "func", what))
        return {"name": name, "summary": (doc or "").strip().split("\n")[0],
                "settings": settings or "", "broken": broken}  # fmt: skip

    def of_kind(kind: Any) -> list[dict[str, Any]]:
        classes: dict[str, Any] = {n: registry.usable[kind, n].cls for n in registry.names(kind)}
        good = [
            entry(n, c, _settings(c))
            | {"source": c.source, "recovers": sorted(getattr(c, "recovers", ()))}
            for n, c in classes.items()
        ]
        bad = [
            entry(p.name, p.origin, broken=f"{p.origin}: {p.broken}")
            for p in registry.broken
            if p.kind == kind
        ]
        return good + bad

    embedded = [
        entry(n, f, "embedded" if n in data.NO_DOWNLOAD else "--data-dir or --download")
        for n, f in data.LOADERS.items()
    ]
    paths = [entry(f"{n}:PATH", f, "your own") for n, f in data.PATH_LOADERS.items()]
    return {
        "defenses": of_kind("defense"),
        "attacks": of_kind("attack"),
        "datasets": embedded + paths,
        "models": [entry(n, f) for n, f in models.BUILDERS.items()],
        "suites": [entry(n, suite.load(n).description) for n in suite.shipped()],
    }


def _settings(cls: Any) -> str:
    """name, name=default, ... of a plugin's constructor."""
    import inspect

    parameters = inspect.signature(cls).parameters.values()
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in parameters
        if p.kind is p.KEYWORD_ONLY
    )


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A result folder.")],
    format_: Annotated[
        str, typer.Option("--format", help="Files to write: md,csv,json (any of them).")
    ] = "md,csv,json",
) -> None:
    """Print a result folder's leaderboard and write it as files beside the records."""
    with _plain_errors():
        from bench.names import did_you_mean

        formats = [f.strip() for f in format_.split(",") if f.strip()]
        for name in formats:
            if name not in ("md", "csv", "json"):
                raise ValueError(did_you_mean("report format", name, ["md", "csv", "json"]))
        paths = _publish(folder, tuple(formats))
        console.print("Written: " + ", ".join(map(str, paths)), soft_wrap=True)


def _publish(folder: Path, formats: tuple[str, ...]) -> list[Path]:
    """Print the folder's leaderboard and write it in the given formats."""
    from bench.report import leaderboard, tables
    from bench.store import write_whole

    rows = leaderboard.rows(folder)
    text = {
        "json": lambda: tables.to_leaderboard_json(rows),
        "csv": lambda: tables.to_csv(rows),
        "md": lambda: tables.markdown(rows, leaderboard.read_run(folder)),
    }
    paths = []
    for name in formats:
        path = folder / f"leaderboard.{name}"
        try:
            write_whole(path, text[name]())
        except OSError as error:
            raise ValueError(f"cannot write {path} ({error.strerror or error}).") from error
        paths.append(path)
    for table in tables.terminal(rows):
        console.print()
        console.print(table)
    console.print()
    console.print(tables.terminal_legend(rows), style="dim", highlight=False)
    return paths


@app.command()
def ledger(
    defense: Annotated[str, typer.Argument(help="A defense, or a+b.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
    facts: Annotated[
        str,
        typer.Option(
            "--facts",
            help="parameters=N,rounds=T,clients=n,participation=p,batch=b,records=m,delta=d",
        ),
    ] = "parameters=1",
    as_json: Annotated[bool, typer.Option("--json")] = False,
    plugin: PluginFile = None,
) -> None:
    """Print claim, proof and mechanism constants of a defense setting, without training."""
    with _plain_errors():
        from bench import suite
        from bench.privacy.events import Facts
        from bench.privacy.ledger import account
        from bench.store import to_json

        built = _setting(defense, set_, plugin)
        given = _facts(suite.parse_pairs([f for f in facts.split(",") if f], "--facts"))
        known = Facts(**given)
        entry = account(built, known)
    document = {"defense": defense, "variant": built.variant, "facts": asdict(known)}
    document |= asdict(entry)
    if as_json:
        typer.echo(to_json(document))
        return
    unit = f" per {entry.unit}" if entry.unit else ""
    delta = f" at delta {entry.claim_delta:g}" if entry.claim_delta else ""
    claimed = "none" if entry.eps_claimed is None else f"{entry.eps_claimed:.6g}{unit}{delta}"
    console.print(f"claimed epsilon: {claimed}", highlight=False)
    console.print(
        f"proven epsilon for one training record, whole run, delta {entry.delta:g}: "
        f"{entry.eps_record:.6g}", highlight=False, soft_wrap=True,
    )  # fmt: skip
    for sentence in entry.words:
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    for reason in entry.reasons:
        console.print(f"- {reason}", highlight=False, soft_wrap=True, markup=False)
    for key, value in entry.constants.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        console.print(f"{key} = {shown}", highlight=False, markup=False)


@app.command()
def audit(
    defense: Annotated[str, typer.Argument(help="A defense, or a+b.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
    draws: Annotated[int, typer.Option("--draws", help="Per input of a pair.")] = 4000,
    confidence: Annotated[
        float, typer.Option("--confidence", help="That no finding is wrong.")
    ] = 0.95,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    parameters: Annotated[
        int, typer.Option("--parameters", help="Coordinates of the audited tensors.")
    ] = 16,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    plugin: PluginFile = None,
) -> None:
    """Attack a defense setting's epsilon: certified lower bounds against claim and proof."""
    with _plain_errors():
        from bench.protocols import audit as audits
        from bench.store import to_json

        built = _setting(defense, set_, plugin)
        found = audits.audit(
            built, draws=draws, confidence=confidence, seed=seed, parameters=parameters
        )
    if as_json:
        typer.echo(to_json({"defense": defense, "variant": built.variant} | found.to_dict()))
        return
    from bench.report.audits import terminal

    for block in terminal(found):
        console.print(block, highlight=False)


def _setting(defense: str, pairs: list[str] | None, plugins: list[Path] | None) -> Defense:
    """A defense, or a+b, with the settings of --set."""
    from bench import suite
    from bench.registry import discover

    registry = discover(tuple(p.resolve() for p in plugins or ()))
    return registry.defense(defense, suite.parse_pairs(pairs or (), "--set"))


def _facts(pairs: dict[str, Any]) -> dict[str, Any]:
    """Checked names and types of --facts."""
    from dataclasses import fields

    from bench.names import did_you_mean
    from bench.privacy.events import Facts

    known = {f.name for f in fields(Facts)}
    floats = {"participation", "delta"}
    for key, value in pairs.items():
        if key not in known:
            raise ValueError(did_you_mean("fact", key, sorted(known)))
        flag = isinstance(value, bool)
        right = flag if key in ("split", "broadcast") else isinstance(value, int) and not flag
        if not (right or (key in floats and isinstance(value, float))):
            expected = "true or false" if key in ("split", "broadcast") else "a whole number"
            expected = "a number" if key in floats else expected
            raise ValueError(f"fact {key} must be {expected}, got {value!r}.")
    return pairs


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
