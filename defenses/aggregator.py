"""A trusted aggregator: the server reads the noised sum of the clients' clipped updates alone.

It stands for an enclave, or for secure aggregation to whose sum the clients' shares of the noise
add up. Defenses differ in how long the clip is and in which noise a round gets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from bench.api import (
    EVERYONE,
    SERVER,
    SUM,
    UPLOAD_KINDS,
    Client,
    Clip,
    Defense,
    Facts,
    Gaussian,
    GaussianNoise,
    Local,
    Mechanism,
    Message,
    Part,
    Party,
    Round,
    Sealed,
    Server,
    Stage,
    State,
    Strength,
)
from bench.privacy.gaussian import exact_gaussian_epsilon
from bench.toolkit import vectors
from bench.toolkit.settings import Limits

AGGREGATOR = "aggregator"
_TERM, _CLIP, _WITHIN, _MEAN = "term", "clip", "within", "mean"
"""What parties tell: a client's clipped update as a vector, the clip, whether the update was within
it, and the noised mean."""
_LONE = "lone"
"""In the plan of a client that an attacker rehearses, which stands for all: std of its noise, in
clips."""

_RATE = 0.2
"""Of the clip's steps. Source: Andrew et al., arXiv:1905.03871, as all of an adaptive clip."""


@dataclass(kw_only=True, eq=False)
class Aggregator(Party):
    """Adds up clipped updates, and tells the server their mean with noise.

    Attributes:
        clip_norm: L2 norm that updates are clipped to in this round.
        std: Of the sum's noise, in clips.
        count_std: Of the noise on how many updates were within the clip.
        quantile: Share of the updates that the clip is to leave as they are; None: it stays.
        expected: Clients of a round, by whom the share is told: how many came is a secret too.
        rng: Draws noise.
        terms: The updates that have come in this round.
        within: Summed over them, 1/2 for each within the clip and -1/2 for each other: half of
            what a 0 or 1 moves when a client is added.
    """

    clip_norm: float
    std: float
    count_std: float
    quantile: float | None
    expected: int
    rng: torch.Generator
    terms: list[Tensor] = field(default_factory=list)
    within: float = 0.0

    def noise(self, like: Tensor, round: int) -> Tensor:
        """A round's noise on the sum of the updates, in clips."""
        return vectors.gaussian_like(like, std=self.std, rng=self.rng)

    def begin(self, when: Stage, roster: Sequence[str], round: int, step: int) -> list[Message]:
        if when != "round":
            return []
        self.terms, self.within = [], 0.0
        told = Message(kind=_CLIP, sender=AGGREGATOR, receiver=EVERYONE, round=round)
        return [told.with_parts({_CLIP: Part(values=torch.tensor(self.clip_norm))})]

    def reply(self, message: Message) -> list[Message]:
        if message.kind == _TERM:
            self.terms.append(message.parts[_TERM].values)
            self.within += float(message.parts[_WITHIN].values) - 0.5
            return []
        noise = self.noise(self.terms[0], message.round) * self.clip_norm
        mean = (torch.stack(self.terms).sum(dim=0) + noise) / len(self.terms)
        if self.quantile is not None:
            noised = self.within + self.count_std * float(torch.randn((), generator=self.rng))
            share = noised / self.expected + 0.5
            self.clip_norm *= math.exp(-_RATE * (share - self.quantile))
        answer = replace(message, sender=AGGREGATOR, receiver=SERVER)
        return [answer.with_parts({_MEAN: Part(values=mean)})]


