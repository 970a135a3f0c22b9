"""What the code of a file tries to do outside its own folder: files, connections, processes.

An audit hook of Python's tells of each as it is tried, before it is done, so that code which hides
an error from its caller is named too. This notes and stops nothing: a sandbox does that. Code that
calls the system past Python (a compiled library, ctypes), or starts a thread whose own frames are
all a library's, is not seen.
"""

from __future__ import annotations

import json
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

_WRITES = {
    "os.remove": "remove",
    "os.rename": "rename",
    "os.mkdir": "make the folder",
    "os.rmdir": "remove the folder",
    "os.link": "link",
    "os.symlink": "link",
    "os.truncate": "cut",
    "os.chmod": "change the mode of",
    "os.chown": "change the owner of",
    "os.utime": "change the time of",
    "sqlite3.connect": "write",
}
_READS = {"os.listdir": "list", "os.scandir": "list"}
_CONNECTIONS = {
    "socket.connect": "connect to",
    "socket.bind": "listen on",
    "socket.sendto": "send to",
    "socket.sendmsg": "send to",
    "socket.getaddrinfo": "look up",
    "socket.gethostbyname": "look up",
    "socket.gethostbyaddr": "look up",
}
_PROCESSES = {
    "subprocess.Popen": "start the process",
    "os.system": "start the process",
    "os.exec": "become the process",
    "os.posix_spawn": "start the process",
    "os.spawn": "start the process",
    "os.fork": "start a process",
    "os.forkpty": "start a process",
    "pty.spawn": "start the process",
    "os.kill": "send a signal to the process",
    "os.killpg": "send a signal to the processes",
}
_TWO_PLACES = ("os.rename", "os.link", "os.symlink")
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/proc", "/sys")
_NOWHERE = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_OPENED_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOST = 100
"""Attempts that are noted per process; a loop must not fill the memory."""
WATCH = "LEAKBENCH_WATCH"
"""Name of the environment variable by which worker processes are told what to watch."""
_LINE = "leakbench-attempt: "


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Something that a watched file's code tried.

    Attributes:
        what: "write", "connect to" and so on.
        on: Path, address or command; "" where there is none.
        file: Name of the file whose code it was.
        line: In that file.
    """

    what: str
    on: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{' '.join(filter(None, (self.what, self.on)))}: {self.file}:{self.line}"


@dataclass(kw_only=True)
class CodeWatch:
    """Whose code is watched, and which places it may use.

    Attributes:
        files: Python files, wherever their code stands in a call's stack.
        writable: Folders in which it may write.
        readable: Folders that it may read beside those of Python, the system and its own file.
        note: Is told of each attempt, once per kind and line; it must not raise.
    """

    _hooked: ClassVar[bool] = False
    _active: ClassVar[list[CodeWatch]] = []

    files: Sequence[Path]
    writable: Sequence[Path] = ()
    readable: Sequence[Path] = ()
    note: Callable[[Attempt], None] = lambda attempt: None
    _told: set[tuple[str, str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._names = {name for f in self.files for name in (str(f), os.path.realpath(f))}
        self._writable = [os.path.realpath(p) for p in self.writable]
        read = [os.path.realpath(p) for p in (*_environment(), *map(str, self.readable))]
        self._readable = [*self._names, *_SYSTEM, *read, *self._writable]

    def start(self) -> None:
        """Watch from now on."""
        self._active.append(self)
        if not CodeWatch._hooked:  # a hook cannot be taken away, so there is one for all
            CodeWatch._hooked = True
            sys.addaudithook(_heard)

    def stop(self) -> None:
        """Watch no more."""
        self._active.remove(self)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what an audit event stands for, if it is an attempt of the watched files."""
        found = self._attempted(event, arguments)
        frame = sys._getframe(2) if found else None
        while frame is not None and frame.f_code.co_filename not in self._names:
            if _imports(frame, event, arguments):
                return
            frame = frame.f_back
        if found is None or frame is None:
            return
        what, on = found
        file, line = frame.f_code.co_filename, frame.f_lineno
        if (what, file, line) in self._told or len(self._told) >= _MOST:
            return
        self._told.add((what, file, line))
        name = printable(os.path.basename(file))
        self.note(Attempt(what=what, on=printable(on[:300]), file=name, line=line))

    def _attempted(self, event: str, arguments: tuple[Any, ...]) -> tuple[str, str] | None:
        """What is tried, and on what; None for what is allowed."""
        if event in _PROCESSES:
            command = arguments[1] if event == "subprocess.Popen" and arguments[1] else arguments
            return _PROCESSES[event], _shown(command)
        if event in _CONNECTIONS:
            of_socket = event in (
                "socket.connect",
                "socket.bind",
                "socket.sendto",
                "socket.sendmsg",
            )
            place = arguments[1] if of_socket else arguments[0]
            return None if place is None else (_CONNECTIONS[event], _shown(place))
        writes = event in _WRITES
        what = _WRITES.get(event) or _READS.get(event, "read")
        if event == "open":
            _, mode, flags = arguments
            opened = isinstance(flags, int) and bool(flags & _OPENED_TO_WRITE)
            writes = opened or (isinstance(mode, str) and bool(set(mode) & set("wax+")))
            what = "write" if writes else "read"
        for place in arguments[: 2 if event in _TWO_PLACES else 1]:
            if place is None:
                place = os.curdir
            if isinstance(place, (str, bytes, os.PathLike)):
                path = os.path.realpath(os.fsdecode(place))
                if path not in _NOWHERE and not _within(
                    path, self._writable if writes else self._readable
                ):
                    return what, os.path.abspath(os.fsdecode(place))
        return None


