"""Attacks on what a split protocol shows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.decoder import Decoder
from attacks.dlg import DLG
from attacks.engine.channel import Channel
from attacks.engine.observation import gradient_estimate, parse_view, split_view
from attacks.idlg import IDLG
from attacks.ilrg import ILRG
from attacks.judge import Likelihood
from attacks.ridge import Ridge
from attacks.split_label import SplitLabel
from bench.contract.attack import Context, Reconstruction, Seen
from bench.contract.defense import Client, Defense
from bench.contract.messages import State
from bench.data.dataset import Dataset
from bench.models import Network
from bench.protocols.observe import Truth
from bench.registry import Registry
from bench.seeding import generator
from bench.toolkit.images import ssim
from defenses.dp_cutmix import DPCutMix
from defenses.noise import GaussianUpdate
from defenses.pm_sfl import PMSFL
from defenses.splitfed import SplitFedDP, SplitFedPM
from tests.conftest import context_for, network_for, rehearsing_context, require, seen_under
from tests.matchers import evidence_for
from tests.test_ilrg import counts_of
from tests.test_releases import similarity
from tests.test_shipped_plugins_conform import DEFENSES


def split_under(
    digits: Dataset, network: Network, defense: Defense | None = None, *, cut: str = "block1",
    labels: str = "private", **more: Any,
) -> tuple[Seen, Truth]:  # fmt: skip
    return seen_under(
        digits, network, defense or Defense(), protocol="splitfed",
        split={"cut": cut, "labels": labels}, **more,
    )  # fmt: skip


def context(digits: Dataset, network: Network, seen: Seen, *, budget: int = 200) -> Context:
    return rehearsing_context(digits, network, Defense(), seen, budget=budget)


@pytest.mark.parametrize("model", ["lenet", "cnn_selective_shield"])
@pytest.mark.parametrize("batch", [1, 8])
def test_split_label_reads_every_label_of_an_undefended_client(
    digits: Dataset, model: str, batch: int
) -> None:
    network = network_for(digits, model)
    seen, truth = split_under(digits, network, batch=batch)
    attack = SplitLabel()
    assert attack.applies(seen) is None
    answer = attack.run(seen, context_for(digits, network, Defense()))
    assert torch.equal(require(answer.labels), truth.y)
    assert torch.equal(require(answer.label_counts).sum(dim=1), torch.full((8,), batch))
    assert answer.notes == ()


class NoisesSlope(Defense):
    """Returns a gradient that is all noise."""

    def features_grad(self, g: Tensor, client: Client) -> Tensor:
        return torch.randn(g.shape, generator=client.rng["defense"])


def test_split_label_says_when_it_cannot_know(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = split_under(digits, network, NoisesSlope(), batch=8)
    answer = SplitLabel().run(seen, context_for(digits, network, NoisesSlope()))
    assert float((require(answer.labels) == truth.y).double().mean()) < 0.4
    assert "uncertain" in answer.notes[0]


def test_split_label_needs_the_channel(digits: Dataset) -> None:
    network = network_for(digits)
    seen, _ = split_under(digits, network, labels="shared")
    assert SplitLabel().applies(seen) == "no gradient by features returns to the server"


def test_labels_in_the_clear_are_disclosed_and_noised_ones_decoded(digits: Dataset) -> None:
    network = network_for(digits)
    seen, _ = split_under(digits, network, labels="shared", batch=8)
    assert ILRG().applies(seen) == "the labels are sent in the clear (disclosed)"

    class NoisesLabels(Defense):
        def labels(self, y: Tensor, client: Client) -> Tensor:
            return y + 0.05 * torch.randn(y.shape, generator=client.rng["defense"])

    seen, truth = split_under(digits, network, NoisesLabels(), labels="shared", batch=8)
    assert ILRG().applies(seen) is None
    found = ILRG().run(seen, context_for(digits, network, Defense())).label_counts
    assert torch.equal(require(found), counts_of(truth.y, 10))


def test_ilrg_reads_the_private_heads_update(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = split_under(digits, network, batch=8)
    found = ILRG().run(seen, context_for(digits, network, Defense())).label_counts
    assert torch.equal(require(found), counts_of(truth.y, 10))


@pytest.mark.parametrize("attack", [DLG(restarts=0), IDLG(restarts=0)])
@pytest.mark.parametrize("labels", ["private", "shared"])
def test_joint_matching_solves_undefended_clients(
    digits: Dataset, attack: DLG, labels: str
) -> None:
    network = network_for(digits)
    seen, truth = split_under(digits, network, labels=labels, clients=4)
    answer = attack.run(seen, context(digits, network, seen, budget=100))
    assert answer.images is not None
    assert answer.labels is not None
    similar = ssim(answer.images[:, 0], truth.x[:, 0])
    assert int((similar > 0.9).sum()) == 4
    assert torch.equal(answer.labels, truth.y)


def test_smashed_data_gives_a_whole_batch_away(digits: Dataset) -> None:
    """With activations per sample a batch of four is as open as one sample."""
    network = network_for(digits)
    seen, truth = split_under(digits, network, batch=4, clients=2)
    answer = IDLG(restarts=0).run(seen, context(digits, network, seen))
    similar = ssim(require(answer.images).flatten(0, 1), truth.x.flatten(0, 1))
    assert float((similar > 0.9).double().mean()) == 1.0


@pytest.mark.parametrize(
    "attack", [Ridge(rows=360), pytest.param(Decoder(rows=360), marks=pytest.mark.slow)]
)
def test_learned_inverters_beat_the_floor_on_smashed_data(digits: Dataset, attack: Any) -> None:
    network = network_for(digits)
    seen, truth = split_under(digits, network, batch=4)
    assert similarity(attack, seen, context(digits, network, seen, budget=100), truth) > 0.9


@pytest.mark.slow
def test_the_deeper_the_cut_the_weaker_ridge(digits: Dataset) -> None:
    network = network_for(digits)
    scores = []
    for cut in ("block1", "block3"):
        seen, truth = split_under(digits, network, cut=cut)
        scores.append(similarity(Ridge(rows=360), seen, context(digits, network, seen), truth))
    assert scores[0] >= scores[1]


def test_matching_through_masks_allows_for_what_they_leave_unexplained(digits: Dataset) -> None:
    """PM-SFL's first stage under random masks: without the activations' spread over masks, the
    mean mask's misfit is taken for signal and the attack reads 0.47 in place of 0.95; were they
    taken to move each on its own, 0.90."""
    network, defense = network_for(digits), PMSFL(lr_scale=300.0)
    seen, truth = split_under(digits, network, defense)
    ctx = context_for(digits, network, defense)
    evidence = evidence_for(seen, ctx)
    assert evidence.noisy
    assert evidence.spread is not None
    # By hand: the variance of fresh activations around the mean weights', on the same images.
    rng = generator(1, "masks")
    start = defense.receive(seen.before, seen.const)
    x = digits.aux_x[:64]
    centre = network.run(defense.mean_realize(start, seen.const), x, last="block1")
    drawn = [
        network.run(
            defense.realize(start, seen.const, defense.draw(start, seen.const, rng)), x,
            last="block1",
        )
        for _ in range(64)
    ]  # fmt: skip
    expected = (torch.stack(drawn) - centre).square().mean()
    assert float(evidence.spread.variance.mean()) == pytest.approx(float(expected), rel=0.15)
    assert similarity(DLG(restarts=0), seen, ctx, truth) > 0.93


@pytest.mark.parametrize("std", [0.0, 0.1])
def test_the_own_patches_of_a_mixed_client_are_read(digits: Dataset, std: float) -> None:
    """Noise on smashed data does not touch the bottom's update, which the returned slopes open."""
    network = network_for(digits)
    defense = DPCutMix(patches=16, group=2, clip=1.0, smashed_std=std, label_std=0.0)
    seen, truth = split_under(digits, network, defense, clients=4)
    ctx = context_for(digits, network, defense, budget=100)
    assert similarity(IDLG(restarts=0), seen, ctx, truth) > 0.85


