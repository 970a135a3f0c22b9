"""Attacks where the answer is known: undefended networks leak."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attacks.dlg import DLG
from attacks.engine import deep_leakage
from attacks.engine.encoding import Encoding
from attacks.engine.observation import gradient_estimate, parse_view
from attacks.engine.terms import roughness
from attacks.idlg import IDLG
from attacks.ilrg import ILRG
from attacks.inverting_gradients import InvertingGradients, fade_variation
from attacks.prior_only import PriorOnly
from bench.contract.attack import Attack, Seen
from bench.contract.defense import Defense, Loss
from bench.contract.messages import Message, Part, State
from bench.data import load_dataset
from bench.data.dataset import Dataset
from bench.metrics.floors import floors
from bench.metrics.score import score
from bench.models import Network
from bench.protocols.local_training import LocalWork
from bench.protocols.observe import Truth
from bench.protocols.settings import ProtocolSettings
from bench.toolkit.images import ssim
from defenses.noise import GaussianUpdate
from defenses.spm import SPM
from tests.conftest import context_for, federation_of, network_for, observed_round, seen_under
from tests.matchers import matcher_for


def scored(attack, dataset: Dataset, seen: Seen, truth: Truth, network, defense=None, **ctx):  # type: ignore[no-untyped-def]
    answer = attack.run(seen, context_for(dataset, network, defense or Defense(), **ctx))
    return score(
        answer, x=truth.x, y=truth.y, classes=dataset.classes, aux_x=dataset.aux_x,
        categorical=dataset.categorical,
    ).values  # fmt: skip


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# --- undefended networks leak -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least"), [("digits", 0.98), pytest.param("photos", 0.95, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "attack",
    [DLG(), IDLG(), DLG(preset="paper"), IDLG(start="gray"), InvertingGradients()],
    ids=["dlg", "idlg", "dlg-paper", "idlg-gray", "inverting_gradients"],
)
def test_undefended_lenet_leaks_every_image_and_label_at_init(
    name: str, least: float, attack: Attack, request: pytest.FixtureRequest
) -> None:
    data = request.getfixturevalue(name)
    network = network_for(data)
    seen, truth = seen_under(data, network, Defense(), clients=4)
    values = scored(attack, data, seen, truth, network, budget=100 if name == "digits" else 200)
    assert values["success"] == [1.0] * 4
    assert mean(values["ssim"]) >= least
    assert values["label_accuracy"] == [1.0] * 4


@pytest.mark.parametrize(
    "attack",
    [IDLG(), *(pytest.param(a, marks=pytest.mark.slow) for a in (DLG(), InvertingGradients()))],
)
def test_several_samples_are_rebuilt_and_matched_one_to_one(
    digits: Dataset, attack: Attack
) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=2, batch=2)
    values = scored(attack, digits, seen, truth, network, budget=200)
    floor = floors(x=truth.x, y=truth.y, classes=10, aux_x=digits.aux_x, aux_y=digits.aux_y)
    assert mean(values["ssim"]) > mean(floor["ssim_class_mean"]) + 0.1
    assert values["label_accuracy"] == [1.0, 1.0]


def test_settings_replace_those_of_the_preset() -> None:
    each = DLG(), DLG(history=7), DLG(preset="paper"), DLG(preset="paper", history=7, restarts=1)
    assert [(a.history, a.restarts) for a in each] == [(30, 2), (7, 2), (100, 0), (7, 1)]


def seen_after_training(
    data: Dataset, network: Network, *, lr: float, epochs: int, rounds: int
) -> tuple[Seen, Truth]:
    federation = federation_of(data, network, Defense(), clients=4, each=200)
    work = LocalWork(protocol="fedavg", batch=32, lr=lr, local_epochs=epochs)
    for _ in range(rounds):
        federation.play(work, [c.id for c in federation.clients])
    settings = ProtocolSettings(name="fedavg", clients=4, local_steps=1, lr=lr)
    return observed_round(federation, data, settings, name="final")


@pytest.mark.slow
def test_a_public_start_beats_a_gray_one_on_a_trained_network(digits: Dataset) -> None:
    """A trained network's gradients point nowhere from gray: 3 of 8 against 8 of 8."""
    network = network_for(digits)
    seen, truth = seen_after_training(digits, network, lr=0.5, epochs=5, rounds=25)
    public = scored(DLG(restarts=0), digits, seen, truth, network)
    gray = scored(DLG(restarts=0, start="gray"), digits, seen, truth, network)
    assert mean(public["ssim"]) > 0.9
    assert mean(public["ssim"]) >= mean(gray["ssim"])


