"""What commands share: options, the two consoles, one-sentence errors, building a plan."""

from __future__ import annotations

import errno
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from bench.errors import UserError
from bench.report.console import PlainConsole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.text import Text

    from bench.harness.environment import Environment
    from bench.harness.keys import Keys
    from bench.harness.plan import Plan
    from bench.registry import Registry

console = PlainConsole()
errors = PlainConsole(stderr=True)

SuiteName = Annotated[str, typer.Argument(help="A shipped suite (see 'list suites') or FILE.toml.")]
Only = Annotated[
    list[str] | None, typer.Option(help="Keep cells with key=value; task=0 is the first.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Change a suite value: path.to.key=value.")
]
DataDir = Annotated[Path | None, typer.Option(help="Folder of data sets (or LEAKBENCH_DATA).")]
Download = Annotated[bool, typer.Option("--download", help="Fetch data sets that are missing.")]
PluginFile = Annotated[
    list[Path] | None, typer.Option(help="A Python file with a defense or attack.")
]
Out = Annotated[Path | None, typer.Option(help="Result folder; default leakbench-runs/SUITE.")]
Shard = Annotated[
    str, typer.Option(help="i/n: the i-th of n parts, for batch systems; then merge.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DefenseSet = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the plugin: key=value.")
]
Details = Annotated[
    bool, typer.Option("--details", help="Print every row and attack below the overview.")
]
Loss = Annotated[
    float,
    typer.Option(min=0, max=100, help="Points of accuracy that an overview's settings may lose."),
]
Jobs = Annotated[
    int | None, typer.Option(min=0, max=1024, help="Worker processes; 0: none, run here.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_announced: set[Path] = set()
"""Files of which the command under way has said that it runs them."""


def say(text: str, *, aside: bool = False, style: str | None = None) -> None:
    """Print plain text, which only the terminal wraps; aside: on stderr."""
    (errors if aside else console).print(text, style=style, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as strict JSON, see `bench.records.text`."""
    from bench.records import to_json

    typer.echo(to_json(value))


def pairs_of(given: Sequence[str] | None, option: str) -> dict[str, Any]:
    """The values by key that an option of key=value was given."""
    from bench.suite import parse_pairs

    return parse_pairs(given or (), option)


def file_in(target: str) -> list[Path]:
    """The file that FILE.py or FILE.py:Net names, nothing for an installed plugin's name."""
    file = Path(target if Path(target).is_file() else target.rpartition(":")[0])
    return [file] if file.is_file() else []


def announce(files: Iterable[Path]) -> None:
    """Say once per command, before it happens, which files are executed."""
    new = [f for f in dict.fromkeys(files) if f not in _announced and f.is_file()]
    _announced.update(new)
    if new:
        say(f"Runs {', '.join(map(str, new))} with your rights.", aside=True, style="dim")


def confirm(question: str, *, yes: bool) -> bool:
    """Return whether the user agrees, by --yes or at the terminal.

    Raises UserError where there is neither.
    """
    if yes:
        return True
    if not at_terminal():
        raise UserError("nothing was run, since no terminal is here to ask you; give --yes.")
    return typer.confirm(question, default=False, err=True)


def at_terminal() -> bool:
    """Return whether somebody can answer."""
    return sys.stdin.isatty()


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str | Text]], *, figures: int = 0, **more: Any
) -> None:
    """Print a table without lines around its cells, nothing where it has no rows.

    Args:
        heads: Of the columns.
        rows: Their cells.
        figures: Number of the last columns that hold figures, which are never broken.
        more: What else rich's table takes, such as its title.
    """
    from rich.table import Table

    table = Table(title_justify="left", box=None, pad_edge=False, **more)
    for left, head in enumerate(heads, start=figures - len(heads)):
        if left < 0:
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        console.print(table)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}", aside=True, style="yellow")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Bad input ends with one sentence and exit code 2; a plugin's warning is one sentence."""
    _announced.clear()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except UserError as error:
        refuse(str(error))
    except SystemExit as error:  # of a plugin: it must not end a command as if all were well
        raise RuntimeError(f"a plugin raised SystemExit({error.code!r})") from error
    except OSError as error:
        if error.filename is None and error.errno not in NO_SPACE:  # no file of the user's: a bug
            raise
        refuse(f"cannot use {str(error.filename or 'the disk')[:200]} ({error.strerror}).")


def refuse(sentence: str) -> NoReturn:
    """End the command with what is wrong, on one line, and exit code 2."""
    say(f"leakbench: {sentence}", aside=True, style="red")
    raise typer.Exit(2) from None


def choose_environment(
    device: str,
    data_dir: Path | None,
    download: bool,
    plugins: list[Path] | None,
    *,
    here: bool = True,
) -> Environment:
    """The environment that a command's options choose."""
    from bench.harness import launch

    announce(plugins or ())
    return launch.environment(device, data_dir, download, plugins or (), here=here)


def shard_of(text: str) -> tuple[int, int]:
    """The pair (i, n) that "i/n" stands for. Raises UserError for other text."""
    number, slash, of = text.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and len(text) < 20):
        raise UserError(f"--shard takes i/n, as 1/8, got '{text[:60]}'.")
    return int(number), int(of)


def plan_suite(
    suite: str,
    only: list[str] | None,
    overrides: list[str] | None,
    env: Environment,
    shard: tuple[int, int] = (1, 1),
) -> tuple[Plan, Keys]:
    """A suite's plan and keys, as a command's options change it."""
    from bench import models
    from bench import suite as suites
    from bench.harness import launch

    chosen = suites.read_suite(suite, overrides or ())
    announce(f for f in (models.named.file_of(task.model) for task in chosen.tasks) if f)
    return launch.plan_suite(chosen, pairs_of(only, "--only"), env, shard)


def registry_of(plugins: list[Path] | None) -> Registry:
    """Return all plugins, those of --plugin too."""
    from bench.registry import discover

    announce(plugins or ())
    return discover(tuple(p.resolve() for p in plugins or ()))


def values_over(over: str) -> tuple[str, list[str]]:
    """Key and values that --over names. Raises UserError for fewer than two, or one twice."""
    key, equals, listed = over.partition("=")
    texts = [t.strip() for t in listed.split(",") if t.strip()]
    if not equals or not key or len(set(texts)) < 2:
        raise UserError(f"--over takes key=value,value,..., at least two values, got '{over}'.")
    if len(set(texts)) < len(texts):
        raise UserError(f"--over {key} names a value twice, got '{listed}'.")
    return key, texts
