"""What was seen, as stacked tensors that an attack can compare candidates with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from bench.api import (
    UPLOAD_KINDS,
    BernoulliMask,
    Clip,
    GaussianNoise,
    Kind,
    LaplaceNoise,
    Mechanism,
    Message,
    Part,
    Seen,
    SignPerturbation,
    SmashedNoise,
    State,
    as_kind,
)
from bench.toolkit.patches import patch_map
from bench.toolkit.vectors import clip_rows_l1


@dataclass(frozen=True, kw_only=True)
class Observation:
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


def mechanisms_of(seen: Seen) -> list[Mechanism]:
    """The public mechanisms that act on uploads, in the order in which they do. Probabilities
    that are sent as they are do not: `observe` reads them as the scores behind them."""
    plain = _probabilities(seen)
    return [m for m in _mechanisms(seen) if m.of in UPLOAD_KINDS and m != plain]


def _probabilities(seen: Seen) -> BernoulliMask | None:
    """The mechanism by which probabilities themselves are sent, or None."""
    for mechanism in _mechanisms(seen):
        if isinstance(mechanism, BernoulliMask) and not mechanism.sampled:
            return mechanism
    return None


def kind_of(mechanism: Mechanism) -> Kind:
    """The kind of upload that one of `mechanisms_of` acts on."""
    return cast(Kind, mechanism.of)


def _mechanisms(seen: Seen) -> list[Mechanism]:
    return [Mechanism.from_dict(m) for m in seen.known["mechanisms"]]


def noise_of(seen: Seen) -> Mechanism | None:
    """The last mechanism that makes uploads random, or None if all are deterministic."""
    noises: list[Mechanism] = []
    for mechanism in mechanisms_of(seen):
        match mechanism:
            case GaussianNoise(std=level) | LaplaceNoise(scale=level):
                noises += [mechanism] if level > 0 else []
            case SignPerturbation() | BernoulliMask():
                noises.append(mechanism)
    return noises[-1] if noises else None


def observe(seen: Seen, kind: Kind | None = None, *, dtype: torch.dtype) -> Observation:
    """The victims' uploads converted to `kind` (None: as sent), in `dtype`.

    Raises ValueError if there is none or if a value is not finite, naming the client.
    """
    sent = seen.upload_kind()
    if sent is None:
        raise ValueError("no upload of weights, update or gradient was seen.")
    lr = float(seen.known["lr"])
    base = {n: v.to(dtype) for n, v in seen.before.items()}
    masks = _probabilities(seen)
    if masks is not None:
        base = {n: torch.logit(v.clamp(masks.clip, 1 - masks.clip)) if n in seen.const else v
                for n, v in base.items()}  # fmt: skip
    rows, zone = [], opened(seen)
    broken: dict[tuple[str, str], Tensor] = {}
    for client in seen.clients:
        message = seen.of(client, sent)[0]
        wide = message.with_parts(
            {
                n: Part(values=p.values.to(dtype), present=p.present)
                if masks is None or n not in seen.const
                else _as_scores(p, dtype)
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
        raise ValueError(f"the upload '{name}' of {client} holds non-finite values.")
    return Observation(
        kind=kind or sent,
        values={n: torch.stack([r[n].values for r in rows]) for n in rows[0]},
        present={n: torch.stack([r[n].presence() for r in rows]) for n in rows[0]},
    )


def _as_scores(part: Part, dtype: torch.dtype) -> Part:
    """Probabilities as the scores behind them; one that was rounded to 0 or 1 tells no score."""
    values = part.values.to(dtype)
    inside = (values > 0) & (values < 1)
    shown = part.presence() & (inside | values.isnan())
    return Part(values=torch.where(inside, torch.logit(values), values), present=shown)


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


def unusable(seen: Seen) -> str | None:
    """Why the uploads cannot be matched, or None."""
    if not seen.clients:
        return "no client took part in the observed round"
    kind = seen.upload_kind()
    if kind is None:
        return f"no upload of {', '.join(UPLOAD_KINDS)} was seen"
    shown = [p for c in seen.clients for p in seen.of(c, kind)[0].parts.values()]
    if not any(p.present is None or bool(p.present.any()) for p in shown) and not opened(seen):
        return "no coordinate of any upload is visible"
    return None


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


SMASHED, SLOPES, PATCHES = "smashed", "smashed_gradient", "patches"
"""Kinds of the messages, and names of the one part, with cut-layer activations and the gradient
returned for them; kind of a mixer's, one part per client."""


