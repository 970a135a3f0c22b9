"""A check in a process of its own: that a plugin never ends, or ends its process, is a finding."""

import faulthandler
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.sandbox.findings import Conformance, Finding
from bench.toolkit.processes import serve_parent

_STACK = "stack.txt"


def check_in_process(
    target: str,
    settings: Mapping[str, Any],
    *,
    fast: bool = False,
    dataset: str | None = None,
    timeout_s: float = 600.0,
) -> Iterator[Conformance]:
    """As `check_plugins`, in a process of its own, which works in an empty temporary folder.

    Its end is the last finding, where a plugin brings it about or the check of one plugin takes
    longer than `timeout_s`. Raises UserError as `check_plugins`, and for a limit that is no number
    of seconds.
    """
    if not 1 <= timeout_s <= 1e6:
        raise UserError(f"--timeout must be between 1 and 1e6 seconds, got {timeout_s:g}.")
    file, colon, model = target.rpartition(":")
    if not file.endswith(".py"):
        file, colon, model = target, "", ""
    if file.endswith(".py") or Path(file).is_file():
        file = str(Path(file).resolve())
    asked = {"target": f"{file}{colon}{model}", "fast": fast, "dataset": dataset}
    blank = Conformance(kind="plugin", name=target, settings=settings)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="leakbench-check-") as folder:
        pipe, far = context.Pipe()
        given = far, Path(folder), timeout_s, {**asked, "settings": settings}
        process = context.Process(target=_serve, args=given)
        process.start()
        far.close()
        try:
            for conformance in _receive(process, pipe, blank, timeout_s, Path(folder)):
                yield replace(conformance, name=target) if colon else conformance
        finally:
            pipe.close()
            process.kill()
            process.join()


def _receive(
    process: BaseProcess, pipe: Connection, blank: Conformance, timeout_s: float, folder: Path
) -> Iterator[Conformance]:
    """The findings on each plugin; where the process ends before it says so, that is the last.
    Raises the UserError that the process raises."""
    at, conformance = "its import", blank
    with suppress(EOFError, OSError):
        while pipe in wait([pipe, process.sentinel]):  # a child of its own may hold the pipe
            news = pipe.recv()
            if news is None:
                return
            if isinstance(news, UserError):
                raise news
            at, conformance = news
            if not at:
                yield conformance
                at, conformance = "its import", blank
    process.join()
    code = process.exitcode or 0
    end = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    reason = f"{at} ended its process, which {end}."
    change = "Neither end the process nor crash it; lines above may say more."
    if stack := (folder / _STACK).read_text(errors="replace", encoding="utf-8"):
        reason = f"{at} did not end within {timeout_s:g} s{_place(stack, blank.name)}."
        change = "Let it end; --timeout gives it longer."
    last = Finding(name="ends", status="failed", reason=reason, change=change)
    yield replace(conformance, findings=[*conformance.findings, last])


def _place(stack: str, target: str) -> str:
    """Where the main thread was: the innermost line of the plugin's own file, or else of any."""
    main = stack.rpartition("Thread ")[2]  # the one that began first is told last
    lines = re.findall(r'File "(.*)", line (\d+) in (.*)', main)
    own = [line for line in lines if Path(line[0]).name == Path(target.partition(":")[0]).name]
    file, line, function = [*own, *lines][0]
    return f": it was at {Path(file).name}, line {line}, in {function}"


def _serve(pipe: Connection, folder: Path, timeout_s: float, asked: dict[str, Any]) -> None:
    """The process's own part: everything that is noticed goes into the pipe, and where it is when
    the time of a plugin is over into a file."""
    serve_parent()
    stack = (folder / _STACK).open("w", encoding="utf-8")
    sys.path[:] = [os.path.abspath(p) for p in sys.path]
    place = folder / "work"
    place.mkdir()
    os.chdir(place)
    os.environ["TMPDIR"], tempfile.tempdir = str(place), None
    from bench.sandbox.conformance.plugins import progress

    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stack)
    try:
        for news in progress(**asked):
            pipe.send(news)
            if not news[0]:
                faulthandler.dump_traceback_later(timeout_s, exit=True, file=stack)
        pipe.send(None)
    except UserError as error:
        pipe.send(UserError(str(error)))
