"""What was seen, as stacked tensors that an attack can compare candidates with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, cast

import torch
from torch import Tensor

from bench.api import (
    UPLOAD_KINDS,
    Kind,
    Mechanism,
    Message,
    Part,
    Seen,
    State,
    as_kind,
    without_law,
)
from bench.toolkit.patches import patch_map

SMASHED: Final = "smashed"
SLOPES, PATCHES = "smashed_gradient", "patches"
"""Kinds of the messages, and names of the one part, with cut-layer activations and the gradient
returned for them; kind of a mixer's, one part per client."""
EPOCH: Final = "local_epoch"
"""Of what is known of a release, where it is a later local epoch of a round (see `epochs`)."""
STEPS: Final = "steps_of_an_epoch"
"""Of what is known of a release, where it stands for several steps (see `whole_epochs`)."""
SUMMED: Final = "summed"
"""Of what is known of a release, where the mean of so many clients' uploads is one victim's."""
IN_ORDER: Final = "in_order"
"""Of what is known of a release: all its steps have the samples in one order (see `lined_up`)."""


@dataclass(frozen=True, kw_only=True)
class ObservedUploads:
    """Uploads of V victims as one kind: values and presence, [V, ...] by name."""

    kind: Kind
    values: Mapping[str, Tensor]
    present: Mapping[str, Tensor]

    @cached_property
    def square(self) -> Tensor:
        """Squared norm of the visible values, [V]."""
        terms = [
            torch.where(self.present[n], v, 0.0).flatten(1).square().sum(dim=1)
            for n, v in self.values.items()
        ]
        return torch.stack(terms).sum(dim=0)


def same_state(one: Seen, other: Seen) -> bool:
    """Whether two releases of a run begin from one state."""
    return all(torch.equal(v, other.before[n]) for n, v in one.before.items())


# --- public mechanisms ------------------------------------------------------------------------
def mechanisms_of(seen: Seen, name: str | None = None) -> list[Mechanism]:
    """The public mechanisms that act on uploads (name: on that tensor of them), in the order in
    which they do. One by which scores are sent as they are does not: `observe` reads the scores."""
    plain = _plain_scores(seen)
    acting = [m for m in _mechanisms(seen) if m.of in UPLOAD_KINDS and m != plain]
    return [m for m in acting if name is None or m.covers(name)]


def kind_of(mechanism: Mechanism) -> Kind:
    """The kind of upload that one of `mechanisms_of` acts on."""
    return cast(Kind, mechanism.of)


def noise_of(seen: Seen) -> Mechanism | None:
    """The last mechanism that makes uploads random, or else the last that leaves them vague;
    None if neither does."""
    acting = mechanisms_of(seen)[::-1]
    return next((m for m in acting if m.random), next((m for m in acting if m.vague), None))


def bounds_of(seen: Seen) -> Mechanism | None:
    """The last mechanism that draws nothing and tells in which interval a value lies, where
    nothing is random; else None."""
    if noise_of(seen) is not None:
        return None
    return next((m for m in reversed(mechanisms_of(seen)) if m.tells_interval), None)


def _mechanisms(seen: Seen) -> list[Mechanism]:
    return [Mechanism.from_dict(m) for m in seen.known["mechanisms"]]


def _plain_scores(seen: Seen) -> Mechanism | None:
    """The mechanism by which what stands for scores is itself sent, or None."""
    return next((m for m in _mechanisms(seen) if m.scores and not m.random), None)


class NonFiniteError(ValueError):
    """What was seen holds values that are not finite, which nothing can be compared with."""


# --- uploads ----------------------------------------------------------------------------------
def observe(
    seen: Seen, kind: Kind | None = None, *, dtype: torch.dtype, absent: bool = False
) -> ObservedUploads:
    """The victims' uploads converted to `kind` (None: as sent), in `dtype`.

    absent: Whether to show as 0 what was not sent because it is small, for a law that takes it so.
    Raises ValueError if there is none, and NonFiniteError, naming the client.
    """
    sent = seen.upload_kind()
    if sent is None:
        raise ValueError("no upload of weights, update or gradient was seen.")
    lr = float(seen.known["lr"])
    base = {n: v.to(dtype) for n, v in seen.before.items()}
    scores = _plain_scores(seen)
    if scores is not None:
        base = {n: scores.received(v) if n in seen.const else v for n, v in base.items()}
    rows, zone = [], opened(seen)
    broken: dict[tuple[str, str], Tensor] = {}
    for client in seen.clients:
        message = seen.of(client, sent)[0]
        wide = message.with_parts(
            {
                n: replace(p, values=p.values.to(dtype))
                if scores is None or n not in seen.const
                else _as_scores(p, scores, dtype)
                for n, p in message.parts.items()
            }
        )
        if zone:
            wide = _with_opened(wide, zone, seen, base=base, lr=lr)
        rows.append(as_kind(wide, kind or sent, base=base, lr=lr).parts)
        for name, part in rows[-1].items():
            broken[name, client] = (~part.values.isfinite() & part.presence()).any()
    if broken and bool(torch.stack(list(broken.values())).any()):  # asked once, for all of them
        name, client = next(which for which, found in broken.items() if bool(found))
        raise NonFiniteError(f"the upload '{name}' of {client} holds non-finite values.")
    if absent:
        rows = [{n: _zeros_shown(p) for n, p in row.items()} for row in rows]
    return ObservedUploads(
        kind=kind or sent,
        values={n: torch.stack([r[n].values for r in rows]) for n in rows[0]},
        present={n: torch.stack([r[n].presence() for r in rows]) for n in rows[0]},
    )


