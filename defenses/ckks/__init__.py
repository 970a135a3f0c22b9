"""CKKS encryption of client vectors that a server adds without being able to read them.

Three parties. `KeyServer` makes the key pair and decrypts sums; clients hold the public key and
`encrypt`; `AggregationServer` holds the public key too and adds. Values are fixed-point, so that
the decrypted sum is exact: TenSEAL draws its own randomness, and unrounded sums would differ
between two runs with one seed. Rounding also takes away the noise of CKKS, which depends on the
secret key and should not be published (Li and Micciancio, Eurocrypt 2021).

    key_server = KeyServer()
    public = key_server.public_context()
    uploads = [encrypt(vector, public) for vector in vectors]
    total = key_server.decrypt(AggregationServer(public).add(uploads), length=len(vectors[0]))
    assert total.equal(sum(rounded(vector, ADDITIVE) for vector in vectors))
"""

from defenses.ckks.encryptor import Encryptor, encrypt, encrypt_all
from defenses.ckks.parameters import ADDITIVE, STANDARD, Parameters, ciphertexts_for, rounded
from defenses.ckks.parties import AggregationServer, KeyServer

__all__ = [
    "ADDITIVE",
    "STANDARD",
    "AggregationServer",
    "Encryptor",
    "KeyServer",
    "Parameters",
    "ciphertexts_for",
    "encrypt",
    "encrypt_all",
    "rounded",
]
