"""Vision transformers from timm's blocks, for small images.

timm is imported where it is first needed: with torchvision it costs six seconds, which nobody
should pay to train a perceptron.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from bench.errors import UserError
from bench.models.network import Initial, Shape, Stages, chain, image_sides, positive

_STD = 0.02
_PIT_DEPTHS, _PIT_HEADS, _PIT_WIDTH_PER_HEAD = (2, 6, 4), (2, 4, 8), 32


class Positions(nn.Module):
    """Adds a learned embedding to each of N tokens: [B, N, D] -> [B, N, D]."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class ClassToken(nn.Module):
    """Puts a learned token before the others: [B, N, D] -> [B, 1 + N, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.weight.expand(len(x), 1, -1), x], dim=1)


class MeanToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class FirstToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class FlatGrid(nn.Module):
    """Turns [B, D, h, w] into tokens [B, h * w, D], row by row."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mT


class OnGrid(nn.Module):
    """A stage of timm's PiT on one tensor of tokens; timm's has a grid and a class token.

    It maps [B, 1 + h * w, D], class token first, to [B, 1 + h' * w', D'].
    """

    def __init__(self, inner: nn.Module, grid: tuple[int, int]) -> None:
        super().__init__()
        self.inner, self.grid = inner, grid

    def forward(self, x: Tensor) -> Tensor:
        cells, token = self.inner((x[:, 1:].mT.unflatten(2, self.grid), x[:, :1]))
        return torch.cat([token, cells.flatten(2).mT], dim=1)


def _draw_truncated_normal(module: nn.Module, name: str, rng: torch.Generator) -> Tensor:
    """timm's default: N(0, 0.02^2) cut off at +-2, and biases of 0."""
    value = torch.zeros(module.get_parameter(name).shape)
    return value if name == "bias" else nn.init.trunc_normal_(value, std=_STD, generator=rng)


def _strong_positions(module: nn.Module, name: str, rng: torch.Generator) -> Tensor:
    return 0.3 * torch.randn(module.get_parameter(name).shape, generator=rng)


SMALL_INITIAL: Initial = {Positions: _strong_positions}
"""For plain SGD, under which timm's small positions take thousands of steps to matter: linear
layers keep PyTorch's default."""
VIT_INITIAL: Initial = {nn.Linear: _draw_truncated_normal, Positions: _draw_truncated_normal}
"""As timm's ViT: its patch embedding, a convolution, keeps PyTorch's default."""
PIT_INITIAL: Initial = {Positions: _draw_truncated_normal, ClassToken: _draw_truncated_normal}
"""As timm's PiT: its linear layers keep PyTorch's default."""


def vit_small(
    *, shape: Shape, classes: int, dim: int = 64, depth: int = 3, heads: int = 2, patch: int = 4
) -> Stages:
    """Small ViT for quick runs: three blocks of width 64 on 4x4 patches, mean of the tokens.

    Built like `vit_tiny`; the sizes are ours.
    """
    return _vit("vit_small", shape, dim=dim, depth=depth, heads=heads, patch=patch)


def vit_tiny(
    *, shape: Shape, classes: int, dim: int = 192, depth: int = 12, heads: int = 3, patch: int = 4
) -> Stages:
    """ViT-Tiny of DP-CutMixSL: twelve blocks of width 192, 64 patches on 32x32 images.

    timm's vit_tiny_patch16_224 with 4x4 patches and the mean of the normalised tokens for its
    class token, so that the tokens after `embed` are the patches, which DP-CutMixSL mixes.
    Source: Dosovitskiy et al., arXiv:2010.11929; widths: Touvron et al., arXiv:2012.12877.
    """
    return _vit("vit_tiny", shape, dim=dim, depth=depth, heads=heads, patch=patch)