def test_probabilities_sent_as_they_are_hide_nothing(digits: Dataset) -> None:
    """`splitfed_pm` sends theta itself: its change is the scores' step, exact."""
    network = network_for(digits, "mlp_spm")
    defense = SplitFedPM(lr_scale=1.0)
    seen, truth = seen_under(digits, network, defense, lr=0.5)
    estimate = gradient_estimate(parse_view(seen)[-1])
    start = defense.receive(seen.before, seen.const)
    x, y = truth.x[0], torch.nn.functional.one_hot(truth.y[0], 10).float()

    def loss(variables: State, x: Tensor, y: Tensor) -> Tensor:
        logits = network.apply(defense.mean_realize(variables, seen.const), x)
        return torch.nn.functional.cross_entropy(logits, y)

    # The step itself was taken under drawn masks, so that only its sign and size agree.
    expected = torch.func.grad(loss)(start, x, y)["head.weight"]
    found = estimate.values["head.weight"][0].float()
    assert float(torch.cosine_similarity(expected.flatten(), found.flatten(), dim=0)) > 0.5
    assert evidence_for(seen, context_for(digits, network, defense)).noise is None


def test_laplace_noise_and_an_l1_clip_on_smashed_data_are_modelled(digits: Dataset) -> None:
    network = network_for(digits)
    defense = SplitFedDP(epsilon=50.0, smashed_clip=100.0, update_clip=1.0)
    seen, _ = split_under(digits, network, defense)
    ctx = context_for(digits, network, defense)
    view = require(split_view(parse_view(seen)[-1], ctx, dtype=torch.float32))
    assert [type(m).__name__ for m in view.noises] == ["LaplaceNoise"]
    assert view.std == pytest.approx(2**0.5 * 2 * 100.0 / 50.0)
    q = torch.rand(3, 12, 8, 8) - 0.5
    assert torch.allclose(
        view.activations_sent(q).flatten(1).abs().sum(dim=1).max(), torch.tensor(100.0)
    )


