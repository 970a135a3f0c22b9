"""The gradients that P candidate clients would compute, as one differentiable batch.

`Layered` is the fast way: the clients share the broadcast weights, so one forward and one
backward pass over all samples give each layer's input and output gradient, and a weight gradient
is their product per client. `Simulated` is the general way: the defense's own local steps, one
vmapped program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from attacks.engine.observation import SplitView
from bench.api import Defense, Layer, NetworkView, State
from bench.toolkit.batches import soft_cross_entropy
from bench.toolkit.losses import NetworkLoss, SplitLoss

_SOFTNESS = 0.1
"""Of the direction in which a client's variables move (see `Defense.direction`)."""
_BATCHES, _SEED = 16, 0
"""Public batches, each under a draw of its own, that show how far directions hold under draws."""
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class ObservedTraining:
    """One observed local training of a client.

    Attributes:
        start: Variables that it starts from.
        const: Constants of the defense's variables.
        buffers: Normalisation statistics.
        steps: Local steps.
        batch: Samples of a step.
        lr: Learning rate.
        mode: Of normalisation, train or eval.
    """

    start: State
    const: State
    buffers: State
    steps: int
    batch: int
    lr: float
    mode: str

    def played(self, network: NetworkView, defense: Defense) -> dict[str, Any]:
        """How a loss runs the network: with weights without the defense's randomness."""
        return {
            "network": network,
            "realize": lambda variables: defense.mean_realize(variables, self.const),
            "mode": self.mode,
            "buffers": self.buffers,
        }

    def mean_direction(
        self,
        defense: Defense,
        gradient: Callable[[int, State], State],
        variables: State,
        sure: State | None = None,
    ) -> dict[str, Tensor]:
        """Mean over the steps of the directions that the defense makes of gradients.

        gradient: Of a step, counted from 0, by the variables at its start. sure: Factors by name.
        """
        memory: State = {}
        sure = sure or {}
        total: dict[str, Tensor] = {}
        for step in range(self.steps):
            slopes = gradient(step, variables)
            moved, memory = defense.direction(slopes, memory, step, self.const, _SOFTNESS)
            moved = {n: sure[n] * m if n in sure else m for n, m in moved.items()}
            total = {n: total[n] + g for n, g in moved.items()} if step else dict(moved)
            if step + 1 < self.steps:
                variables = {n: v - self.lr * moved[n] for n, v in variables.items()}
        return {n: g / self.steps for n, g in total.items()}


