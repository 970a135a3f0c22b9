"""CKKS encryption of client vectors that a server adds without being able to read them.

Three parties. `KeyServer` makes the key pair and decrypts sums; clients hold the public key and
`encrypt`; the aggregation server holds the public key too and can `add`. Values are fixed-point, so
that the decrypted sum is exact: TenSEAL draws its own randomness, and unrounded sums would differ
between two runs with one seed. Rounding also takes away the noise of CKKS, which depends on the
secret key and should not be published (Li and Micciancio, Eurocrypt 2021).

    key_server = KeyServer()
    public = key_server.public_context
    uploads = [encrypt(vector, public) for vector in vectors]
    total = key_server.decrypt(add(uploads, public), length=len(vectors[0]))
    assert total.equal(sum(rounded(vector, ADDITIVE) for vector in vectors))
"""

import functools
import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_UPLOADS = 1000
"""Uploads in one sum for which `Parameters.resolution` is chosen."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Ring, moduli and fixed-point grid of one key pair.

    Both shipped sets have 128 bits of classical security, with ternary secrets: Homomorphic
    Encryption Security Standard (2018), Table 1, allows 109 bits of coefficient modulus at a ring
    degree of 4096, and 218 at 8192.

    coeff_mod_bit_sizes: bits of each prime; the last is used up while encrypting and never sent.
    log2_scale: CKKS scale, in bits.
    """

    poly_modulus_degree: int
    coeff_mod_bit_sizes: tuple[int, ...]
    log2_scale: int

    @property
    def slots(self) -> int:
        """Values per ciphertext."""
        return self.poly_modulus_degree // 2

    def error_std(self, uploads: int) -> float:
        """Standard deviation of the CKKS error of one value of a sum, before rounding.

        Dropping the last prime rounds both halves c0 + c1 s of a ciphertext, 1/12 each per
        coefficient, with 2/3 of the N coefficients of s nonzero: N/18. A slot is the real part of
        N such terms: N^2/36. The rest of the noise was divided by that prime and is far below.
        A slot's own deviation is proportional to |s| there, so that over slots and keys the error
        is Laplace-like, P(|error| > t std) = exp(-sqrt(2) t), and a key's worst slot has about
        sqrt(log slots), 2.8 or 2.9 times this.
        """
        return math.sqrt(uploads) * self.poly_modulus_degree / 6 / 2**self.log2_scale

    @property
    def resolution(self) -> float:
        """Grid of the values: the least power of two with 20 std of `MOST_UPLOADS` below half."""
        return float(2.0 ** math.ceil(math.log2(2 * 20 * self.error_std(MOST_UPLOADS))))

    @property
    def max_magnitude(self) -> float:
        """Largest |value| of an upload; sums are sure to come back if no |value| is above it, or
        if the root mean square over each ciphertext is not.

        Coefficients must stay below half the modulus. Slots are encoded with pseudo-random signs,
        so each coefficient is a signed sum of variance at most 2 m^2 / N at root mean square m:
        Hoeffding's bound, at 2^-30 over the N coefficients of a ciphertext. Where the modulus
        allows more than the encoder's float64 resolves, 2^40 resolutions.
        """
        degree = self.poly_modulus_degree
        tail = math.sqrt(2 / degree * 2 * math.log(2 * degree * 2.0**30))
        data_bits = sum(self.coeff_mod_bit_sizes[:-1])  # of the modulus that ciphertexts have
        half_modulus = 2.0 ** (data_bits - 1 - self.log2_scale)
        return math.floor(min(half_modulus / tail, 2.0**40 * self.resolution))


STANDARD = Parameters(poly_modulus_degree=8192, coeff_mod_bit_sizes=(60, 40, 40, 60), log2_scale=40)
"""TenSEAL's tutorial setting: 81 bytes a value, about 1.5 s for a million on one core. Grid 2^-19,
|sum| to 2^21.

Error of sums of uploads in [-8, 8], std (and largest): 1: 1.25e-9 (9.6e-9 of 65536 values);
20: 5.6e-9 (3.8e-8 of 32768); 100: 1.24e-8 (9.4e-8 of 16384); 1000: 3.95e-8 (2.7e-7 of 8192).
Half a grid step is 763, 172, 77 and 24 times the std: at 1000 a value goes wrong once in 5e14.
"""

ADDITIVE = Parameters(poly_modulus_degree=4096, coeff_mod_bit_sizes=(41, 41), log2_scale=34)
"""For sums only: 25 bytes a value, about 0.7 s for a million on one core. Grid 2^-14, |sum| to 375.

One prime travels. Security is above STANDARD's: 82 bits of modulus where 128 bits of security
allow 109. Two thousand values share a ciphertext, so it also pads short vectors less.
Error of sums of uploads in [-8, 8], std (and largest): 1: 3.96e-8 (3.8e-7 of 32768 values);
20: 1.78e-7 (1.4e-6 of 16384); 100: 3.94e-7 (2.6e-6 of 8192); 1000: 1.27e-6 (9.4e-6 of 4096).
Half a grid step is 770, 172, 77 and 24 times the std: at 1000 a value goes wrong once in 5e14.
"""