@pytest.mark.slow
@pytest.mark.parametrize("defense", [SplitFedPM(lr_scale=300.0), PMSFL(lr_scale=10_000.0)])
def test_an_update_made_under_drawn_masks_is_not_taken_for_one_of_the_mean_weights(
    digits: Dataset, defense: Defense
) -> None:
    """Beside the mean weights' own misfit it would outweigh the smashed data, also where it is
    noised: SSIM 0.30 and 0.08."""
    network = network_for(digits, "cnn_selective_shield")
    seen, truth = split_under(digits, network, defense, lr=0.1)
    ctx = context_for(digits, network, defense, budget=100)
    assert similarity(DLG(restarts=0), seen, ctx, truth) > 0.65


@pytest.mark.slow
@pytest.mark.parametrize(
    "defense", [SplitFedPM(), pytest.param(PMSFL(lr_scale=10_000.0), marks=pytest.mark.slow)]
)
def test_under_drawn_masks_the_judge_knows_the_true_images(
    digits: Dataset, defense: Defense
) -> None:
    """By the smashed data: taken as many independent figures, the upload would let others win."""
    network = network_for(digits, "cnn_selective_shield")
    seen, truth = split_under(digits, network, defense, cut="block2", labels="shared")
    ctx = context_for(digits, network, defense)

    def judged(images: Tensor) -> Tensor:
        answer = Reconstruction(images=images, labels=truth.y)
        return require(Likelihood().losses(seen, ctx, answer))

    own, others = judged(truth.x), [judged(truth.x.roll(k, 0)) for k in range(1, 5)]
    assert float(torch.stack([own < other for other in others]).double().mean()) > 0.85


def test_of_all_images_that_smashed_data_may_be_of_the_likeliest_is_taken(digits: Dataset) -> None:
    """Patches of 16 pixels become tokens of 4 numbers, and the update is noised beyond use."""
    network = network_for(digits, "vit_small", dim=4)
    noised = GaussianUpdate(noise_multiplier=1.0, clip_norm=1.0)
    seen, truth = split_under(digits, network, noised, cut="embed", clients=3)
    assert similarity(IDLG(), seen, context_for(digits, network, noised), truth) > 0.97


@pytest.mark.parametrize(
    "name",
    ["none", "gaussian", "pm_sfl", "splitfed_pm", "splitfed_dp", "dp_sl", "dp_mixsl", "dp_cutmix",
     "cutmix", "cutout", "mixup", "lg_fedavg"],
)  # fmt: skip
def test_the_first_step_does_not_depend_on_how_many_follow(
    digits: Dataset, registry: Registry, name: str
) -> None:
    """So `ridge` plays one step, of which alone it reads smashed data, in place of all."""
    network = network_for(digits, "vit_small")
    defense = registry.defense(name, DEFENSES.get(name, {}))
    seen, _ = split_under(digits, network, defense, cut="embed", labels="shared", local_steps=3)
    few = digits.aux_x[:4, None], digits.aux_y[:4, None]
    made = []
    for steps in (3, 1):
        played = replace(seen, known={**seen.known, "batch": 1, "local_steps": steps})
        plays = rehearsing_context(digits, network, defense, seen).shadow(*few, release=played)
        sent = {m.sender: m.parts["smashed"] for m in plays.messages
                if m.kind == "smashed" and m.step == 0}  # fmt: skip
        assert len({m.step for m in plays.messages if m.kind == "smashed"}) == steps
        made.append(torch.stack([torch.where(p.presence(), p.values, 0.0) for p in sent.values()]))
    assert torch.equal(*made)
    channel = Channel(parse_view(seen), rehearsing_context(digits, network, defense, seen))
    assert channel.played.known["local_steps"] == 1
