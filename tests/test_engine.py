"""The attacks' engine: gradients, likelihoods, chunks."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attacks.dlg import DLG
from attacks.engine.clients import Layered, ObservedTraining, Simulated, as_vector, layered_gradient
from attacks.engine.optimisers import in_chunks
from attacks.idlg import IDLG
from bench import models
from bench.api import (
    BernoulliMask,
    Clip,
    Defense,
    GaussianNoise,
    LaplaceNoise,
    Loss,
    Mechanism,
    SignPerturbation,
    SmashedNoise,
    State,
)
from bench.data.dataset import Dataset
from bench.seeding import generator
from bench.toolkit import memory
from tests.conftest import context_for, network_for, require, seen_under
from tests.matchers import matcher_for

DOUBLE = torch.float64

# --- gradients ------------------------------------------------------------------------------------

NETWORKS = {
    "lenet": ((3, 16, 16), {}),
    "cnn_selective_shield": ((1, 16, 16), {}),
    "cnn_spm": ((1, 16, 16), {}),
    "mlp3": ((1, 16, 16), {}),
    "resnet18": ((3, 16, 16), {"width": 4}),
}


def work_of(name: str, *, batch: int) -> tuple[models.Network, ObservedTraining]:
    shape, options = NETWORKS[name]
    network = models.build(name, shape=shape, classes=5, settings=options)
    params = {n: v.double() for n, v in network.init(generator(0, "engine")).items()}
    public = torch.rand(32, *shape, dtype=DOUBLE, generator=generator(1, "engine"))
    buffers = network.calibrate(params, public)
    return network, ObservedTraining(
        start=params, const={}, buffers=buffers, steps=1, batch=batch, lr=0.1, mode="eval"
    )


def candidates(network: models.Network, problems: int, samples: int) -> tuple[Tensor, Tensor]:
    rng = generator(2, "engine")
    x = torch.rand(problems, samples, *network.shape, dtype=DOUBLE, generator=rng)
    y = torch.randn(problems, samples, network.classes, dtype=DOUBLE, generator=rng).softmax(-1)
    return x.requires_grad_(), y.requires_grad_()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_layered_gradients_and_their_derivatives_are_the_simulated_ones(
    name: str, samples: int
) -> None:
    network, work = work_of(name, batch=samples)
    fast = layered_gradient(network, Defense(), work)
    assert isinstance(fast, Layered)
    x, y = candidates(network, 2, samples)
    names = list(work.start)
    one = as_vector(fast(x, y), names)
    two = as_vector(Simulated(network, Defense(), work)(x, y), names)
    assert torch.allclose(one, two, rtol=1e-9, atol=1e-12)
    slope = torch.randn(one.shape, dtype=DOUBLE, generator=generator(3, "engine"))
    for mine, theirs in zip(
        torch.autograd.grad(one, (x, y), slope), torch.autograd.grad(two, (x, y), slope),
        strict=True,
    ):  # fmt: skip
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-12)


class OwnGradient(Defense):
    owns = frozenset({"gradient"})

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        return {n: 2 * g for n, g in super().gradient(loss, variables, x, y, draw).items()}


def test_layered_gradients_are_used_only_where_they_hold() -> None:
    network, work = work_of("cnn_selective_shield", batch=2)
    assert layered_gradient(network, Defense(), work) is not None
    assert layered_gradient(network, OwnGradient(), work) is None
    assert layered_gradient(network, Defense(), replace(work, steps=2)) is None
    assert layered_gradient(network, Defense(), replace(work, mode="train")) is None
    with pytest.raises(ValueError, match="cannot be traced in train mode"):
        network.trace(work.start, torch.zeros(2, *network.shape).double(), mode="train")


# --- the objective --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"distance": "cosine"}, {"distance": "cosine", "total_variation": 0.1},
])  # fmt: skip
@pytest.mark.parametrize("held", [True, False])
def test_the_objectives_derivative_is_right(
    digits: Dataset, options: dict[str, object], held: bool
) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=2)
    matcher = matcher_for(seen, context_for(digits, network, Defense()), dtype=DOUBLE, **options)  # type: ignore[arg-type]
    labels = truth.y if held else None
    evaluate = matcher.evaluator(torch.arange(2), labels)
    size = matcher.encoding.pixels + (0 if held else matcher.encoding.classes)
    z = torch.rand(2, size, dtype=DOUBLE, generator=generator(0, "slope"))
    along = torch.randn(2, size, dtype=DOUBLE, generator=generator(1, "slope"))
    _, gradient = evaluate(z, torch.arange(2))
    step = 1e-6
    ahead, _ = evaluate(z + step * along, torch.arange(2))
    behind, _ = evaluate(z - step * along, torch.arange(2))
    assert torch.allclose((ahead - behind) / (2 * step), (gradient * along).sum(dim=1), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"distance": "cosine"}])
def test_the_truth_has_no_loss(digits: Dataset, options: dict[str, object]) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=3)
    matcher = matcher_for(seen, context_for(digits, network, Defense()), dtype=DOUBLE, **options)  # type: ignore[arg-type]
    y = torch.nn.functional.one_hot(truth.y, 10).double()
    right = matcher.losses(truth.x.double(), y, torch.arange(3))
    wrong = matcher.losses(truth.x.double(), y, torch.tensor([1, 2, 0]))
    assert bool((right < 1e-10 * wrong).all())


def test_withheld_coordinates_do_not_count(digits: Dataset) -> None:
    network = network_for(digits)
    seen, truth = seen_under(digits, network, Defense(), clients=2)
    for message in seen.messages:
        for name, part in message.parts.items():
            if message.sender in seen.clients:
                hidden = torch.zeros_like(part.values, dtype=torch.bool)
                hidden.view(-1)[::3] = True
                part.values[hidden] = 1e3  # must never be read
                message.parts[name] = replace(part, present=~hidden)  # type: ignore[index]
    for distance in ("likelihood", "cosine"):
        matcher = matcher_for(
            seen, context_for(digits, network, Defense()), dtype=DOUBLE, distance=distance
        )  # type: ignore[arg-type]
        y = torch.nn.functional.one_hot(truth.y, 10).double()
        loss = matcher.losses(truth.x.double(), y, torch.arange(2))
        assert bool((loss < 1e-9 * matcher.evidence.square).all())


@pytest.mark.slow
@pytest.mark.parametrize("attack", [DLG(restarts=0), IDLG(restarts=1)], ids=["dlg", "idlg"])
def test_an_attack_gives_a_victim_the_same_answer_whatever_the_chunk(
    digits: Dataset, attack: DLG, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_for(digits)
    seen, _ = seen_under(digits, network, Defense(), clients=5)
    whole = attack.run(seen, context_for(digits, network, Defense(), budget=30))
    monkeypatch.setattr(memory, "_CPU_BYTES", 1)  # one problem at a time
    pieces = attack.run(seen, context_for(digits, network, Defense(), budget=30))
    assert torch.allclose(require(whole.images), require(pieces.images), atol=1e-2)
    assert whole.evaluations == pieces.evaluations


# --- chunks ---------------------------------------------------------------------------------------


def halving(fits: int, refuse: Callable[[], Exception]) -> tuple[list[int], list[int]]:
    done: list[int] = []
    sizes: list[int] = []

    def work(part: slice) -> None:
        sizes.append(part.stop - part.start)
        if sizes[-1] > fits:
            raise refuse()
        done.extend(range(part.start, part.stop))

    in_chunks(work, 13, bytes_each=1, device=torch.device("cpu"))
    return done, sizes


@pytest.mark.parametrize("refuse", [
    lambda: torch.OutOfMemoryError("CUDA out of memory."), lambda: MemoryError(),
    lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
])  # fmt: skip
@given(fits=st.integers(1, 20))
@settings(max_examples=20, deadline=None)
def test_chunks_are_halved_until_they_fit_and_nothing_is_lost(
    refuse: Callable[[], Exception], fits: int
) -> None:
    done, sizes = halving(fits, refuse)
    assert done == list(range(13))
    assert all(later <= earlier for earlier, later in itertools.pairwise(sizes))


def test_what_never_fits_and_what_is_no_shortage_are_raised() -> None:
    with pytest.raises(MemoryError):
        halving(0, MemoryError)
    with pytest.raises(RuntimeError, match="shapes differ"):
        halving(0, lambda: RuntimeError("shapes differ"))


# --- likelihoods ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "noise",
    [
        Clip(of="update", norm=1.0),
        GaussianNoise(of="update", std=0.3),
        SmashedNoise(of="smashed", std=0.3),
        LaplaceNoise(of="update", scale=0.3),
        SignPerturbation(of="weights", keep=0.7, low=1.0, high=3.0),
        SignPerturbation(of="weights", keep=1.0, low=1.0, high=2.0),
        BernoulliMask(of="weights", clip=0.1),
    ],
)
def test_the_written_out_derivative_of_every_misfit_is_right(noise: Mechanism) -> None:
    rng = torch.Generator().manual_seed(0)
    value = torch.randn(1, 200, dtype=DOUBLE, generator=rng)
    sent = torch.randn(1, 200, dtype=DOUBLE, generator=rng).requires_grad_()
    terms, slopes = noise.prepared(value, noise.softness()).misfit(sent)
    (expected,) = torch.autograd.grad(terms.sum(), sent)
    assert torch.allclose(slopes, expected, rtol=1e-8, atol=1e-10)


def test_the_sign_misfit_is_the_mixture_of_both_signs() -> None:
    """Well inside of the factors' interval only the sign tells, and how long the interval is."""
    mechanism = SignPerturbation(of="weights", keep=0.7, low=1.0, high=3.0)
    sent, value = torch.tensor([0.4, -0.4]).double(), torch.tensor([0.9, 0.9]).double()
    terms = mechanism.misfit(sent[None], value[None], mechanism.softness())[0][0]
    smeared = 0.9 * math.hypot(1e-3, mechanism.softness())
    for term, chance in zip(terms.tolist(), (0.7, 0.3), strict=True):
        assert term == pytest.approx(-math.log(chance * smeared / (2 * 0.4)), rel=1e-5)
