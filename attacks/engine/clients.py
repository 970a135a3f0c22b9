"""What a client with given samples would compute and send, before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.engine.gradients import ObservedTraining, Returned, Simulated, layered
from attacks.engine.observation import Release, SplitView
from bench.api import Context, Kind, Mechanism, State

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
        def moved(state: State) -> dict[str, Tensor]:
            return {n: v.to(dtype=dtype, device=ctx.device) for n, v in state.items()}

        self.network, self.defense = ctx.network, ctx.defense
        self.dtype, self.device = dtype, ctx.device
        const = moved(release.seen.const)
        self.before = moved(release.before)
        self.start = dict(ctx.defense.receive(self.before, const))
        self.batch, self.samples = release.batch, release.samples
        self.step, self.in_order = release.step, release.in_order
        self.summed = int(release.seen.known.get("summed", 1))
        self.training = ObservedTraining(
            start=self.start,
            const=const,
            buffers=moved(release.seen.buffers),
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
        self.gradients = layered(ctx.network, ctx.defense, self.training) or self.simulated

    # --- uploads ------------------------------------------------------------------------------
    def computed(self, x: Tensor, y: Tensor, moves: State | None = None) -> dict[str, Tensor]:
        """Gradients [P, ...] of candidates, once for all releases that begin from this state.

        moves: From what was received to where each candidate starts [P, ...]; None: nowhere.
        """
        if moves is not None:
            return self.simulated(x, y, moves)
        if self._latest is not None and self._latest[0] is x and self._latest[1] is y:
            return self._latest[2]
        self._latest = None  # its graph goes before another is made
        found = self.gradients(x, y)
        if self.shared:
            self._latest = x, y, found
        return found

    def apart(self, x: Tensor, y: Tensor, clips: bool) -> tuple[Tensor, Tensor]:
        """Samples and labels [P, K, ...] as those of the clients whose mean is taken
        [P * summed, K / summed, ...]; clips: whether a mechanism acts on each client's upload."""
        if self.summed == 1 or not (clips or isinstance(self.gradients, Simulated)):
            return x, y

        def split(values: Tensor) -> Tensor:
            steps = values.unflatten(1, (-1, self.summed, self.training.batch))
            return steps.transpose(1, 2).flatten(2, 3).flatten(0, 1)

        return split(x), split(y)

    def joined(self, gradient: State, problems: int) -> dict[str, Tensor]:
        """Gradients of the clients of `problems` candidates as the candidates' [problems, ...]."""
        return {
            n: g if len(g) == problems else g.unflatten(0, (problems, -1)).mean(dim=1)
            for n, g in gradient.items()
        }

    def returned(self, view: SplitView) -> Returned | None:
        """The gradient of the first stages by the slopes that the server returned, if it did; None
        for several steps whose samples are not known to be in one order."""
        aligned = self.samples == 1 or self.in_order
        if view.slopes is None or (self.training.steps > 1 and not aligned):
            return None
        return Returned(self.network, self.defense, self.training, view)

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

    def spread(self, view: SplitView, public: Tensor, *, least: float) -> Spread | None:
        """How activations move with the defense's random weights, around those of the mean weights;
        None where weights are not random.

        public: Samples [N, *shape] on which it is measured. least: Share of the mean variance
        below which none is taken to be: an activation that hardly moves there may move elsewhere.
        """
        if not self.realised(1):
            return None
        few = public[:_SPREAD_SAMPLES].to(dtype=self.dtype, device=self.device)
        with torch.no_grad():
            centre = view.made(self.network, self.weights, few)
            draws = self.realised(_SPREAD_DRAWS)
            apart = torch.cat([view.made(self.network, w, few) - centre for w in draws])
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


def column(values: Tensor, like: Tensor) -> Tensor:
    """[P] -> [P, 1, ...] with the dimensions of `like`."""
    return values.view(-1, *[1] * (like.ndim - 1))
