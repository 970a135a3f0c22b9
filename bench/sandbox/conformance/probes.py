"""What enters and leaves a defense's hooks: pairs for the tests of its noise, and which values of
an upload are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from bench.contract.defense import Defense, fresh
from bench.contract.events import Round
from bench.contract.hooks import overrides
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS, Message, Part, as_kind
from bench.sandbox.conformance.playground import BATCH, CLASSES, Ground, company, play, private_data
from bench.sandbox.conformance.watching import Watch, watched
from bench.sandbox.findings import Broken
from bench.sandbox.hooked import PluginFault
from bench.sandbox.noise import Pair, upload_pair
from bench.sandbox.stage import Uploader, client_alone
from bench.seeding import generator

_ROUNDS, _LABEL_ROUNDS, _STEPS = 4, 40, 8
_SHAPES = {"block1.weight": (16, 24), "block1.bias": (16,), "head.weight": (10, 30)}
_COORDINATION = ("say", "inspect", "third_parties")
"""Hooks without which an upload can be made without a round."""
_UPDATES, _DRAWS = 4, 16
"""Made-up updates, and draws of the client's stream for each."""
_LONG_LR = 1e4
"""A learning rate whose uploads are beyond every clip."""
_FAR = 1e6
"""A coordinate beyond every clip."""


def mechanisms_on(ground: Ground, defense: Defense) -> tuple[Mechanism, ...]:
    """The public mechanisms of the rounds that pairs come from. What a mechanism does before the
    upload is in what enters it, as a learning rate of 0 says."""
    parameters = ground.network().n_parameters
    clients = company(defense)
    known = Round(lr=0.0, parameters=parameters, uploads=1, clients=clients, batch=BATCH)
    return fresh(defense).mechanisms_in(known)


def pairs_of(defense: Defense, of: str, *, split: Ground, whole: Ground) -> Sequence[Pair]:
    """Pairs of uploads in that kind, of smashed data or of labels.

    Args:
        split: The ground on which smashed data and labels are sent.
        whole: The one of whole rounds, of one step each.
    """
    if of in ("smashed", "labels"):
        return _sent(defense, of, split)
    if "gradient" in defense.owns and not overrides(defense, "upload"):
        return _steps(defense, whole)
    pairs: list[Pair] = []

    def listen(arguments: tuple[Any, ...], result: Any) -> None:
        messages, local, _ = arguments
        given = next(m for m in messages if m.kind in UPLOAD_KINDS)
        pairs.extend(
            upload_pair(given, sent, base=local.broadcast, lr=local.lr, kind=of)
            for sent in result
            if sent.kind in UPLOAD_KINDS
        )

    play(defense, whole, watch=Watch(listeners={"upload": listen}), rounds=_ROUNDS)
    if any(float(m.apply(torch.full((1, 1000), _FAR))[0, 0]) < _FAR
           for m in defense.mechanisms() if m.of == of):  # fmt: skip
        watch = Watch(listeners={"upload": listen})
        play(defense, whole, watch=watch, rounds=1, draws=1, lr=_LONG_LR)
    return pairs


def _sent(defense: Defense, hook: str, ground: Ground) -> list[Pair]:
    pairs: list[Pair] = []
    masked = hook == "smashed" and overrides(defense, "third_parties")
    unwatched = fresh(defense)

    def listen(arguments: tuple[Any, ...], result: Any) -> None:
        given, client = arguments
        if masked:  # by what a third party dealt; of 0 every mask leaves 0
            given = torch.zeros_like(given)
            result = unwatched.smashed(given, client)
        part = result if isinstance(result, Part) else Part(values=result)
        sent = Part(values=part.values.detach().double(), present=part.present)
        given = Part(values=given.detach().double())
        pairs.append(Pair(given={hook: given}, sent={hook: sent}))

    try:
        rounds = _ROUNDS if hook == "smashed" else _LABEL_ROUNDS
        play(defense, ground, watch=Watch(listeners={hook: listen}), rounds=rounds)
    except PluginFault:
        if not pairs:
            raise
    return pairs


