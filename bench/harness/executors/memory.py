"""What jobs take of the memory, and what they may take."""

import resource
import sys
from pathlib import Path

import psutil

_SHARE = 0.9
"""Of the machine's memory, what all workers together may take."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def peaks() -> dict[str, int | None]:
    """Return the most bytes that this process has held since it started: `host`, in its memory, and
    `device`, in tensors on the GPU, None without one."""
    unit = 1 if sys.platform == "darwin" else 1024
    host = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # A job without tensors on a GPU must not start one: CUDA's own context takes memory.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {"host": host, "device": None}
    return {"host": host, "device": torch.cuda.max_memory_allocated()}


def share_of(workers: int) -> int:
    """Return the bytes that each of some workers may hold, of the memory of this machine or of the
    container that it is."""
    limits = [psutil.virtual_memory().total]
    for place in map(Path, _CGROUP_LIMITS):
        text = place.read_text(encoding="utf-8").strip() if place.is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return int(_SHARE * min(limits) / max(1, workers))


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