@pytest.mark.slow
def test_a_prior_that_fades_solves_what_the_distance_alone_does_not(digits: Dataset) -> None:
    """A trained vision transformer: .78 without, .99 with it."""
    network = network_for(digits, "vit_small")
    seen, truth = seen_after_training(digits, network, lr=0.1, epochs=3, rounds=15)
    alone = scored(IDLG(restarts=0), digits, seen, truth, network)
    whole = scored(IDLG(), digits, seen, truth, network)
    assert mean(whole["ssim"]) > mean(alone["ssim"]) + 0.1
    assert mean(whole["ssim"]) > 0.95


def test_what_no_candidate_explains_counts_as_noise(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that train from values of their own miss what is computed from the broadcast ones
    by far more than a small noise; to believe in the noise alone bends the images."""
    network, defense = network_for(digits), GaussianUpdate(noise_multiplier=1e-6, clip_norm=5.0)
    seen, truth = seen_under(digits, network, defense, clients=4, labels=True)
    rng = torch.Generator().manual_seed(0)
    for message in seen.messages:
        for part in message.parts.values() if message.sender in seen.clients else ():
            rms = part.values.square().mean().sqrt()
            part.values.add_(0.3 * rms * torch.randn(part.values.shape, generator=rng))
    found = mean(scored(IDLG(), digits, seen, truth, network, defense, budget=60)["ssim"])
    monkeypatch.setattr(deep_leakage, "leaves_unexplained", lambda *_: False)
    sure = mean(scored(IDLG(), digits, seen, truth, network, defense, budget=60)["ssim"])
    assert found > sure + 0.1


def test_smashed_data_is_matched_alone_and_jointly(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=2, batch=2)
    cut = [network.run(seen.before, x, last="block1") for x in truth.x]
    smashed = tuple(
        Message(kind="smashed", sender=c, receiver="server", round=0,
                parts={"smashed": Part(values=v)})
        for c, v in zip(seen.clients, cut, strict=True)
    )  # fmt: skip
    known = {**seen.known, "cut": "block1"}
    both = replace(seen, messages=seen.messages + smashed, known=known)
    alone = replace(seen, messages=smashed, known=known)
    assert DLG().applies(alone) is None
    apart = scored(DLG(), digits, alone, truth, network, budget=100)
    jointly = scored(DLG(), digits, both, truth, network, budget=100)
    assert min(mean(values["ssim"]) for values in (apart, jointly)) > 0.98
    assert jointly["label_accuracy"] == [1.0, 1.0]  # which smashed data alone cannot tell
    cut[0][0] = torch.nan
    with pytest.raises(ValueError, match=r"smashed data of client-\d holds non-finite"):
        DLG().run(alone, context_for(digits, network, Defense()))


def test_there_may_be_more_starts_than_public_candidates(digits: Dataset) -> None:
    network = network_for(digits)
    seen, _ = seen_under(digits, network, Defense(), clients=1)
    answer = InvertingGradients(restarts=39).run(
        seen, context_for(digits, network, Defense(), budget=2)
    )
    assert answer.evaluations == 40 + 40 * 2  # the candidates, then the steps


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_loss_scale_of_the_network_does_not_matter(digits: Dataset, scale: float) -> None:
    """A learning rate in the upload's unit: gradients a million times smaller or larger."""
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Scaled(scale), clients=2)
    values = scored(IDLG(restarts=0), digits, seen, truth, network, Scaled(scale), budget=100)
    assert values["success"] == [1.0, 1.0]