def _steps(defense: Defense, ground: Ground) -> list[Pair]:
    """Gradients with and without their draw, which by contract is without noise."""
    defense, (x, y) = watched(defense, Watch()), private_data(1)[0]
    federation = ground.federation(defense, ground.network(), [(x, y)] * defense.together)
    variables = defense.receive(federation.state, federation.const)
    batch = x[:BATCH], torch.nn.functional.one_hot(y[:BATCH], CLASSES).float()
    rng, pairs = generator(0, "conformance steps"), []
    for _ in range(_STEPS):
        draw = defense.draw(variables, federation.const, rng)
        loss = federation.loss("train", draw)
        plain, noised = (defense.gradient(loss, variables, *batch, d) for d in ({}, draw))
        given, sent = ({n: Part(values=v.detach()) for n, v in g.items()} for g in (plain, noised))
        pairs.append(Pair(given=given, sent=sent))
    return pairs


# --- which values are sent ------------------------------------------------------------------------


def check_patterns(defense: Defense, ground: Ground, epsilon: float) -> str:
    """Whether data chooses which values are sent, which noise on them does not hide: a proof has to
    count that. Compared are different updates and data, over several draws.

    Args:
        ground: Of the whole rounds.
        epsilon: The finite proof.

    Raises:
        Broken: If data, without any noise, decides which values are sent.
    """
    groups = _of_rounds(defense, ground)
    if not any(overrides(defense, hook) for hook in _COORDINATION):
        groups.append([_of_update(defense, n) for n in range(_UPDATES)])
    for one, other in (pair for patterns in groups for pair in combinations(patterns, 2)):
        # What is sent in all draws of an input, or in none.
        fixed = (one == one[0]).all(dim=0) & (other == other[0]).all(dim=0)
        chosen = int((fixed & (one[0] != other[0])).sum())
        if chosen:
            raise Broken(
                f"guarantee() proves an epsilon of {epsilon:.4g} for a record, but which "
                f"values are sent follows from the data without noise: {chosen} of "
                f"{len(fixed)} values are always sent for one input and never for another."
            )
    return "which values are sent does not follow from the data"


def _of_update(defense: Defense, number: int) -> Tensor:
    """Bool [draws, N] of one made-up update, whose magnitudes cover many powers of ten."""
    rng = generator(number, "conformance patterns")
    broadcast = {n: 0.1 * torch.randn(s, generator=rng) for n, s in _SHAPES.items()}
    uploader = Uploader.of(watched(defense, Watch()), broadcast, 0)
    update = {
        n: torch.randn(v.shape, generator=rng).sign()
        * 10 ** (8 * torch.rand(v.shape, generator=rng) - 6)
        for n, v in uploader.received.items()
    }
    message, local = uploader.training(update)
    rows = []
    for draw in range(_DRAWS):
        client = client_alone(generator(draw, "conformance pattern draws"))
        sent = [
            as_kind(m, "update", base=local.broadcast, lr=local.lr)
            for m in uploader.upload(message, local, client)
            if m.kind in UPLOAD_KINDS
        ]
        rows.append(_presence(sent, update))
    return torch.stack(rows)


def _of_rounds(defense: Defense, ground: Ground) -> list[list[Tensor]]:
    """Bool [draws, N] of a first round with one client's data and with another's, for every client
    where the two differ and no draws change them."""

    def played(draw: int, shift: int) -> dict[str, Tensor]:
        result = play(defense, ground, draws=draw, rounds=1, shift=shift)
        return {
            m.sender: _presence([m], {n: p.values for n, p in m.parts.items()})
            for m in result.seen[0]
            if m.kind in UPLOAD_KINDS and m.sender in result.used
        }

    one, other = played(1, 0), played(1, 1)
    if all(torch.equal(v, other[c]) for c, v in one.items() if c in other):
        return []
    pairs = ((one, played(2, 0)), (other, played(2, 1)))
    return [
        [torch.stack([first[c], again[c]]) for first, again in pairs]
        for c in one
        if all(c in a and c in b and torch.equal(a[c], b[c]) for a, b in pairs)
        and one[c].shape == other[c].shape
    ]


def _presence(messages: Sequence[Message], like: Mapping[str, Tensor]) -> Tensor:
    """Bool [N]: which values were sent. An exact zero among values that hardly repeat was not."""
    parts = {n: p for m in messages for n, p in m.parts.items()}
    present, values = [], []
    for name, value in like.items():
        part = parts.get(name)
        values.append((torch.zeros_like(value) if part is None else part.values).flatten())
        there = torch.zeros_like(value, dtype=torch.bool) if part is None else part.presence()
        present.append(there.flatten())
    sent, nonzero = torch.cat(present), torch.cat(values) != 0
    others = torch.cat(values)[sent & nonzero]
    return sent & nonzero if 2 * len(others.unique()) > len(others) else sent
