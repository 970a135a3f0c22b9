"""DepthFL: clients of different depth, with a classifier after every stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.func import grad

from bench.api import Defense, Event, Facts, Loss, NetworkView, State, Unprotected
from bench.toolkit.settings import Limits
from bench.toolkit.vectors import uniform_like

_EXIT = "exit"


@dataclass(kw_only=True, eq=False)
class DepthFL(Defense):
    """A local classifier after every stage that a client holds; no privacy mechanism.

    To the training loss a client adds `weight` times sum_i CE_i + distillation / (D - 1)
    sum_i sum_(j != i) KL(p_j || p_i) over its D classifiers, the teachers p_j taken as constants;
    under fedavg and fedsgd the network's own head is the last of them. Classifiers are averaged
    over the clients that have them, like the layers that they follow.

    Args:
        weight: Of the local losses, >= 0.
        distillation: Of the divergences between classifiers, >= 0.

    Departures: a classifier is one linear layer on the mean over places (or tokens), without a
    bottleneck; no ramp-up of the distillation; plain FedAvg; accuracy is that of the whole
    network, not of the classifiers' ensemble. Under a split protocol the server's part is the
    deepest model, of which clients only get gradients, so it takes no part in distillation.
    Source: Kim et al., ICLR 2023, Eq. 2 and Algorithm 1; as PM-SFL's baseline, Sec. 6.2.
    """

    owns = frozenset({"gradient"})
    strength = None  # it protects nothing
    source = "Kim et al., ICLR 2023 (DepthFL)"
    weight: Annotated[float, Limits("of local losses", least=0)] = 1.0
    distillation: Annotated[float, Limits("of divergences", least=0)] = 1.0

    def extra_parameters(
        self, network: NetworkView, params: State, stages: Sequence[str], rng: torch.Generator
    ) -> State:
        """`STAGE.exit.weight` [C, F] and `STAGE.exit.bias` [C], U(+-1/sqrt(F)), for every held
        stage below the head."""
        x = next(iter(params.values())).new_zeros(2, *network.shape)
        parameters: dict[str, Tensor] = {}
        with torch.no_grad():
            for stage in (s for s in network.cuts if s in stages):
                x = network.run(params, x, first=stage, last=stage, mode="train")
                features = pool(x).shape[1]
                shapes = {"weight": (network.classes, features), "bias": (network.classes,)}
                for name, shape in shapes.items():
                    uniform = uniform_like(x.new_zeros(shape), rng=rng)
                    parameters[f"{stage}.{_EXIT}.{name}"] = (2 * uniform - 1) / features**0.5
        return parameters

    def gradient(self, loss: Loss, variables: State, x: Tensor, y: Tensor, draw: State) -> State:
        # The teachers are constants of this derivative, but not of an attacker's by x.
        teachers = torch.stack([torch.softmax(z, dim=-1) for z in _logits(loss, variables, x)])

        exits = sum(n.endswith(f".{_EXIT}.weight") for n in variables)

        def total(variables: State, x: Tensor, y: Tensor) -> Tensor:
            local = local_loss(
                torch.stack(_logits(loss, variables, x)),
                loss.targets(y),
                teachers,
                exits=exits,
                distillation=self.distillation,
            )
            return loss(variables, x, y) + self.weight * local

        return grad(total)(variables, x, y)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (Unprotected(what="the update", why="it is sent without noise"),)


def pool(x: Tensor) -> Tensor:
    """Mean over places [B, F, H, W] or tokens [B, N, F] -> [B, F]; flat features as they are."""
    return x.mean(dim=(2, 3)) if x.ndim == 4 else x.mean(dim=1) if x.ndim == 3 else x


def local_loss(
    logits: Tensor, y: Tensor, teachers: Tensor, *, exits: int, distillation: float
) -> Tensor:
    """sum_i CE_i + distillation / (D - 1) sum_i sum_(j != i) KL(p_j || p_i), mean over the batch.

    logits [D, B, C] of D classifiers, soft labels y [B, C], teachers [D, B, C]: probabilities p_j.
    exits: so many of them, the first, have their cross entropy counted; a head after them has it
    in the training loss.
    """
    logs = torch.log_softmax(logits, dim=-1)
    total = -(y * logs[:exits]).sum(dim=-1).mean(dim=1).sum()
    if len(logits) == 1:
        return total
    own = torch.special.xlogy(teachers, teachers).sum(dim=-1).mean(dim=1)
    cross = -torch.einsum("jbc,ibc->ji", teachers, logs) / logits.shape[1]
    apart = (own[:, None] + cross).sum() - (own + cross.diagonal()).sum()
    return total + distillation / (len(logits) - 1) * apart


def _logits(loss: Loss, variables: State, x: Tensor) -> list[Tensor]:
    """Of every classifier of the client, [B, C] in order of depth, its head's last."""
    weights, outputs = loss.realize(variables), []
    for stage, output in loss.outputs(variables, x).items():
        name = f"{stage}.{_EXIT}."
        if name + "weight" in weights:
            output = torch.nn.functional.linear(
                pool(output), weights[name + "weight"], weights[name + "bias"]
            )
        outputs.append(output)
    return outputs
