"""What was seen, as stacked tensors that an attack can compare candidates with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bench.api import UPLOAD_KINDS, Kind, Seen, as_kind
from bench.privacy.events import GaussianNoise, LaplaceNoise, Mechanism, SignPerturbation


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
    """The defense's public mechanisms, in the order in which they act."""
    return [Mechanism.from_dict(m) for m in seen.known["mechanisms"]]


def noise_of(seen: Seen) -> Mechanism | None:
    """The last mechanism that makes uploads random, or None if all are deterministic."""
    noises: list[Mechanism] = []
    for mechanism in mechanisms_of(seen):
        match mechanism:
            case GaussianNoise(std=level) | LaplaceNoise(scale=level):
                noises += [mechanism] if level > 0 else []
            case SignPerturbation():
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
    rows = []
    for client in seen.clients:
        message = seen.of(client, sent)[0]
        wide = message.with_parts(
            {
                n: type(p)(values=p.values.to(dtype), present=p.present)
                for n, p in message.parts.items()
            }
        )
        rows.append(as_kind(wide, kind or sent, base=base, lr=lr).parts)
        for name, part in rows[-1].items():
            if not bool(torch.isfinite(part.values[part.presence()]).all()):
                raise ValueError(f"the upload '{name}' of {client} holds non-finite values.")
    return Observation(
        kind=kind or sent,
        values={n: torch.stack([r[n].values for r in rows]) for n in rows[0]},
        present={n: torch.stack([r[n].presence() for r in rows]) for n in rows[0]},
    )


def unusable(seen: Seen) -> str | None:
    """Why the uploads cannot be matched, or None."""
    if not seen.clients:
        return "no client took part in the observed round"
    kind = seen.upload_kind()
    if kind is None:
        return f"no upload of {', '.join(UPLOAD_KINDS)} was seen"
    return None


SMASHED = "smashed"
"""Kind of the message, and name of its one part, that carries cut-layer activations."""


def smashed_of(seen: Seen, *, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """First-step activations of every victim's batch and their presence, [V, B, ...] each, or
    None if no smashed data was seen. Raises ValueError for a value that is not finite."""
    if not seen.clients or not seen.of(seen.clients[0], SMASHED):
        return None
    values, present = seen.stack(SMASHED, seen.clients)
    for client, value, sent in zip(seen.clients, values[SMASHED], present[SMASHED], strict=True):
        if not bool(torch.isfinite(value[sent]).all()):
            raise ValueError(f"the smashed data of {client} holds non-finite values.")
    return values[SMASHED].to(dtype), present[SMASHED]


def nothing_to_match(seen: Seen) -> str | None:
    """Why neither uploads nor smashed data can be matched, or None."""
    if seen.clients and seen.of(seen.clients[0], SMASHED):
        return None
    return unusable(seen)
