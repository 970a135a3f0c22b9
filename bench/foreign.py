"""Code of others, inside which anything may happen: what it raises leaves as an Exception, what it
prints goes to stderr, and what it changed of the process is put back.

Only what decides figures and what plugins change without thinking of it is looked after. Code that
replaces functions of other modules, signal handlers or limits of the process, ends it or starts
others is not held by this; see docs/clusters.md.
"""

import functools
import gc
import io
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_TEXT = 400
"""Characters of an exception that are shown."""


class Escaped(Exception):
    """What foreign code raised that is no Exception, such as SystemExit.

    Attributes:
        error: The exception itself.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(in_one_line(error))
        self.error = error


class OverLimit(BaseException):
    """Code ran longer than `time_limit` lets it. No Exception, so that few handlers catch it."""


def in_one_line(error: BaseException, most: int = MOST_TEXT) -> str:
    """Return an exception's kind and text in one line, only the kind where the text cannot be
    read."""
    if isinstance(error, Escaped):
        error = error.error
    try:
        text = " ".join(str(error).split())
    except Exception:  # whatever a foreign exception's own __str__ raises
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}"[:most]


def place_of(error: BaseException, packages: Collection[str]) -> str:
    """File and line of the innermost of those packages' own lines that the error passed, "" where
    it passed none; a package is the top name of a module."""
    if isinstance(error, Escaped):
        error = error.error
    places = [
        f"{Path(frame.f_code.co_filename).name}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages
    ]
    return places[-1] if places else ""


# --- what ends it -------------------------------------------------------------------------------

_told: list[BaseException] = []
"""Why the process was told from outside to stop what it is at: Ctrl-C, or a time limit."""


@contextmanager
def contain() -> Iterator[None]:
    """Let every exception inside leave as an Exception: SystemExit and its like as `Escaped`.

    Only what comes from outside passes, KeyboardInterrupt where somebody pressed Ctrl-C and
    OverLimit; and both pass even where the code inside swallowed them.
    """
    here = _in_main_thread()  # only the main thread is told
    listens = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, _stop)
    try:
        yield
    except BaseException as error:
        if not (here and _told):
            if isinstance(error, Exception):
                raise
            raise Escaped(error) from error
    finally:
        if listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if here and _told:
        interrupt = _told[0]
        if listens:
            _told.clear()
        raise interrupt


@contextmanager
def time_limit(seconds: float, again_s: float = 1.0) -> Iterator[bool]:
    """End the code inside with OverLimit after some seconds, and again every `again_s`, for code
    that swallows it.

    That is so in the main thread alone, where nobody else uses the process's alarm clock, and for
    code that comes back to Python now and then; elsewhere there is no limit, and False is given.
    """
    used = any(signal.getitimer(signal.ITIMER_REAL))
    if used or not (_in_main_thread() and 0 < seconds < threading.TIMEOUT_MAX):
        yield False
        return
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, again_s)
    try:
        yield True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        _told.clear()


def _stop(number: int, _: object) -> None:
    _told.append(KeyboardInterrupt() if number == signal.SIGINT else OverLimit())
    raise _told[-1]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# --- what it leaves behind ----------------------------------------------------------------------


def _process_state() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return what plugins change of the process without thinking of it, by name: how it is read,
    and how it is set."""
    import numpy as np
    import torch

    def set_device(before: torch.device) -> None:
        # Set by name it costs every call of torch a little, which None does not.
        torch.set_default_device(None if before.type == "cpu" else before)

    def torch_generator() -> bytes:
        # Inside of a torch.func transform torch refuses to use its own generator.
        inside = torch._C._functorch.maybe_current_level() is not None
        return b"" if inside else torch.get_rng_state().numpy().tobytes()

    def set_torch_generator(before: bytes) -> None:
        if before:
            torch.set_rng_state(torch.frombuffer(bytearray(before), dtype=torch.uint8))

    def numpy_generator() -> Any:
        name, keys, *rest = np.random.get_state()  # noqa: NPY002 (put back, not used)
        return name, keys.tobytes(), *rest  # type: ignore[attr-defined]

    def set_numpy_generator(before: Any) -> None:
        name, keys, *rest = before
        np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002

    def working_directory() -> str | None:
        with suppress(FileNotFoundError):  # it was removed
            return os.getcwd()
        return None

    def set_variables(before: dict[str, str]) -> None:
        os.environ.clear()
        os.environ.update(before)

    def set_autocast(before: list[bool]) -> None:
        for kind, on in zip(("cpu", "cuda"), before, strict=True):
            torch.set_autocast_enabled(kind, on)

    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    exact = torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    return {
        "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "torch's default device": (torch.get_default_device, set_device),
        "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "torch's autocast": (
            lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
            set_autocast,
        ),
        "torch's precision of products": precision,
        "torch's choice of deterministic algorithms": exact,
        "torch's global generator": (torch_generator, set_torch_generator),
        "numpy's global generator": (numpy_generator, set_numpy_generator),
        "Python's global generator": (random.getstate, random.setstate),
        "the number of threads": (torch.get_num_threads, torch.set_num_threads),
        "the working directory": (working_directory, os.chdir),
        "environment variables": (lambda: dict(os.environ), set_variables),
    }


@dataclass
class Left:
    """What foreign code left behind, once it has ended.

    Attributes:
        deciding: Names of what it changed that decides figures, with what was and what is.
        moved: Names of the global generators that it moved.
    """

    deciding: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        """Why figures that it had a part in are none, None if they are."""
        if not self.deciding:
            return None
        return (
            f"changed {' and '.join(self.deciding)} for the whole process, and with it what is "
            "computed after: set it for a few lines and put it back, or give it with each tensor"
        )


@contextmanager
def foreign_code(left: Left | None = None, *, relays: bool = True) -> Iterator[None]:
    """Run foreign code as `contain`, with its prints on stderr, and restore the process's state.

    left: is told what was changed. relays: whether what is printed comes out at all.
    """
    left = left or Left()
    before = [(name, read, write, read()) for name, (read, write) in _process_state().items()]
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdout = _Aside(sys.stderr if relays else None, sys.stdout)
    try:
        with contain():
            yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        for name, read, write, was in before:
            now = read()
            if now == was:
                continue
            if "generator" in name:
                left.moved.append(name)
            elif name.startswith("torch"):
                left.deciding.append(f"{name} ({was} to {now})")
            with suppress(Exception):  # a folder that is gone, a limit that is too low now
                write(was)


def forget() -> None:
    """Empty leakbench's own caches in this process: what they hold may have been computed in a
    state that foreign code had changed."""
    for item in gc.get_objects():
        # By type(), since to ask some objects for their class makes them import something.
        if type(item) is functools._lru_cache_wrapper and item.__module__.startswith("bench."):
            item.cache_clear()


class _Aside(io.TextIOBase):
    """Takes what is printed in place of stdout; closing it closes no other stream."""

    def __init__(self, stream: Any, instead_of: Any) -> None:
        self._stream = stream
        # Where rich looks for the stream behind: the bar of progress is drawn while a job runs.
        self.rich_proxied_file = getattr(instead_of, "rich_proxied_file", instead_of)

    def write(self, text: str) -> int:
        if self._stream is not None:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def close(self) -> None:
        """Nothing: others write to the stream as well."""
