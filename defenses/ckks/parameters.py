"""Ring, moduli and fixed-point grid of CKKS keys, and what they can carry."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

MOST_UPLOADS = 1000
"""Uploads in one sum for which `Parameters.resolution` is chosen."""

MAX_MODULUS_BITS = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
"""Most bits of coefficient modulus by ring degree, for 128 bits of classical security and ternary
secrets: Homomorphic Encryption Security Standard (2018), Table 1, and SEAL's own limits."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Ring, moduli and fixed-point grid of one key pair.

    coeff_mod_bit_sizes: bits of each prime; the last is used up while encrypting and never sent.
    log2_scale: CKKS scale, in bits.
    Raises ValueError if 128 bits of security are not reached or the scale leaves no room.
    """

    poly_modulus_degree: int
    coeff_mod_bit_sizes: tuple[int, ...]
    log2_scale: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "coeff_mod_bit_sizes", tuple(self.coeff_mod_bit_sizes))
        if len(self.coeff_mod_bit_sizes) < 2:
            raise ValueError(
                f"coeff_mod_bit_sizes must name at least 2 primes (the last is not sent), "
                f"got {self.coeff_mod_bit_sizes}."
            )
        self.security_bits  # noqa: B018
        if self.max_magnitude < 1:
            raise ValueError(
                f"log2_scale must leave room for sums of magnitude 1 in {self.data_bits} bits of "
                f"modulus, got {self.log2_scale}."
            )

    @property
    def slots(self) -> int:
        """Values per ciphertext."""
        return self.poly_modulus_degree // 2

    @property
    def data_bits(self) -> int:
        """Bits of the modulus that ciphertexts travel under."""
        return sum(self.coeff_mod_bit_sizes[:-1])

    @property
    def security_bits(self) -> int:
        """128. Raises ValueError if the moduli have more bits than that allows."""
        limit = MAX_MODULUS_BITS.get(self.poly_modulus_degree)
        if limit is None:
            raise ValueError(
                f"poly_modulus_degree must be one of {sorted(MAX_MODULUS_BITS)}, "
                f"got {self.poly_modulus_degree}."
            )
        total = sum(self.coeff_mod_bit_sizes)
        if total > limit:
            raise ValueError(
                f"coeff_mod_bit_sizes must sum to at most {limit} bits at poly_modulus_degree "
                f"{self.poly_modulus_degree} for 128-bit security, got {total}."
            )
        return 128

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
        half_modulus = 2.0 ** (self.data_bits - 1 - self.log2_scale)
        return math.floor(min(half_modulus / tail, 2.0**40 * self.resolution))


STANDARD = Parameters(poly_modulus_degree=8192, coeff_mod_bit_sizes=(60, 40, 40, 60), log2_scale=40)
"""The paper's: 81 bytes a value, about 1.5 s for a million on one core. Grid 2^-19, |sum| to 2^21.

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


def ciphertexts_for(n: int, slots: int) -> int:
    """Number of ciphertexts that n values take."""
    return -(-n // slots)


def rounded(values: Tensor, parameters: Parameters) -> Tensor:
    """Float64 values on the grid: what `encrypt` sends, so sums of these are what comes back."""
    return (values.detach().cpu().double() / parameters.resolution).round() * parameters.resolution
