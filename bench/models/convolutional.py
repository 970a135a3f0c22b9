"""The convolutional networks of DLG, SelectiveShield, SPM and DP-CutMixSL."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from bench.errors import UserError
from bench.models.network import Stages, StaticBatchNorm


def _image(shape: tuple[int, ...], what: str, multiple: int) -> int:
    """The number of channels of an image whose sides are multiples of `multiple`."""
    if len(shape) != 3 or shape[1] % multiple or shape[2] % multiple:
        raise UserError(
            f"model {what} takes images [channels, height, width] with sides divisible by "
            f"{multiple}, got samples of shape {list(shape)}."
        )
    return shape[0]


def lenet(*, shape: tuple[int, ...], classes: int) -> Stages:
    """LeNet of DLG: three 5x5 convolutions of 12 channels with sigmoids, strides 2, 2, 1.

    Source: Zhu, Liu, Han, arXiv:1906.08935 (twice differentiable; weights U(-0.5, 0.5) there,
    see the setting `init`).
    """
    channels = _image(shape, "lenet", 4)

    def block(inputs: int, stride: int) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(inputs, 12, 5, stride=stride, padding=2), sigmoid=nn.Sigmoid()
            )
        )

    return OrderedDict(
        block1=block(channels, 2),
        block2=block(12, 2),
        block3=block(12, 1),
        flatten=nn.Flatten(),
        head=nn.Identity(),
    )


def cnn_selective_shield(*, shape: tuple[int, ...], classes: int) -> Stages:
    """Convolutions of 32 and 64 channels with BN, hidden layer of 256.

    Source: SelectiveShield, Table 7. Its BatchNorm2d is static here (see StaticBatchNorm).
    """
    channels = _image(shape, "cnn_selective_shield", 4)

    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(inputs, outputs, 3, padding=1),
                norm=StaticBatchNorm(outputs),
                relu=nn.ReLU(),
                pool=nn.MaxPool2d(2),
            )
        )

    width = 64 * (shape[1] // 4) * (shape[2] // 4)
    return OrderedDict(
        block1=block(channels, 32),
        block2=block(32, 64),
        flatten=nn.Flatten(),
        hidden=nn.Sequential(OrderedDict(linear=nn.Linear(width, 256), relu=nn.ReLU())),
        head=nn.Identity(),
    )


def cnn_spm(*, shape: tuple[int, ...], classes: int) -> Stages:
    """Convolutions of 64 and 128 channels, hidden layers of 384 and 192.

    Source: SPM, Sec. 5.1, Model 1 (kernel size is not given there; 3x3 with padding makes its
    "128 channels, 8 height, 8 width" from 32x32).
    """
    channels = _image(shape, "cnn_spm", 4)

    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(inputs, outputs, 3, padding=1),
                relu=nn.ReLU(),
                pool=nn.MaxPool2d(2),
            )
        )

    width = 128 * (shape[1] // 4) * (shape[2] // 4)
    return OrderedDict(
        block1=block(channels, 64),
        block2=block(64, 128),
        flatten=nn.Flatten(),
        hidden1=nn.Sequential(OrderedDict(linear=nn.Linear(width, 384), relu=nn.ReLU())),
        hidden2=nn.Sequential(OrderedDict(linear=nn.Linear(384, 192), relu=nn.ReLU())),
        head=nn.Identity(),
    )


_VGG16 = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Channels of each block, as a multiple of the first's, and its convolutions."""


def vgg16(*, shape: tuple[int, ...], classes: int, width: int = 64) -> Stages:
    """VGG-16 for small images: five blocks of 3x3 convolutions with static BN, one linear layer.

    The convolutions of torchvision's vgg16_bn. Its classifier of three layers is made for
    ImageNet; as usual for 32x32 images the head alone takes its place. On sides that 32 does
    not divide, such as 16, block5 does not pool. Source: Simonyan, Zisserman, arXiv:1409.1556,
    Table 1, D; used by DP-CutMixSL; static BN: HeteroFL, arXiv:2010.01264.
    """
    before = _image(shape, "vgg16", 16)
    if width < 1:
        raise UserError(f"width of model vgg16 must be >= 1 (channels), got {width}.")
    stages: Stages = OrderedDict()
    for i, (multiple, convolutions) in enumerate(_VGG16, start=1):
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for j in range(1, convolutions + 1):
            layers[f"conv{j}"] = nn.Conv2d(before, multiple * width, 3, padding=1)
            before = multiple * width
            layers[f"norm{j}"] = StaticBatchNorm(before)
            layers[f"relu{j}"] = nn.ReLU()
        if i < 5 or not (shape[1] % 32 or shape[2] % 32):
            layers["pool"] = nn.MaxPool2d(2)
        stages[f"block{i}"] = nn.Sequential(layers)
    return stages | OrderedDict(flatten=nn.Flatten(), head=nn.Identity())
