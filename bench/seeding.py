"""Every random stream of a run, derived by name from the training's seed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # torch takes seconds to import, and reports need none
    import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed of the stream `names`; streams of different names are independent."""
    text = "\x1f".join(["leakbench", str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """Return a CPU generator of a named stream, since draws on the CPU are the same for every
    device."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *names))


def numpy_generator(seed: int, *names: str | int) -> np.random.Generator:
    """A NumPy generator of a named stream, for splits and resampling."""
    return np.random.default_rng(derive_seed(seed, *names))
