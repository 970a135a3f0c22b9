"""Costly attacks spare the victims that cheaper ones on the same observation have rebuilt.

A suite's entry names the attacks that it goes `after`. A victim whose image one of them has rebuilt
to an SSIM of `REBUILT` is not attacked again: the answer that rebuilt it stands as the later
attack's too. So a spared victim's SSIM, and the upper bound of it, is at most 1 - `REBUILT` below
what the later attack could have reached. The others are attacked as without the cascade but for
their draws, which depend on who is attacked. The attacker's choice is made of fewer answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.contract.attack import Seen
from bench.contract.defense import Defense
from bench.contract.messages import UPLOAD_KINDS
from bench.records import RECONSTRUCTION, AttackRecord, check_kept

REBUILT = 0.98
"""Least SSIM of an answer that is as good as the image."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """An attack that went before on the same observation.

    Attributes:
        label: Its column.
        record: What it found.
        artifacts: Folder with what it rebuilt.
        first: Where there the record's victims begin.
    """

    label: str
    record: AttackRecord
    artifacts: Path
    first: int = 0

    def of_view(self, number: int) -> Earlier:
        """The same of the victims of one view alone."""
        first = sum(self.record.views[:number])
        return replace(self, record=self.record.of_view(number), first=first)


@dataclass(frozen=True, kw_only=True)
class Spared:
    """Which of an observation's victims an attack spares.

    Attributes:
        victims: Of the observation.
        by: Place of a spared victim -> whose answer stands.
    """

    victims: int
    by: Mapping[int, Earlier]

    @property
    def left(self) -> list[int]:
        """Places of the victims that are attacked, ascending."""
        return [v for v in range(self.victims) if v not in self.by]

    def filled(self, own: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Figures of all victims, from those of the ones that were attacked; of the metrics that
        all answers have."""
        others = [e.record.values for e in self.by.values()]
        named = [m for m in (own if self.left else others[0]) if all(m in o for o in others)]
        found = {}
        for metric in named:
            figures = {v: e.record.values[metric][v] for v, e in self.by.items()}
            found[metric] = self._all(own.get(metric, ()), figures)
        return found

    def judged(self, own: Sequence[float] | None) -> list[float] | None:
        """Judged losses of all victims; None where one is not known."""
        known = {v: e.record.judged[v] for v, e in self.by.items() if e.record.judged is not None}
        if own is None or known.keys() != self.by.keys():
            return None
        return self._all(own, known)

    def _all(self, own: Sequence[float], others: Mapping[int, float]) -> list[float]:
        rest = iter(own)
        return [others[v] if v in others else next(rest) for v in range(self.victims)]

    def images(self, own: Tensor | None) -> Tensor | None:
        """Answers [V, K, ...] of all victims; None where one was not kept."""
        if own is None and self.left:
            return None
        found: dict[int, Tensor] = {} if own is None else dict(zip(self.left, own, strict=True))
        for victim, earlier in self.by.items():
            file = earlier.artifacts / RECONSTRUCTION
            if not file.is_file():
                return None
            check_kept(earlier.artifacts, earlier.record, RECONSTRUCTION)
            found[victim] = load_file(file)["images"][earlier.first + victim]
        return torch.stack([found[v] for v in range(self.victims)])

    @property
    def note(self) -> str:
        """What the record says of it."""
        names = ", ".join(dict.fromkeys(e.label for e in self.by.values()))
        return (
            f"{len(self.by)} of {self.victims} victims were spared, since {names} had rebuilt them "
            f"to an SSIM of at least {REBUILT:g}: the figures are those of that answer"
        )


def spare(earlier: Sequence[Earlier], seen: Seen, defense: Defense) -> Spared:
    """Which victims need no further attack: the best answer of each decides. Where messages tell of
    several victims at once (see `apart`), all are spared or none."""
    victims, by = len(seen.clients), dict[int, Earlier]()
    for victim in range(victims):
        best = max(earlier, key=lambda e: _ssim(e, victim), default=None)
        if best is not None and _ssim(best, victim) >= REBUILT:
            by[victim] = best
    if len(by) < victims and not apart(seen, defense):
        by = {}
    return Spared(victims=victims, by=by)


def _ssim(earlier: Earlier, victim: int) -> float:
    similar = earlier.record.values.get("ssim")
    return float("-inf") if similar is None or earlier.record.is_floor else similar[victim]


def apart(seen: Seen, defense: Defense) -> bool:
    """Whether each victim's messages can be read without the others': none is mixed with theirs,
    and no part is hidden that a sum over all of them would show."""
    if defense.together > 1:
        return False
    uploads = [
        message
        for one in seen.releases
        for message in one.messages
        if message.sender in one.clients and message.kind in UPLOAD_KINDS
    ]
    hidden = any(message.sealed for message in uploads)
    parts = [part for message in uploads for part in message.parts.values()]
    return not hidden and all(bool(part.presence().all()) for part in parts)


def of_victims(seen: Seen, places: Sequence[int]) -> Seen:
    """The same view, whose victims are those at the places alone."""
    one = replace(seen, clients=tuple(seen.clients[v] for v in places))
    return replace(one, earlier=tuple(of_victims(e, places) for e in seen.earlier))


def truth_of_victims(truth: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """What `score` takes, of the victims at the places alone."""
    return dict(truth) | {n: truth[n][list(places)] for n in ("x", "y")}
