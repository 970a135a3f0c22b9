"""Pairs of what enters and leaves a defense's hooks, for the tests of its noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.contract.defense import Defense, fresh
from bench.contract.events import Round
from bench.contract.hooks import overrides
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS, Part
from bench.sandbox.conformance.playground import BATCH, CLASSES, Ground, company, play, private_data
from bench.sandbox.conformance.watching import Watch, watched
from bench.sandbox.hooked import PluginFault
from bench.sandbox.noise import Pair, upload_pair
from bench.seeding import generator

_ROUNDS, _LABEL_ROUNDS, _STEPS = 4, 40, 8
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
