"""What attacks make of what a threat lets the server hear."""

import pytest
import torch

from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.registry import Registry
from defenses.fedml_he import FedMLHE
from defenses.mask_crypt import MaskCrypt
from defenses.selective_shield import SelectiveShield
from tests.conftest import context_for, network_for, seen_under


@pytest.mark.parametrize(
    "defense",
    [
        SelectiveShield(tau=0.05, rho=0.5, noise_multiplier=0.0, clip_norm=1000.0),
        FedMLHE(share=0.1),
        MaskCrypt(share=0.1),
    ],
    ids=lambda d: type(d).__name__,
)
@pytest.mark.parametrize(
    ("attack", "batch"), [pytest.param("analytic", 1, marks=pytest.mark.slow), ("ilrg", 8)]
)
def test_of_several_clients_these_attacks_read_nothing_of_the_next_model(
    digits: Dataset, registry: Registry, defense: Defense, attack: str, batch: int
) -> None:
    """So the suite `selective_shield`, whose attacks they are, measures both threats alike."""
    network, answers = network_for(digits, "mlp3"), []
    for hears in ("addressed", "every_broadcast"):
        seen, _ = seen_under(
            digits, network, defense, clients=4, victims=4, batch=batch, hears=hears
        )
        context = context_for(digits, network, defense)
        answers.append(registry.attack(attack, {}).run(seen, context))
    for part in ("images", "label_counts"):
        one, other = (getattr(answer, part) for answer in answers)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
