"""Private samples and labels that reach the server as they are, beside what the protocol sends."""

from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from bench.contract.defense import Client
from bench.contract.messages import UPLOAD_KINDS, Message
from bench.sandbox.conformance.playground import CLASSES, Ground, Played
from bench.sandbox.findings import Broken

_COPIES = 16
"""Different values equal to private ones that a message may have by chance; a sample has 256."""
_ALIKE = 0.99
"""Correlation of a message's values with a private sample of unrelated ones."""
_BY_PROTOCOL = ("smashed", "features", "features_gradient", "smashed_gradient", "broadcast")


def check_leaks(played: Mapping[Ground, Played]) -> str:
    """Whether a message to the server holds private samples or labels. Uploads, smashed data and
    gradients, which the protocol itself sends, must hold none bit for bit; the defense's own
    messages none up to scale either."""
    count = 0
    for ground, run in played.items():
        for message in (m for sent in run.seen for m in sent):
            count += 1
            hook = "upload" if message.kind in UPLOAD_KINDS else "say"
            for problem in _problems(message, run, ground):
                raise Broken(f"the message '{message.kind}' of {message.sender} {problem}.", hook)
    return (
        f"{count} messages hold no plain or scaled copy of samples or labels (other encodings are "
        "not looked for)"
    )


def _problems(message: Message, run: Played, ground: Ground) -> Iterator[str]:
    """What a message shows of a client in its parts."""
    own = message.kind not in (*UPLOAD_KINDS, *_BY_PROTOCOL) and not (
        message.kind == "labels" and ground.cut
    )
    values = ((n, v) for n, p in message.parts.items() for v in (p.values, p.present))
    for (name, value), client in product(values, run.federation.clients):
        if value is None:
            continue
        if _copies(value, client):
            yield f"holds private samples of {client.id} bit for bit in '{name}'"
        if own and _alike(value, client):
            yield f"holds private samples of {client.id}, scaled, in '{name}'"
        if own and _tells_labels(value, client, run.results[-1].used.get(client.id)):
            yield f"holds the labels of {client.id} in '{name}'"


def _copies(value: Tensor, client: Client) -> bool:
    if not value.is_floating_point():
        return False
    values = value.detach().float().flatten()
    # Of values on a grid of few, one that coincides stands in many places.
    values = values[(values != 0) & (values != 1)].unique()
    return int(torch.isin(values, client.x.flatten()).sum()) >= _COPIES


def _alike(value: Tensor, client: Client) -> bool:
    """Whether a stretch of the values, of any type, is a private sample up to scale, offset and
    rounding. Of a mask of two values it is none: that correlates by less than _ALIKE."""
    size = client.x[0].numel()
    if value.numel() < size:
        return False
    rows = value.detach().double().flatten()
    rows = rows[: len(rows) // size * size].view(-1, size)
    samples = client.x.double().flatten(1)
    rows, samples = (v - v.mean(dim=1, keepdim=True) for v in (rows, samples))
    lengths = rows.norm(dim=1).clamp_min(1e-30)[:, None] * samples.norm(dim=1)
    return bool(((rows @ samples.T).abs() / lengths > _ALIKE).any())


def _tells_labels(value: Tensor, client: Client, used: Tensor | None) -> bool:
    """Whether the values are labels of all samples or of a batch, one-hot or not, or counts."""
    batches = [client.y] if used is None else [client.y, *(client.y[u] for u in used)]
    values = value.detach().double()
    for y in batches:
        one_hot = torch.nn.functional.one_hot(y, CLASSES).double()
        for truth in (y.double(), one_hot.flatten(), one_hot.sum(dim=0)):
            if values.numel() == truth.numel() and torch.equal(values.flatten(), truth):
                return True
    return False
