"""Attacks where the answer is known: undefended networks leak."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.dlg import DLG
from attacks.engine.estimate import gradient_estimate
from attacks.engine.lbfgs import minimise
from attacks.engine.matching import Likelihood, Matcher
from attacks.idlg import IDLG
from attacks.ilrg import ILRG
from attacks.prior_only import PriorOnly
from bench.api import Defense, Seen
from bench.data import load
from bench.data.dataset import Dataset
from bench.metrics.score import floors, score
from bench.privacy.events import GaussianNoise, LaplaceNoise, SignPerturbation
from bench.protocols.observe import Truth
from defenses.noise import GaussianUpdate
from defenses.spm import SPM
from tests.conftest import context_for, network_for, seen_under


def scored(attack, dataset: Dataset, seen: Seen, truth: Truth, network, defense=None, **ctx):  # type: ignore[no-untyped-def]
    answer = attack.run(seen, context_for(dataset, network, defense or Defense(), **ctx))
    return score(
        answer, x=truth.x, y=truth.y, classes=dataset.classes, aux_x=dataset.aux_x,
        categorical=dataset.categorical,
    ).values  # fmt: skip


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# --- the optimiser ------------------------------------------------------------------------------


def rosenbrock(z: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    def one(z: Tensor) -> Tensor:
        return (100 * (z[1:] - z[:-1] ** 2) ** 2 + (1 - z[:-1]) ** 2).sum()

    grad, loss = torch.func.vmap(torch.func.grad_and_value(one))(z)
    return loss, grad


def test_lbfgs_solves_every_problem_of_a_batch() -> None:
    start = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = minimise(
        rosenbrock, start, stop=torch.full((16,), 1e-12).double(), max_evaluations=1000
    )
    solved = found.reached
    assert int(solved.sum()) >= 12  # Rosenbrock in 8 dimensions has a second, local minimum
    assert torch.allclose(found.x[solved], torch.ones(1, dtype=torch.float64), atol=1e-4)
    assert int(found.evaluations.max()) < 1000


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_lbfgs_does_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    start = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    stop = torch.full((4,), 1e-10).double()

    def scaled(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = rosenbrock(z, p)
        return scale * loss, scale * grad

    one = minimise(rosenbrock, start, stop=stop, max_evaluations=300)
    two = minimise(scaled, start, stop=scale * stop, max_evaluations=300)
    assert torch.equal(one.reached, two.reached)
    assert torch.allclose(one.x, two.x, atol=1e-4)


def test_a_problem_has_the_same_answer_whatever_the_batch_it_ran_in() -> None:
    start = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    stop = torch.full((6,), 1e-12).double()
    together = minimise(rosenbrock, start, stop=stop, max_evaluations=400)
    for k in range(6):
        alone = minimise(rosenbrock, start[k : k + 1], stop=stop[:1], max_evaluations=400)
        assert torch.allclose(alone.x[0], together.x[k], atol=1e-6)


def test_a_problem_that_is_not_finite_stops_as_diverged_and_harms_no_other() -> None:
    def poisoned(z: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        loss, grad = z.square().sum(dim=1), 2 * z
        return torch.where(p == 1, torch.nan, loss), grad

    found = minimise(poisoned, torch.ones(3, 4), stop=torch.full((3,), 1e-10), max_evaluations=50)
    assert found.diverged.tolist() == [False, True, False]
    assert found.reached.tolist() == [True, False, True]


# --- likelihoods --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "noise",
    [
        None,
        GaussianNoise(of="update", std=0.3),
        LaplaceNoise(of="update", scale=0.3),
        SignPerturbation(of="weights", keep=0.7, low=1.0, high=3.0),
        SignPerturbation(of="weights", keep=1.0, low=1.0, high=2.0),
    ],
)
def test_the_written_out_derivative_of_every_misfit_is_right(noise) -> None:  # type: ignore[no-untyped-def]
    rng = torch.Generator().manual_seed(0)
    value = torch.randn(200, dtype=torch.float64, generator=rng)
    sent = torch.randn(200, dtype=torch.float64, generator=rng).requires_grad_()
    likelihood = Likelihood(noise)
    terms, slopes = likelihood.misfit(sent, likelihood.prepare(value))
    (expected,) = torch.autograd.grad(terms.sum(), sent)
    assert torch.allclose(slopes, expected, rtol=1e-8, atol=1e-10)


def test_the_sign_misfit_is_the_mixture_of_both_signs() -> None:
    mechanism = SignPerturbation(of="weights", keep=0.7, low=1.0, high=3.0)
    sent, value = torch.tensor([0.4, -0.4]).double(), torch.tensor([0.9, 0.9]).double()
    likelihood = Likelihood(mechanism)
    terms, _ = likelihood.misfit(sent, likelihood.prepare(value))
    magnitude = 0.9 / 2
    spread = magnitude * mechanism.relative_std
    for k in range(2):
        kept = 0.7 * math.exp(-(((float(sent[k]) - magnitude) / spread) ** 2) / 2)
        flipped = 0.3 * math.exp(-(((float(sent[k]) + magnitude) / spread) ** 2) / 2)
        assert float(terms[k]) == pytest.approx(-math.log(kept + flipped))


# --- undefended networks leak -----------------------------------------------------------------


@pytest.mark.parametrize(("name", "least"), [("digits", 0.99), ("photos", 0.95)])
@pytest.mark.parametrize("attack", [DLG(), IDLG()], ids=["dlg", "idlg"])
def test_undefended_lenet_leaks_every_image_and_label_at_init(
    name: str, least: float, attack: DLG
) -> None:
    data = load(name, seed=0)
    network = network_for(data)
    seen, truth = seen_under(data, network, Defense())
    values = scored(attack, data, seen, truth, network)
    assert values["success"] == [1.0] * 8
    assert mean(values["ssim"]) >= least
    assert values["label_accuracy"] == [1.0] * 8


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_dlg_reads_fedsgd_and_fedavg_alike(digits: Dataset, protocol: str) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), protocol=protocol, clients=2)
    assert mean(scored(DLG(restarts=0), digits, seen, truth, network)["ssim"]) > 0.99


def test_dlg_rebuilds_both_images_of_two_local_steps(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=2, local_steps=2)
    values = scored(DLG(), digits, seen, truth, network, budget=400)
    floor = floors(x=truth.x, y=truth.y, classes=10, aux_x=digits.aux_x, aux_y=digits.aux_y)
    assert mean(values["ssim"]) > mean(floor["ssim"]) + 0.1


def test_granted_labels_are_used(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=2, labels=True)
    assert scored(DLG(), digits, seen, truth, network)["label_accuracy"] == [1.0, 1.0]
    assert scored(PriorOnly(), digits, seen, truth, network)["lnacc"] == [1.0, 1.0]


def test_dlg_rebuilds_tabular_records() -> None:
    data = load("breast_cancer", seed=0)
    network = network_for(data, "logistic")
    seen, truth = seen_under(data, network, Defense(), clients=4)
    values = scored(DLG(), data, seen, truth, network)
    assert "ssim" not in values
    assert max(values["mse"]) < 0.01


@pytest.mark.parametrize("model", ["lenet", "mlp3", "cnn_selective_shield", "cnn_spm"])
@pytest.mark.parametrize("dataset", ["digits", "photos"])
def test_ilrg_restores_all_counts_of_batches_of_eight_at_init(dataset: str, model: str) -> None:
    data = load(dataset, seed=0)
    network = network_for(data, model)
    seen, truth = seen_under(data, network, Defense(), batch=8)
    values = scored(ILRG(), data, seen, truth, network)
    assert values["leacc"] == [1.0] * 8
    assert values["lnacc"] == [1.0] * 8


# --- defended networks --------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["weights", "gradient"])
def test_a_defense_aware_attack_reads_through_spm(digits: Dataset, target: str) -> None:
    """Magnitudes are public and signs follow the broadcast, so the perturbation hides little."""
    network = network_for(digits)
    defense = SPM(epsilon=1.5, target=target)  # type: ignore[arg-type]
    seen, truth = seen_under(digits, network, defense, clients=4)
    values = scored(IDLG(), digits, seen, truth, network, defense)
    assert mean(values["ssim"]) > 0.9


def test_the_weights_estimate_takes_signs_from_the_broadcast(digits: Dataset) -> None:
    network = network_for(digits)
    defense = SPM(epsilon=3.9, variant="sign_rr")
    seen, _ = seen_under(digits, network, defense, clients=2)
    plain, _ = seen_under(digits, network, Defense(), clients=2)
    estimate, exact = gradient_estimate(seen), gradient_estimate(plain)
    for name in ("head.weight", "head.bias"):
        close = (estimate.values[name] - exact.values[name]).abs() < 1e-4
        assert float(close.double().mean()) > 0.8


def test_strong_noise_brings_attacks_to_the_floor_not_below(digits: Dataset) -> None:
    network = network_for(digits)
    defense = GaussianUpdate(noise_multiplier=1.0, clip_norm=1.0)
    seen, truth = seen_under(digits, network, defense)
    ours = mean(scored(DLG(), digits, seen, truth, network, defense)["ssim"])
    floor = mean(
        floors(x=truth.x, y=truth.y, classes=10, aux_x=digits.aux_x, aux_y=digits.aux_y)["ssim"]
    )
    assert abs(ours - floor) < 0.1


def test_a_clipped_update_is_matched_through_its_clip(digits: Dataset) -> None:
    network = network_for(digits)
    defense = GaussianUpdate(noise_multiplier=0.0, clip_norm=0.01)
    seen, truth = seen_under(digits, network, defense, clients=2)
    assert mean(scored(IDLG(), digits, seen, truth, network, defense)["ssim"]) > 0.9


# --- clear refusals -----------------------------------------------------------------------------


def test_attacks_say_why_they_do_not_apply(digits: Dataset) -> None:
    seen, _ = seen_under(digits, network_for(digits), Defense(), clients=2, batch=2)
    assert IDLG().applies(seen) == "the label of one sample is read, but 2 were used"
    silent = replace(seen, messages=())
    assert "no upload" in str(DLG().applies(silent))
    assert "no upload" in str(ILRG().applies(silent))
    nobody = replace(seen, clients=())
    assert "no client" in str(PriorOnly().applies(nobody))
    headless = tuple(
        m.with_parts({n: p for n, p in m.parts.items() if n != "head.bias"}) for m in seen.messages
    )
    assert "bias were not both sent" in str(ILRG().applies(replace(seen, messages=headless)))


def test_non_finite_uploads_are_refused_by_name(digits: Dataset) -> None:
    network = network_for(digits)
    seen, _ = seen_under(digits, network, Defense(), clients=2)
    seen.messages[1].parts["head.bias"].values[0] = torch.nan
    with pytest.raises(ValueError, match=r"'head\.bias' of client-\d holds non-finite"):
        Matcher(seen, context_for(digits, network, Defense()), dtype=torch.float64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"restarts": -1}, "restarts must be >= 0"),
        ({"history": 0}, "history must be >= 1"),
        ({"tolerance": 2.0}, r"tolerance must lie in \(0, 1\)"),
        ({"start": "black"}, "start must be gray, uniform or normal"),
        ({"precision": "half"}, "precision must be auto, float32 or float64"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DLG(**settings)  # type: ignore[arg-type]
