"""What the server saw as feature vectors, and training pairs made through the deployed defense."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacks.engine.observation import (
    SMASHED,
    Release,
    gradient_estimate,
    parse,
    parse_view,
    read_smashed,
    unusable,
)
from attacks.engine.private import with_private_parts
from attacks.engine.regression import Grid, grid_shape, on_grid
from bench.api import Context, Seen

Blocks = Mapping[str, Tensor]
"""Named groups of features, each [M, F_b] float32, one row per private sample."""

FEATURES = 4096
"""Wider observations are reduced block by block with a seeded count sketch."""
SMALL_BLOCK = 256
"""A block up to this width is never sketched."""
SHADOW_COORDINATES = 4_000_000
"""Uploaded coordinates of one shadow call, so that a large network's clients fit in memory."""
SHADOW_WEIGHTS = 16_000_000
"""Weights that the clients of one shadow call hold: each has its own, and thirty copies of them
while it trains (2 GB in all), however little smashed data it sends."""
WIDE = 100_000
"""Coordinates of an upload above which float32 is precise enough."""


@dataclass(frozen=True, kw_only=True)
class ShadowPairs:
    """Features and the public samples that they came from.

    Attributes:
        blocks: [N * G, ...], G rows per public image, image by image: a row is one play of the
            defense with fresh secrets.
        x: What was played, [N * G, *shape].
        y: The label it was played under, int64 [N * G].
        own: The image's true label, int64 [N * G].
        turn: How it was mirrored, int64 [N * G].
        group: G.
    """

    blocks: Blocks
    x: Tensor
    y: Tensor
    own: Tensor
    turn: Tensor
    group: int

    @property
    def real(self) -> Tensor:
        """Bool [N * G]: the public image as it is, under its own label."""
        return (self.own == self.y) & (self.turn == 0)


def no_sample_channel(seen: Seen) -> str | None:
    """Why no message of `seen` belongs to a single private sample, or None.

    Smashed data has one activation per sample; an update has one sample behind it only where
    the batch and the local steps are both 1.
    """
    release = parse_view(seen)[-1]
    if SMASHED in release.by_sample:
        return None
    reason = unusable(release)
    if reason is None and release.samples > 1:
        reason = f"it inverts one sample per update, but {release.samples} were used"
    return reason


