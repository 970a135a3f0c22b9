"""What a defense did over a run: facts and events, from which the ledger tells epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from bench.errors import UserError

if TYPE_CHECKING:  # messages are tensors, and reports need no torch
    from bench.contract.messages import Message

Unit = Literal["coordinate", "label", "record", "client"]
_MOST = 10**15
"""Of what a fact counts; a float64 still holds every whole number up to it."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What happened over a run, from which epsilon follows.

    Attributes:
        parameters: Trained coordinates that a client uploads per round.
        rounds: Rounds played.
        clients: Number of clients.
        participation: Fraction of the clients that is sampled per round.
        batch: Local batch size.
        records: Samples of the smallest client.
        local_steps: Gradient steps per round.
        participations: Most uploads of any one client; None, the worst case, means `rounds`.
        fewest: Clients in the step that the fewest took, others having finished theirs; None means
            those of a round.
        head: Those of the parameters in a head on the client (split protocols, private labels).
        split: Whether smashed data was sent too.
        broadcast: Whether the server hears every broadcast, also of a model that it does not form.
        delta: The delta at which epsilon is told.

    Raises:
        UserError: For a fact out of its range.
    """

    parameters: int
    rounds: int = 1
    clients: int = 1
    participation: float = 1.0
    batch: int = 1
    records: int = 1
    local_steps: int = 1
    participations: int | None = None
    fewest: int | None = None
    head: int = 0
    split: bool = False
    broadcast: bool = False
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("parameters", "rounds", "clients", "batch", "records", "local_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"fact {name} must be >= 1, got {getattr(self, name)}.")
            if getattr(self, name) > _MOST:
                raise UserError(f"fact {name} must be <= 10^15, got {getattr(self, name)!s:.60}.")
        for name, low, limit in (
            ("participations", 0, "rounds"),
            ("fewest", 1, "clients"),
            ("head", 0, "parameters"),
        ):
            value, high = getattr(self, name), getattr(self, limit)
            if value is not None and not low <= value <= high:
                raise UserError(f"fact {name} must lie in [{low}, {limit}={high}], got {value}.")
        if not 0 < self.participation <= 1:
            raise UserError(f"fact participation must lie in (0, 1], got {self.participation}.")
        if not 0 < self.delta < 1:
            raise UserError(f"fact delta must lie in (0, 1), got {self.delta}.")

    @property
    def releases(self) -> int:
        """Uploads of the most exposed client."""
        return self.rounds if self.participations is None else self.participations

    @property
    def sampled(self) -> int:
        """Clients that take part in a round."""
        return max(1, round(self.participation * self.clients))


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of the ledger's events.

    Attributes:
        count: How often it happened to the most exposed client.
    """

    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Gaussian(Event):
    """Noise N(0, std^2) on a vector.

    Attributes:
        sensitivity: How far one `unit` moves the vector at most, in L2 norm.
        std: Standard deviation of the noise on each coordinate.
        unit: What the neighbours differ in.
        largest: The largest magnitude of a value before the noise, > 0, where `upload` adds it to
            all values and they do not depend on noise of earlier rounds that nobody else knows.
            Only then do the noises of several clients add up in a sum of their uploads.
        summed: The sum that the server reads in place of the vector; `Composed` sets it.
    """

    sensitivity: float
    std: float
    unit: Unit
    largest: float | None = None
    summed: Summed | None = None


@dataclass(frozen=True, kw_only=True)
class Laplace(Event):
    """Laplace noise on a vector.

    Attributes:
        sensitivity: How far one `unit` moves the vector at most, in L1 norm.
        scale: Scale of the noise on each coordinate.
        unit: What the neighbours differ in.
    """

    sensitivity: float
    scale: float
    unit: Unit


@dataclass(frozen=True, kw_only=True)
class RandomisedResponse(Event):
    """Randomised response on each of several values, such as signs.

    Attributes:
        epsilon: Pure epsilon of one value.
        coordinates: Number of values.
        covers: Noun phrase for what the values are.
        unit: What the neighbours differ in.
    """

    epsilon: float
    coordinates: int
    covers: str
    unit: Unit


@dataclass(frozen=True, kw_only=True)
class Withheld(Event):
    """Something that never leaves the client, so that it costs nothing.

    Attributes:
        what: Noun phrase for it.
    """

    what: str


@dataclass(frozen=True, kw_only=True)
class Encrypted(Event):
    """Something that the server gets as ciphertext alone.

    Its values cost nothing against a server without the key.

    Attributes:
        what: Noun phrase for it.
    """

    what: str


@dataclass(frozen=True, kw_only=True)
class Summed(Event):
    """Something of which the server learns the sum over clients alone.

    That tells no more than what each client has sent, and by itself nothing is proven of it.

    Attributes:
        what: Noun phrase for it.
        fewest: Uploads in a sum that the server can read, at least.
        most: The same, at most.
        values: In one upload.
        clip: Values are cut to [-clip, clip] before they are summed.
        step: Distance of the values to which they are rounded at random, 0 for no rounding.
    """

    what: str
    fewest: int = 1
    most: int = 1
    values: int = 1
    clip: float = math.inf
    step: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Unprotected(Event):
    """Something that leaves the client with no proven protection.

    Attributes:
        what: Noun phrase for it.
        why: Clause that says why.
    """

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Round:
    """What everybody knows of an observed round.

    Attributes:
        clients: How many take part.
        batch: Their batch size.
        local_steps: Their gradient steps.
        lr: Learning rate of a local step.
        parameters: Values that one client uploads.
        uploads: Most uploads that one of them sent in earlier rounds.
        constants: Sizes of the public constants that the defense drew, by the trained tensor that
            each belongs to.
        messages: What the server was told and sent.
    """

    clients: int = 1
    batch: int = 1
    local_steps: int = 1
    lr: float = 1.0
    parameters: int = 1
    uploads: int = 0
    constants: Mapping[str, int] = field(default_factory=dict)
    messages: Sequence[Message] = ()
