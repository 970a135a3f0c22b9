"""What a defense did: public mechanisms (for attackers) and ledger events (for the accountant)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

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
                raise ValueError(f"fact {name} must be >= 1, got {getattr(self, name)}.")
        if self.participations is not None and not 0 <= self.participations <= self.rounds:
            raise ValueError(
                f"fact participations must lie in [0, rounds={self.rounds}], "
                f"got {self.participations}."
            )
        if self.fewest is not None and not 1 <= self.fewest <= self.clients:
            raise ValueError(
                f"fact fewest must lie in [1, clients={self.clients}], got {self.fewest}."
            )
        if not 0 < self.participation <= 1:
            raise ValueError(f"fact participation must lie in (0, 1], got {self.participation}.")
        if not 0 < self.delta < 1:
            raise ValueError(f"fact delta must lie in (0, 1), got {self.delta}.")

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


# --- public mechanisms, as an attacker models them ------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Round:
    """What everybody knows of an observed round: clients that take part, their batch size and
    local steps."""

    clients: int = 1
    batch: int = 1
    local_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Base of the public descriptions of how an upload is disturbed.

    of: what it acts on.
    """

    of: Literal["weights", "update", "gradient", "smashed", "labels"]
    kinds: ClassVar[dict[str, type[Mechanism]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Mechanism.kinds[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **asdict(self)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Mechanism:
        """Inverse of `to_dict`. Raises ValueError for an unknown kind."""
        kind = Mechanism.kinds.get(data.get("kind", ""))
        if kind is None:
            raise ValueError(
                f"unknown mechanism '{data.get('kind')}'; known: {', '.join(Mechanism.kinds)}."
            )
        names = {f.name for f in fields(kind)}
        return kind(**{k: v for k, v in data.items() if k in names})


@dataclass(frozen=True, kw_only=True)
class Clip(Mechanism):
    """The whole vector is scaled down to norm `norm` of order `order` if it is longer."""

    norm: float
    order: int = 2


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Mechanism):
    """Independent N(0, std^2) per coordinate."""

    std: float


@dataclass(frozen=True, kw_only=True)
class LaplaceNoise(Mechanism):
    """Independent Laplace(scale) per coordinate."""

    scale: float


@dataclass(frozen=True, kw_only=True)
class SignPerturbation(Mechanism):
    """v -> |v| t with v's sign kept with probability `keep`, else flipped; t ~ U[low, high]."""

    keep: float
    low: float
    high: float

    @property
    def mean_scale(self) -> float:
        return (self.low + self.high) / 2

    @property
    def relative_std(self) -> float:
        """Standard deviation of t over its mean."""
        return (self.high - self.low) / 12**0.5 / self.mean_scale


@dataclass(frozen=True, kw_only=True)
class BernoulliMask(Mechanism):
    """Each value sent is a fresh Bernoulli(sigmoid(score)) bit, score being the trained variable.

    clip: c; training began from broadcast probabilities clipped to [c, 1 - c]. sampled: False
    where the probability itself is sent in place of the bit.
    """

    clip: float
    sampled: bool = True


@dataclass(frozen=True, kw_only=True)
class SmashedNoise(Mechanism):
    """Activations clipped to [low, high] (None: not clipped), then N(0, std^2) per value sent."""

    std: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class LabelNoise(Mechanism):
    """N(0, std^2) on every entry of a soft label."""

    std: float