def _zeros_shown(part: Part) -> Part:
    """An update or gradient with the zeros in place that were not sent."""
    if part.absent != "zero" or part.present is None:
        return part
    return Part(values=torch.where(part.present, part.values, 0.0))


def gradient_estimate(seen: Seen, *, dtype: torch.dtype = torch.float64) -> ObservedUploads:
    """Mean gradient of every victim as well as the public mechanisms allow, [V, ...] by name.

    Additive noise is unbiased and left, and so is a clip. Where what was sent is not the value
    itself (perturbed signs, drawn bits), the mechanism's own estimate is taken.
    """
    unlike = [m for m in mechanisms_of(seen) if not m.faithful]
    if not unlike:
        return observe(seen, "gradient", dtype=dtype)
    mechanism = unlike[-1]
    sent = observe(seen, kind_of(mechanism), dtype=dtype)
    plain = observe(seen, "gradient", dtype=dtype)
    step = float(seen.known["lr"]) * int(seen.known["local_steps"])
    values = {
        name: mechanism.gradient(value, base=seen.before[name].to(dtype), step=step)
        if mechanism.covers(name)
        else plain.values[name]
        for name, value in sent.values.items()
    }
    return ObservedUploads(kind="gradient", values=values, present=sent.present)


def _as_scores(part: Part, mechanism: Mechanism, dtype: torch.dtype) -> Part:
    """What stands for scores as the scores themselves, where it tells them."""
    values, told = mechanism.read(part.values.to(dtype))
    return Part(values=values, present=part.presence() & told)


def _with_opened(
    message: Message, zone: Mapping[str, Tensor], seen: Seen, *, base: State, lr: float
) -> Message:
    """The upload with the coordinates `zone` as the state after the round shows them."""
    assert seen.after is not None
    plain = as_kind(message, "weights", base=base, lr=lr)
    parts = dict(plain.parts)
    for name, covers in zone.items():
        part, after = parts[name], seen.after[name].to(parts[name].values)
        parts[name] = Part(
            values=torch.where(covers, after, part.values), present=part.presence() | covers
        )
    return plain.with_parts(parts)


def opened(seen: Seen) -> dict[str, Tensor]:
    """Encrypted coordinates of the only client that uploaded, bool by name: the sum that was
    opened is its own, and the state after the round tells it. Empty for several clients, and
    where the server does not learn that state."""
    kind = seen.upload_kind()
    if kind is None or seen.after is None:
        return {}
    senders = {m.sender for m in seen.messages if m.kind == kind}
    if len(senders) != 1 or len(seen.clients) != 1:
        return {}
    sealed = seen.of(seen.clients[0], kind)[0].sealed
    return {n: s.covers for n, s in sealed.items() if n in seen.after}


def opened_mean(seen: Seen, *, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor] | None:
    """Which coordinates all victims encrypted, bool by name, and the mean update there [M], where
    the state after the round shows it: several clients took part, all of them victims. None
    where it does not, or where what was sent in the open shows that the server takes no mean."""
    kind = seen.upload_kind()
    senders = {m.sender for m in seen.messages if m.kind == kind}
    if kind is None or seen.after is None or len(seen.clients) < 2 or senders != set(seen.clients):
        return None
    boxes = [seen.of(c, kind)[0].sealed for c in seen.clients]
    covers = {
        n: torch.stack([b[n].covers for b in boxes]).all(dim=0)
        for n in boxes[0]
        if n in seen.after and all(n in b for b in boxes)
    }
    covers = {n: c for n, c in covers.items() if bool(c.any())}
    if not covers:
        return None
    moved = {n: (v - seen.before[n]).to(dtype) for n, v in seen.after.items()}
    shown = observe(seen, "update", dtype=dtype)
    for name, value in shown.values.items():
        everyone = shown.present[name].all(dim=0)
        expected = value.mean(dim=0)[everyone]
        if not torch.allclose(moved[name][everyone], expected, rtol=1e-3, atol=1e-6):
            return None
    return covers, torch.cat([moved[n][c] for n, c in covers.items()])


