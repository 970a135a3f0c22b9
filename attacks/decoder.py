"""Learned decoder: a small network that corrects the ridge inverter's image, or a U-Net that reads
smashed data under noise."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attacks.engine.channel import Blocks, Channel, distance, no_sample_channel
from attacks.engine.inverter import Inverter, inverter_of, reconstruction
from attacks.engine.regression import uncut
from bench.api import Attack, Context, Reconstruction, Seen
from bench.toolkit.settings import check_number

COMPONENTS = 128
"""Principal components of flat features that the network sees."""
STEPS_PER_EVALUATION = 2
"""Optimiser steps per gradient evaluation of the budget."""
BATCH, CHANNELS, RATE = 32, 32, 3e-3
"""Pairs of a step; width of the network; AdamW's highest learning rate."""
PLAYS, PLAYED = 8, 100_000_000
"""Most plays of a public image that the U-Net learns from; most numbers of all plays together."""
NOISED = 0.3
"""Held-out loss of ridge above which the U-Net takes over."""


class Corrector(nn.Module):
    """Base image [B, C, H, W] and features -> image of the same shape, equal to the base at
    first (the last layer begins at 0).

    Samples that are no images, [B, P] or [B, channels, length], go through a perceptron instead.

    Args:
        shape: Of a sample.
        features: Shape of its features: on a grid [D, h, w] over the image, or flat [F], which
            are projected to a small map.
        channels: Width.
        level: Size of the correction, so that the network's own numbers are near 1.
    """

    def __init__(
        self, shape: tuple[int, ...], features: tuple[int, ...], channels: int, *, level: float
    ) -> None:
        super().__init__()
        self.level = level
        self.image = len(shape) == 3
        if not self.image:
            self.body = nn.Sequential(
                nn.Linear(math.prod(features) + math.prod(shape), 4 * channels),
                nn.ReLU(),
                nn.Linear(4 * channels, 4 * channels),
                nn.ReLU(),
            )
            self.last: nn.Module = nn.Linear(4 * channels, math.prod(shape))
            return
        self.size = shape[1:]
        self.flat, self.channels = len(features) == 1, channels // 2
        self.small = (-(-shape[1] // 4), -(-shape[2] // 4))
        if not self.flat:
            self.small = features[1], features[2]
        self.block = (-(-shape[1] // self.small[0]), -(-shape[2] // self.small[1]))
        if self.flat:
            self.project: nn.Module = nn.Linear(features[0], self.channels * math.prod(self.small))
        else:
            self.project = nn.Conv2d(features[0], self.channels * math.prod(self.block), 1)
        self.body = nn.Sequential(
            nn.Conv2d(self.channels + shape[0], channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
        )
        self.last = nn.Conv2d(channels, shape[0], 3, padding=1)

    def forward(self, base: Tensor, features: Tensor) -> Tensor:
        if not self.image:
            given = torch.cat([base.flatten(1), features.flatten(1)], dim=1)
            return base + self.level * self.last(self.body(given)).view_as(base)
        inputs = torch.cat([4 * (base - 0.5), self.upsample(features)], dim=1)
        return base + self.level * self.last(self.body(inputs))

    def upsample(self, features: Tensor) -> Tensor:
        """[B, channels / 2, H, W]: each pixel of a block has its own linear map from the cell, as a
        token is made of a block's pixels. (Of neighbours' numbers it would learn the noise.)"""
        small = self.project(features)
        if self.flat:
            small = small.view(len(features), -1, *self.small)
            return nn.functional.interpolate(small, size=self.size, mode="bilinear")
        return spread(small, (self.channels, *self.size), self.block)


class Denoiser(nn.Module):
    """U-Net from noised features on a grid to an image, with the arguments of `Corrector`.

    Each level halves the grid, so that a wide surrounding helps to tell the image from the noise.
    """

    def __init__(
        self, shape: tuple[int, ...], features: tuple[int, ...], channels: int, *, level: float
    ) -> None:
        super().__init__()
        self.shape, self.level = shape, level
        self.block = tuple(-(-n // m) for n, m in zip(shape[1:], features[1:], strict=True))
        a, b, c = (channels * n for n in (1, 2, 4))
        conv = partial(nn.Conv2d, kernel_size=3, padding=1)
        self.top = conv(features[0], a)
        self.down = nn.ModuleList([conv(a, b, stride=2), conv(b, c, stride=2)])
        self.same = nn.ModuleList([conv(b, b), conv(c, c)])
        self.up = nn.ModuleList([conv(b + c, b), conv(a + b, a)])
        self.last = conv(a, shape[0] * math.prod(self.block))

    def forward(self, base: Tensor, features: Tensor) -> Tensor:
        levels = [torch.relu(self.top(features))]
        for down, same in zip(self.down, self.same, strict=True):
            x = torch.relu(down(levels[-1]))
            levels.append(x + torch.relu(same(x)))
        x = levels.pop()
        for up in self.up:
            level = levels.pop()
            below = nn.functional.interpolate(x, size=level.shape[2:])
            x = level + torch.relu(up(torch.cat([level, below], dim=1)))
        image = base + self.level * spread(self.last(x), self.shape, self.block)
        # Answers are clipped, and so is the loss; a small slope is left for values outside.
        return image.clamp(0, 1).lerp(image, 0.05)


def spread(cells: Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> Tensor:
    """Lay blocks of p x q pixels [B, C * p * q, h, w] side by side, scaled to [B, *shape]."""
    high, wide = cells.shape[2:]
    image = uncut(cells.flatten(2).mT, (high, wide), (shape[0], high * block[0], wide * block[1]))
    if image.shape[2:] == shape[1:]:
        return image
    return nn.functional.interpolate(image, size=shape[1:], mode="bilinear")


def initial(module: nn.Module, rng: torch.Generator, device: torch.device) -> dict[str, Tensor]:
    """Parameters of a module on the meta device, U(+-1/sqrt(fan in)) drawn from `rng`; biases
    and the last layer are 0."""
    params = {}
    for name, meta in module.named_parameters():
        value = torch.zeros(meta.shape)
        if meta.ndim > 1 and not name.startswith("last"):
            bound = math.sqrt(3 / meta[0].numel())
            value.uniform_(-bound, bound, generator=rng)
        params[name] = value.to(device).requires_grad_()
    return params


class Decoder(Attack):
    """Network trained on public images that went through the deployed defense.

    It starts from the ridge inverter's answer and learns what that leaves over, from smashed data
    on its grid over the image (a map, or tokens, and which of them are present), or from the
    principal components of other messages; on a training image that answer is the one of a ridge
    fit without this image, as it will be for a victim. Where noise on a whole map leaves ridge a
    held-out loss above `NOISED`, a U-Net learns instead, from `PLAYS` plays of each public image,
    starting from the mean image, in twice as many steps of half the pairs. AdamW with cosine decay
    (U-Net: after a warm-up); loss: squared error in units of the public variance plus 1 - SSIM. A
    fifth of the public images is held out in all its plays. The parameters of least held-out loss
    are kept; where ridge loses less, the answer is ridge's. The answer's evaluations are optimiser
    steps of 32 pairs.
    Source: decoder of He, Zhang, Lee 2019 (ACSAC, inverse network). Departures: residual to
    ridge or a U-Net, SSIM in the loss.

    Args:
        steps: Of the optimiser, each of 32 pairs; 0: twice the budget.
        rows: Pairs per regression, as of `ridge`.
    """

    recovers = frozenset({"images", "labels"})
    reads = "all"
    source = "He, Zhang, Lee 2019 (inverse network), trained through the defense"

    def __init__(self, *, steps: int = 0, rows: int = 800) -> None:
        check_number("steps", steps, least=0)
        check_number("rows", rows, "training pairs per regression", least=1)
        self.steps, self.rows = steps, rows

    def applies(self, seen: Seen) -> str | None:
        return no_sample_channel(seen)

    def run(self, seen: Seen, ctx: Context) -> Reconstruction:
        inverter = inverter_of(seen, ctx, rows=self.rows)
        data = Data(inverter, inverter.channel, ctx)
        steps = self.steps or STEPS_PER_EVALUATION * ctx.budget
        if not all(data.feature_shape):  # what is sent is the same for every sample
            steps = 0
        images, loss, before = self.train(data, ctx, steps)
        expected = torch.full((inverter.samples,), loss, device=ctx.device)
        note = f"held-out loss {before:.3f} of ridge, {loss:.3f} of the decoder"
        return reconstruction(images, expected, inverter, evaluations=steps, notes=(note,))

    def train(self, data: Data, ctx: Context, steps: int) -> tuple[Tensor, float, float]:
        """(victims' images, held-out loss, held-out loss of ridge), of ridge in 0 steps."""
        if not steps:
            return data.ridge, data.before, data.before
        steps, batch = (2 * steps, BATCH // 2) if data.noised else (steps, BATCH)
        shape, network = tuple(ctx.network.shape), Denoiser if data.noised else Corrector
        with torch.device("meta"):
            module = network(shape, data.feature_shape, CHANNELS, level=data.level)
        params = initial(module, ctx.rng, ctx.device)
        optimiser = torch.optim.AdamW(params.values(), lr=RATE, weight_decay=1e-3)
        rates = torch.optim.lr_scheduler
        schedule = (
            rates.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.15)
            if data.noised  # without a warm-up, some draws of a U-Net's parameters learn little
            else rates.CosineAnnealingLR(optimiser, steps)
        )

        def left_out_loss() -> float:
            with torch.no_grad():
                guess = functional_call(module, params, data.of(data.held))
            return float(distance(guess, data.x[data.held], variance=data.variance).mean())

        least, kept = data.before, None
        often = max(1, steps // 20)
        # All batches are drawn first: a copy to a GPU in every step would make the host wait.
        picks = [torch.randint(len(data.train), (batch,), generator=ctx.rng) for _ in range(steps)]
        picked = data.train[torch.stack(picks).to(data.train.device)]
        for step in range(1, steps + 1):
            rows = picked[step - 1]
            guess = functional_call(module, params, data.of(rows))
            loss = distance(guess, data.x[rows], variance=data.variance).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            if step % often == 0 or step == steps:
                now = left_out_loss()
                if now < least:
                    least, kept = now, {n: p.detach().clone() for n, p in params.items()}
                ctx.progress(step / steps)
        if kept is None:
            return data.ridge, least, data.before
        with torch.no_grad():
            images = functional_call(module, kept, data.victims)
        return images, least, data.before


class Data:
    """Everything that the network is trained on, as tensors: base images, features, targets.

    Attributes:
        train: Rows that are learnt from, int64.
        held: Rows like the victims', of a fifth of the public images, int64.
        feature_shape: Of one sample's features, a map where the smashed data is one.
        before: Loss of the rows held out by ridge.
        noised: Whether the map is random and present everywhere, and ridge loses much.
    """

    def __init__(self, inverter: Inverter, channel: Channel, ctx: Context) -> None:
        self.variance = inverter.variance
        pieces = list({id(p.pairs): p for p in inverter.pieces}.values())
        pairs = [p.pairs for p in pieces]
        self.x = torch.cat([p.x for p in pairs])
        self.base = torch.cat([p.left_out.float() for p in pieces]).view_as(self.x)
        image = torch.cat([torch.arange(len(p.x)) // p.group for p in pairs])
        order = torch.randperm(len(ctx.aux_x), generator=ctx.rng)
        judged = torch.cat([p.judged for p in pieces])
        fifth = order[: max(1, len(order) // 5)]
        out = torch.isin(image, fifth).to(ctx.device)
        if not bool((out & judged).any()):
            # Few rows hold few of the public images: perhaps none of that fifth.
            order = order[torch.isin(order, image[judged.cpu()])]
            fifth = order[: max(1, len(order) // 5)]
            out = torch.isin(image, fifth).to(ctx.device)
        self.held = (out & judged).nonzero()[:, 0]
        self.train = (~out).nonzero()[:, 0]
        self.level = float((self.base - self.x)[self.train].square().mean().sqrt())
        views = [inverter.standard(b) for b in (*(p.blocks for p in pairs), channel.blocks)]
        maps = [_on_grid(channel, v) for v in views] if len(inverter.shape) == 3 else [None]
        *parts, told = [m for m in maps if m is not None] or [
            torch.cat(list(v.values()), dim=1) for v in views
        ]
        self.features = torch.cat(parts)
        if self.features.ndim == 2:
            self.features, told = _principal(self.features, self.train, told)
        self.feature_shape = tuple(self.features.shape[1:])
        self.ridge = inverter.predict()[0]
        self.victims = self.ridge, told
        held = self.base[self.held], self.x[self.held]
        self.before = float(distance(*held, variance=self.variance).mean())
        grid = channel.grid(channel.blocks) if channel.random and len(inverter.shape) == 3 else None
        self.noised = grid is not None and grid.present is None and self.before > NOISED
        if self.noised:
            self._play(inverter, channel, ~torch.isin(torch.arange(len(ctx.aux_x)), fifth))

    def _play(self, inverter: Inverter, channel: Channel, shown: Tensor) -> None:
        """Take new plays of the public images `shown` (bool [N]) for training, with the mean image
        as base."""
        plays = max(1, min(PLAYS, PLAYED // (len(shown) * math.prod(self.feature_shape))))
        own, start = shown.nonzero()[:, 0].to(self.x.device), len(self.x)
        x, features = [self.x], [self.features]
        for _ in range(plays):
            pairs = channel.pairs(group=1)
            noised = _on_grid(channel, inverter.standard(pairs.blocks))
            assert noised is not None  # as the victims'
            x.append(pairs.x[own])
            features.append(noised[own])
        self.x, self.features = torch.cat(x), torch.cat(features)
        self.train = torch.arange(start, len(self.x), device=self.x.device)
        mean = self.x[self.train].mean(dim=0)
        self.base, self.victims = mean.expand_as(self.x), (mean, self.victims[1])
        self.level = float((mean - self.x[self.train]).square().mean().sqrt())

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.base[rows], self.features[rows]


def _on_grid(channel: Channel, blocks: Blocks) -> Tensor | None:
    """Smashed data and presence as one map [M, D, h, w], or None."""
    grid = channel.grid(blocks)
    if grid is None:
        return None
    return torch.cat([grid.values] if grid.present is None else [grid.values, grid.present], dim=1)


def _principal(x: Tensor, train: Tensor, victims: Tensor) -> tuple[Tensor, Tensor]:
    """Principal components of x [R, F] and of the victims' features, at unit variance, by the
    rows `train` (a thousand of them at most)."""
    fitted = x[train[:: max(1, len(train) // 1000)]].double()
    values, vectors = torch.linalg.eigh(fitted @ fitted.mT)
    strong = (values > 1e-9 * values[-1]).nonzero()[-COMPONENTS:, 0]
    axes = fitted.mT @ (vectors[:, strong] / values[strong].sqrt())
    axes = (axes * (len(fitted) / values[strong]).sqrt()).float()
    return x @ axes, victims @ axes
