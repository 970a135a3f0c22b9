"""Costly attacks spare the victims that cheaper ones on the same observation have reconstructed.

A suite's entry names the attacks that it goes `after`. A victim is not attacked again where an
answer of one of them leaves at most `EXPLAINED` of what was seen unexplained, which an attacker
sees without the truth: that answer stands as the later attack's too. Under noise nobody is spared.
The others are attacked as without the cascade but for their draws, which depend on who is attacked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.contract.attack import Reconstruction, Seen
from bench.contract.defense import Defense
from bench.contract.messages import UPLOAD_KINDS
from bench.metrics.answers import merge

EXPLAINED = 1e-6
"""Share of what was seen, squared, that an answer as good as the image leaves unexplained at
most."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The answer of an attack that went before on the same view.

    Attributes:
        label: Its column.
        answer: About all victims.
        unexplained: See `Judge.unexplained`; None where it is not known.
        judged: Its judged losses, None where they are not known.
    """

    label: str
    answer: Reconstruction
    unexplained: Sequence[float] | None
    judged: Sequence[float] | None


@dataclass(frozen=True, kw_only=True)
class Spared:
    """Which of a view's victims an attack spares.

    Attributes:
        victims: Of the view.
        by: Place of a spared victim -> whose answer stands.
    """

    victims: int
    by: Mapping[int, Earlier]

    @property
    def left(self) -> list[int]:
        """Places of the victims that are attacked, ascending."""
        return [v for v in range(self.victims) if v not in self.by]

    def whole(self, own: Reconstruction) -> Reconstruction:
        """Return the answer about all victims, from the one about those that were attacked."""
        return merge({v: e.answer for v, e in self.by.items()}, own)

    def judge(self, own: Sequence[float] | None) -> list[float] | None:
        """Return the likelihood losses of all victims; None where one is unknown."""
        if own is None or any(e.judged is None for e in self.by.values()):
            return None
        remaining = iter(own)
        of = {v: e.judged[v] for v, e in self.by.items() if e.judged is not None}
        return [of[v] if v in of else next(remaining) for v in range(self.victims)]

    @property
    def note(self) -> str:
        """What the record says of it."""
        names = ", ".join(dict.fromkeys(e.label for e in self.by.values()))
        return (
            f"{len(self.by)} of {self.victims} victims were spared, since {names} explained what "
            f"was seen of them but for {EXPLAINED:g}: the figures are those of that answer"
        )


def spare(earlier: Sequence[Earlier], seen: Seen, defense: Defense) -> Spared:
    """Return which victims need no further attack: the best answer of each decides. Where messages
    mix several victims (see `is_separable`), all are spared or none."""
    victims, by = len(seen.clients), dict[int, Earlier]()
    known = [(e, e.unexplained) for e in earlier if e.unexplained is not None]
    for victim in range(victims):
        best = min(known, key=lambda pair: pair[1][victim], default=None)
        if best is not None and best[1][victim] <= EXPLAINED:
            by[victim] = best[0]
    if len(by) < victims and not is_separable(seen, defense):
        by = {}
    return Spared(victims=victims, by=by)


def is_separable(seen: Seen, defense: Defense) -> bool:
    """Return whether each victim's messages can be read without the others': none is mixed with
    theirs, and no part is hidden that a sum over all of them would show."""
    if defense.together > 1:
        return False
    sent = [m for release in seen.releases for m in release.messages if m.sender in release.clients]
    uploads = [message for message in sent if message.kind in UPLOAD_KINDS]
    hidden = any(message.sealed for message in uploads)
    parts = [part for message in uploads for part in message.parts.values()]
    return not hidden and all(bool(part.presence().all()) for part in parts)


def of_victims(seen: Seen, places: Sequence[int]) -> Seen:
    """Return the view of only the victims at some places."""
    view = replace(seen, clients=tuple(seen.clients[v] for v in places))
    return replace(view, earlier=tuple(of_victims(e, places) for e in seen.earlier))
