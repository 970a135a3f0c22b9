"""Pairs of what enters and leaves a defense's hooks, for the tests of its noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.contract.defense import Defense, Local, fresh
from bench.contract.events import Round
from bench.contract.hooks import overrides
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS, Message, Part
from bench.protocols.federation import Federation
from bench.sandbox.conformance.playground import BATCH, CLASSES, Ground, company, play, private_data
from bench.sandbox.conformance.watching import Watch, watched
from bench.sandbox.hooked import PluginFault
from bench.sandbox.noise import Pair, upload_pair
from bench.sandbox.stage import CPU, Uploader, client_alone
from bench.seeding import generator

SHAPES = {"block1.weight": (16, 24), "block1.bias": (16,), "head.weight": (10, 30)}
"""Of made-up updates."""
_COUNT = sum(math.prod(shape) for shape in SHAPES.values())
_SPREAD = 0.5
"""Of the broadcast weights: ranges that follow it are at their widest."""
_SIZE = 1e-3
_SHORT, _LONG = 60, 20
"""Uploads below and beyond a declared clip."""
_FAR = 1e6
"""A coordinate beyond every clip."""
_COORDINATION = ("say", "inspect", "third_parties")


@dataclass(kw_only=True)
class Probes:
    """Pairs of a defense by what its mechanisms act on; each kind is made once.

    Attributes:
        split: The ground on which smashed data and labels are sent.
        whole: The one of whole rounds.
    """

    defense: Defense
    split: Ground
    whole: Ground
    made: dict[str, Sequence[Pair]] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether an upload depends on nothing that clients or third parties said before."""
        return not any(overrides(self.defense, hook) for hook in _COORDINATION)

    @property
    def known(self) -> Round:
        """What is public of the rounds that the pairs come from. Uploads that are made alone
        follow no training, as a learning rate of 0 says."""
        if self.alone and not self._in_steps():
            return Round(lr=0.0, parameters=_COUNT, uploads=1)
        return Round(clients=company(self.defense), batch=BATCH, uploads=1)

    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The public mechanisms of those rounds."""
        return fresh(self.defense).mechanisms_in(self.known)

    def _in_steps(self) -> bool:
        return "gradient" in self.defense.owns and not overrides(self.defense, "upload")

    def pairs(self, of: str) -> Sequence[Pair]:
        """Pairs of uploads in that kind, of smashed data or of labels."""
        if of not in self.made:
            self.made[of] = self._make(of)
        return self.made[of]

    def _make(self, of: str) -> list[Pair]:
        if of in ("smashed", "labels"):
            return self._sent(of)
        if self._in_steps():
            return self._steps()
        return self._alone(of) if self.alone else self._rounds(of)

    # --- a client alone -----------------------------------------------------------------------
    def _alone(self, kind: str) -> list[Pair]:
        rng = generator(0, "conformance uploads", kind)
        broadcast = {n: _SPREAD * _alternating(shape) for n, shape in SHAPES.items()}
        uploader = Uploader.of(watched(self.defense, Watch()), broadcast, 0)
        received = uploader.received
        acting = [m for m in self.defense.mechanisms() if m.of in UPLOAD_KINDS]
        scores = any(m.scores for m in acting)
        clipped = _clipped([m for m in acting if m.of == kind])
        # One client for all, so that what it keeps in its memory acts on later uploads.
        client = client_alone(generator(0, "conformance noise", kind))
        pairs = []
        for number in range(_SHORT + (_LONG if clipped else 0)):
            if number >= _SHORT:
                size = 10 * max(clipped)
            else:
                size = min([_SIZE, *(c / 4 for c in clipped)])
            aim = {n: torch.randn(v.shape, generator=rng) for n, v in received.items()}
            if not scores:
                aim = {n: size * (0.5 + v.abs()) * v.sign() for n, v in aim.items()}
            message, local = uploader.training(
                {n: _update(v, kind, received[n], scores) for n, v in aim.items()}
            )
            out = uploader.upload(message, local, client)
            pairs += _uploads([message], out, local, kind)
        return pairs

    # --- real rounds --------------------------------------------------------------------------
    def _rounds(self, kind: str) -> list[Pair]:
        pairs: list[Pair] = []

        def listen(arguments: tuple[Any, ...], result: Any) -> None:
            messages, local, _ = arguments
            pairs.extend(_uploads(messages, result, local, kind))

        play(self.defense, self.whole, watch=Watch(listeners={"upload": listen}), rounds=4)
        return pairs

    def _sent(self, hook: str) -> list[Pair]:
        pairs: list[Pair] = []

        masked = hook == "smashed" and overrides(self.defense, "third_parties")
        unwatched = fresh(self.defense)

        def listen(arguments: tuple[Any, ...], result: Any) -> None:
            given, client = arguments
            if masked:  # by what a third party dealt; of 0 every mask leaves 0
                given = torch.zeros_like(given)
                result = unwatched.smashed(given, client)
            given = given.detach().double()
            part = result if isinstance(result, Part) else Part(values=result)
            sent = Part(values=part.values.detach().double(), present=part.present)
            pairs.append(Pair(given={hook: Part(values=given)}, sent={hook: sent}))

        try:
            rounds = 4 if hook == "smashed" else 40
            play(self.defense, self.split, watch=Watch(listeners={hook: listen}), rounds=rounds)
        except PluginFault:
            if not pairs:
                raise
        return pairs

    # --- noise of local steps -----------------------------------------------------------------
    def _steps(self) -> list[Pair]:
        """Gradients with and without their draw, which by contract is without noise."""
        defense = watched(self.defense, Watch())
        x, y = private_data(1)[0]
        federation = Federation.start(
            network=self.whole.network(),
            defense=defense,
            data=[(x, y)] * defense.together,
            seed=0,
            device=CPU,
        )
        variables = defense.receive(federation.state, federation.const)
        batch = x[:BATCH], torch.nn.functional.one_hot(y[:BATCH], CLASSES).float()
        rng, pairs = generator(0, "conformance steps"), []
        for _ in range(8):
            draw = defense.draw(variables, federation.const, rng)
            noised = defense.gradient(federation.loss("train", draw), variables, *batch, draw)
            plain = defense.gradient(federation.loss("train", draw), variables, *batch, {})
            pairs.append(
                Pair(
                    given={n: Part(values=v.detach()) for n, v in plain.items()},
                    sent={n: Part(values=v.detach()) for n, v in noised.items()},
                )
            )
        return pairs


def _alternating(shape: Sequence[int]) -> Tensor:
    flat = torch.ones(math.prod(shape))
    flat[1::2] = -1.0
    return flat.view(*shape)


def _clipped(mechanisms: Sequence[Mechanism]) -> list[float]:
    """Typical coordinate of an upload as long as each mechanism lets one be, if it limits any."""
    far = torch.full((1, _COUNT), _FAR)
    left = [float(m.apply(far)[0, 0]) for m in mechanisms]
    return [value for value in left if value < _FAR]


def _update(aim: Tensor, kind: str, received: Tensor, scores: bool) -> Tensor:
    """The update of which `aim` is the upload expressed as `kind`."""
    if scores or kind == "update":
        return aim
    return -aim if kind == "gradient" else aim - received


def _uploads(
    given: Sequence[Message], sent: Sequence[Message], local: Local, kind: str
) -> list[Pair]:
    first = next(m for m in given if m.kind in UPLOAD_KINDS)
    return [
        upload_pair(first, m, base=local.broadcast, lr=local.lr, kind=kind)
        for m in sent
        if m.kind in UPLOAD_KINDS
    ]
