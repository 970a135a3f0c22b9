"""What P candidate clients with given samples would compute and send, before anything is drawn.

Gradients are one differentiable batch. `Layered` is the fast way: the clients share the broadcast
weights, so one forward and one backward pass over all samples give each layer's input and output
gradient, and a weight gradient is their product per client. `Simulated` is the general way: the
defense's own local steps, one vmapped program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from attacks.engine.observation import Release, SplitView
from attacks.engine.optimisers import column
from bench.api import Context, Defense, Kind, Layer, Mechanism, NetworkView, State
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

    def how_to_play(self, network: NetworkView, defense: Defense) -> dict[str, Any]:
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
        self.loss = NetworkLoss(**training.how_to_play(network, defense))
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
        self.loss = SplitLoss(
            **training.how_to_play(network, defense), cut=view.cut, sent=view.activations_sent
        )

    def __call__(self, x: Tensor, y: Tensor, victims: Tensor) -> dict[str, Tensor]:
        """x [P, K, *shape], soft labels y [P, K, C], int64 victims [P] -> [P, ...] by name."""
        return vmap(self._one)(x, self.slopes[victims], y)

    def _one(self, x: Tensor, slopes: Tensor, y: Tensor) -> dict[str, Tensor]:
        def gradient(step: int, variables: State) -> State:
            given = (slopes[step] * len(slopes[step]), y)
            return self.defense.gradient(self.loss, variables, (x,), given, {})  # type: ignore[arg-type]

        return self.training.mean_direction(self.defense, gradient, self.start)


class Layered:
    """One local step of the shared weights; see `layered_gradient` for when it may be used."""

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
        totals: dict[str, Tensor] = {}
        for layer, delta in zip(layers, deltas, strict=True):
            weight, bias = f"{layer.name}.weight", f"{layer.name}.bias"
            gradients = {weight: _weight_gradient(layer, delta, problems)}
            if bias in names_of(layer):
                d = delta.unflatten(0, (problems, -1))
                channel = d.ndim - 1 if layer.kind == "linear" else 2
                gradients[bias] = d.sum(dim=[i for i in range(1, d.ndim) if i != channel])
            for name, value in gradients.items():
                totals[name] = totals[name] + value if name in totals else value
        return totals


def layered_gradient(
    network: NetworkView, defense: Defense, training: ObservedTraining
) -> Layered | None:
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
    covered = {name for layer in layers if is_plain(layer) for name in names_of(layer)}
    return Layered(network, training) if covered == set(training.start) else None


def names_of(layer: Layer) -> list[str]:
    """Names of the layer's own parameters."""
    return [f"{layer.name}.{n}" for n, _ in layer.module.named_parameters(recurse=False)]


def is_plain(layer: Layer) -> bool:
    """Whether its gradient has a closed form here: of convolutions, without groups or dilation and
    padded by zeros alone."""
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


_SPREAD_SAMPLES, _SPREAD_DRAWS, _SPREAD_SEED = 64, 64, 0
"""Public samples and draws of a defense's random weights that show how far activations move."""
_CORRELATED = 4096
"""Activations of a sample up to which it is asked how they move together."""
_UNLIKE = 0.1
"""Share of their mean variance that each has on its own, since public samples tell how another
sample's activations move only about."""


