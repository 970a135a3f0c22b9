"""What a client with given samples would compute and send, before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from attacks.engine.gradients import ObservedTraining, Returned, Simulated, layered
from attacks.engine.observation import SplitView
from bench.api import Context, Kind, Mechanism, Seen, State

_SPREAD_SAMPLES, _SPREAD_DRAWS, _SPREAD_SEED = 64, 16, 0
"""Public samples and draws of a defense's random weights that show how far activations move."""


class Clients:
    """P candidate clients that start from the broadcast and train as the victims did.

    Attributes:
        start: Variables that were received.
        training: One observed local training.
        samples: Per client, batch times local steps.
        step: Learning rate times local steps.
    """

    def __init__(self, seen: Seen, ctx: Context, *, dtype: torch.dtype) -> None:
        def moved(state: State) -> dict[str, Tensor]:
            return {n: v.to(dtype=dtype, device=ctx.device) for n, v in state.items()}

        self.network, self.defense = ctx.network, ctx.defense
        self.dtype, self.device = dtype, ctx.device
        const = moved(seen.const)
        self.before = moved(seen.before)
        self.start = dict(ctx.defense.receive(self.before, const))
        steps, batch = int(seen.known["local_steps"]), int(seen.known["batch"])
        self.training = ObservedTraining(
            start=self.start,
            const=const,
            buffers=moved(seen.buffers),
            steps=steps,
            batch=batch,
            lr=float(seen.known["lr"]),
            mode=str(seen.known["mode"]),
        )
        self.samples, self.step = steps * batch, self.training.lr * steps
        self.gradients = layered(ctx.network, ctx.defense, self.training) or Simulated(
            ctx.network, ctx.defense, self.training
        )

    # --- uploads ------------------------------------------------------------------------------
    def returned(self, view: SplitView) -> Returned | None:
        """The gradient of the first stages by the slopes that the server returned, if it did."""
        if view.slopes is None:
            return None
        return Returned(self.network, self.defense, self.training, view, view.slopes)

    def applied(
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
        return {n: (v - (base[n] if base else 0.0)) / slope for n, v in sent.items()}

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

    def realised(self, count: int) -> list[State]:
        """Network weights of `count` draws of the defense's randomness, always the same ones;
        empty where it draws nothing for its weights."""
        if "variables" not in self.defense.owns:
            return []
        rng, const = torch.Generator().manual_seed(_SPREAD_SEED), self.training.const
        cpu = {n: v.detach().cpu() for n, v in self.start.items()}
        found = []
        for _ in range(count):
            draw = self.defense.draw(cpu, {n: v.cpu() for n, v in const.items()}, rng)
            if not draw:
                return []
            moved = {n: v.to(dtype=self.dtype, device=self.device) for n, v in draw.items()}
            found.append(self.defense.realize(self.start, const, moved))
        return found

    def cut(self, view: SplitView, weights: State, x: Tensor) -> Tensor:
        """Activations before noise of samples x [N, *shape]."""
        return view.sent(
            self.network.run(
                weights, x, last=view.cut, mode=self.training.mode, buffers=self.training.buffers
            )
        )

    def spread(self, view: SplitView, public: Tensor, *, least: float) -> Tensor | None:
        """Variance of every activation of a sample over the defense's random weights, around
        that of the mean weights, [...]; None where weights are not random.

        public: Samples [N, *shape] on which it is measured. least: Share of the mean variance
        below which none is taken to be: an activation that hardly moves there may move elsewhere.
        """
        if not self.realised(1):
            return None
        few = public[:_SPREAD_SAMPLES].to(dtype=self.dtype, device=self.device)
        with torch.no_grad():
            centre = self.cut(view, self.weights, few)
            apart = [self.cut(view, w, few) - centre for w in self.realised(_SPREAD_DRAWS)]
        variance = torch.stack(apart).square().mean(dim=(0, 1))
        return variance.clamp_min(least * float(variance.mean()))


def moves(mechanisms: Sequence[Mechanism]) -> list[Mechanism]:
    """Those that do more than draw: their deterministic part is not the identity."""
    probe = torch.zeros(1, 1)
    return [m for m in mechanisms if m.apply(probe) is not probe]


def column(values: Tensor, like: Tensor) -> Tensor:
    """[P] -> [P, 1, ...] with the dimensions of `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))