def _vit(model: str, shape: Shape, *, dim: int, depth: int, heads: int, patch: int) -> Stages:
    """The stages embed (tokens [B, N, dim] of N patches), block1 and so on, and pool."""
    positive(model, dim=dim, depth=depth, heads=heads, patch=patch)
    channels, height, width = image_sides(model, shape)
    if height % patch or width % patch:
        raise UserError(
            f"model {model} needs image sides divisible by its patch {patch}, got samples of "
            f"shape {list(shape)}."
        )

    from timm.layers import PatchEmbed

    patches = PatchEmbed((height, width), patch, channels, dim)
    embed = chain(patches=patches, positions=Positions(patches.num_patches, dim))
    return encoder(model, embed, dim=dim, depth=depth, heads=heads)


def encoder(model: str, embed: nn.Module, *, dim: int, depth: int, heads: int) -> Stages:
    """The stages of a transformer encoder whose tokens [B, N, dim] `embed` gives, their mean last.

    Raises UserError for a dim that the heads cannot share.
    """
    if dim % heads:
        raise UserError(f"dim of model {model} must be divisible by its heads {heads}, got {dim}.")

    from timm.models.vision_transformer import Block

    stages: Stages = OrderedDict(embed=embed)
    for i in range(1, depth + 1):
        stages[f"block{i}"] = _twice_differentiable(Block(dim, heads, qkv_bias=True))
    stages["pool"] = chain(norm=nn.LayerNorm(dim, eps=1e-6), mean=MeanToken())
    return stages


def pit_tiny(*, shape: Shape, classes: int, patch: int = 4, stride: int | None = None) -> Stages:
    """PiT-Tiny of DP-CutMixSL: three stages of 2, 6, 4 blocks on a grid that halves in between.

    timm's pit_ti with `patch` and `stride` (absent: patch) for its 16 and 8, which 32x32 images
    have no room for: 64 patches without overlap, grids of 8x8, 4x4, 2x2. Its class token is
    added after `embed`, so that the tokens there are the patches, and leads those of the later
    stages. Source: Heo et al., arXiv:2103.16302.
    """
    stride = patch if stride is None else stride
    positive("pit_tiny", patch=patch, stride=stride)
    channels, *sides = image_sides("pit_tiny", shape)
    if any(side < patch or (side - patch) % stride for side in sides):
        raise UserError(
            f"model pit_tiny needs image sides of its patch {patch} plus a multiple of its "
            f"stride {stride}, got samples of shape {list(shape)}."
        )

    from timm.models.pit import Pooling, Transformer

    grid = ((sides[0] - patch) // stride + 1, (sides[1] - patch) // stride + 1)
    width = _PIT_WIDTH_PER_HEAD * _PIT_HEADS[0]
    stages: Stages = OrderedDict(
        embed=chain(
            patches=nn.Conv2d(channels, width, patch, stride=stride),
            flat=FlatGrid(),
            positions=Positions(grid[0] * grid[1], width),
        )
    )
    for i, (depth, heads) in enumerate(zip(_PIT_DEPTHS, _PIT_HEADS, strict=True), start=1):
        before, width = width, _PIT_WIDTH_PER_HEAD * heads
        blocks = _twice_differentiable(
            Transformer(
                _PIT_WIDTH_PER_HEAD,
                depth,
                heads,
                mlp_ratio=4,
                pool=None if i == 1 else Pooling(before, width, stride=2),
                drop_path_prob=[0.0] * depth,
            )
        )
        inside = OrderedDict[str, nn.Module](token=ClassToken(width)) if i == 1 else OrderedDict()
        inside["blocks"] = OnGrid(blocks, grid)
        stages[f"stage{i}"] = nn.Sequential(inside)
        grid = grid if i == 1 else (-(-grid[0] // 2), -(-grid[1] // 2))
    stages["pool"] = chain(first=FirstToken(), norm=nn.LayerNorm(width, eps=1e-6))
    return stages


def _twice_differentiable(block: nn.Module) -> nn.Module:
    """Give timm's attention plain arithmetic, since fused kernels have no second derivative.

    In eval mode its dropouts, of rate 0, draw nothing, which vmap would refuse.
    """
    from timm.layers import Attention

    for module in block.modules():
        if isinstance(module, Attention):
            module.fused_attn = False  # type: ignore[misc]  # Final for TorchScript only
    return block.eval()
