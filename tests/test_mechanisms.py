"""What the public mechanisms say of themselves: laws, draws, estimates."""

from __future__ import annotations

import math

import torch

from bench.api import (
    BernoulliMask,
    Clip,
    GaussianNoise,
    LaplaceNoise,
    Mechanism,
    SignPerturbation,
    without_law,
)

F64 = torch.float64


def test_the_usual_likelihoods_are_those_that_attacks_descend() -> None:
    """Written out value by value, as an oracle of the vectorised forms."""
    sent, seen = torch.tensor([0.3, -0.2], dtype=F64), torch.tensor([0.1, 0.25], dtype=F64)
    rests = [0.2, -0.45]
    gaussian = GaussianNoise(of="update", std=0.5).misfit(sent, seen)[0]
    assert gaussian.tolist() == [r * r / (2 * 0.25) for r in rests] or torch.allclose(
        gaussian, torch.tensor([r * r / 0.5 for r in rests], dtype=F64)
    )
    laplace = LaplaceNoise(of="update", scale=0.5)
    rounded = [(math.hypot(r, 0.05) - 0.05) / 0.5 for r in rests]
    found = laplace.misfit(sent, seen, laplace.usual_softness)[0]
    torch.testing.assert_close(found, torch.tensor(rounded, dtype=F64))
    signs = SignPerturbation(of="weights", keep=0.8, low=1.0, high=2.0)
    expected = []
    for u, v in zip(sent.tolist(), seen.tolist(), strict=True):
        centre, spread = v / 1.5, abs(v) / 1.5 * signs.relative_std
        modes = [0.8 * math.exp(-(((u - centre) / spread) ** 2) / 2),
                 0.2 * math.exp(-(((u + centre) / spread) ** 2) / 2)]  # fmt: skip
        expected.append(-math.log(sum(modes)))
    found = signs.misfit(sent, seen, signs.usual_softness)[0]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64))
    bits = torch.tensor([1.0, 0.0], dtype=F64)
    p = torch.sigmoid(sent)
    found = BernoulliMask(of="weights", clip=0.1).misfit(sent, bits)[0]
    torch.testing.assert_close(found, torch.stack([-p[0].log(), -(1 - p[1]).log()]))


def test_a_random_mechanism_of_a_plugin_without_law_is_named_as_such() -> None:
    class Cauchy(Mechanism):
        pass

    del Mechanism.kinds["Cauchy"]
    unknown = Cauchy(of="update")
    assert unknown.random
    assert not unknown.known_law
    assert without_law([Clip(of="update", norm=1.0), GaussianNoise(of="update", std=1.0)]) is None
    reason = without_law([GaussianNoise(of="update", std=1.0), unknown])
    assert reason is not None
    assert "Cauchy gives no likelihood" in reason
