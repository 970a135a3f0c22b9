"""Updates sent in few bits per value."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from bench.api import (
    SERVER,
    Client,
    Defense,
    Event,
    Facts,
    Local,
    Mechanism,
    Message,
    Part,
    Quantised,
    Unprotected,
)
from bench.toolkit.vectors import change_uploads

_BITS = {"qsgd": 4, "sign": 1, "int8": 8, "stochastic": 4, "nf4": 4, "fp4": 4}
_MOST = 16


class Quantise(Defense):
    """Rounds every tensor of an update to a grid, so that a value takes few bits.

    Args:
        how: qsgd, a sign and steps up to the tensor's largest magnitude, rounded at random; sign,
            the sign times the mean magnitude; int8, the nearest of 127 steps to either side;
            stochastic, steps from the least to the largest value, rounded at random; nf4 and fp4,
            the nearest of 16 and 15 shares of the largest magnitude of 64 values.
        bits: Of one value: 1 for sign, 8 for int8, 4 for nf4 and fp4; qsgd from 2 to 16,
            stochastic from 1 to 16. None: 4 for these two.

    Departures: QSGD's practical variant, which scales by the largest magnitude in place of the L2
    norm; its buckets are whole tensors, and its lossless code of the rounded values is left out.
    The sign of 0 counts as plus, since one bit has no third value. The scaled sign is that of
    Karimireddy et al.; signSGD's majority vote is replaced by the mean.
    Source: Alistarh et al., arXiv:1610.02132 (QSGD); Bernstein et al., arXiv:1802.04434 (signSGD);
    Karimireddy et al., arXiv:1901.09847 (scale); Suresh et al., arXiv:1611.00429 (stochastic);
    Dettmers et al., arXiv:2305.14314 (nf4), by bitsandbytes, as NVFlare sends messages.
    """

    strength = None  # bits are whole numbers, few enough to list
    source = (
        "Alistarh et al., arXiv:1610.02132; Bernstein et al., arXiv:1802.04434; "
        "Suresh et al., arXiv:1611.00429; Dettmers et al., arXiv:2305.14314"
    )

    def __init__(
        self,
        *,
        how: Literal["qsgd", "sign", "int8", "stochastic", "nf4", "fp4"] = "qsgd",
        bits: int | None = None,
    ) -> None:
        if how not in _BITS:
            raise ValueError(f"how must be one of {', '.join(_BITS)}, got '{how}'.")
        self.how, self.bits = how, _BITS[how] if bits is None else bits
        least, most = {"qsgd": (2, _MOST), "stochastic": (1, _MOST)}.get(how, (_BITS[how],) * 2)
        if not least <= self.bits <= most:
            span = f"lie in [{least}, {most}]" if least < most else f"be {least}"
            raise ValueError(f"bits must {span} with how = {how} (of one value), got {bits}.")

    @property
    def law(self) -> Quantised:
        return Quantised(of="update", how=self.how, bits=self.bits)

    def upload(self, messages: list[Message], local: Local, client: Client) -> list[Message]:
        def round_values(update: Message) -> list[Message]:
            rng = client.rng["defense"]
            parts = {n: self._round(p, rng) for n, p in update.parts.items()}
            return [update.with_parts(parts), self._grid(update, parts)]

        return change_uploads(messages, "update", local, round_values)

    def _round(self, part: Part, rng: torch.Generator) -> Part:
        """The part with its present values on the grid that they span."""
        shown = part.presence()
        if self.law.in_blocks:
            whole = torch.where(shown, part.values, 0.0).flatten().cpu()
            values = self.law.sample(whole[None], rng).view_as(part.values).to(part.values)
            blocks = self.law.block_sizes(whole[None]).numel()
            return replace(part, values=values, bits=self.bits, grids=blocks)
        given = part.values[shown].cpu()
        if not len(given):
            return replace(part, bits=self.bits)
        values = torch.zeros_like(part.values)
        values[shown] = self.law.sample(given[None], rng)[0].to(values)
        return replace(part, values=values, bits=self.bits)

    def _grid(self, update: Message, parts: dict[str, Part]) -> Message:
        """The ends of every tensor's grid, without which the server cannot read it."""
        some = {n: p for n, p in parts.items() if bool(p.presence().any())}
        grid = {n: Part(values=self._ends(p)) for n, p in some.items()}
        return replace(update, kind="grid", receiver=SERVER, parts=grid, sealed={})

    def _ends(self, part: Part) -> Tensor:
        """What a receiver needs of a grid: its lower and upper end, or one of two alike, or that
        of every block."""
        if self.law.in_blocks:
            return self.law.block_sizes(part.values.flatten()[None])[0]
        values = part.values[part.presence()]
        if self.how == "stochastic":
            return torch.stack([values.min(), values.max()])
        return values.abs().max()[None]

    def mechanisms(self) -> tuple[Mechanism, ...]:
        return (self.law,)

    def guarantee(self, facts: Facts) -> tuple[Event, ...]:
        return (Unprotected(what="the rounded values", why="rounding is no noise of a known size"),)
