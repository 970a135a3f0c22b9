"""What clients keep to themselves, estimated beside their images."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attacks.engine import deep_leakage, matching
from attacks.engine.observation import parse_view
from attacks.engine.private import with_private_parts
from attacks.judge import Likelihood
from bench.contract.attack import Reconstruction, Seen
from bench.data.dataset import Dataset
from bench.models import Network
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import Truth
from bench.protocols.settings import ProtocolSettings
from bench.registry import discover
from bench.toolkit.images import ssim
from defenses.ms_pafl import MSPAFL, private_coordinates
from tests.conftest import context_for, federation_of, network_for, observed_round


class Trained(NamedTuple):
    network: Network
    defense: MSPAFL
    seen: Seen
    truth: Truth


@pytest.fixture(scope="module")
def trained(digits: Dataset) -> Trained:
    """Clients after twenty rounds, without noise to speak of."""
    network = network_for(digits)
    defense = MSPAFL(epsilon=1e9, noise="analytic", clip_norm=100.0, check_in=0.7)
    run = federation_of(digits, network, defense, clients=10, each=80)
    work = LocalWork(protocol="fedavg", batch=16, lr=0.5, local_steps=25)
    for _ in range(20):
        run.play(work, [])
    settings = ProtocolSettings(name="fedavg", clients=10, local_steps=1, lr=0.5)
    seen, truth = observed_round(run, digits, settings, name="final", victims=4)
    return Trained(network, defense, seen, truth)


def similarity(digits: Dataset, case: Trained, seen: Seen) -> float:
    ctx = context_for(digits, case.network, case.defense, budget=200)
    found = discover().attack("idlg", {}).run(seen, ctx).images
    assert found is not None
    return float(ssim(found.flatten(0, 1), case.truth.x.flatten(0, 1)).mean())


@pytest.mark.slow
def test_a_surrogate_of_the_private_half_opens_a_trained_clients_image(
    digits: Dataset, trained: Trained
) -> None:
    """With the first values in its place, twenty rounds on, idlg gets nowhere near."""
    network, defense, seen, _ = trained
    (own,) = with_private_parts(parse_view(seen), context_for(digits, network, defense))
    kept = private_coordinates(seen.before, 0.5)
    for name, value in own.before.items():
        assert torch.equal(value[~kept[name]], seen.before[name][~kept[name]])
    assert any(not torch.equal(own.before[n], v) for n, v in seen.before.items())
    blind = [replace(m, round=0) for m in seen.messages]  # taken for the first round
    other = similarity(digits, trained, replace(seen, messages=tuple(blind)))
    assert similarity(digits, trained, seen) > other + 0.4


@pytest.mark.slow
def test_what_a_client_kept_is_found_together_with_its_image(
    digits: Dataset, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the surrogate alone images are bent until they explain the rest."""
    together = similarity(digits, trained, trained.seen)
    for module in (deep_leakage, matching):
        monkeypatch.setattr(module, "keeping", lambda evidence: [])
    monkeypatch.setattr(deep_leakage, "leaves_unexplained", lambda *_: False)
    alone = similarity(digits, trained, trained.seen)
    assert together > alone + 0.1
    assert together > 0.8


@pytest.mark.slow
def test_the_judge_believes_the_true_images(
    digits: Dataset, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are judged with the own values that suit them best."""
    network, defense, seen, truth = trained
    ctx = context_for(digits, network, defense)

    def judged(images: Tensor) -> float:
        answer = Reconstruction(images=images, labels=truth.y)
        losses = Likelihood().losses(seen, ctx, answer)
        assert losses is not None
        return float(losses.sum())

    true = judged(truth.x)
    assert true < judged(truth.x.flip(0)) - 100
    assert true < judged(torch.full_like(truth.x, 0.5)) - 100
    monkeypatch.setattr(matching, "suit", lambda *_: None)
    assert true < judged(truth.x) - 100