class Clients:
    """P candidate clients that start from the broadcast and train as the victims did.

    Attributes:
        start: Variables that were received.
        training: One observed local training.
        samples: Per victim.
        batch: Of a step, per victim.
        summed: Clients whose mean update is that of a victim, each with a part of every batch.
        step: Learning rate times local steps.
        in_order: Whether all steps are known to have the samples in one order.
        shared: Whether several releases begin from this state, so that what one candidate would
            send is asked for several times.
    """

    def __init__(self, release: Release, ctx: Context, *, dtype: torch.dtype) -> None:
        def move(state: State) -> dict[str, Tensor]:
            return {n: v.to(dtype=dtype, device=ctx.device) for n, v in state.items()}

        self.network, self.defense = ctx.network, ctx.defense
        self.dtype, self.device = dtype, ctx.device
        const = move(release.seen.const)
        self.before = move(release.before)
        self.start = dict(ctx.defense.receive(self.before, const))
        self.batch, self.samples = release.batch, release.samples
        self.step, self.in_order = release.step, release.in_order
        self.summed = int(release.seen.known.get("summed", 1))
        self.training = ObservedTraining(
            start=self.start,
            const=const,
            buffers=move(release.seen.buffers),
            steps=release.steps,
            batch=self.batch // self.summed,
            lr=release.lr,
            mode=str(release.seen.known["mode"]),
        )
        self.shared = False
        self._latest: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None
        self.simulated = Simulated(
            ctx.network,
            ctx.defense,
            self.training,
            (ctx.aux_x.to(ctx.device), ctx.aux_y.to(ctx.device)),
        )
        self.gradients = layered_gradient(ctx.network, ctx.defense, self.training) or self.simulated

    # --- uploads ------------------------------------------------------------------------------
    def compute(self, x: Tensor, y: Tensor, moves: State | None = None) -> dict[str, Tensor]:
        """Gradients [P, ...] of candidates, once for all releases that begin from this state.

        moves: From what was received to where each candidate starts [P, ...]; None: nowhere.
        """
        if moves is not None:
            return self.simulated(x, y, moves)
        if self._latest is not None and self._latest[0] is x and self._latest[1] is y:
            return self._latest[2]
        self._latest = None  # its graph goes before another is made
        gradients = self.gradients(x, y)
        if self.shared:
            self._latest = x, y, gradients
        return gradients

    def apart(self, x: Tensor, y: Tensor, clips: bool) -> tuple[Tensor, Tensor]:
        """Samples and labels [P, K, ...] as those of the clients whose mean is taken
        [P * summed, K / summed, ...]; clips: whether a mechanism acts on each client's upload."""
        if self.summed == 1 or not (clips or isinstance(self.gradients, Simulated)):
            return x, y

        def split(values: Tensor) -> Tensor:
            steps = values.unflatten(1, (-1, self.summed, self.training.batch))
            return steps.transpose(1, 2).flatten(2, 3).flatten(0, 1)

        return split(x), split(y)

    def join(self, gradient: State, problems: int) -> dict[str, Tensor]:
        """Gradients of the clients of `problems` candidates as the candidates' [problems, ...]."""
        return {
            n: g if len(g) == problems else g.unflatten(0, (problems, -1)).mean(dim=1)
            for n, g in gradient.items()
        }

    def returned_gradient(self, view: SplitView) -> Returned | None:
        """The gradient of the first stages by the slopes that the server returned, if it did; None
        for several steps whose samples are not known to be in one order."""
        aligned = self.samples == 1 or self.in_order
        if view.slopes is None or (self.training.steps > 1 and not aligned):
            return None
        return Returned(self.network, self.defense, self.training, view)

    def apply(
        self, gradient: State, mechanism: Mechanism, shown: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Gradients [P, ...] after the deterministic part of a mechanism.

        mechanism: Acts on gradient, update or weights as a whole. shown: Which coordinates
        [P or 1, ...] were sent, of the tensors sent in part; the others neither count nor mean
        anything afterwards.
        """
        slope = 1.0 if mechanism.of == "gradient" else -self.step
        base = self.start if mechanism.of == "weights" else {}
        sent = {n: slope * g + base[n] if base else slope * g for n, g in gradient.items()}
        rows = torch.cat(
            [
                (torch.where(shown[n], v, 0.0) if n in shown else v).flatten(1)
                for n, v in sent.items()
            ],
            dim=1,
        )
        factor = mechanism.shrinkage(rows)
        if factor is not None:
            sent = {n: v * column(factor, v) for n, v in sent.items()}
        else:
            pieces = mechanism.apply(rows).split([v[0].numel() for v in sent.values()], dim=1)
            sent = {n: p.view_as(v) for p, (n, v) in zip(pieces, sent.items(), strict=True)}
        return {n: (v - base[n] if base else v) / slope for n, v in sent.items()}

    def as_sent(self, gradient: State, kind: Kind) -> dict[str, Tensor]:
        """Gradients [P, ...] as the kind of upload that the client would have made of them."""
        if kind == "gradient":
            return dict(gradient)
        update = {n: -self.step * g for n, g in gradient.items()}
        return update if kind == "update" else {n: self.start[n] + u for n, u in update.items()}

    # --- activations --------------------------------------------------------------------------
    @cached_property
    def weights(self) -> State:
        """The network's weights without the defense's randomness."""
        return self.defense.mean_realize(self.start, self.training.const)

    def smash(self, view: SplitView, x: Tensor) -> Tensor:
        """Activations before noise [P, B, ...] of the first step's samples of candidates x
        [P, K, *shape], under these weights."""
        first = x[:, : self.training.batch]
        cut = view.make(self.network, self.weights, first.flatten(0, 1))
        return cut.unflatten(0, first.shape[:2])

    def draw_weights(self, count: int) -> list[State]:
        """Network weights of `count` draws of the defense's randomness, always the same ones;
        empty where it draws nothing for its weights."""
        if "variables" not in self.defense.owns:
            return []
        rng, const = torch.Generator().manual_seed(_SPREAD_SEED), self.training.const
        cpu = {n: v.detach().cpu() for n, v in self.start.items()}
        weights = []
        for _ in range(count):
            draw = self.defense.draw(cpu, {n: v.cpu() for n, v in const.items()}, rng)
            if not draw:
                return []
            moved = {n: v.to(dtype=self.dtype, device=self.device) for n, v in draw.items()}
            weights.append(self.defense.realize(self.start, const, moved))
        same = all(torch.equal(v, weights[0][n]) for w in weights[1:] for n, v in w.items())
        return [] if same else weights

    def spread(self, view: SplitView, public: Tensor, *, least: float) -> Spread | None:
        """How activations move with the defense's random weights, around those of the mean weights;
        None where weights are not random.

        public: Samples [N, *shape] on which it is measured. least: Share of the mean variance
        below which none is taken to be: an activation that hardly moves there may move elsewhere.
        """
        draws = self.draw_weights(_SPREAD_DRAWS)
        if not draws:
            return None
        few = public[:_SPREAD_SAMPLES].to(dtype=self.dtype, device=self.device)
        with torch.no_grad():
            centre = view.make(self.network, self.weights, few)
            apart = torch.cat([view.make(self.network, w, few) - centre for w in draws])
        variance = apart.square().mean(dim=0)
        floor = float(variance.mean())
        together = None
        if variance.numel() <= _CORRELATED:
            rows = apart.flatten(1).double()
            together = rows.mT @ rows / len(rows)
            together.diagonal().add_(_UNLIKE * floor)
        return Spread(variance=variance.clamp_min(least * floor), together=together)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a sample's activations move.

    Attributes:
        variance: Of each [...].
        together: Their covariance [N, N] in float64, or None where they are too many.
    """

    variance: Tensor
    together: Tensor | None

    def precision(self, noise: float) -> Tensor | None:
        """Inverse covariance [N, N] with independent noise of a variance beside it, or None."""
        if self.together is None:
            return None
        eye = torch.eye(len(self.together), dtype=torch.float64, device=self.together.device)
        return torch.linalg.inv(self.together + noise * eye).to(self.variance)


def moves(mechanisms: Sequence[Mechanism]) -> list[Mechanism]:
    """Those that do more than draw: their deterministic part is not the identity."""
    probe = torch.zeros(1, 1)
    return [m for m in mechanisms if m.apply(probe) is not probe]
