"""Encryption by the clients, on several cores."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import numpy as np
from torch import Tensor

from bench.toolkit.processes import KEEP_MEMORY, environment_variables
from defenses.ckks.wire import encoded, encrypt_row, open_context

_context: Any = None
"""The public key of a companion process, which serves one `Encryptor` alone."""


class Encryptor:
    """Encrypts many vectors under one public key, on `processes` cores, this process among them.

    A context manager that keeps its other processes: each takes seconds to start. The values sent
    do not depend on the number of processes; the ciphertexts are fresh every time.
    """

    def __init__(self, public_context: bytes, *, processes: int = 1) -> None:
        if processes < 1:
            raise ValueError(f"processes must be >= 1, got {processes}.")
        self._context, self.parameters = open_context(public_context)
        self._public_context, self._companions = public_context, processes - 1
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Encryptor:
        if self._companions:
            # Never fork: torch's threads and locks would be copied in whatever state they are.
            known = multiprocessing.get_all_start_methods()
            start = multiprocessing.get_context("forkserver" if "forkserver" in known else "spawn")
            if "forkserver" in known:
                start.set_forkserver_preload([__name__])
            self._pool = ProcessPoolExecutor(
                self._companions, start, initializer=_open, initargs=(self._public_context,)
            )
            with environment_variables(KEEP_MEMORY):
                ready = [self._pool.submit(bool) for _ in range(self._companions)]
                for future in ready:
                    future.result()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def encrypt_all(self, vectors: Sequence[Tensor]) -> list[list[bytes]]:
        """Ciphertexts of each vector [n], as `encrypt` gives them.

        Raises:
            ValueError: As `encrypt` does.
            RuntimeError: If another process died.
        """
        rows = [encoded(vector, self.parameters) for vector in vectors]
        ciphertexts = iter(self._share_out([row for each in rows for row in each]))
        return [list(itertools.islice(ciphertexts, len(r))) for r in rows]

    def _share_out(self, rows: Sequence[np.ndarray]) -> list[bytes]:
        """Ciphertexts of all rows. Companions are given a few at a time, so that whoever is slow
        gets fewer; this process takes the next one in between."""
        out: dict[int, bytes] = {}
        given: dict[int, Future[bytes]] = {}
        waiting = iter(range(len(rows)))
        while len(out) + len(given) < len(rows):
            if self._pool is not None:
                for i in [i for i, future in given.items() if future.done()]:
                    out[i] = given.pop(i).result()
                for i in itertools.islice(waiting, 4 * self._companions - len(given)):
                    given[i] = self._pool.submit(_encrypt, rows[i])
            for i in itertools.islice(waiting, 1):
                out[i] = encrypt_row(rows[i], self._context)
        out |= {i: future.result() for i, future in given.items()}
        return [out[i] for i in range(len(rows))]


def _open(public_context: bytes) -> None:
    global _context
    _context, _ = open_context(public_context)


def _encrypt(row: np.ndarray) -> bytes:
    return encrypt_row(row, _context)


def encrypt(values: Tensor, public_context: bytes) -> list[bytes]:
    """Ciphertexts of values [n] rounded to the grid, `ciphertexts_for(n, slots)` of them.

    Raises:
        ValueError: If a value is not finite or beyond `Parameters.max_magnitude`.
    """
    return encrypt_all([values], public_context, processes=1)[0]


def encrypt_all(
    vectors: Sequence[Tensor], public_context: bytes, *, processes: int
) -> list[list[bytes]]:
    """`encrypt` of each vector, on several cores; `Encryptor` saves starting them every time."""
    with Encryptor(public_context, processes=processes) as encryptor:
        return encryptor.encrypt_all(vectors)