class Simulated:
    """Mean direction over the local steps, each on its own slice of the candidate samples: the
    gradient, unless the defense makes another of it.

    The network runs with weights without the defense's randomness. Directions that are no linear
    function of a gradient, such as its signs, are then surer than under drawn weights: those of a
    tensor are as much shorter as public batches show.

    Attributes:
        public: Samples [N, *shape] and labels int64 [N], or None for directions as they are.
    """

    def __init__(
        self,
        network: NetworkView,
        defense: Defense,
        training: ObservedTraining,
        public: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.network, self.defense, self.training = network, defense, training
        self.loss = NetworkLoss(**training.played(network, defense))
        self.public = public

    @cached_property
    def sureness(self) -> dict[str, Tensor]:
        """Factors in [0, 1] by name: the regression of directions under drawn weights on those
        without draws. Empty where the direction is the gradient, or nothing is drawn."""
        training, start = self.training, self.training.start
        if self.public is None or "direction" not in self.defense.owns:
            return {}
        like = next(iter(start.values()))
        cpu, const = ({n: v.cpu() for n, v in s.items()} for s in (start, training.const))
        rng = torch.Generator().manual_seed(_SEED)
        hot = torch.nn.functional.one_hot(self.public[1], self.network.classes)
        both = {n: v.new_zeros(2) for n, v in start.items()}
        for batch in torch.randint(len(hot), (_BATCHES, training.batch), generator=rng):
            draw = {n: v.to(like) for n, v in self.defense.draw(cpu, const, rng).items()}
            if not draw:
                return {}
            x, y = (t[batch.to(t.device)].to(like) for t in (self.public[0], hot))
            realize = partial(self.defense.realize, const=training.const, draw=draw)
            loss = replace(self.loss, realize=realize)
            grads = (self.defense.gradient(one, start, x, y, {}) for one in (loss, self.loss))
            real, _ = self.defense.direction(next(grads), {}, 0, training.const)
            mean, _ = self.defense.direction(next(grads), {}, 0, training.const, _SOFTNESS)
            for name, value in mean.items():
                both[name] += torch.stack([(real[name] * value).sum(), value.square().sum()])
        return {n: (t[0] / t[1].clamp_min(_TINY)).clamp(0, 1) for n, t in both.items()}

    def __call__(self, x: Tensor, y: Tensor, moves: State | None = None) -> dict[str, Tensor]:
        """x [P, K, *shape], soft labels y [P, K, C] -> [P, ...] by name. moves: From the common
        start to each client's own [P, ...]; None: nowhere."""
        _ = self.sureness  # before vmap
        return vmap(self._one)(x, y, {} if moves is None else dict(moves))

    def _one(self, x: Tensor, y: Tensor, moves: State) -> dict[str, Tensor]:
        training, start = self.training, self.training.start
        per_epoch = -(-len(x) // training.batch)

        def gradient(step: int, variables: State) -> State:
            first = step % per_epoch * training.batch  # an epoch after the other
            part = slice(first, first + training.batch)
            return self.defense.gradient(self.loss, variables, x[part], y[part], {})

        variables = {**start, **{n: start[n] + move for n, move in moves.items()}}
        return training.mean_direction(self.defense, gradient, variables, self.sureness)


class Returned:
    """Mean direction, as of `Simulated`, of the client's first stages over the steps of a split
    protocol, each on the same samples.

    The server returned the loss's gradient by the smashed data, so it needs no loss and, but for
    a defense that trains those stages with labels of its own, no label: the gradient of
    <smashed(x), slopes>.

    Attributes:
        start: Variables of those stages.
        slopes: What the server returned to the victims [V, steps, B, ...].
    """

    def __init__(
        self, network: NetworkView, defense: Defense, training: ObservedTraining, view: SplitView
    ) -> None:
        assert view.slopes is not None
        self.defense, self.slopes, self.training = defense, view.slopes, training
        self.start = view.below(network, training.start)
        self.loss = SplitLoss(**training.played(network, defense), cut=view.cut, sent=view.sent)

    def __call__(self, x: Tensor, y: Tensor, victims: Tensor) -> dict[str, Tensor]:
        """x [P, K, *shape], soft labels y [P, K, C], int64 victims [P] -> [P, ...] by name."""
        return vmap(self._one)(x, self.slopes[victims], y)

    def _one(self, x: Tensor, slopes: Tensor, y: Tensor) -> dict[str, Tensor]:
        def gradient(step: int, variables: State) -> State:
            given = (slopes[step] * len(slopes[step]), y)
            return self.defense.gradient(self.loss, variables, (x,), given, {})  # type: ignore[arg-type]

        return self.training.mean_direction(self.defense, gradient, self.start)


class Layered:
    """One local step of the shared weights; see `layered` for when it may be used."""

    def __init__(self, network: NetworkView, training: ObservedTraining) -> None:
        self.network, self.training = network, training

    def __call__(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x [P, K, *shape], soft labels y [P, K, C] -> mean gradients [P, ...] by name."""
        training, problems = self.training, len(x)
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            logits, layers = self.network.trace(
                training.start, x.flatten(0, 1), mode=training.mode, buffers=training.buffers
            )
            loss = soft_cross_entropy(logits, y.flatten(0, 1)) * problems  # mean over K, sum over P
            outputs = [layer.output for layer in layers]
            deltas = torch.autograd.grad(loss, outputs, create_graph=True)
        found: dict[str, Tensor] = {}
        for layer, delta in zip(layers, deltas, strict=True):
            weight, bias = f"{layer.name}.weight", f"{layer.name}.bias"
            gradients = {weight: _weight_gradient(layer, delta, problems)}
            if bias in _names(layer):
                d = delta.unflatten(0, (problems, -1))
                channel = d.ndim - 1 if layer.kind == "linear" else 2
                gradients[bias] = d.sum(dim=[i for i in range(1, d.ndim) if i != channel])
            for name, value in gradients.items():
                found[name] = found[name] + value if name in found else value
        return found


def layered(network: NetworkView, defense: Defense, training: ObservedTraining) -> Layered | None:
    """The fast way, or None where it does not hold: several local steps, a defense with its own
    variables, gradient or direction, samples tied by batch normalisation, or an unknown kind of
    layer."""
    own = {"variables", "gradient", "direction"} & defense.owns
    if training.steps > 1 or own or (training.mode == "train" and network.normalises):
        return None
    sample = next(iter(training.start.values())).new_zeros(1, *network.shape)
    with torch.no_grad():
        _, layers = network.trace(
            training.start, sample, mode=training.mode, buffers=training.buffers
        )
    covered = {name for layer in layers if _supported(layer) for name in _names(layer)}
    return Layered(network, training) if covered == set(training.start) else None


def _names(layer: Layer) -> list[str]:
    return [f"{layer.name}.{n}" for n, _ in layer.module.named_parameters(recurse=False)]


def _supported(layer: Layer) -> bool:
    module = layer.module
    if isinstance(module, nn.Conv2d):
        plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
        return plain and isinstance(module.padding, tuple)
    return layer.kind in ("linear", "affine")


def _weight_gradient(layer: Layer, delta: Tensor, problems: int) -> Tensor:
    """[P, ...] of the gradient by the layer's output [P * K, ...], grouped by problem."""
    module = layer.module
    if isinstance(module, nn.Conv2d):
        assert isinstance(module.padding, tuple)
        patches = nn.functional.unfold(
            layer.input, module.kernel_size, padding=module.padding, stride=module.stride
        )
        each = delta.flatten(2) @ patches.mT
        return each.unflatten(0, (problems, -1)).sum(dim=1).unflatten(2, module.weight.shape[1:])
    if layer.kind == "affine":
        d, a = (t.unflatten(0, (problems, -1)) for t in (delta, layer.input))
        return (d * a).sum(dim=[i for i in range(1, d.ndim) if i != 2])
    a = layer.input.reshape(problems, -1, layer.input.shape[-1])
    return delta.reshape(problems, -1, delta.shape[-1]).mT @ a


def as_vector(gradients: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """[P, ...] by name -> [P, D] in the order of `names`."""
    return torch.cat([gradients[n].flatten(1) for n in names], dim=1)