@dataclass(kw_only=True, eq=False)
class CentralNoise(Defense):
    """Updates clipped to L2 norm clip_norm, whose noised sum is all that leaves the aggregator.

    The model moves by the sum over `expected` clients, however many took part.

    Args:
        noise_multiplier: Std of the sum's noise over clip_norm, >= 0.
        clip_norm: L2 norm of one client's update, > 0.
        expected: Clients that are expected in a round.
    """

    owns = frozenset({"aggregate"})
    only_sums = True
    strength = Strength(setting="noise_multiplier", weak=1e-3, strong=100.0)

    noise_multiplier: Annotated[float, Limits("noise over clip_norm", least=0)]
    clip_norm: Annotated[float, Limits("L2 norm of one client's update", above=0)]
    expected: Annotated[int, Limits("clients of a round", least=1)]

    quantile: ClassVar[float | None] = None
    """See `Aggregator`."""

    @property
    def std(self) -> float:
        """Of the noise on the sum of updates, in clips."""
        return self.noise_multiplier

    @property
    def count_std(self) -> float:
        """Of the noise on how many updates were within the clip."""
        return max(self.expected / 20, self.noise_multiplier)

    def spread(self, round: int) -> float:
        """Std of a round's noise in units of `std`."""
        return 1.0

    # --- round ------------------------------------------------------------------------------------
    def third_parties(self, seed: int) -> Mapping[str, Party]:
        return {AGGREGATOR: self._make(Aggregator, seed)}

    def _make(self, kind: type[Aggregator], seed: int, **more: Any) -> Aggregator:
        return kind(
            clip_norm=self.clip_norm,
            std=self.std,
            count_std=self.count_std,
            quantile=self.quantile,
            expected=self.expected,
            rng=torch.Generator().manual_seed(seed),
            **more,
        )

    def hear(self, when: Stage, client: Client, heard: Sequence[Message]) -> None:
        if when == "round" and _LONE not in client.plan:
            client.plan[_CLIP] = _clip_told(heard, self.clip_norm)

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        norm = client.plan[_CLIP]

        def seal(update: Message) -> list[Message]:
            parts = vectors.clip(update.parts, norm=norm)
            if _LONE in client.plan:
                std, rng = client.plan[_LONE] * norm, client.rng["defense"]
                noised = {n: p.values + vectors.gaussian_like(p.values, std=std, rng=rng)
                          for n, p in parts.items()}  # fmt: skip
                return [vectors.replace_values(update, noised)]
            whole, term = (_flatten(p) for p in (update.parts, parts))
            within = Part(values=(whole.norm() <= norm).float(), bits=1)
            told = {_TERM: Part(values=term), _WITHIN: within}
            own = replace(update, kind=_TERM, receiver=AGGREGATOR, parts=told)
            sealed = {n: Sealed(n_bytes=0, covers=p.told()) for n, p in update.parts.items()}
            hidden = {n: vectors.showing(p, torch.tensor(False)) for n, p in update.parts.items()}
            return [replace(update, parts=hidden, sealed=sealed), own]

        return vectors.change_uploads(messages, "update", local, seal)

    def public_plans(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """An attacker rehearses the mean with one client, in the place of as many as sent."""
        count = max(1, len({m.sender for m in messages if m.kind in UPLOAD_KINDS and m.sealed}))
        std = self.std * self.spread(_round_of(messages)) / count
        return ({_LONE: std, _CLIP: _clip_told(messages, self.clip_norm)},)

    def aggregate(self, server: Server, messages: Sequence[Message]) -> State:
        """Move by the noised sum, over the clients expected; of uploads that nobody sealed, as of
        an attacker's rehearsal, by their mean."""
        uploads = [m for m in messages if m.kind in UPLOAD_KINDS]
        sealed, share = [m for m in uploads if m.sealed], 1 / len(uploads)
        if sealed:
            assert server.ask is not None
            share, first = len(sealed) / self.expected, sealed[0]
            asked = Message(kind=_MEAN, sender=SERVER, receiver=AGGREGATOR, round=first.round)
            (answer,) = server.ask(asked)
            like = {n: p.values for n, p in first.parts.items()}
            mean = vectors.cut_like(answer.parts[_MEAN].values, like)
            parts = {n: Part(values=v) for n, v in mean.items()}
            uploads = [replace(first, sender=SUM, sealed={}, parts=parts)]
            server.ask(uploads[0])
        moved = {n: share * sum(m.parts[n].values for m in uploads) for n in uploads[0].parts}
        return {n: v + moved.get(n, 0.0) for n, v in server.state.items()}

    # --- what is known and proven -----------------------------------------------------------------
    def mechanisms_in(self, round: Round) -> tuple[Mechanism, ...]:
        """Each of the round's clients has its share of the noise on the sum."""
        norm = _clip_told(round.messages, self.clip_norm)
        std = self.std * self.spread(_round_of(round.messages)) * norm / math.sqrt(round.clients)
        return (Clip(of="update", norm=norm), GaussianNoise(of="update", std=std))

    def constants(self, facts: Facts) -> dict[str, float | str]:
        """Of a client, added or removed, or replaced, proven by all that its releases tell."""
        (event,) = (e for e in self.guarantee(facts) if isinstance(e, Gaussian))
        mu = event.sensitivity / event.std * math.sqrt(event.count) if event.std else math.inf
        return {
            "eps_client_added": exact_gaussian_epsilon(mu=mu / 2, delta=facts.delta),
            "eps_client_replaced": exact_gaussian_epsilon(mu=mu, delta=facts.delta),
        }


def _flatten(parts: Mapping[str, Part]) -> Tensor:
    return torch.cat([p.values.flatten() for p in parts.values()])


def _clip_told(messages: Sequence[Message], first: float) -> float:
    """The clip that the aggregator told before a round, else the first one."""
    return next((float(m.parts[_CLIP].values) for m in messages if m.kind == _CLIP), first)


def _round_of(messages: Sequence[Message]) -> int:
    return max((m.round for m in messages), default=0)