def smashed_of(seen: Seen, *, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """First-step activations of every victim's batch and their presence, [V, B, ...] each, or
    None if no smashed data was seen.

    Where a mixer told the server which patches a client contributed, the others are absent:
    there is at most noise. Raises ValueError for a value that is not finite.
    """
    if not seen.clients or not seen.of(seen.clients[0], SMASHED):
        return None
    values, present = seen.stack(SMASHED, seen.clients)
    for client, value, sent in zip(seen.clients, values[SMASHED], present[SMASHED], strict=True):
        if not bool(torch.isfinite(value[sent]).all()):
            raise ValueError(f"the smashed data of {client} holds non-finite values.")
    own = _patches(seen, values[SMASHED])
    there = present[SMASHED] if own is None else present[SMASHED] & own
    return values[SMASHED].to(dtype), there


def _patches(seen: Seen, values: Tensor) -> Tensor | None:
    """Which values [V, B, ...] lie in the patches that each victim contributed, or None."""
    told = {
        name: part.values
        for m in seen.messages
        if m.kind == PATCHES and m.step == 0
        for name, part in m.parts.items()
    }
    if not set(seen.clients) <= set(told):
        return None
    maps = [patch_map(told[c].bool(), v) for c, v in zip(seen.clients, values, strict=True)]
    return torch.stack(maps)


@dataclass(frozen=True, kw_only=True)
class SplitView:
    """What a split protocol's server knows of V victims' first step.

    values, present [V, B, ...]: smashed data and which of it are the victims' own. slopes
    [V, B, ...]: the loss's gradient by it that the server returned, 0 where nothing was sent, or
    None. std: of the noise on it; low, high: the range, and norm: the L1 norm of a sample, to
    which it was clipped before, or None.
    """

    cut: str
    values: Tensor
    present: Tensor
    slopes: Tensor | None
    std: float
    low: float | None
    high: float | None
    norm: float | None

    def sent(self, q: Tensor) -> Tensor:
        """Activations [B, ...] as they were before noise."""
        if self.low is not None or self.high is not None:
            q = q.clamp(self.low, self.high)
        return q if self.norm is None else clip_rows_l1(q, norm=self.norm)


def split_view(seen: Seen, *, dtype: torch.dtype, device: torch.device) -> SplitView | None:
    """See `SplitView`; None where no smashed data was seen. Raises as `smashed_of`."""
    found = smashed_of(seen, dtype=dtype)
    if found is None:
        return None
    values, present = (t.to(device) for t in found)
    returned = {
        m.receiver: m.parts[SLOPES].values
        for m in seen.messages
        if m.kind == SLOPES and m.step == 0
    }
    slopes = None
    if set(seen.clients) <= set(returned):
        slopes = torch.stack([returned[c] for c in seen.clients]).to(values)
        slopes = torch.where(present, slopes, 0.0)
    acting = [m for m in _mechanisms(seen) if m.of == SMASHED]
    noises = [m for m in acting if isinstance(m, SmashedNoise)]
    # Laplace noise by its variance: the objective is Gaussian.
    laplace = [m.scale for m in acting if isinstance(m, LaplaceNoise)]
    norms = [m.norm for m in acting if isinstance(m, Clip)]
    lows = [m.low for m in noises if m.low is not None]
    highs = [m.high for m in noises if m.high is not None]
    return SplitView(
        cut=str(seen.known["cut"]), values=values, present=present, slopes=slopes,
        std=math.sqrt(sum(m.std**2 for m in noises) + sum(2 * b**2 for b in laplace)),
        low=max(lows, default=None), high=min(highs, default=None), norm=min(norms, default=None),
    )  # fmt: skip


def nothing_to_match(seen: Seen) -> str | None:
    """Why neither uploads nor smashed data can be matched, or None."""
    if seen.clients and seen.of(seen.clients[0], SMASHED):
        return None
    return unusable(seen)
