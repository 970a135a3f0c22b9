"""NVFlare's SVTPrivacy: which values are sent, what noise they get, and what is claimed of it."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from bench.api import Facts, Message
from bench.privacy.ledger import account
from bench.seeding import generator
from defenses.sparse_vector import CensoredLaplace, SparseVector
from tests.uploads import make_client, uploads_of

VALUES = torch.linspace(-3, 3, 400)
LARGE: dict[str, Any] = {"fraction": 0.2, "epsilon": 30.0, "noise_var": 4.0, "gamma": 2.0, "tau": 1}


def sent(defense: SparseVector, seed: int, steps: int = 1) -> Message:
    client = make_client(rng={"defense": generator(seed, "test sparse vector")})
    return uploads_of(defense, {"p": steps * VALUES}, client, steps=steps)[0]


def by_nvflare(rng: np.random.Generator, *, clip: str, replace: bool) -> np.ndarray:
    """One upload as NVFlare 2.7 (clip after) and 2.8 make it: a loop of passes over the values."""
    given = LARGE
    w, gamma, epsilon = VALUES.double().numpy(), given["gamma"], given["epsilon"]
    n = int(np.ceil(len(w) * given["fraction"]))
    if clip == "after":
        rho = gamma * 2 / epsilon
        nu = gamma * 4 * n / (epsilon * (2 * n) ** (2 / 3))
    else:
        first = epsilon / (1 + (2 * n) ** (2 / 3))
        rho, nu = gamma / first, gamma * 2 * n / (epsilon - first)
    threshold = given["tau"] + rng.laplace(scale=rho)
    accepted, left = [], np.arange(len(w))
    while len(accepted) < n:
        above = np.abs(np.clip(w, -gamma, gamma))[left] + rng.laplace(scale=nu, size=len(left))
        accepted += left[above >= threshold].tolist()
        left = left[above < threshold]
    chosen = rng.choice(accepted, size=n, replace=replace)
    noise = rng.laplace(scale=gamma * 2 / given["noise_var"], size=n)
    out = np.full(len(w), np.nan)
    if clip == "after":
        out[chosen] = np.clip(w[chosen] + noise, -gamma, gamma)
    else:
        out[chosen] = np.clip(w[chosen], -gamma, gamma) + noise
    return out


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("clip", ["after", "before"])
def test_it_sends_what_nvflare_sends(clip: Any, replace: bool) -> None:
    """Of 400 uploads each: how many values, which ones, and what they are; an honest filter fails
    one of the four tests of a case with a chance of 4 in 10,000."""
    defense, rng = SparseVector(**LARGE, clip=clip, replace=replace), np.random.default_rng(0)
    theirs = np.stack([by_nvflare(rng, clip=clip, replace=replace) for _ in range(400)])
    ours = np.full_like(theirs, np.nan)
    for seed in range(400):
        part = sent(defense, seed, steps=2).parts["p"]
        where = part.presence().numpy()
        ours[seed, where] = part.values.double().numpy()[where] / 2
    for how in (
        lambda u: (~np.isnan(u)).sum(axis=1),
        lambda u: np.nanmean(np.where(np.isnan(u), np.nan, np.abs(VALUES.numpy())), axis=1),
        lambda u: np.nanmean(u * np.sign(VALUES.numpy()), axis=1),
        lambda u: np.nanstd(u, axis=1),
    ):
        assert stats.ks_2samp(how(ours), how(theirs)).pvalue > 1e-4


def test_the_law_is_the_density_of_what_is_sampled() -> None:
    """Within the limits, and as a chance on them, by 200,000 draws; scipy gives the density."""
    law = CensoredLaplace(of="update", scale=0.7, limit=1.0)
    noise = stats.laplace(scale=0.7)
    value = torch.tensor([[0.4, -1.6]], dtype=torch.float64)
    draws = law.sample(value.expand(200_000, 2), generator(0, "test law"))
    for place, w in enumerate(value[0].tolist()):
        for edge, chance in ((1.0, noise.sf(1 - w)), (-1.0, noise.cdf(-1 - w))):
            share = float((draws[:, place] == edge).double().mean())
            assert share == pytest.approx(chance, abs=0.005)  # 4 standard errors
            loss, _ = law.misfit(value[:, [place]], torch.tensor([[edge]]))
            assert float(loss) == pytest.approx(-np.log(chance))
        loss, _ = law.misfit(value[:, [place]], torch.full((1, 1), 0.3, dtype=torch.float64))
        assert float(loss) - np.log(1 / 1.4) == pytest.approx(-noise.logpdf(0.3 - w))
    at = torch.linspace(-3, 3, 25, dtype=torch.float64)[None] + 0.01
    seen = torch.tensor([1.0, -1.0, 0.3, 0.9, -0.2]).repeat(5)[None]
    up, down = (law.misfit(at + s, seen, 0.1)[0] for s in (1e-6, -1e-6))
    slope = (up - down) / 2e-6
    torch.testing.assert_close(law.misfit(at, seen, 0.1)[1], slope, rtol=1e-4, atol=1e-6)


def test_the_claim_is_the_sum_of_nvflares_budgets_and_only_a_clip_before_proves_one() -> None:
    facts = Facts(parameters=7_000_000, rounds=2)
    choice = 0.1 * 1_400_000 ** (2 / 3)
    after, before = (account(SparseVector(clip=c), facts) for c in ("after", "before"))  # type: ignore[arg-type]
    assert after.eps_claimed == pytest.approx(2 * (0.1 + choice + 700_000 * 0.1))
    assert round((after.eps_claimed or 0) / 2) == 71_252
    assert before.eps_claimed == pytest.approx(2 * (0.1 + 700_000 * 0.1))
    assert after.eps_record == np.inf
    first = 0.1 / (1 + 1_400_000 ** (2 / 3))
    assert before.eps_record == pytest.approx(2 * (first + 10 * (0.1 - first) + 70_000), rel=1e-6)


def test_with_hardly_any_noise_the_largest_values_are_sent_in_the_end() -> None:
    """NVFlare would take for ever, since too few values lie above the threshold."""
    defense = SparseVector(fraction=0.2, epsilon=1e12, noise_var=1e12, gamma=5.0, tau=2.9)
    part = sent(defense, 0).parts["p"]
    assert bool(part.presence()[VALUES.abs() > 2.9].any())
    torch.testing.assert_close(part.values[part.presence()], VALUES[part.presence()])
