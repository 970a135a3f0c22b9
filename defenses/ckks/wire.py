"""Public keys, encoded vectors and ciphertexts as bytes."""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from defenses.ckks.parameters import Parameters, ciphertexts_for, rounded

CHECKSUM_BYTES = 4


@functools.lru_cache
def signs(slots: int) -> np.ndarray:
    """±1 per slot, the same for everyone: a constant vector would else be one huge coefficient."""
    bits = np.frombuffer(hashlib.shake_256(b"leakbench ckks signs").digest(slots // 8), np.uint8)
    signs = 1.0 - 2.0 * np.unpackbits(bits)
    signs.flags.writeable = False
    return signs


def encoded(values: Tensor, parameters: Parameters) -> np.ndarray:
    """Encoded values [ciphertexts, slots]: on the grid, signed, zeros at the end.

    TenSEAL would repeat a short vector instead, which shows its length in the ciphertext's size.
    """
    if values.ndim != 1:
        raise ValueError(f"values must have one dimension, got shape {tuple(values.shape)}.")
    on_grid = rounded(values, parameters).numpy()
    bad = np.flatnonzero(~(np.abs(on_grid) <= parameters.max_magnitude))
    if len(bad):
        raise ValueError(
            f"values must be finite and within ±{parameters.max_magnitude:g}, "
            f"got {float(values[bad[0]]):g} at {bad[0]}."
        )
    rows = np.zeros((ciphertexts_for(len(on_grid), parameters.slots), parameters.slots))
    rows.reshape(-1)[: len(on_grid)] = on_grid
    return rows * signs(parameters.slots)


def encrypt_row(row: np.ndarray, context: Any) -> bytes:
    import tenseal

    return checked(tenseal.ckks_vector(context, row.tolist()).serialize())


def header(parameters: Parameters) -> bytes:
    return json.dumps(asdict(parameters)).encode() + b"\n"


def open_context(public_context: bytes) -> tuple[Any, Parameters]:
    import tenseal
    import tenseal.sealapi  # registers the types that seal_context() returns

    try:
        header, _, body = public_context.partition(b"\n")
        parameters = Parameters(**json.loads(header))
        context = tenseal.context_from(body, n_threads=1)
        key = context.seal_context().data.key_context_data()
        found = (key.parms().poly_modulus_degree(), key.total_coeff_modulus_bit_count())
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"public_context must be bytes from KeyServer.public_context(), got {error}"
        ) from error
    expected = (parameters.poly_modulus_degree, sum(parameters.coeff_mod_bit_sizes))
    if found != expected or context.global_scale != 2.0**parameters.log2_scale:
        raise ValueError(f"public_context must have the keys its header names, got {found}.")
    return context, parameters


def checked(payload: bytes) -> bytes:
    return zlib.crc32(payload).to_bytes(CHECKSUM_BYTES, "big") + payload


def load_ciphertext(data: bytes, context: Any) -> Any:
    """The ciphertext. The checksum finds damage that would else decrypt to other values; it does
    not authenticate the sender."""
    import tenseal

    checksum, payload = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    if zlib.crc32(payload).to_bytes(CHECKSUM_BYTES, "big") != checksum:
        raise ValueError(
            f"Ciphertext must be unchanged since encryption, got {len(data)} damaged bytes."
        )
    try:
        return tenseal.ckks_vector_from(context, payload)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"Ciphertext must be of this context's parameters, got: {error}."
        ) from error
