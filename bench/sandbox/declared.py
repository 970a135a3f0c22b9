"""Whether what clients sent in a run's rounds is what their defense declares.

What each round's clients trained is known here, and what they sent: it is held against what the
declared mechanisms sample, with the tests of `leakbench check`, an honest defense failing any with
a chance of one in a million; and a client's noise of one round against that of its next. No test
is made of mechanisms that follow from a client's memory, that lie one on another, or that act
before the upload. A round that is attacked is also held against the others: whether its clients
sent as much, and trained as much, and whether one sample is trained on as a batch of its copies is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from typing import Literal

import torch
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.defense import Client, Defense
from bench.contract.mechanisms import Clip, GaussianNoise, LaplaceNoise, Mechanism
from bench.contract.messages import UPLOAD_KINDS
from bench.protocols.federation import Federation, RoundResult
from bench.protocols.observe import READ_BY_AGGREGATION, Victims, round_of
from bench.sandbox.findings import Broken, NotChecked
from bench.sandbox.noise import ROUNDING, TOLERANCE, Pair, checks_of, noise_of, pairs_of_round
from bench.seeding import generator

_VALUES = 20_000
"""Values of a round that are held against what is declared, about."""
_UNLIKE = 1e-3
"""Relative difference of a sample's gradient from that of its copies that is let pass."""
_Z_ROUNDS = 6.0
"""Standard deviations of the correlation of two rounds' noise that chance may reach: one in 500
million."""
_LESS, _LITTLE = 0.5, 0.1
"""Of what clients send, and train, in any round that is not attacked."""
_ROUNDS = 60
"""Rounds of a longer training that are drawn to be checked. A drawn client's next upload is too."""
Where = Literal["training", "recorded", "of its own"]
"""A round: of the training, of the training and attacked, or played only to be attacked."""


