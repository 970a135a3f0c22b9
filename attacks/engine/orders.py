"""Local epochs: which sample each step of a victim's training used.

A client shuffles its samples before every epoch and tells nobody, but its update depends on the
order. Images are first matched as if the order were noise, as large as it is for public samples.
Given the images, exchanges of two samples are tried, and the images are matched again under a
noise as large as what one exchange changes, until the order is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.engine.chunks import in_chunks
from attacks.engine.clients import Clients
from bench.api import Context

_SEED, _PUBLIC = 0, 4
"""Of the guesses; times that public samples are sent in two orders."""
_EXCHANGES, _SWEEPS = 40, 2
"""Exchanges tried per epoch, and how often one search goes through all epochs."""
_FOUND = 0.15
"""Misfit, in units of what one exchange changes, below which the order is taken to be found."""

Sent = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Samples [P, T, *shape] and soft labels [P, T, C], step after step, of candidates for the victims
int64 [P] -> uploads [P, D], 0 where nothing was seen."""


@dataclass(kw_only=True)
class Orders:
    """Guesses for the victims of one release.

    Attributes:
        places: Which of its samples the steps of a victim use in turn, int64 [V, T].
        samples: Per victim.
        batch: Of a step.
        std: Noise of an upload's coordinates that stands for wrong guesses, [V].
        rng: Draws what is tried.
    """

    places: Tensor
    samples: int
    batch: int
    std: Tensor
    rng: torch.Generator

    @staticmethod
    def drawn(victims: int, clients: Clients, ctx: Context, *, first: bool, sent: Sent) -> Orders:
        """Random ones, with the noise that they are for public samples.

        clients: The candidates. first: Whether the samples stand as the first epoch used them.
        sent: What candidates upload.
        """
        samples, batch, steps = clients.samples, clients.batch, clients.training.steps
        rng = torch.Generator().manual_seed(_SEED)

        def places() -> Tensor:
            rows = [_shuffled(samples, batch * steps, rng) for _ in range(victims)]
            return torch.stack(rows).to(ctx.device)

        everyone, square = torch.arange(victims, device=ctx.device), torch.zeros(())
        for _ in range(_PUBLIC):
            chosen = torch.randint(len(ctx.aux_y), (victims, samples), generator=rng)
            x = ctx.aux_x[chosen].to(device=ctx.device, dtype=clients.dtype)
            y = torch.nn.functional.one_hot(ctx.aux_y[chosen], ctx.network.classes).to(x)
            with torch.no_grad():
                one, other = (
                    sent(_taken(x, p), _taken(y, p), everyone) for p in (places(), places())
                )
            square = square + (one - other).square().mean() / _PUBLIC
        std = square.sqrt().expand(victims).clone()
        guess = places()
        if first:
            guess[:, :samples] = torch.arange(samples, device=ctx.device)
        return Orders(places=guess, samples=samples, batch=batch, std=std, rng=rng)

    def arranged(self, x: Tensor, victims: Tensor) -> Tensor:
        """Samples or labels [P, K, ...] of candidates for victims int64 [P], step after step."""
        return _taken(x, self.places[victims])

    def improve(self, sent: Sent, seen: Tensor, x: Tensor, y: Tensor, *, bytes_each: int) -> int:
        """Exchange samples of different steps where that explains more, and set `std` anew.

        Args:
            sent: What candidates upload.
            seen: What the victims uploaded [V, D].
            x: One candidate for every victim [V, K, *shape].
            y: Soft labels [V, K, C].
            bytes_each: Memory of one candidate.

        Returns:
            How many orders were tried of all victims.
        """
        count, total = self.places.shape
        everyone = torch.arange(count, device=x.device)
        tried, changes = 0, []
        for _ in range(_SWEEPS):
            before = self.places.clone()
            for first in range(0, total, self.samples):
                pairs = _exchanges(first, min(first + self.samples, total), self.batch, self.rng)
                if not len(pairs):
                    continue
                places = self.places[:, None].repeat(1, 1 + len(pairs), 1)  # the present one first
                rows, pairs = torch.arange(1, 1 + len(pairs)), pairs.to(x.device)
                places[:, rows, pairs[:, 0]] = self.places[:, pairs[:, 1]]
                places[:, rows, pairs[:, 1]] = self.places[:, pairs[:, 0]]
                misfit, change = self._tried(sent, seen, x, y, places, bytes_each=bytes_each)
                self.places = places[everyone, misfit.argmin(dim=1)]
                tried += places.shape[0] * places.shape[1]
                changes.append(change)
            if torch.equal(before, self.places):
                break
        if changes:
            misfit, _ = self._tried(sent, seen, x, y, self.places[:, None], bytes_each=bytes_each)
            change = torch.stack(changes).mean(dim=0)
            found = misfit[:, 0] < _FOUND**2 * change
            self.std = torch.where(found, misfit[:, 0], change.maximum(misfit[:, 0])).sqrt()
        return tried

    def _tried(
        self, sent: Sent, seen: Tensor, x: Tensor, y: Tensor, places: Tensor, *, bytes_each: int
    ) -> tuple[Tensor, Tensor]:
        """Mean square [V, O] of what the orders [V, O, T] leave open, and mean [V] of what they
        change beside the first."""
        count, orders, _ = places.shape
        flat = places.flatten(0, 1)
        victims = torch.arange(count, device=x.device).repeat_interleave(orders)
        pieces: dict[int, Tensor] = {}

        def work(part: slice) -> None:
            who = victims[part]
            with torch.no_grad():
                rows = _taken(x[who], flat[part]), _taken(y[who], flat[part])
                pieces[part.start] = sent(*rows, who)

        in_chunks(work, len(flat), bytes_each=bytes_each, device=x.device)
        made = torch.cat([pieces[k] for k in sorted(pieces)]).unflatten(0, (count, orders))
        misfit = (made - seen[:, None]).square().mean(dim=2)
        return misfit, (made[:, 1:] - made[:, :1]).square().mean(dim=2).mean(dim=1)


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Rows [P, T, ...] of x [P, K, ...] at the places int64 [P, T]."""
    return x[torch.arange(len(x), device=x.device)[:, None], places]


def _shuffled(samples: int, total: int, rng: torch.Generator) -> Tensor:
    """So many places int64 [total], epoch after epoch, each in an order of its own."""
    epochs = -(-total // samples)
    return torch.cat([torch.randperm(samples, generator=rng) for _ in range(epochs)])[:total]


def _exchanges(first: int, end: int, batch: int, rng: torch.Generator) -> Tensor:
    """Some pairs of places from `first` to `end` that lie in different steps, int64 [N, 2]."""
    pairs = torch.combinations(torch.arange(first, end), 2)
    pairs = pairs[pairs[:, 0] // batch != pairs[:, 1] // batch]
    return pairs[torch.randperm(len(pairs), generator=rng)[:_EXCHANGES]]
