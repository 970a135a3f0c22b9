"""Networks for signals [channels, length], such as those of motion sensors.

A convolution over time is written as one of an image of height 1, so that all that knows image
convolutions (normalisation, the attacks' fast gradients) serves it too.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from bench.errors import UserError
from bench.models.network import Shape, Stages, chain, positive
from bench.models.transformers import FlatGrid, MeanToken, Positions, _twice_differentiable


class Unsqueezed(nn.Module):
    """Signals [B, channels, length] as images of height 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2)


def _signal_sides(model: str, shape: Shape) -> tuple[int, int]:
    if len(shape) != 2:
        raise UserError(
            f"model {model} takes signals [channels, length], got samples of shape {list(shape)}."
        )
    return shape[0], shape[1]


def har_cnn(
    *, shape: Shape, classes: int, width: int = 96, hidden: int = 1000, kernel: int = 9
) -> Stages:
    """Three convolutions over time of 96, 192 and 192 channels, each pooled by 3, hidden of 1000.

    Source: Ronao, Cho 2016, "Human activity recognition with smartphone sensors using deep learning
    neural networks" (Expert Systems with Applications 59): their best network on UCI HAR, with
    kernels of 9 and pooling of 3. Departures: zeros at both ends keep the length before pooling,
    and there is no dropout, since every gradient must be reproducible.
    """
    channels, length = _signal_sides("har_cnn", shape)
    positive("har_cnn", width=width, hidden=hidden, kernel=kernel)
    if length < 27 or kernel % 2 == 0:
        raise UserError(
            "model har_cnn needs signals of at least 27 values, which it pools by 3 three times, "
            f"and an odd kernel, got {length} values and kernel {kernel}."
        )

    def block(inputs: int, outputs: int) -> OrderedDict[str, nn.Module]:
        conv = nn.Conv2d(inputs, outputs, (1, kernel), padding=(0, kernel // 2))
        return OrderedDict(conv=conv, relu=nn.ReLU(), pool=nn.MaxPool2d((1, 3)))

    return OrderedDict(
        block1=chain(signal=Unsqueezed(), **block(channels, width)),
        block2=chain(**block(width, 2 * width)),
        block3=chain(**block(2 * width, 2 * width)),
        flatten=nn.Flatten(),
        hidden=chain(linear=nn.Linear(2 * width * (length // 27), hidden), relu=nn.ReLU()),
        head=nn.Identity(),
    )


def har_transformer(
    *, shape: Shape, classes: int, dim: int = 64, depth: int = 2, heads: int = 4, patch: int = 8
) -> Stages:
    """Small transformer encoder on patches of 8 values in time, with the mean of the tokens.

    Built like `vit_small` of timm's blocks; the sizes are ours. Encoders of this kind on UCI HAR:
    Dirgova Luptakova, Kubovcik, Pospichal 2022, "Wearable sensor-based human activity recognition
    with transformer model" (Sensors 22).
    """
    channels, length = _signal_sides("har_transformer", shape)
    positive("har_transformer", dim=dim, depth=depth, heads=heads, patch=patch)
    if length % patch:
        raise UserError(
            f"model har_transformer needs signals whose length is divisible by its patch {patch}, "
            f"got samples of shape {list(shape)}."
        )
    if dim % heads:
        raise UserError(
            f"dim of model har_transformer must be divisible by its heads {heads}, got {dim}."
        )

    from timm.models.vision_transformer import Block

    stages: Stages = OrderedDict(
        embed=chain(
            signal=Unsqueezed(),
            patches=nn.Conv2d(channels, dim, (1, patch), stride=(1, patch)),
            flat=FlatGrid(),
            positions=Positions(length // patch, dim),
        )
    )
    for i in range(1, depth + 1):
        stages[f"block{i}"] = _twice_differentiable(Block(dim, heads, qkv_bias=True))
    stages["pool"] = chain(norm=nn.LayerNorm(dim, eps=1e-6), mean=MeanToken())
    stages["head"] = nn.Identity()
    return stages