class MessageCheck:
    """Holds the rounds of a run against what its defense declares.

    Args:
        defense: The run's.
        seed: Of the run; who is watched is drawn from it.
        batch: Samples of a step of the training.
        clients: Those of the run at its beginning.
        rounds: Of the training.
    """

    def __init__(
        self, defense: Defense, seed: int, batch: int, clients: Sequence[Client], rounds: int = 1
    ) -> None:
        self.defense, self.batch, self.every = defense, batch, max(1.0, rounds / _ROUNDS)
        self.samples = {c.id: _fingerprint(c) for c in clients}
        self.rng = generator(seed, "declared")
        self.again = ""
        self.noise: dict[str, Tensor] = {}
        self.misfits: dict[str, None] = {}
        self.rounds: list[tuple[Where, float, float]] = []

    def choose_watched(self, sampled: Sequence[str]) -> list[str]:
        """The client of the next round whose upload is to be kept, if any: rounds and clients are
        drawn, and a client's next upload is kept too, so that the noise of both can be compared."""
        if self.again in sampled:
            again, self.again = self.again, ""
            return [again]
        # Only one round in `every` is drawn: a place beyond the clients' is nobody's.
        place = int(torch.randint(max(1, int(len(sampled) * self.every)), (1,), generator=self.rng))
        self.again = "".join(sampled[place : place + 1]) or self.again
        return list(sampled[place : place + 1])

    def check_round(self, federation: Federation, result: RoundResult, where: Where) -> None:
        """Hold a round that the federation has just played against what is declared."""
        plain = [p.values for m in result.trained.values() for p in m.parts.values()]
        if not plain or not all(bool(v.isfinite().all()) for v in plain):
            return  # nobody took part, or the training diverges
        number = next(iter(result.trained.values())).round
        name = f"round {number}" + (" on a fork" if where == "of its own" else "")
        for client in result.joined if where != "training" else ():
            if self.samples.get(client.id, "") not in ("", _fingerprint(client)):
                self.misfits.setdefault(f"{name}: the samples of {client.id} were changed")
        for reason in self._misfits(federation, result, fork=where == "of its own"):
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

    def _misfits(self, federation: Federation, result: RoundResult, *, fork: bool) -> Iterator[str]:
        (steps, batch), *_ = (used.shape for used in result.used.values())
        took_part = Victims(ids=list(result.used), batch=batch, samples=batch, steps=steps)
        sizes = (sum(p.values.numel() for p in m.parts.values()) for m in result.trained.values())
        in_round = round_of(federation, took_part, lr=result.lr, parameters=max(sizes))
        early = "gradient" in self.defense.owns
        mechanisms = [m for m in self.defense.mechanisms_in(in_round)
                      if m.of in UPLOAD_KINDS and not (early and m.of == "gradient")]  # fmt: skip
        sent = [p.values for client in result.trained for m in result.sent[client]
                if m.kind in UPLOAD_KINDS for p in m.parts.values()]  # fmt: skip
        if not all(bool(v.isfinite().all()) for v in sent):
            yield "values are sent that are not finite, though what was trained is"
            return
        by_client = cache(partial(pairs_of_round, result))  # for several tests, by kind

        def pairs_of(kind: str) -> list[Pair]:
            return [pair for pairs in by_client(kind).values() for pair in pairs]

        checks = checks_of(mechanisms, pairs_of, most=_VALUES)
        for _, check in checks:
            try:
                check()
            except NotChecked:
                continue
            except Broken as error:
                yield error.reason.removesuffix(".")
        yield from _find_change(mechanisms, pairs_of("update"))
        if fork:
            yield from self._of_copies(federation, result)
        else:
            yield from self._find_repeated_noise(mechanisms, by_client)

    def _find_repeated_noise(
        self,
        mechanisms: Sequence[Mechanism],
        by_client: Callable[[str], Mapping[str, Sequence[Pair]]],
    ) -> Iterator[str]:
        """A sentence if a client's noise of this round correlates with its noise of the last."""
        before, self.noise = self.noise, {}
        noises = [m for m in mechanisms if isinstance(m, GaussianNoise | LaplaceNoise)]
        clips = [m for m in mechanisms if isinstance(m, Clip)]
        if len(noises) != 1 or len(noises) + len(clips) < len(mechanisms):
            return
        for client, pairs in by_client(noises[0].of).items():
            if len(pairs) != 1:  # several uploads have no order that two rounds share
                continue
            noise = noise_of(noises[0], clips, pairs[0])[:_VALUES]
            earlier = before.get(client, noise[:0])
            if len(earlier) == len(noise) > 1:
                correlation = float(torch.corrcoef(torch.stack([earlier, noise]))[0, 1])
                if abs(correlation) > TOLERANCE + _Z_ROUNDS / len(noise) ** 0.5:
                    yield (
                        "noise is declared independent, but that of two rounds of a client has a "
                        f"correlation of {correlation:.2g}"
                    )
            self.noise[client] = noise

    def _of_copies(self, federation: Federation, result: RoundResult) -> Iterator[str]:
        """A sentence if the gradient of a sample is not that of a batch of its copies. Under split
        protocols nothing is tried: there the gradient is of two losses."""
        client = result.joined[0]
        if "gradient" not in self.defense.owns or client.cut is not None or self.batch == 1:
            return
        chosen = result.used[client.id][0, :1]
        x, y = client.x[chosen], federation.targets(client, chosen)
        loss, variables = federation.loss("eval"), dict(result.received[client.id])
        try:
            rows = ((torch.cat([x] * n), torch.cat([y] * n)) for n in (1, self.batch))
            one, many = (self.defense.gradient(loss, variables, *row, {}) for row in rows)
        except Exception:  # a plugin's code, which may need what it draws
            return
        away = max(float((one[n] - many[n]).abs().max()) for n in one)
        if away > _UNLIKE * max(float(g.abs().max()) for g in (*one.values(), *many.values())):
            yield "the gradient of one sample is not that of a batch of its copies"


def _fingerprint(client: Client) -> str:
    """Of a client's samples and labels."""
    return sha256(b"".join(v.cpu().numpy().tobytes() for v in (client.x, client.y))).hexdigest()


def _find_change(mechanisms: Sequence[Mechanism], pairs: Sequence[Pair]) -> Iterator[str]:
    """A sentence if values are changed on which no mechanism is declared to act."""
    for pair in pairs:
        for name, part in pair.sent.items():
            if name not in pair.given or any(m.covers(name) for m in mechanisms):
                continue
            given, there = pair.given[name].values, part.presence()
            moved = (part.values - given)[there].abs().max() if bool(there.any()) else 0.0
            if float(moved) > ROUNDING * float(given.abs().max()) + 1e-7:
                yield f"'{name}' is changed by up to {float(moved):.4g}, but nothing is declared"
                return
