"""What jobs take of the memory, and what they may take."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_SHARE = 0.9
"""Of the machine's memory, what all workers together may take."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@contextmanager
def peak() -> Iterator[dict[str, int | None]]:
    """Measure memory, filled in at the end: `host`, the most bytes that this process has held
    inside (resident; where the system cannot forget an earlier peak, since its start), and
    `device`, the most that tensors held on the GPU, None without one."""
    peaks: dict[str, int | None] = {"host": None, "device": None}
    _forget_peak()
    # A job without tensors on a GPU must not start one: CUDA's own context takes memory.
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    try:
        yield peaks
    finally:
        peaks["host"] = _highest()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            peaks["device"] = torch.cuda.max_memory_allocated()


def _forget_peak() -> None:
    place = Path("/proc/self/clear_refs")
    if place.exists() and os.access(place, os.W_OK):
        place.write_text("5", encoding="utf-8")  # Linux: the peak begins anew at the present size


def _highest() -> int:
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        (line,) = (x for x in status.splitlines() if x.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def total_bytes() -> int:
    """Memory of this machine, or of the container that it is."""
    limits = [psutil.virtual_memory().total]
    for place in map(Path, _CGROUP_LIMITS):
        text = place.read_text(encoding="utf-8").strip() if place.is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def share_of(workers: int) -> int:
    """Return the bytes that each of some workers may hold."""
    return int(_SHARE * total_bytes() / max(1, workers))


def keep_to_share() -> None:
    """Hold this process to its share of the GPU's memory, so that those beside it keep theirs: past
    it torch's allocator refuses, and chunks are halved."""
    import torch

    from bench.toolkit.memory import gpu_share

    share = gpu_share()
    if share < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def resident(pid: int) -> int:
    """Bytes that a process holds now; 0 if it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
