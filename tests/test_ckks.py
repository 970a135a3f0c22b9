"""CKKS primitives: exact sums, who can decrypt, what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from defenses.ckks import (
    ADDITIVE,
    STANDARD,
    KeyServer,
    Parameters,
    add,
    encrypt,
    load_ciphertext,
    open_context,
    round_values,
)

PRESETS = {"standard": STANDARD, "additive": ADDITIVE}


class Parties:
    """Key server and public context of one preset."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.key_server = KeyServer(parameters)
        self.public = self.key_server.public_context

    def total(self, vectors: list[Tensor]) -> Tensor:
        uploads = [encrypt(vector, self.public) for vector in vectors]
        return self.key_server.decrypt(add(uploads, self.public), length=len(vectors[0]))


@pytest.fixture(scope="module")
def both() -> dict[str, Parties]:
    return {name: Parties(parameters) for name, parameters in PRESETS.items()}


@pytest.fixture(params=list(PRESETS))
def parties(request: pytest.FixtureRequest, both: dict[str, Parties]) -> Parties:
    return both[request.param]


def uniform(n: int, seed: int, limit: float = 8.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(n, generator=rng, dtype=torch.float64) - 1) * limit


def exact_sum(vectors: list[Tensor], parameters: Parameters) -> Tensor:
    return torch.stack([round_values(vector, parameters) for vector in vectors]).sum(0)


@pytest.mark.parametrize("length", ["0", "1", "50", "slots", "slots + 1", "10000"])
def test_sum_is_the_exact_sum_of_rounded_vectors(parties: Parties, length: str) -> None:
    slots = parties.parameters.slots
    n = {"slots": slots, "slots + 1": slots + 1}.get(length) or int(length)
    vectors = [uniform(n, seed) for seed in range(20 if n == 50 else 5)]
    total = parties.total(vectors)
    assert total.dtype == torch.float64
    assert total.equal(exact_sum(vectors, parties.parameters))


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(sorted(PRESETS)),
    st.integers(0, 40).flatmap(
        lambda n: st.lists(
            st.lists(st.floats(-90, 90), min_size=n, max_size=n), min_size=1, max_size=4
        )
    ),
)
def test_sum_is_exact_for_any_short_vectors(
    both: dict[str, Parties], preset: str, rows: list[list[float]]
) -> None:
    vectors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    expected = exact_sum(vectors, PRESETS[preset])
    assert both[preset].total(vectors).equal(expected)


def test_error_has_the_stated_standard_deviation(parties: Parties) -> None:
    """Theory to a tenth: a slot's own deviation makes 16 ciphertexts count as few samples."""
    parameters = parties.parameters
    zeros = encrypt(torch.zeros(16 * parameters.slots), parties.public)
    context = parties.key_server._context
    noise = torch.tensor(
        [load_ciphertext(c, context).decrypt() for c in zeros], dtype=torch.float64
    )
    assert float(noise.std()) == pytest.approx(parameters.error_std(1), rel=0.1)


def test_margin_of_a_thousand_uploads_is_at_least_20_standard_deviations() -> None:
    for parameters in PRESETS.values():
        assert math.log2(parameters.resolution).is_integer()
        assert 20 <= parameters.resolution / 2 / parameters.error_std(1000) < 40


def test_every_slot_at_the_largest_magnitude_comes_back(parties: Parties) -> None:
    largest = parties.parameters.max_magnitude
    for values in (
        torch.full((parties.parameters.slots,), largest, dtype=torch.float64),
        -uniform(parties.parameters.slots, 0).sign() * largest,
    ):
        assert parties.total([values]).equal(values)


@pytest.mark.parametrize("times", [2, 3, 8, 100])
def test_a_sum_beyond_the_largest_magnitude_is_refused(parties: Parties, times: int) -> None:
    values = torch.full((parties.parameters.slots,), parties.parameters.max_magnitude)
    upload = encrypt(values, parties.public)
    total = add([upload] * times, parties.public)
    with pytest.raises(ValueError, match="Decrypted sum must"):
        parties.key_server.decrypt(total, length=len(values))


def test_encrypt_sends_values_over_slots_ciphertexts_rounded_up(parties: Parties) -> None:
    slots = parties.parameters.slots
    for n, count in ((0, 0), (1, 1), (slots, 1), (slots + 1, 2), (3 * slots - 7, 3)):
        assert len(encrypt(torch.zeros(n), parties.public)) == count


def test_aggregation_server_cannot_decrypt(parties: Parties) -> None:
    data = encrypt(torch.ones(3), parties.public)
    context, _ = open_context(parties.public)
    assert not context.has_secret_key()
    assert not context.has_galois_keys()
    assert not context.has_relin_keys()
    with pytest.raises(ValueError, match="secret_key"):
        load_ciphertext(data[0], context).decrypt()
    with pytest.raises(ValueError, match="Secret key"):
        context.data.secret_key()


def test_presets_have_128_bit_security() -> None:
    """Most bits of modulus by ring degree: Homomorphic Encryption Security Standard, Table 1."""
    limits = {4096: 109, 8192: 218}
    for preset in PRESETS.values():
        assert sum(preset.coeff_mod_bit_sizes) <= limits[preset.poly_modulus_degree]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e12])
def test_a_value_that_cannot_be_sent_is_named(parties: Parties, bad: float) -> None:
    values = torch.zeros(7, dtype=torch.float64)
    values[4] = bad
    with pytest.raises(ValueError, match=r"values must be finite.*got .* at 4\.") as error:
        encrypt(values, parties.public)
    assert f"{bad:g}" in str(error.value)


def test_two_encryptions_of_one_vector_differ(parties: Parties) -> None:
    values = uniform(100, 0)
    first, second = (encrypt(values, parties.public)[0] for _ in range(2))
    same = sum(a == b for a, b in zip(first, second, strict=False)) / min(len(first), len(second))
    assert same < 0.5  # zstd's tables and the words' zero bytes are alike, the rest is not


def test_size_is_within_its_budget_whatever_the_values_and_their_number(parties: Parties) -> None:
    slots, largest = parties.parameters.slots, parties.parameters.max_magnitude
    vectors = [torch.zeros(1), torch.zeros(slots), torch.full((slots,), largest), uniform(slots, 0)]
    sizes = [len(encrypt(vector, parties.public)[0]) for vector in vectors]
    assert max(sizes) < 1.01 * min(sizes)
    assert max(sizes) / slots <= {STANDARD: 85, ADDITIVE: 25}[parties.parameters]


def test_damaged_ciphertexts_are_refused(parties: Parties) -> None:
    good = encrypt(uniform(10, 0), parties.public)[0]
    damaged = [b"", b"junk", good[:-1], good[1:], good + b"x"]
    for at in (0, 10, 100, len(good) // 2, len(good) - 1):
        damaged.append(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    for bad in damaged:
        with pytest.raises(ValueError, match="Ciphertext must be"):
            parties.key_server.decrypt([bad], length=10)
        with pytest.raises(ValueError, match="Ciphertext must be"):
            add([[good], [bad]], parties.public)


def test_ciphertexts_of_another_key_are_refused(both: dict[str, Parties]) -> None:
    for parties in both.values():
        ours = encrypt(torch.ones(5), parties.public)
        with pytest.raises(ValueError, match="another key"):
            KeyServer(parties.parameters).decrypt(ours, length=5)
