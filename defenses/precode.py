"""PRECODE: a random layer before the head, so that gradients depend on what nobody else knows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import linear, softplus

from bench.api import (
    Defense,
    Event,
    Facts,
    Loss,
    Mechanism,
    NetworkView,
    RandomLayer,
    State,
    Strength,
    Unprotected,
)
from bench.toolkit.batches import soft_cross_entropy
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import gaussian_like, uniform_like

ENCODER, DECODER, NOISE = "encoder", "decoder", "noise"
"""The two layers, and the draws, in names of the head's stage."""
_SAMPLES = 256
"""Of a step, at most: as many draws are made whatever its samples are."""
_TINY = 1e-12


@dataclass(kw_only=True, eq=False)
class Precode(Defense):
    """Puts a variational bottleneck before the head, which adds noise to what the head gets.

    A linear layer turns the features into means mu and, by softplus, deviations s of a code; a
    second one turns z = mu + s e, e from N(0, I) for every sample, back into as many features. To
    the loss comes `weight` times the divergence of N(mu, s^2) from N(0, I) in bits. Evaluation
    takes z = mu.

    Args:
        width: Of the code.
        weight: Of the divergence.

    Departures: under split protocols, where no client has the whole network, nothing is added. A
    step has 256 samples at most.
    Source: Scheliga, Maeder, Seeland, WACV 2022 (PRECODE), as in its code. With one sample, layers
    with a bias show what they got, however random that is: Balunovic et al., arXiv:2111.04706.
    """

    owns = frozenset({"variables", "gradient"})
    strength = Strength(setting="weight", weak=1e-6, strong=10.0)
    source = "Scheliga et al., WACV 2022 (PRECODE)"
    width: Annotated[int, Limits("values of the code", least=1, most=10_000)] = 256
    weight: Annotated[float, Limits("of the divergence", least=0)] = 1e-3

    def extra_parameters(
        self, network: NetworkView, params: State, stages: Sequence[str], rng: torch.Generator
    ) -> State:
        """Weights and biases of both layers, U(+-1/sqrt(inputs))."""
        weight, bias = network.head
        head, features = weight.rpartition(".")[0], params[weight].shape[1]
        if not {*network.cuts, head} <= set(stages):
            return {}
        if bias not in params:
            raise ValueError(f"precode needs a head with a bias, but there is no '{bias}'.")
        parameters: dict[str, Tensor] = {}
        for layer, outputs, inputs in (
            (ENCODER, 2 * self.width, features),
            (DECODER, features, self.width),
        ):
            for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
                uniform = uniform_like(params[weight].new_zeros(shape), rng=rng)
                parameters[f"{head}.{layer}.{name}"] = (2 * uniform - 1) / inputs**0.5
        return parameters

    def draw(self, variables: State, const: State, rng: torch.Generator) -> State:
        """e of every sample."""
        if _find_head(variables) is None:
            return {}
        like = next(iter(variables.values()))
        return {NOISE: gaussian_like(like.new_zeros(_SAMPLES, self.width), std=1.0, rng=rng)}

    def realize(self, variables: State, const: State, draw: State) -> State:
        """The head after both layers, which are one linear layer where z = mu."""
        head = _find_head(variables)
        if head is None:
            return variables
        weight, bias = _layer(variables, head)
        inner, shift = (t[: self.width] for t in _layer(variables, f"{head}.{ENCODER}"))
        outer, more = _layer(variables, f"{head}.{DECODER}")
        both = weight @ outer
        folded = {"weight": both @ inner, "bias": both @ shift + weight @ more + bias}
        own = (f"{head}.{ENCODER}.", f"{head}.{DECODER}.")
        network = {n: v for n, v in variables.items() if not n.startswith(own)}
        return network | {f"{head}.{n}": v for n, v in folded.items()}

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        head = _find_head(variables)
        if head is None:
            return grad(loss)(variables, x, y)
        noise = draw.get(NOISE, variables.get(f"{head}.{NOISE}"))
        if noise is not None and len(x) > len(noise):
            raise ValueError(f"precode draws for {len(noise)} samples of a step, got {len(x)}.")

        def total(variables: State, x: Tensor, y: Tensor) -> Tensor:
            *_, features, _ = loss.outputs(variables, x).values()
            encoded = linear(features, *_layer(variables, f"{head}.{ENCODER}"))
            mean, wide = encoded.split(self.width, dim=1)
            std = softplus(wide)
            code = mean if noise is None else mean + std * noise[: len(x)]
            decoded = linear(code, *_layer(variables, f"{head}.{DECODER}"))
            logits = linear(decoded, *_layer(variables, head))
            apart = mean.square() + std.square() - 2 * (std + _TINY).log() - 1
            bits = apart.sum(dim=1).mean() / (2 * math.log(2))
            return soft_cross_entropy(logits, loss.targets(y)) + self.weight * bits

        return grad(total)(variables, x, y)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (RandomLayer(of="gradient", name=ENCODER, noise=NOISE, width=self.width),)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (Unprotected(what="the update", why="its sensitivity to a sample is not bounded"),)


def _layer(variables: State, name: str) -> tuple[Tensor, Tensor]:
    """Weight and bias."""
    return variables[f"{name}.weight"], variables[f"{name}.bias"]


def _find_head(variables: State) -> str | None:
    """The stage with both layers, or None."""
    ending = f".{ENCODER}.weight"
    return next((n.removesuffix(ending) for n in variables if n.endswith(ending)), None)