def round_values(values: Tensor, parameters: Parameters) -> Tensor:
    """Float64 values on the grid: what `encrypt` sends, so sums of these are what comes back."""
    return (values.detach().cpu().double() / parameters.resolution).round() * parameters.resolution


# --- keys, encoded vectors and ciphertexts as bytes ----------------------------------------

CHECKSUM_BYTES = 4


@functools.lru_cache
def signs(slots: int) -> np.ndarray:
    """±1 per slot, the same for everyone: a constant vector would else be one huge coefficient."""
    bits = np.frombuffer(hashlib.shake_256(b"leakbench ckks signs").digest(slots // 8), np.uint8)
    signs = 1.0 - 2.0 * np.unpackbits(bits)
    signs.flags.writeable = False
    return signs


def encode(values: Tensor, parameters: Parameters) -> np.ndarray:
    """Encoded values [ciphertexts, slots]: on the grid, signed, zeros at the end.

    TenSEAL would repeat a short vector instead, which shows its length in the ciphertext's size.
    """
    on_grid = round_values(values, parameters).numpy()
    bad = np.flatnonzero(~(np.abs(on_grid) <= parameters.max_magnitude))
    if len(bad):
        raise ValueError(
            f"values must be finite and within ±{parameters.max_magnitude:g}, "
            f"got {float(values[bad[0]]):g} at {bad[0]}."
        )
    rows = np.zeros((-(-len(on_grid) // parameters.slots), parameters.slots))
    rows.reshape(-1)[: len(on_grid)] = on_grid
    return rows * signs(parameters.slots)


def header(parameters: Parameters) -> bytes:
    return json.dumps(asdict(parameters)).encode() + b"\n"


def open_context(public_context: bytes) -> tuple[Any, Parameters]:
    import tenseal

    header, _, body = public_context.partition(b"\n")
    return tenseal.context_from(body, n_threads=1), Parameters(**json.loads(header))


def check_payload(payload: bytes) -> bytes:
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
    return tenseal.ckks_vector_from(context, payload)


# --- who holds which key -------------------------------------------------------------------


class KeyServer:
    """Makes the key pair, hands out the public key, decrypts sums."""

    def __init__(self, parameters: Parameters = ADDITIVE) -> None:
        import tenseal

        self.parameters = parameters
        self._context = tenseal.context(
            tenseal.SCHEME_TYPE.CKKS,
            parameters.poly_modulus_degree,
            coeff_mod_bit_sizes=list(parameters.coeff_mod_bit_sizes),
            n_threads=1,
        )
        self._context.global_scale = 2.0**parameters.log2_scale

    @functools.cached_property
    def public_context(self) -> bytes:
        """Parameters and public key: what clients and the aggregation server get."""
        return header(self.parameters) + self._context.serialize(
            save_public_key=True,
            save_secret_key=False,
            save_galois_keys=False,
            save_relin_keys=False,
        )

    def decrypt(self, ciphertexts: Sequence[bytes], *, length: int) -> Tensor:
        """Exact sum of the rounded vectors behind `ciphertexts`, float64 [length].

        Raises ValueError for damaged ciphertexts, and sums that do not come back on the grid:
        beyond the modulus, of too many uploads, or of another key.
        """
        slots, resolution = self.parameters.slots, self.parameters.resolution
        if not ciphertexts:
            return torch.zeros(0, dtype=torch.float64)
        decoded = np.array([load_ciphertext(data, self._context).decrypt() for data in ciphertexts])
        values = np.round(decoded / resolution) * resolution
        off = np.abs(decoded - values).max()
        rms = np.sqrt(np.square(values).mean(axis=1)).max()
        # A sum that wrapped around the modulus is anywhere between the points of the grid.
        if not (off < 3 / 8 * resolution and rms <= self.parameters.max_magnitude):
            raise ValueError(
                f"Decrypted sum must lie within {3 / 8 * resolution:.3g} of its grid with a root "
                f"mean square of at most {self.parameters.max_magnitude:g} per ciphertext, got "
                f"{off:.3g} and {rms:.6g}: its values are too large, it has more than "
                f"{MOST_UPLOADS} uploads, or it is under another key."
            )
        return torch.from_numpy((values * signs(slots)).reshape(-1)[:length] + 0.0)


def add(uploads: Sequence[Sequence[bytes]], public_context: bytes) -> list[bytes]:
    """Ciphertexts of the sum, position by position, with the public key only.

    uploads: one list of ciphertexts per client, 1 to 1000 clients, equally long lists.
    Raises ValueError on damaged ciphertexts.
    """
    context, _ = open_context(public_context)
    sums = []
    for position in zip(*uploads, strict=True):
        total = load_ciphertext(position[0], context)
        for data in position[1:]:
            total.add_(load_ciphertext(data, context))
        sums.append(check_payload(total.serialize()))
    return sums


# --- encryption by the clients -------------------------------------------------------------


def encrypt(values: Tensor, public_context: bytes) -> list[bytes]:
    """Ciphertexts of values [n] rounded to the grid, n over slots of them, rounded up, fresh every
    time.

    Raises:
        ValueError: If a value is not finite or beyond `Parameters.max_magnitude`.
    """
    import tenseal

    context, parameters = open_context(public_context)
    rows = encode(values, parameters)
    return [check_payload(tenseal.ckks_vector(context, row.tolist()).serialize()) for row in rows]
