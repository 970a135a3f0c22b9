"""SPM against reference values and by Monte Carlo."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.seeding import generator
from defenses.spm import SPM, Variant, keep_probability, moments, perturb, scale_range
from tests.oracle import assert_reference, reference_cases
from tests.oracle import spm as spm_oracle
from tests.uploads import assert_moments, assert_share, tensor, upload_of

ORACLE = reference_cases("spm")
COMPUTE: dict[str, Any] = {
    "spm_params": lambda i: spm_oracle.mechanism_constants(i["eps"]),
    "spm_variances": lambda i: spm_oracle.variances(i["eps"], i["w"]),
    "spm_thm3": lambda i: spm_oracle.theorem3(i["eps"], uploads=i["n"], beta=i["beta"], w=i["w"]),
    "spm_growth": lambda i: spm_oracle.growth_constants(i["eps"], i["n"]),
    "spm_apply": lambda i: {"w_bar": _applied(i)},
}
APPLIED: dict[str, Variant] = {
    "spm_apply_as_printed_uniform": "printed",
    "spm_apply_unbiased_uniform": "unbiased",
    "spm_apply_sign_rr": "sign_rr",
}
VARIANTS: tuple[Variant, ...] = ("printed", "unbiased", "sign_rr")


def _applied(inputs: dict[str, Any]) -> list[float]:
    w, u_sign, u_mag = (tensor(inputs[k]) for k in ("w", "u_sign", "u_mag"))
    return perturb(
        w, u_sign, u_mag, epsilon=inputs["eps"], variant=APPLIED[inputs["name"]]
    ).tolist()


@pytest.mark.parametrize("case", ORACLE, ids=lambda c: c["name"])
def test_reference_values(case: dict[str, Any]) -> None:
    assert_reference(case, COMPUTE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("target", ["weights", "gradient"])
@pytest.mark.parametrize("epsilon", [0.3, 1.5, 3.9])
def test_mean_and_variance_of_uploads_match_the_closed_form(
    variant: Variant, target: str, epsilon: float
) -> None:
    """Of releases of a weight or gradient through the defense's real upload."""
    values = torch.full((200_000,), -0.4)
    defense = SPM(epsilon=epsilon, variant=variant, target=target)  # type: ignore[arg-type]
    upload = upload_of(
        defense, values if target == "weights" else -values, generator(0, "mc", variant)
    )
    assert upload.kind == target
    factor = upload.parts["p"].values.double() / -0.4
    mean, variance = moments(epsilon, variant)
    assert_moments(factor, mean=mean, variance=variance)
    assert_share(factor < 0, 1 - keep_probability(epsilon))


@pytest.mark.parametrize("epsilon", [0.3, 0.6, 1.5, 1.9, 3.9])
def test_the_printed_mechanism_is_biased_by_e_over_e_plus_1(epsilon: float) -> None:
    means = [moments(epsilon, v)[0] for v in VARIANTS]
    assert means == pytest.approx([keep_probability(epsilon), 1.0, 1.0])


@given(
    epsilon=st.floats(0.01, 20), w=st.floats(-2, 2), u=st.floats(0, 0.999), m=st.floats(0, 0.999)
)
@settings(deadline=None)
def test_uploads_stay_in_the_published_range_and_zero_stays_zero(
    epsilon: float, w: float, u: float, m: float
) -> None:
    for variant in VARIANTS:
        low, high = scale_range(epsilon, variant)
        out = perturb(
            torch.tensor(w, dtype=torch.float64), torch.tensor(u), torch.tensor(m),
            epsilon=epsilon, variant=variant,
        )  # fmt: skip
        size = abs(float(out))
        assert low * abs(w) * (1 - 1e-6) - 1e-300 <= size <= high * abs(w) * (1 + 1e-6) + 1e-300


def test_large_budgets_neither_overflow_nor_perturb() -> None:
    low, high = scale_range(700.0, "unbiased")
    assert (low, high) == (1.0, 1.0)
    assert keep_probability(700.0) == 1.0