class Scaled(Defense):
    """Every gradient is multiplied by a public number."""

    owns = frozenset({"gradient"})

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        found = super().gradient(loss, variables, x, y, draw)
        return {n: self.scale * g for n, g in found.items()}


@pytest.mark.parametrize("attack", [DLG(restarts=0), IDLG(restarts=0), InvertingGradients()])
def test_a_zero_gradient_is_told_and_counted_as_failed(digits: Dataset, attack: Attack) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=3)
    for part in next(m for m in seen.messages if m.sender == seen.clients[1]).parts.values():
        part.values.zero_()
    answer = attack.run(seen, context_for(digits, network, Defense(), budget=20))
    assert answer.failed is not None
    assert answer.failed.tolist() == [False, True, False]
    assert "of 1 victims nothing was sent but zeros" in answer.notes
    scores = score(answer, x=truth.x, y=truth.y, classes=10, aux_x=digits.aux_x)
    assert scores.failed == 1


def test_attacks_run_on_dead_relus_and_train_mode_normalisation(digits: Dataset) -> None:
    network = network_for(digits, "cnn_selective_shield")
    seen, _ = seen_under(digits, network, Defense(), clients=2, batch=2, mode="train")
    dead = {n: v - 100 if n.endswith("linear.bias") else v for n, v in seen.before.items()}
    for view in (seen, replace(seen, before=dead)):
        for attack in (DLG(restarts=0), InvertingGradients(restarts=0)):
            answer = attack.run(view, context_for(digits, network, Defense(), budget=2))
            assert answer.images is not None
            assert bool(torch.isfinite(answer.images).all())


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_dlg_reads_fedsgd_and_fedavg_alike(digits: Dataset, protocol: str) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), protocol=protocol, clients=2)
    values = scored(DLG(restarts=0), digits, seen, truth, network, budget=100)
    assert mean(values["ssim"]) > 0.99


@pytest.mark.slow
def test_dlg_rebuilds_both_images_of_two_local_steps(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=2, local_steps=2)
    values = scored(DLG(), digits, seen, truth, network, budget=400)
    floor = floors(x=truth.x, y=truth.y, classes=10, aux_x=digits.aux_x, aux_y=digits.aux_y)
    assert mean(values["ssim"]) > mean(floor["ssim"]) + 0.1


def test_granted_labels_are_used(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=2, labels=True)
    values = scored(DLG(restarts=0), digits, seen, truth, network, budget=20)
    assert values["label_accuracy"] == [1.0, 1.0]
    assert scored(PriorOnly(), digits, seen, truth, network)["lnacc"] == [1.0, 1.0]


def test_dlg_rebuilds_tabular_records() -> None:
    data = load_dataset("breast_cancer", seed=0)
    network = network_for(data, "logistic")
    seen, truth = seen_under(data, network, Defense(), clients=4)
    values = scored(DLG(), data, seen, truth, network)
    assert "ssim" not in values
    assert max(values["mse"]) < 0.01


@pytest.mark.parametrize("model", ["lenet", "mlp3", "cnn_selective_shield", "cnn_spm"])
@pytest.mark.parametrize("dataset", ["digits", "photos"])
def test_ilrg_restores_all_counts_of_batches_of_eight_at_init(
    dataset: str, model: str, request: pytest.FixtureRequest
) -> None:
    data = request.getfixturevalue(dataset)
    network = network_for(data, model)
    seen, truth = seen_under(data, network, Defense(), batch=8)
    values = scored(ILRG(), data, seen, truth, network)
    assert values["leacc"] == [1.0] * 8
    assert values["lnacc"] == [1.0] * 8


# --- defended networks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defense", "budget"),
    [
        # Magnitudes are public and signs follow the broadcast, so the perturbation hides little.
        (SPM(epsilon=1.5, target="weights"), 50),
        (SPM(epsilon=1.5, target="gradient"), 50),
        (GaussianUpdate(noise_multiplier=0.0, clip_norm=0.01), 100),
    ],
)
def test_an_attack_that_knows_the_defense_reads_through_signs_and_a_clip(
    digits: Dataset, defense: Defense, budget: int
) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, defense, clients=2)
    values = scored(IDLG(), digits, seen, truth, network, defense, budget=budget)
    assert mean(values["ssim"]) > 0.9


