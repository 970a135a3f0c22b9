"""How processes that compute on tensors are started."""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
"""glibc gives large blocks back to the system at every free and takes them again, zeroed page by
page, at the next tensor: a fifth of an attack's time. Processes started with these keep up to as
much as they name instead."""

GPU_SHARE = "LEAKBENCH_GPU_SHARE"
"""Name of the environment variable that says which share of its GPU's memory, in (0, 1], a process
may take; without it all of it."""


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a process started inside; the user's own settings win."""
    added = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def serve_parent() -> None:
    """Work for the process that started this one: only that one decides when to stop, what is
    printed goes to stderr, and this process ends when that one is gone, however that ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prints_aside()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def prints_aside() -> None:
    """From here on all that this process prints goes to stderr, a warning as one sentence: its
    stdout is another's."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.stdout.flush()
    with suppress(OSError):  # one that was started without stderr
        os.dup2(2, 1)
