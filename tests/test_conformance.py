"""`leakbench check` of defenses: how deliberately broken ones are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.contract.defense import Client
from bench.contract.mechanisms import GaussianNoise
from bench.contract.messages import Part
from bench.registry import Registry
from bench.sandbox.conformance.findings import Finding
from bench.sandbox.conformance.leaks import _alike
from bench.sandbox.conformance.noise import Pair, check_independence, check_mechanisms
from bench.sandbox.conformance.playground import private_data
from bench.sandbox.conformance.plugins import check
from bench.seeding import generator
from tests.broken_plugins import BROKEN_DEFENSES, HEAD, check_text, failures

# --- broken plugins -------------------------------------------------------------------------------

SLOW = {
    "declares twice its noise", "proves by a Gaussian that is Laplace", "contradicts itself",
    "keeps other signs", "sends the labels", "lies about bits", "takes any number",
    "does something at zero strength", "halves its sensitivity", "clips elsewhere",
    "does not own its role", "has no annotation", "flips whole rows",
    "draws once per row", "sends a sample as bytes",
}  # fmt: skip
"""Kinds of mistakes of which another is found in the fast tests."""


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=pytest.mark.slow if w in SLOW else ()) for w in BROKEN_DEFENSES]
)
def test_a_broken_defense_is_found_with_its_hook(tmp_path: Path, what: str) -> None:
    name, hook, text = BROKEN_DEFENSES[what]
    wrong = failures(check_text(tmp_path, text))
    assert name in wrong, wrong
    assert wrong[name].hook == hook
    assert wrong[name].reason.endswith((".", ":"))
    assert wrong[name].change
    assert "Traceback" not in wrong[name].reason


def noise_finding(noise: Tensor, *, std: float, size: float) -> Finding:
    """What is found where `noise` [uploads, values] is added to values of that size."""
    signs = torch.ones(noise.shape[1])
    signs[::2] = -1
    pairs = [
        Pair(given={"w": Part(values=size * signs)}, sent={"w": Part(values=size * signs + n)})
        for n in noise
    ]
    (found,) = check_mechanisms((GaussianNoise(of="update", std=std),), lambda of: pairs)
    return found


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, "test noise"))


@pytest.mark.parametrize("std", [1e-5, 1e-4, 2e-4, 1e-3])
def test_noise_that_rounding_hides_is_never_passed(std: float) -> None:
    honest = noise_finding(std * drawn(60, 384), std=std, size=0.5)
    nothing = noise_finding(torch.zeros(60, 384), std=std, size=0.5)
    assert honest.status == "skipped"
    assert "cannot be told from rounding" in honest.reason
    assert nothing.status == ("skipped" if std < 5e-5 else "failed")


def test_independent_draws_pass_and_those_that_hang_together_do_not() -> None:
    free = drawn(60, 384)
    assert noise_finding(0.1 * free, std=0.1, size=0.5).status == "passed"
    rows = free[:, ::24].repeat_interleave(24, dim=1)
    columns = free[:, :24].repeat(1, 16)
    pairs = torch.stack([free[:30], -free[:30]], dim=1).flatten(0, 1)
    far = torch.cat([free[:30], free[:30]])
    sums = (free - free.roll(1, dims=0)) / 2**0.5
    for noise, which in (
        (rows, "neighbouring draws"), (columns, "draws 24 values apart"),
        (pairs, "draws 384 values apart"), (far, "draws 11520 values apart"),
        (sums, "draws 384 values apart"),
    ):  # fmt: skip
        # Few distinct draws have a level of their own, which is not what is tested here.
        found = noise_finding(0.1 * noise / noise.std(), std=0.1, size=0.5)
        assert found.status == "failed"
        assert f"declared independent, but {which} have a correlation" in found.reason


def test_honest_draws_of_every_law_are_hardly_ever_called_dependent() -> None:
    rng = generator(1, "test noise")
    for number in range(100):
        normal = torch.randn(5000, generator=rng)
        heavy = torch.empty(5000).exponential_(generator=rng) * normal.sign()
        rare = (torch.rand(23_000, generator=rng) < 0.05).double()
        for rest in (normal, heavy, rare, normal[: 10 + number]):
            check_independence(rest, "noise")  # raises nothing


@pytest.mark.parametrize("scale", [255, 1_000_000, -1000])
def test_private_samples_are_found_as_whole_numbers_and_masks_are_let_pass(scale: int) -> None:
    x, y = private_data(1)[0]
    client = Client(id="client-0", x=x, y=y, rng={})
    sent = x[2:4] * scale
    assert _alike(sent.long(), client)
    assert _alike(sent.abs().clamp(max=255).byte(), client) == (scale == 255)
    for mask in (x[:3] > 0.5, x[:3] > 2, torch.ones(3, 256, dtype=torch.int64), drawn(3, 256)):
        assert not _alike(mask, client)


def test_stacked_mechanisms_are_left_to_the_checks_of_each(registry: Registry) -> None:
    settings = {"none.a": 1}
    with pytest.raises(ValueError, match="setting"):
        check(registry, "defense", "none+spm", settings)
    settings = {"gaussian.noise_multiplier": 0.1, "gaussian.clip_norm": 1.0, "spm.epsilon": 1.0}
    found = check(registry, "defense", "gaussian+spm", settings)
    assert not failures(found)
    stacked = [f for f in found.findings if "one after another" in f.reason]
    assert [f.status for f in stacked] == ["skipped"] * 3


def test_a_crash_names_the_hook_and_the_error(tmp_path: Path) -> None:
    wrong = failures(check_text(tmp_path, BROKEN_DEFENSES["crashes"][2]))
    line = 1 + (HEAD + BROKEN_DEFENSES["crashes"][2]).split("\n").index("        return 1 / 0")
    assert wrong["runs under fedavg"].reason == (
        f"upload raised ZeroDivisionError: division by zero (broken.py, line {line})."
    )
