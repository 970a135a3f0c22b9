"""Whether what clients sent in a run's rounds is what their defense declares.

What each round's clients trained is known here, and what they sent: it is held against what the
declared mechanisms sample, with the tests of `leakbench check`, an honest defense failing any with
a chance of one in a million. No test is made of mechanisms that follow from a client's memory, that
lie one on another, or that act before the upload. A round that is attacked is also held against
the others: whether its clients sent as much, and trained as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from bench.contract.attack import Seen
from bench.contract.defense import Defense
from bench.contract.mechanisms import Mechanism
from bench.contract.messages import UPLOAD_KINDS, Message
from bench.protocols.federation import Federation, RoundResult
from bench.protocols.observe import READ_BY_AGGREGATION, Victims, round_of
from bench.sandbox.broken import Broken, NotChecked
from bench.sandbox.noise import Pair, checks_of, upload_pair
from bench.seeding import generator

_VALUES = 20_000
"""Values of a round that are held against what is declared, about."""
_ROUNDING = 1e-4
_LESS, _LITTLE = 0.5, 0.1
"""Of what clients send, and train, in any round that is not attacked."""
Where = Literal["training", "recorded", "of its own"]
"""A round: of the training, of the training and attacked, or played only to be attacked."""


class MessageCheck:
    """Holds the rounds of a run against what its defense declares.

    Args:
        defense: The run's.
        seed: Of the run; who is watched is drawn from it.
    """

    def __init__(self, defense: Defense, seed: int) -> None:
        self.defense = defense
        self.rng = generator(seed, "declared")
        self.misfits: dict[str, None] = {}
        self.rounds: list[tuple[Where, float, float]] = []

    def watched(self, sampled: Sequence[str]) -> list[str]:
        """The client of the next round whose upload is to be kept, if any."""
        place = int(torch.randint(max(1, len(sampled)), (1,), generator=self.rng))
        return list(sampled[place : place + 1])

    def check_round(
        self, federation: Federation, result: RoundResult, lr: float, where: Where
    ) -> None:
        """Hold a round that the federation has just played against what is declared."""
        plain = [p.values for m in result.trained.values() for p in m.parts.values()]
        if not plain or not all(bool(v.isfinite().all()) for v in plain):
            return  # nobody took part, or the training diverges
        number = next(iter(result.trained.values())).round
        name = f"round {number}" + (" on a fork" if where == "of its own" else "")
        for reason in self._misfits(federation, result, lr):
            self.misfits.setdefault(f"{name}: {reason}")
        square = torch.stack([v.double().square().sum() for v in plain]).sum()
        size = float(square / len(result.trained)) ** 0.5
        self.rounds.append((where, result.shared, size))

    def note_aggregation(self, seen: Seen) -> None:
        """Note whether the server's aggregation reads single clients' updates."""
        if seen.known.get(READ_BY_AGGREGATION):
            self.misfits.setdefault("the server's aggregation reads single clients' updates")

    def reasons(self) -> tuple[str, ...]:
        """What is not as declared, a clause each."""
        plain = [(shared, size) for where, shared, size in self.rounds if where == "training"]
        shares, sizes = zip(*plain, strict=True) if plain else ((0.0,), (0.0,))
        for where, shared, size in self.rounds:
            if where != "training" and shared < _LESS * min(shares):
                self.misfits.setdefault(
                    "clients send less of their values in rounds that are attacked"
                )
            if where == "recorded" and size < _LITTLE * min(sizes):
                self.misfits.setdefault("clients train less in rounds that are attacked")
        return tuple(self.misfits)

    def _misfits(self, federation: Federation, result: RoundResult, lr: float) -> Iterator[str]:
        (steps, batch), *_ = (used.shape for used in result.used.values())
        took_part = Victims(ids=list(result.used), batch=batch, samples=batch, steps=steps)
        sizes = (sum(p.values.numel() for p in m.parts.values()) for m in result.trained.values())
        in_round = round_of(federation, took_part, lr=lr, parameters=max(sizes))
        early = "gradient" in self.defense.owns
        mechanisms = [m for m in self.defense.mechanisms_in(in_round)
                      if m.of in UPLOAD_KINDS and not (early and m.of == "gradient")]  # fmt: skip
        checks = checks_of(mechanisms, lambda kind: _pairs(result, lr, kind), most=_VALUES)
        for _, check in checks:
            try:
                check()
            except NotChecked:
                continue
            except Broken as error:
                yield error.reason.removesuffix(".")
        yield from _changed(mechanisms, _pairs(result, lr, "update"))


def _pairs(result: RoundResult, lr: float, kind: str) -> list[Pair]:
    """The watched clients' uploads before and after their defense."""
    return [
        upload_pair(_here(plain), _here(sent), base=base, lr=lr, kind=kind)
        for client, plain in result.trained.items()
        for base in [{n: v.cpu() for n, v in result.received[client].items()}]
        for sent in result.sent[client]
        if sent.kind in UPLOAD_KINDS
    ]


def _here(message: Message) -> Message:
    """The same on the CPU, where mechanisms draw."""
    return message.with_parts(
        {
            n: replace(
                p, values=p.values.cpu(), present=None if p.present is None else p.present.cpu()
            )
            for n, p in message.parts.items()
        }
    )


def _changed(mechanisms: Sequence[Mechanism], pairs: Sequence[Pair]) -> Iterator[str]:
    """A sentence if values are changed on which no mechanism is declared to act."""
    for pair in pairs:
        for name, part in pair.sent.items():
            if name not in pair.given or any(m.covers(name) for m in mechanisms):
                continue
            given, there = pair.given[name].values, part.presence()
            moved = (part.values - given)[there].abs().max() if bool(there.any()) else 0.0
            if float(moved) > _ROUNDING * float(given.abs().max()) + 1e-7:
                yield f"'{name}' is changed by up to {float(moved):.4g}, but nothing is declared"
                return
