"""A network for signals [channels, length], such as those of motion sensors."""

from torch import nn

from bench.errors import UserError
from bench.models.network import Shape, Stages, chain, positive
from bench.models.transformers import FlatGrid, Positions, encoder


def har_transformer(
    *, shape: Shape, classes: int, dim: int = 64, depth: int = 2, heads: int = 4, patch: int = 8
) -> Stages:
    """Small transformer encoder on patches of 8 values in time, with the mean of the tokens.

    Built like `vit_small` of timm's blocks; the sizes are ours. Encoders of this kind on UCI HAR:
    Dirgova Luptakova, Kubovcik, Pospichal 2022, "Wearable sensor-based human activity recognition
    with transformer model" (Sensors 22).
    """
    if len(shape) != 2:
        raise UserError(
            "model har_transformer takes signals [channels, length], got samples of shape "
            f"{list(shape)}."
        )
    channels, length = shape
    positive("har_transformer", dim=dim, depth=depth, heads=heads, patch=patch)
    if length % patch:
        raise UserError(
            f"model har_transformer needs signals whose length is divisible by its patch {patch}, "
            f"got samples of shape {list(shape)}."
        )
    embed = chain(
        signal=nn.Unflatten(1, (channels, 1)),  # as images of height 1, which attacks know
        patches=nn.Conv2d(channels, dim, (1, patch), stride=(1, patch)),
        flat=FlatGrid(),
        positions=Positions(length // patch, dim),
    )
    return encoder("har_transformer", embed, dim=dim, depth=depth, heads=heads)