def test_the_weights_estimate_takes_signs_from_the_broadcast(digits: Dataset) -> None:
    network = network_for(digits)
    defense = SPM(epsilon=3.9, variant="sign_rr")
    seen, _ = seen_under(digits, network, defense, clients=2)
    plain, _ = seen_under(digits, network, Defense(), clients=2)
    estimate, exact = (
        gradient_estimate(parse_view(seen)[-1]),
        gradient_estimate(parse_view(plain)[-1]),
    )
    for name in ("head.weight", "head.bias"):
        close = (estimate.values[name] - exact.values[name]).abs() < 1e-4
        assert float(close.double().mean()) > 0.8


def test_strong_noise_brings_attacks_to_the_mean_public_image_not_below(digits: Dataset) -> None:
    network = network_for(digits)
    defense = GaussianUpdate(noise_multiplier=1.0, clip_norm=1.0)
    seen, truth = seen_under(digits, network, defense)
    ours = mean(scored(DLG(), digits, seen, truth, network, defense, budget=100)["ssim"])
    public = digits.aux_x.mean(dim=0).expand_as(truth.x)
    assert abs(ours - float(ssim(public, truth.x).mean())) < 0.1


def test_total_variation_weighs_against_noise(digits: Dataset) -> None:
    """With a weight of 2e-4 the answer is the rough image that explains the noise: 0.3 lower."""
    network = network_for(digits)
    defense = SPM(epsilon=1.5, variant="sign_rr", target="gradient")
    seen, truth = seen_under(digits, network, defense, clients=4)
    light = InvertingGradients(restarts=0, total_variation=2e-4)
    ours, lightly = (
        mean(scored(attack, digits, seen, truth, network, defense, budget=100)["ssim"])
        for attack in (InvertingGradients(restarts=0), light)
    )
    assert ours > lightly + 0.1


def test_total_variation_fades_where_the_loss_is_small(digits: Dataset) -> None:
    encoding = Encoding(
        context_for(digits, network_for(digits), Defense()), samples=1, dtype=torch.float64
    )

    def squares(z: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return z.square().sum(dim=1), 2 * z

    draw = torch.rand(1, encoding.pixels, generator=torch.Generator().manual_seed(0))
    x = (draw.double() * torch.tensor([[0.1], [0.01]])).requires_grad_()
    below = torch.tensor([0.1, 0.1], dtype=torch.float64)
    total = squares(x, below)[0]
    assert total[1] < 0.1 < total[0]
    lowered = torch.stack([total[0], 0.1 * (1 + torch.log(total[1] / 0.1))])
    expected = lowered + 0.5 * roughness(x.view(2, *encoding.shape))
    loss, slope = fade_variation(squares, encoding, weight=0.5, below=below)(
        x.detach(), torch.arange(2)
    )
    assert torch.allclose(loss, expected)
    assert torch.allclose(slope, torch.autograd.grad(expected.sum(), x)[0])


# --- clear refusals -----------------------------------------------------------------------------


def test_attacks_say_why_they_do_not_apply(digits: Dataset) -> None:
    seen, _ = seen_under(digits, network_for(digits), Defense(), clients=2, batch=2)
    silent = replace(seen, messages=())
    for attack in (DLG(), IDLG(), InvertingGradients()):
        assert attack.applies(seen) is None
        assert "no upload" in str(attack.applies(silent))
    assert "no upload" in str(ILRG().applies(silent))
    nobody = replace(seen, clients=())
    assert "no client" in str(PriorOnly().applies(nobody))


def test_non_finite_uploads_are_refused_by_name(digits: Dataset) -> None:
    network = network_for(digits)
    seen, _ = seen_under(digits, network, Defense(), clients=2)
    seen.messages[1].parts["head.bias"].values[0] = torch.nan
    with pytest.raises(ValueError, match=r"'head\.bias' of client-\d holds non-finite"):
        matcher_for(seen, context_for(digits, network, Defense()), dtype=torch.float64)
