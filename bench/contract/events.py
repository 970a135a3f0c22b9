"""What a defense did over a run: facts and events, from which the ledger tells epsilon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.errors import UserError

Unit = Literal["coordinate", "label", "record", "client"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What happened over a run, from which epsilon follows.

    parameters: trained coordinates uploaded per round. rounds: rounds played. clients: number
    of clients. participation: fraction sampled per round. batch: local batch size. records:
    samples of the smallest client. local_steps: gradient steps per round. participations: most
    uploads of any one client; `rounds` when unknown, the worst case. fewest: clients in the step
    with the fewest, in which others had done theirs; a round's, if not given. split: whether
    smashed data was sent too. broadcast: whether the server learns the state after a round.
    delta: target delta.
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
    split: bool = False
    broadcast: bool = True
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("parameters", "rounds", "clients", "batch", "records", "local_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"fact {name} must be >= 1, got {getattr(self, name)}.")
        if self.participations is not None and not 0 <= self.participations <= self.rounds:
            raise UserError(
                f"fact participations must lie in [0, rounds={self.rounds}], "
                f"got {self.participations}."
            )
        if self.fewest is not None and not 1 <= self.fewest <= self.clients:
            raise UserError(
                f"fact fewest must lie in [1, clients={self.clients}], got {self.fewest}."
            )
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
    """Base of the ledger's events. count: how often it happened to the most exposed client."""

    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Gaussian(Event):
    """N(0, std^2) on a vector whose L2 sensitivity for one `unit` is `sensitivity`."""

    sensitivity: float
    std: float
    unit: Unit


@dataclass(frozen=True, kw_only=True)
class Laplace(Event):
    """Laplace(scale) on a vector whose L1 sensitivity for one `unit` is `sensitivity`."""

    sensitivity: float
    scale: float
    unit: Unit


@dataclass(frozen=True, kw_only=True)
class RandomisedResponse(Event):
    """Pure `epsilon`-DP randomised response on each of `coordinates` values, e.g. signs."""

    epsilon: float
    coordinates: int
    covers: str
    unit: Unit


@dataclass(frozen=True, kw_only=True)
class Withheld(Event):
    """Something that never leaves the client, so that it costs nothing. what: noun phrase."""

    what: str


@dataclass(frozen=True, kw_only=True)
class Encrypted(Event):
    """Something that the server gets as ciphertexts alone, so that its values cost nothing
    against a server without the key. what: noun phrase."""

    what: str


@dataclass(frozen=True, kw_only=True)
class Unprotected(Event):
    """Something that leaves the client with no proven protection. what: noun phrase; why."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Round:
    """What everybody knows of an observed round.

    Attributes:
        clients: How many take part.
        batch: Samples of a local step.
        local_steps: Of every client.
        lr: Learning rate of a local step.
        parameters: Values that one client uploads.
    """

    clients: int = 1
    batch: int = 1
    local_steps: int = 1
    lr: float = 1.0
    parameters: int = 1