# --- smashed data ------------------------------------------------------------------------------
def smashed_of(seen: Seen, *, dtype: torch.dtype, step: int = 0) -> tuple[Tensor, Tensor] | None:
    """A step's activations of every victim's batch and their presence, [V, B, ...] each, or None if
    no smashed data was seen.

    Where a mixer told the server which patches a client contributed, the others are absent:
    there is at most noise. Raises NonFiniteError.
    """
    if not seen.clients or not seen.of(seen.clients[0], SMASHED):
        return None
    values, present = seen.stack(SMASHED, seen.clients, step)
    for client, value, sent in zip(seen.clients, values[SMASHED], present[SMASHED], strict=True):
        if not bool(torch.isfinite(value[sent]).all()):
            raise NonFiniteError(f"the smashed data of {client} holds non-finite values.")
    own = _patches(seen, values[SMASHED], step)
    there = present[SMASHED] if own is None else present[SMASHED] & own
    return values[SMASHED].to(dtype), there


def _patches(seen: Seen, values: Tensor, step: int) -> Tensor | None:
    """Which values [V, B, ...] lie in the patches that each victim contributed, or None."""
    told = {
        name: part.values
        for m in seen.messages
        if m.kind == PATCHES and m.step == step
        for name, part in m.parts.items()
    }
    if not set(seen.clients) <= set(told):
        return None
    maps = [patch_map(told[c].bool(), v) for c, v in zip(seen.clients, values, strict=True)]
    return torch.stack(maps)


@dataclass(frozen=True, kw_only=True)
class SplitView:
    """What a split protocol's server knows of V victims' first step, and what it answered in each.

    Attributes:
        cut: Stage after which the activations were sent.
        values: Smashed data [V, B, ...].
        present: Which of it are the victims' own, bool [V, B, ...].
        slopes: The loss's gradient by every step's smashed data that the server returned
            [V, steps, B, ...], 0 where nothing was sent, or None.
        mechanisms: Public ones that act on it, in the order in which they do.
    """

    cut: str
    values: Tensor
    present: Tensor
    slopes: Tensor | None
    mechanisms: tuple[Mechanism, ...]

    @property
    def noises(self) -> tuple[Mechanism, ...]:
        """The mechanisms that make it random."""
        return tuple(m for m in self.mechanisms if m.random)

    @property
    def std(self) -> float:
        """Standard deviation of all its noise."""
        return math.sqrt(sum(m.variance for m in self.noises))

    def sent(self, q: Tensor) -> Tensor:
        """Activations [B, ...] as they were before noise."""
        for mechanism in self.mechanisms:
            q = mechanism.apply(q)
        return q


def _slopes(seen: Seen, step: int, like: Tensor) -> Tensor | None:
    """What the server returned in a step [V, B, ...], 0 where nothing was sent, or None."""
    returned = {
        m.receiver: m.parts[SLOPES].values
        for m in seen.messages
        if m.kind == SLOPES and m.step == step
    }
    if not set(seen.clients) <= set(returned):
        return None
    found = smashed_of(seen, dtype=like.dtype, step=step)
    assert found is not None
    slopes = torch.stack([returned[c] for c in seen.clients]).to(like)
    return torch.where(found[1].to(like.device), slopes, 0.0)


def split_view(seen: Seen, *, dtype: torch.dtype, device: torch.device) -> SplitView | None:
    """See `SplitView`; None where no smashed data was seen. Raises as `smashed_of`."""
    found = smashed_of(seen, dtype=dtype)
    if found is None:
        return None
    values, present = (t.to(device) for t in found)
    steps = [_slopes(seen, step, values) for step in range(int(seen.known["local_steps"]))]
    known = [s for s in steps if s is not None]
    slopes = torch.stack(known, dim=1) if len(known) == len(steps) else None
    return SplitView(
        cut=str(seen.known["cut"]),
        values=values,
        present=present,
        slopes=slopes,
        mechanisms=tuple(m for m in _mechanisms(seen) if m.of == SMASHED),
    )


# --- why an attack does not apply ---------------------------------------------------------------
def unusable(seen: Seen) -> str | None:
    """Why the uploads cannot be matched, or None."""
    if not seen.clients:
        return "no client took part in the observed round"
    kind = seen.upload_kind()
    if kind is None:
        return f"no upload of {', '.join(UPLOAD_KINDS)} was seen"
    shown = [p for c in seen.clients for p in seen.of(c, kind)[0].parts.values()]
    visible = any(p.present is None or bool(p.present.any()) for p in shown)
    if not visible and not opened(seen) and opened_mean(seen, dtype=torch.float64) is None:
        return "no coordinate of any upload is visible"
    return None


def nothing_to_match(seen: Seen) -> str | None:
    """Why neither uploads nor smashed data can be matched, or None."""
    if seen.clients and seen.of(seen.clients[0], SMASHED):
        return None
    return unusable(seen)


def lawless(seen: Seen) -> str | None:
    """Why what was seen cannot be compared with candidates as it deserves, or None."""
    return without_law([m for m in _mechanisms(seen) if m.of in (*UPLOAD_KINDS, SMASHED)])
