"""A client's training loss, as protocols descend it and attackers rebuild it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.contract.messages import State
from bench.contract.network import NetworkView
from bench.toolkit.batches import soft_cross_entropy


@dataclass(frozen=True, kw_only=True)
class _OfNetwork:
    """What both losses stand on; mode and buffers are as in `NetworkView.run`."""

    network: NetworkView
    realize: Callable[[State], State]
    mode: str
    buffers: State | None

    def _run(self, weights: State, x: Tensor, first: str | None, last: str | None) -> Tensor:
        return self.network.run(
            weights, x, first=first, last=last, mode=self.mode, buffers=self.buffers
        )

    def _each(self, variables: State, x: Tensor, stages: tuple[str, ...]) -> dict[str, Tensor]:
        weights, outputs = self.realize(variables), {}
        for stage in stages:
            x = self._run(weights, x, stage, stage)
            outputs[stage] = x
        return outputs


@dataclass(frozen=True, kw_only=True)
class NetworkLoss(_OfNetwork):
    """Mean cross entropy of the whole network: samples x [B, ...], soft labels y [B, C]."""

    def __call__(self, variables: State, x: Tensor, y: Tensor) -> Tensor:
        return soft_cross_entropy(self._run(self.realize(variables), x, None, None), y)

    def outputs(self, variables: State, x: Tensor) -> dict[str, Tensor]:
        return self._each(variables, x, (*self.network.cuts, head_of(self.network)))

    def targets(self, y: Tensor) -> Tensor:
        return y


@dataclass(frozen=True, kw_only=True)
class SplitLoss(_OfNetwork):
    """What a client of a split protocol descends, mean over a batch.

    It is called with x = (samples,), or (samples, features) where the head is the client's (private
    labels), and with y = (slopes, soft labels). The slopes [B, ...] are B times the gradient of the
    batch's mean loss by what was sent: <sent, slope> has the first stages' gradient, and the head's
    loss has the head's.

    Attributes:
        cut: The client's last stage.
        sent: Turns activations into what was sent of them, before noise.
    """

    cut: str
    sent: Callable[[Tensor], Tensor] = lambda q: q

    def __call__(self, variables: State, x: Any, y: Any) -> Tensor:
        weights = self.realize(variables)
        # A mean over samples, as any loss, for defenses that clip per sample.
        sent = self.sent(self._run(weights, x[0], None, self.cut))
        bottom = (sent * y[0]).flatten(1).sum(dim=1).mean()
        if len(x) == 1:
            return bottom
        head = head_of(self.network)
        return bottom + soft_cross_entropy(self._run(weights, x[1], head, head), y[1])

    def outputs(self, variables: State, x: Any) -> dict[str, Tensor]:
        stages = self.network.cuts
        return self._each(variables, x[0], stages[: stages.index(self.cut) + 1])

    def targets(self, y: Any) -> Tensor:
        return y[1]


def head_of(network: NetworkView) -> str:
    """Name of the last stage."""
    return network.head[0].rsplit(".", 1)[0]