class Channel:
    """One victim message per private sample as features, and pairs that were made alike.

    Smashed data where there is any (sample k of a batch from activation k), else the update.
    Releases that begin from one state differ by their randomness alone, and are averaged.

    Args:
        releases: From one state (see `by_state`).
        ctx: The attack's.

    Attributes:
        blocks: The victims', V * K rows, victim by victim.
        labels: int64 [V * K] if granted, else None.
        random: Whether two plays of the same sample differ, so that several draws are worth it.

    Raises:
        NonFiniteError: If a value that was seen is not finite, naming the client.
    """

    def __init__(self, releases: list[Release], ctx: Context) -> None:
        self.releases = with_private_parts(releases, ctx)
        release, kept = releases[-1], self.releases[-1]
        self.per_sample = SMASHED in release.by_sample
        # Plays begin where the victims did; smashed data is translated to the broadcast instead.
        self.played = (release if self.per_sample else kept).playable
        if self.per_sample:  # of later steps nothing is read
            self.played = replace(self.played, known={**self.played.known, "local_steps": 1})
        self.ctx = ctx
        self.head = ctx.network.head
        self.seed = int(torch.randint(2**31, (1,), generator=ctx.rng))
        self.maps: dict[str, tuple[Tensor, Tensor, int]] = {}
        self.map_shape: tuple[int, ...] | None = None
        held = sum(p.values.numel() for u in release.uploads[:1] for p in u.parts.values())
        self.held = held or sum(v.numel() for v in kept.before.values())
        self.sent, self.batch = held, 1
        if self.per_sample:
            smashed = release.by_sample[SMASHED][0][0][0]
            self.sent = smashed.numel()
            if release.seen.buffers and release.seen.known["mode"] == "train":
                self.batch = len(smashed)
        # Which tensors may be sent in part is learnt from the victims and a few plays.
        self.partial: set[str] = set()
        self.scattered = False  # whether parts of a patch of smashed data are
        self.discovering = True
        self.features(self.releases)
        few = slice(0, 4)
        once, again = (self._play(ctx.aux_x[few], ctx.aux_y[few]) for _ in range(2))
        self.discovering = False
        self.random = any(not torch.equal(once[n], again[n]) for n in once)
        if not self.random:  # all releases say the same
            self.releases = self.releases[-1:]
        self.blocks = self.features(self.releases)
        granted = release.seen.known.get("truth_labels")
        self.labels = None if granted is None else torch.tensor(granted).flatten().to(ctx.device)

    # --- pairs -----------------------------------------------------------------------------
    def pairs(self, *, group: int, label: int | None = None) -> ShadowPairs:
        """`group` plays of each public image.

        Play 0 shows the image as it is. Where nothing is random the others show it mirrored,
        since the defense would answer the same again; else every second one does. What a mirrored
        image, or one under another label, teaches is how the network maps images to messages, not
        how images look.

        Args:
            group: Plays per image.
            label: Under which all are played; None: their own.
        """
        x, y = self.ctx.aux_x.cpu(), self.ctx.aux_y.cpu()
        played = y if label is None else torch.full_like(y, label)
        image = x.ndim == 4
        group = group if image or self.random else 1
        turns = [
            0 if not image else (k % 4 if not self.random else (k % 2) * (k // 2 % 3 + 1))
            for k in range(group)
        ]
        # 0: as it is, 1: left-right, 2: upside down, 3: both
        rows = [x.flip([d for d, bit in ((-1, 1), (-2, 2)) if turn & bit]) for turn in turns]
        blocks = [self._play(r, played) for r in rows]
        return ShadowPairs(
            blocks={n: _interleave([b[n] for b in blocks]) for n in blocks[0]},
            x=_interleave(rows).to(self.ctx.device),
            y=_interleave([played] * group).to(self.ctx.device),
            own=_interleave([y] * group).to(self.ctx.device),
            turn=torch.tensor(turns * len(x), device=self.ctx.device),
            group=group,
        )

    def _play(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Features of samples x [N, ...] with labels y [N], each through the defense once.

        One sample per shadow client, except where batch statistics enter the activations: then
        batches of the victims' size, freshly mixed, the last one filled up with repetitions.
        """
        size = self.batch
        order = torch.randperm(len(x), generator=self.ctx.rng) if size > 1 else torch.arange(len(x))
        filled = order[torch.arange(-(-len(x) // size) * size) % len(x)]
        clients = filled.view(-1, size)
        chunk = max(1, min(SHADOW_COORDINATES // (self.sent * size), SHADOW_WEIGHTS // self.held))
        out = [
            self.features(
                [parse(self.ctx.shadow(x[c], y[c], release=self.played)) for _ in self.releases]
            )
            for c in clients.split(chunk)
        ]
        place = order.argsort()
        return {n: torch.cat([o[n] for o in out])[place] for n in out[0]}

    # --- features --------------------------------------------------------------------------
    def features(self, releases: Sequence[Release]) -> dict[str, Tensor]:
        """Blocks of every client's samples, averaged over releases, float32 on the context's
        device."""
        raw = self._read_smashed(releases) if self.per_sample else self._update(releases)
        total = sum(v.shape[1] for v in raw.values())
        return {n: self._sketch(n, v, total).float().to(self.ctx.device) for n, v in raw.items()}

    def _read_smashed(self, releases: Sequence[Release]) -> dict[str, Tensor]:
        smashed = [
            (values.float(), there) for s in releases for values, there in read_smashed(s)[:1]
        ]
        value, there = (t.flatten(0, 1) for t in _average(smashed))
        self.map_shape = tuple(value.shape[1:])
        shown = self._fill_absent(SMASHED, value, there)
        axis = 1 if there.ndim == 4 else -1
        if self.discovering:
            self.scattered |= not bool((there == there.narrow(axis, 0, 1)).all())
        elif f"presence {SMASHED}" in shown and not self.scattered:
            # Patches are absent as a whole: one number for each says it.
            shown[f"presence {SMASHED}"] = there.to(value).mean(dim=axis).flatten(1)
        return shown

    def grid(self, blocks: Blocks) -> Grid | None:
        """The smashed data of `blocks` (features, standardised or not) on its grid over the
        image, or None if it has none or was sketched."""
        shape = self.map_shape
        if shape is None or grid_shape(shape) is None:
            return None
        if blocks[SMASHED].shape[1] != math.prod(shape):
            return None
        shown, present = blocks.get(f"presence {SMASHED}"), None
        if shown is not None and self.scattered:
            present = on_grid(shown, shape).mean(dim=1, keepdim=True)
        elif shown is not None:
            present = on_grid(shown, (shape[0], 1) if len(shape) == 2 else (1, *shape[1:]))
        return Grid(values=on_grid(blocks[SMASHED], shape), present=present)

    def _update(self, releases: Sequence[Release]) -> dict[str, Tensor]:
        """Gradient tensors in units of the loss's slope, and the inputs of linear layers.

        With one sample a linear layer's gradient is outer(db, input), so that
        sum_j db_j dW_j / sum_j db_j^2 is its input, whatever the label; everything else is
        proportional to the loss's slope p - y, whose length the head's bias gradient shows.
        """
        # A wide network is read in float32: its sketch is no finer anyway.
        dtype = torch.float64 if self.sent < WIDE else torch.float32
        each = [gradient_estimate(s, dtype=dtype) for s in releases]
        both = {n: _average([(e.values[n], e.present[n]) for e in each]) for n in each[0].values}
        present = {n: p.to(self.ctx.device) for n, (_, p) in both.items()}
        whole = all(bool(p.all()) for p in present.values())
        values = {n: v.to(self.ctx.device) for n, (v, _) in both.items()}
        if not whole:
            values = {n: torch.where(present[n], v, 0.0) for n, v in values.items()}
        slope = values.get(self.head[1])
        if slope is None or not bool(present[self.head[1]].any(dim=1).all()):
            slope = torch.cat([v.flatten(1) for v in values.values()], dim=1)
        length = slope.flatten(1).norm(dim=1).clamp_min(1e-30)
        blocks: dict[str, Tensor] = {}
        for name, value in values.items():
            bias = name.removesuffix("weight") + "bias"
            wide = value[0].numel() > FEATURES // 2
            if value.ndim == 3 and bias in values and bias != name:
                blocks[f"input {name}"] = layer_input(
                    value, values[bias], None if whole else present[name]
                )
                if wide:
                    continue
            scaled = value / length.view(-1, *[1] * (value.ndim - 1))
            blocks |= self._fill_absent(name, scaled, present[name])
        return blocks

    def _fill_absent(self, name: str, value: Tensor, there: Tensor) -> dict[str, Tensor]:
        """A block with absent values as 0 and, if it is ever sent in part, its presence."""
        shown = {name: torch.where(there, value, 0.0).flatten(1)}
        if self.discovering:
            self.partial |= set() if bool(there.all()) else {name}
        elif name in self.partial:
            shown[f"presence {name}"] = there.flatten(1).to(value)
        return shown

    def _sketch(self, name: str, value: Tensor, total: int) -> Tensor:
        width = value.shape[1]
        # A map is worth more as it is: the decoder's convolutions need its places.
        allowed = FEATURES * (4 if self.per_sample else 1)
        goal = max(SMALL_BLOCK, allowed * width // max(1, total))
        if total <= allowed or width <= goal:
            return value
        if name not in self.maps:
            rng = torch.Generator().manual_seed(self.seed + len(self.maps))
            bucket = torch.randint(goal, (width,), generator=rng)
            sign = torch.randint(2, (width,), generator=rng) * 2.0 - 1
            self.maps[name] = (bucket.to(value.device), sign.to(value.device), goal)
        bucket, sign, goal = self.maps[name]
        return count_sketch(value, bucket, sign, goal)


def by_state(releases: list[Release]) -> list[list[Release]]:
    """The releases in groups that begin from one state, that of the last release at the end."""
    groups: list[list[Release]] = []
    for one in releases:
        group = next((g for g in groups if one.same_start(g[0])), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def _average(each: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean of those of several values that are present, and where any is."""
    if len(each) == 1:
        return each[0]
    count = torch.stack([there for _, there in each]).sum(dim=0)
    total = torch.stack([torch.where(there, v, 0.0) for v, there in each]).sum(dim=0)
    return total / count.clamp_min(1), count > 0


def layer_input(weight: Tensor, bias: Tensor, present: Tensor | None) -> Tensor:
    """Input [M, F] of a linear layer from its gradients: weight [M, O, F], bias [M, O].

    Least squares over the rows, sum_j db_j dW_j / sum_j db_j^2; absent values are 0 in `weight`
    and `bias` and, by `present` [M, O, F], leave their coordinate's equations.
    """
    top = torch.einsum("mo,mof->mf", bias, weight)
    if present is None:
        return top / bias.square().sum(dim=1, keepdim=True).clamp_min(1e-30)
    square = torch.einsum("mo,mof->mf", bias.square(), present.to(bias))
    return top / square.clamp_min(1e-30)


def count_sketch(value: Tensor, bucket: Tensor, sign: Tensor, width: int) -> Tensor:
    """[M, F] -> [M, width]: coordinate j adds sign[j] * value[:, j] to column bucket[j].

    Inner products are kept in expectation, with variance at most 2 |a|^2 |b|^2 / width.
    Source: Charikar, Chen, Farach-Colton 2002; as a feature map Weinberger et al. 2009.
    """
    out = torch.zeros(len(value), width, dtype=value.dtype, device=value.device)
    return out.index_add_(1, bucket, value * sign.to(value))


def _interleave(rows: list[Tensor]) -> Tensor:
    """G tensors [N, ...] -> [N * G, ...], the G rows of an item side by side."""
    return torch.stack(rows, dim=1).flatten(0, 1)


# --- how good an image is, as an attacker can judge on public data ---------------------------


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """SSIM of images [M, C, H, W] in [0, 1] -> [M], differentiable.

    Gaussian window of 11 pixels, sigma 1.5, valid windows, data range 1; equal to the metric
    that scores reconstructions up to float rounding (a test compares them).
    """
    reach = torch.arange(11, dtype=a.dtype, device=a.device) - 5
    kernel = torch.exp(-reach.square() / (2 * 1.5**2))
    kernel = kernel / kernel.sum()
    flat = torch.stack([a, b, a * a, b * b, a * b]).reshape(-1, 1, *a.shape[-2:])
    rows = torch.nn.functional.conv2d(flat, kernel.view(1, 1, -1, 1))
    blurred = torch.nn.functional.conv2d(rows, kernel.view(1, 1, 1, -1))
    ma, mb, aa, bb, ab = blurred.reshape(5, len(a), -1)
    top = (2 * ma * mb + 1e-4) * (2 * (ab - ma * mb) + 9e-4)
    bottom = (ma * ma + mb * mb + 1e-4) * (aa - ma * ma + bb - mb * mb + 9e-4)
    return (top / bottom).mean(dim=1)


def distance(guess: Tensor, truth: Tensor, *, variance: float) -> Tensor:
    """The learned attacks' own loss per sample [M]: squared error in units of the public
    images' variance, plus 1 - SSIM for images of at least 11 pixels a side."""
    error = (guess - truth).square().flatten(1).mean(dim=1) / max(variance, 1e-12)
    if truth.ndim == 4 and min(truth.shape[-2:]) >= 11:
        return error + 1 - similarity(guess.clamp(0, 1), truth)
    return error
