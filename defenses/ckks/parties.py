"""Who holds which key: the key server opens sums, the aggregation server adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from defenses.ckks.parameters import ADDITIVE, MOST_UPLOADS, Parameters, ciphertexts_for
from defenses.ckks.wire import checked, header, load_ciphertext, open_context, signs


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

        Raises ValueError for damaged ciphertexts, a wrong number of them, and sums that do not
        come back on the grid: beyond the modulus, of too many uploads, or of another key.
        """
        slots, resolution = self.parameters.slots, self.parameters.resolution
        if len(ciphertexts) != ciphertexts_for(length, slots):
            raise ValueError(
                f"{length} values must come in {ciphertexts_for(length, slots)} ciphertexts of "
                f"{slots} slots, got {len(ciphertexts)}."
            )
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


class AggregationServer:
    """Adds ciphertexts with the public key only.

    Raises ValueError if the context holds a secret key or is not one of `KeyServer`'s.
    """

    def __init__(self, public_context: bytes) -> None:
        self._context, self.parameters = open_context(public_context)
        if self._context.is_private():
            raise ValueError(
                "public_context must hold no secret key (the aggregation server may not decrypt), "
                "got one that does."
            )

    def add(self, uploads: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Ciphertexts of the sum, position by position.

        uploads: one list of ciphertexts per client, 1 to 1000 clients, equally long lists.
        Raises ValueError on other numbers and on damaged ciphertexts.
        """
        if not 1 <= len(uploads) <= MOST_UPLOADS:
            raise ValueError(f"uploads must be 1 to {MOST_UPLOADS} lists, got {len(uploads)}.")
        lengths = [len(upload) for upload in uploads]
        if len(set(lengths)) > 1:
            raise ValueError(f"uploads must have equally many ciphertexts each, got {lengths}.")
        sums = []
        for position in zip(*uploads, strict=True):
            total = load_ciphertext(position[0], self._context)
            for data in position[1:]:
                total.add_(load_ciphertext(data, self._context))
            sums.append(checked(total.serialize()))
        return sums

    def decrypt(self, ciphertexts: Sequence[bytes], *, length: int) -> NoReturn:
        """Always PermissionError."""
        raise PermissionError("The aggregation server holds no secret key and cannot decrypt.")
