"""Whether the true samples explain an upload by the local training that attacks simulate."""

from dataclasses import replace

import torch
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.defense import Defense
from bench.contract.messages import SERVER, UPLOAD_KINDS, as_kind
from bench.models import Network
from bench.protocols.observe import Truth
from bench.sandbox.rehearsal import Rehearsals
from bench.seeding import generator

ORDERS = 8
"""Random orders of the samples in which a training of several batches is played."""
SPREADS, SHARE = 5.0, 0.01
"""An upload may lie this many spreads of the plays, and this share of their length, off their mean
before it counts as another training's."""


def explain_difference(
    seen: Seen, truth: Truth, *, network: Network, defense: Defense, device: str = "cpu"
) -> str | None:
    """Say how uploads differ from those of the declared training on the true samples.

    The told local training (mean cross entropy, plain SGD of the told rate, batch and steps) is
    played through the defense on a client's samples, in several random orders where they make
    several batches. A client's upload is unlike if it lies farther from the mean of the plays than
    five times their spread and a hundredth of their length.

    Args:
        seen: Uploads of one round under federated SGD or averaging.
        truth: The clients' samples.
        network: The network that attacks run.
        defense: What is told of the client's defense.
        device: Where to compute.

    Returns:
        A sentence with the likely cause for the first unlike client, None if all are explained.
    """
    sizes = sum(v.numel() for v in seen.before.values())
    together = max(1, 40_000_000 // max(1, sizes))
    alone, place = replace(seen, earlier=()), torch.device(device)
    for number, client in enumerate(seen.clients):
        x, y = truth.x[number], truth.y[number]
        several = int(seen.known["batch"]) < len(y)
        plain = seen.known["defense"]["name"] == "none"
        plays = ORDERS if several or not plain else 1
        rng = generator(0, "orders", client)
        orders = torch.stack([torch.randperm(len(y), generator=rng) for _ in range(plays)])
        rehearse = Rehearsals(seen=alone, network=network, defense=defense, rng=rng, device=place)
        played = []
        for some in orders.split(together):
            shadow = rehearse(x[some], y[some])
            played += [_update(shadow, c) for c in shadow.clients]
        if (sentence := _difference(seen, _update(seen, client), played)) is not None:
            return sentence
    return None


def _update(seen: Seen, client: str) -> dict[str, Tensor]:
    """Return by how much a client's readable uploads moved its state; 0 where it sent nothing."""
    update = {n: torch.zeros_like(v, device="cpu") for n, v in seen.before.items()}
    for message in seen.messages:
        if message.sender == client and message.receiver == SERVER and message.kind in UPLOAD_KINDS:
            lr = float(seen.known["lr"])
            for name, part in as_kind(message, "update", base=seen.before, lr=lr).parts.items():
                if name in update and not message.sealed:
                    update[name] = torch.where(part.presence(), part.values, 0.0).cpu()
    return update


def _difference(seen: Seen, sent: dict[str, Tensor], played: list[dict[str, Tensor]]) -> str | None:
    each = torch.stack([_flat(state) for state in played])
    mean, own = each.mean(dim=0), _flat(sent)
    length = float(mean.norm().clamp_min(1e-12))
    chance = SPREADS * float((each - mean).norm(dim=1).square().mean().sqrt()) / length + SHARE
    off = float((own - mean).norm()) / length
    # How far it goes along the mean varies less from play to play than where it ends.
    steps = each @ mean / length**2
    far, usual = abs(float(own @ mean) / length**2 - 1), float((steps - 1).square().mean().sqrt())
    if off > chance:
        unlike = f"they differ by {off:.0%} of its length, chance explains {chance:.0%}"
    elif far > SPREADS * usual + SHARE:
        unlike = f"it goes {float(own @ mean) / length**2:.2f} times as far the same way, chance "
        unlike += f"explains 1 ± {SPREADS * usual + SHARE:.2f}"
    else:
        return None
    expected = {n: torch.stack([state[n] for state in played]).mean(dim=0) for n in sent}
    return (
        f"what was recorded is not what the told training makes of these samples: {unlike}. "
        f"{_cause(seen, sent, expected)} Attacks simulate the told training, so that they fail "
        "does not show that the training is safe."
    )


def _cause(seen: Seen, sent: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """A sentence on the likeliest cause of a difference."""
    before = _flat({n: v.cpu() for n, v in seen.before.items()})
    own, mean = _flat(sent), _flat(expected)
    still = [n for n, v in sent.items() if not bool(v.any()) and bool(expected[n].any())]
    moved = own.abs()[mean != 0]
    ratio, along = float(own.norm() / mean.norm().clamp_min(1e-12)), _cosine(own, mean)
    if seen.protocol == "fedavg" and _cosine(own, -before) > 0.9 and ratio > 2:
        return "It looks like a difference of weights, which was recorded as weights."
    if len(still) == len(sent):
        return "Nothing moved."
    if still:
        return (
            f"'{still[0]}'{f' and {len(still) - 1} others' if len(still) > 1 else ''} did not "
            "move, as where a part alone is trained: freeze it with requires_grad_(False) first."
        )
    if float(moved.std() / moved.mean().clamp_min(1e-12)) < 0.2:
        return "All values moved by about as much, as by Adam."
    if abs(_cosine(own - mean, before)) > 0.9:
        return "The rest lies along the weights, as of weight decay."
    if along > 0.98:
        return (
            f"It is {ratio:.2g} times as long and points the same way: another learning rate, "
            "momentum, a clip, a proximal term or a summed loss."
        )
    if ratio > 1.2 and along > 0.7:
        return "It is longer and points nearly the same way, as of momentum."
    return (
        "Another loss (a proximal term, label smoothing), another optimiser, dropout, a clip or "
        "other samples may be why."
    )


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.detach().double().flatten() for v in tensors.values()])


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
