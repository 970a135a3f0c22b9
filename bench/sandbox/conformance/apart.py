"""A check in a process of its own: that a plugin never ends, or ends its process, is a finding."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.sandbox.conformance.findings import At, Conformance, Finding, failed
from bench.toolkit.processes import end_with_parent, prints_aside

TIMEOUT_S = 600.0
"""Limit for the check of one plugin."""
_READY_S = 600.0
"""How long the process may take until it has imported leakbench itself."""
_STACK_S = 2.0
"""How long a process may take to tell where it is."""
_STACK = "stack.txt"
_READY = "ready"


@dataclass(frozen=True, kw_only=True)
class Check:
    """What is to be checked; see `check_plugins`."""

    target: str
    settings: Mapping[str, Any]
    fast: bool = False
    dataset: str | None = None


def check_apart(request: Check, *, timeout_s: float = TIMEOUT_S) -> Iterator[Conformance]:
    """As `check_plugins`, in a process of its own, which works in an empty temporary folder.

    Its end is a finding, where the plugin brings it about or the check of one plugin takes longer
    than `timeout_s`. Raises UserError as `check_plugins`, and for a limit that is no number of
    seconds.
    """
    named = request.target
    if not 1 <= timeout_s <= 1e6:
        raise UserError(f"--timeout must be between 1 and 1e6 seconds, got {timeout_s:g}.")
    skip, request = 0, _absolute(request)
    while True:
        with tempfile.TemporaryDirectory(prefix="leakbench-check-") as folder:
            process = _Process(request, Path(folder), skip)
            try:
                for conformance in process.heard(timeout_s):
                    skip += 1
                    model = conformance.kind == "model"
                    yield replace(conformance, name=named) if model else conformance
            finally:
                process.stop()
        if not process.later:
            return


def _absolute(request: Check) -> Check:
    """With the path of its file, where it is one, as it is from any folder."""
    path, colon, model = request.target.rpartition(":")
    if path.endswith(".py"):
        return replace(request, target=f"{Path(path).resolve()}{colon}{model}")
    if request.target.endswith(".py") or Path(request.target).is_file():
        return replace(request, target=str(Path(request.target).resolve()))
    return request


class _Process:
    """A process that checks the plugins of a request but for the first `skip`.

    later: plugins that it did not come to since it was ended. at, found, began: what it was at
    last, the findings on that plugin, and when it began with it.
    """

    def __init__(self, request: Check, folder: Path, skip: int) -> None:
        self.request, self.folder = request, folder
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(far, request, folder, skip))
        self.process.start()
        far.close()
        self.later = 0
        self.at = At(
            kind="plugin", name=request.target, settings=request.settings, check="its import"
        )
        self.found: list[Finding] = []
        self.began = time.monotonic()

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()

    def heard(self, timeout_s: float) -> Iterator[Conformance]:
        """What it finds, and, where it must be ended or ends, that. Raises the UserError that it
        raises."""
        limit = _READY_S
        while True:
            try:
                if not self.pipe.poll(max(0.0, self.began + limit - time.monotonic())):
                    reason = f"{self.at.check} did not end within {limit:g} s{self._place()}."
                    yield self._ended(reason, "Let it end; --timeout gives it longer.")
                    return
                news = self.pipe.recv()
            except (EOFError, OSError):
                self.process.join()
                code = self.process.exitcode or 0
                end = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
                yield self._ended(
                    f"{self.at.check} ended its process, which {end}.",
                    "Neither end the process nor crash it; lines above may say more.",
                )
                return
            match news:
                case None:
                    return
                case UserError():
                    raise news
                case str():  # it is ready
                    self.began, limit = time.monotonic(), timeout_s
                case At():
                    self.at = news
                case list():
                    self.found += news
                case Conformance():
                    self.found, self.began = [], time.monotonic()
                    yield news

    def _ended(self, reason: str, change: str) -> Conformance:
        self.later = self.at.later
        return Conformance(
            kind=self.at.kind,
            name=self.at.name,
            settings=self.at.settings,
            findings=[*self.found, failed("ends", reason, change)],
            seconds=time.monotonic() - self.began,
        )

    def _place(self) -> str:
        """Where it is: the innermost line of the plugin's own file, or else of any."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        until, lines = time.monotonic() + _STACK_S, list[tuple[str, str, str]]()
        while not lines and time.monotonic() < until:
            time.sleep(0.05)
            with suppress(OSError):
                text = (self.folder / _STACK).read_text(errors="replace", encoding="utf-8")
                lines = re.findall(r'File "(.*)", line (\d+) in (.*)', text)
        target = Path(self.request.target.partition(":")[0]).name
        own = [line for line in lines if Path(line[0]).name == target]
        for file, line, function in [*own, *lines][:1]:
            return f": it was at {Path(file).name}, line {line}, in {function}"
        return ""


def _serve(pipe: Connection, request: Check, folder: Path, skip: int) -> None:
    """The process's own part: everything that is noticed goes into the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that started it decides when to stop
    end_with_parent()
    prints_aside()
    stack = (folder / _STACK).open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    sys.path[:] = [os.path.abspath(p) for p in sys.path]
    place = folder / "work"
    place.mkdir()
    os.chdir(place)
    os.environ["TMPDIR"], tempfile.tempdir = str(place), None
    from bench.sandbox.conformance import findings
    from bench.sandbox.conformance.plugins import check_plugins

    findings.listeners.append(pipe.send)
    pipe.send(_READY)
    try:
        for conformance in check_plugins(
            request.target,
            request.settings,
            fast=request.fast,
            dataset=request.dataset,
            skip=skip,
        ):
            pipe.send(conformance)
        pipe.send(None)
    except UserError as error:
        pipe.send(UserError(str(error)))