_EVENTS = frozenset({"open", *_WRITES, *_READS, *_CONNECTIONS, *_PROCESSES})


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        for watch in list(CodeWatch._active):
            try:
                watch.see(event, arguments)
            except Exception:  # whatever a hook raises would stop what it only looks at
                continue


def _imports(frame: FrameType, event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether the import system itself does it: it reads modules, and caches their bytecode."""
    if not frame.f_code.co_filename.startswith("<frozen importlib"):
        return False
    place = str(arguments[0])
    return event in ("open", "os.mkdir", "os.rename", "os.listdir") and (
        event == "os.listdir" or "__pycache__" in place or place.endswith((".py", ".so"))
    )


def printable(text: str) -> str:
    """Text that cannot move a terminal's cursor or colour it: one line, signs for what is none."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _within(path: str, folders: Sequence[str]) -> bool:
    return any(path == f or path.startswith(f.rstrip("/") + "/") for f in folders)


def _environment() -> Iterator[str]:
    """Folders of Python itself and of what is installed."""
    yield from (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())
    yield site.getusersitepackages()
    yield os.path.dirname(os.path.abspath(__file__))
    yield from (p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages"))


def _shown(value: Any) -> str:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return " ".join(os.fsdecode(p) if isinstance(p, (bytes, str)) else repr(p) for p in parts)


@contextmanager
def watched(
    files: Sequence[Path],
    *,
    writable: Sequence[Path] = (),
    readable: Sequence[Path] = (),
    found: list[Attempt] | None = None,
) -> Iterator[list[Attempt]]:
    """Watch the code of these files inside; gives the list that attempts are added to.

    Args:
        files: Of plugins, under the very paths that they are loaded from.
        writable: Folders in which they may write.
        readable: Folders that they may read beside those of Python, the system and their own.
        found: That list, a new one by default.
    """
    found = [] if found is None else found
    watch = CodeWatch(files=files, writable=writable, readable=readable, note=found.append)
    watch.start()
    try:
        yield found
    finally:
        watch.stop()


def watch_workers(
    files: Sequence[Path], *, writable: Sequence[Path] = (), readable: Sequence[Path] = ()
) -> None:
    """Watch this process, and each that it starts and that calls `watch_as_told`, to its end; each
    writes what it notes to its standard error, from where `attempt_of` reads it: what is written
    there cannot be taken back."""
    told = {"files": files, "writable": writable, "readable": readable}
    os.environ[WATCH] = json.dumps({k: [str(p) for p in v] for k, v in told.items()})
    watch_as_told()


def watch_as_told() -> None:
    """In a worker process: watch what the process that started it asked for, if anything."""
    if WATCH in os.environ:
        told = json.loads(os.environ[WATCH])
        CodeWatch(
            files=[Path(p) for p in told["files"]],
            writable=[Path(p) for p in told["writable"]],
            readable=[Path(p) for p in told["readable"]],
            note=_written,
        ).start()


def _written(attempt: Attempt) -> None:
    text = f"\n{_LINE}{json.dumps(asdict(attempt))}\n"
    os.write(2, text.encode(errors="replace"))  # at once: lines of several processes do not mix


def attempt_of(line: str) -> Attempt | None:
    """The attempt that a line of a watched process's standard error tells of, None if none."""
    if not line.startswith(_LINE):
        return None
    try:
        told = json.loads(line.removeprefix(_LINE))
        what, on, file = (printable(str(told[name])) for name in ("what", "on", "file"))
        return Attempt(what=what, on=on, file=file, line=int(told["line"]))
    except (ValueError, KeyError, TypeError):
        return None
