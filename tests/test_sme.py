"""SME: steps of all samples in place of local steps whose order nobody knows."""

import torch

from attacks.engine.evidence import Evidence
from attacks.engine.observation import parse_view
from attacks.engine.terms import Candidate
from attacks.inverting_gradients import SME, InvertingGradients
from bench.api import Context, Seen
from bench.contract.defense import Defense
from bench.data.dataset import Dataset
from bench.protocols.observe import Truth
from defenses.sparsifiers import TopK
from tests.conftest import context_for, network_for, require, seen_under
from tests.test_published_figures import errors


def play(
    digits: Dataset, defense: Defense | None = None, *, budget: int = 60, **work: int | float
) -> tuple[Seen, Truth, Context]:
    """One round of two LeNets that train on digits, labels granted."""
    network, defense = network_for(digits), defense or Defense()
    seen, truth = seen_under(digits, network, defense, clients=2, labels=True, **work)
    return seen, truth, context_for(digits, network, defense, budget=budget)


def misfits(seen: Seen, truth: Truth, ctx: Context, steps: int | None) -> list[float]:
    """Cosine distances of the true images, by where along the shift the steps begin."""
    evidence = Evidence(parse_view(seen), ctx, dtype=torch.float32, distance="cosine", steps=steps)
    hot = torch.nn.functional.one_hot(truth.y, ctx.network.classes).float()
    losses = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = None if steps is None else torch.full((len(hot), 1), share)
        x = truth.x.float()
        candidate = Candidate(x=x, y=hot, vectors=x.flatten(1), own=at)
        misfit = evidence.terms[0](candidate, torch.arange(len(hot)))
        losses.append(float(misfit.loss.mean()))
    return losses


def test_of_one_step_it_is_inverting_gradients(digits: Dataset) -> None:
    seen, _, _ = play(digits, batch=2)
    one, other = (
        attack.run(seen, play(digits, budget=20, batch=2)[2])
        for attack in (SME(), InvertingGradients())
    )
    assert torch.equal(require(one.images), require(other.images))


def test_the_true_images_suit_one_step_between_both_ends_and_three_steps_better(
    digits: Dataset,
) -> None:
    seen, truth, ctx = play(digits, batch=1, local_steps=2, local_epochs=10, lr=0.01)
    one, three = (misfits(seen, truth, ctx, steps) for steps in (1, 3))
    assert min(one[1:4]) < 0.7 * min(one[0], one[4])
    assert min(three) < 0.2 * min(one)


def test_images_are_found_from_ten_epochs_and_better_by_three_steps(digits: Dataset) -> None:
    seen, truth, ctx = play(digits, budget=200, batch=4, local_steps=2, local_epochs=10, lr=0.004)
    one, three = (
        float(errors(SME(steps=steps, restarts=0).run(seen, ctx), truth).mean()) for steps in (1, 3)
    )
    gray = float(truth.x.var())
    assert one < 0.6 * gray
    assert three < 0.5 * one


def test_hidden_coordinates_stay_as_broadcast(digits: Dataset) -> None:
    defense = TopK(keep=0.2)
    seen, _, ctx = play(digits, defense, budget=5, batch=2, local_steps=2, local_epochs=2)
    answer = SME().run(seen, ctx)
    assert not require(answer.failed).any()
    evidence = Evidence(parse_view(seen), ctx, dtype=torch.float32, distance="cosine", steps=1)
    assert evidence.uploads is not None
    assert evidence.uploads.shift is not None
    for name, there in evidence.uploads.observation.present.items():
        assert (evidence.uploads.shift[name][~there] == 0).all()
