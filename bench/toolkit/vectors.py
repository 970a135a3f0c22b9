"""Named tensors as one vector: norms, clipping, noise, flattening."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench.contract.defense import Local
from bench.contract.messages import UPLOAD_KINDS, Kind, Message, Part, State, as_kind
from bench.errors import UserError
from bench.toolkit.memory import to_device


def clip(parts: Mapping[str, Part], *, norm: float, order: int = 2) -> dict[str, Part]:
    """Scale all values by min(1, norm / |v|), where |v| is the norm of that order (1 or 2) over the
    present coordinates."""
    present = [p.values if p.present is None else p.values[p.present] for p in parts.values()]
    flat = torch.cat([v.double().flatten() for v in present])
    length = torch.linalg.vector_norm(flat, ord=order)
    factor = torch.clamp(norm / length.clamp_min(1e-300), max=1.0)
    return {n: replace(p, values=p.values * factor.to(p.values)) for n, p in parts.items()}


def clip_rows_l1(values: Tensor, *, norm: float) -> Tensor:
    """Scale each row of values [B, ...] by min(1, norm / its L1 norm); differentiable."""
    length = values.flatten(1).abs().sum(dim=1).clamp_min(1e-30)
    factor = (norm / length).clamp_max(1.0)
    return values * factor.view(-1, *[1] * (values.dim() - 1))


def gaussian_like(values: Tensor, *, std: float, rng: torch.Generator) -> Tensor:
    """Draws of N(0, std^2) in the shape, dtype and device of `values`."""
    noise = torch.randn(values.shape, generator=rng, dtype=values.dtype, device=rng.device)
    return to_device(noise, values.device) * std


def uniform_like(values: Tensor, *, rng: torch.Generator) -> Tensor:
    """Draws of U[0, 1) in the shape, dtype and device of `values`."""
    drawn = torch.rand(values.shape, generator=rng, dtype=values.dtype, device=rng.device)
    return to_device(drawn, values.device)


def laplace_like(values: Tensor, *, scale: float, rng: torch.Generator) -> Tensor:
    """Draws of Laplace(scale) in the shape of `values`, by the inverse CDF of a float64 uniform."""
    u = torch.rand(values.shape, generator=rng, dtype=torch.float64, device=rng.device) - 0.5
    magnitude = -torch.log1p(-2 * u.abs().clamp_max(0.5 - 2**-54))
    return to_device((scale * u.sign() * magnitude).to(values.dtype), values.device)


def showing(part: Part, shown: Tensor) -> Part:
    """The part with only the coordinates `shown` present; what is absent is 0 and tells nothing."""
    present = part.presence() & shown
    return replace(part, values=torch.where(present, part.values, 0.0), present=present)


def sparse(part: Part, sent: Tensor) -> Part:
    """The part with only the coordinates `sent` on the wire; the others are zero for everybody.

    A part of which nothing is present stays as it is.

    Raises:
        UserError: For a part of which the client keeps some coordinates, since absence can mean
            one thing only.
    """
    present = part.presence()
    if part.absent == "kept" and not bool(present.all()):
        if not bool(present.any()):
            return part
        raise UserError(
            f"a tensor of shape {list(part.values.shape)} of which the client keeps some "
            "coordinates cannot be sparsified: absence would mean both kept and zero. Put the "
            "sparsifier first, as in 'top_k+other'."
        )
    present = present & sent
    values = torch.where(present, part.values, 0.0)
    return replace(part, values=values, present=present, absent="zero")


def change_uploads(
    messages: Sequence[Message],
    kind: Kind | None,
    local: Local,
    change: Callable[[Message], Message | list[Message]],
) -> list[Message]:
    """The messages with `change` of every upload in its place, one message or several.

    kind: What the upload is expressed as before; None: as it is.
    """
    out: list[Message] = []
    for message in messages:
        changed: Message | list[Message] = message
        if message.kind in UPLOAD_KINDS:
            plain = as_kind(message, kind or message.kind, base=local.broadcast, lr=local.lr)
            changed = change(plain)
        out += [changed] if isinstance(changed, Message) else changed
    return out


def replace_values(message: Message, values: Mapping[str, Tensor]) -> Message:
    """The message with other values under the same names and presence, 0 where absent; they are
    as wide as any real numbers, 32 bits at least."""
    parts = {}
    for name, part in message.parts.items():
        value = values[name]
        if part.present is not None:
            value = torch.where(part.present, value, 0.0)
        parts[name] = replace(part, values=value, bits=max(part.bits, 32))
    return message.with_parts(parts)


def flatten(state: State) -> Tensor:
    """The tensors [V, ...] of a stacked state as one matrix [V, D], in the state's order."""
    return torch.cat([v.flatten(1) for v in state.values()], dim=1)


def cut_like(vector: Tensor, like: State) -> dict[str, Tensor]:
    """The values [D] of a state's tensors, one tensor after another, in their names and shapes."""
    pieces = vector.split([v.numel() for v in like.values()])
    return {n: p.view(like[n].shape) for n, p in zip(like, pieces, strict=True)}
