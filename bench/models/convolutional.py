"""The convolutional networks of DLG, SelectiveShield, SPM and DP-CutMixSL, and ResNet-18."""

from collections import OrderedDict

from torch import Tensor, nn

from bench.models.network import Shape, Stages, StaticBatchNorm, chain, image_sides, positive


def _halving_block(inputs: int, outputs: int, **norm: nn.Module) -> nn.Module:
    """A 3x3 convolution whose output, normalised if asked for, is pooled to half the sides."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    return chain(conv=conv, **norm, relu=nn.ReLU(), pool=nn.MaxPool2d(2))


def lenet(*, shape: Shape, classes: int) -> Stages:
    """LeNet of DLG: three 5x5 convolutions of 12 channels with sigmoids, strides 2, 2, 1.

    Source: Zhu, Liu, Han, arXiv:1906.08935 (twice differentiable; weights U(-0.5, 0.5) there,
    see the setting `init`).
    """
    channels = image_sides("lenet", shape, multiple=4)[0]

    def block(inputs: int, stride: int) -> nn.Module:
        return chain(conv=nn.Conv2d(inputs, 12, 5, stride=stride, padding=2), sigmoid=nn.Sigmoid())

    return OrderedDict(
        block1=block(channels, 2), block2=block(12, 2), block3=block(12, 1), flatten=nn.Flatten()
    )


def cnn_selective_shield(*, shape: Shape, classes: int, width: int = 32) -> Stages:
    """Convolutions of 32 and 64 channels with BN, hidden layer of 256.

    width: Channels of the first convolution; the second has twice, the hidden layer eight times
    as many. Source: SelectiveShield, Table 7. Its BatchNorm2d is static here (see
    StaticBatchNorm).
    """
    channels = image_sides("cnn_selective_shield", shape, multiple=4)[0]
    positive("cnn_selective_shield", width=width)
    flat = 2 * width * (shape[1] // 4) * (shape[2] // 4)
    return OrderedDict(
        block1=_halving_block(channels, width, norm=StaticBatchNorm(width)),
        block2=_halving_block(width, 2 * width, norm=StaticBatchNorm(2 * width)),
        flatten=nn.Flatten(),
        hidden=chain(linear=nn.Linear(flat, 8 * width), relu=nn.ReLU()),
    )


def cnn_spm(*, shape: Shape, classes: int) -> Stages:
    """Convolutions of 64 and 128 channels, hidden layers of 384 and 192.

    Source: SPM, Sec. 5.1, Model 1 (kernel size is not given there; 3x3 with padding makes its
    "128 channels, 8 height, 8 width" from 32x32).
    """
    channels = image_sides("cnn_spm", shape, multiple=4)[0]
    width = 128 * (shape[1] // 4) * (shape[2] // 4)
    return OrderedDict(
        block1=_halving_block(channels, 64),
        block2=_halving_block(64, 128),
        flatten=nn.Flatten(),
        hidden1=chain(linear=nn.Linear(width, 384), relu=nn.ReLU()),
        hidden2=chain(linear=nn.Linear(384, 192), relu=nn.ReLU()),
    )


_VGG16 = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Channels of each block, as a multiple of the first's, and its convolutions."""


def vgg16(*, shape: Shape, classes: int, width: int = 64) -> Stages:
    """VGG-16 for small images: five blocks of 3x3 convolutions with static BN, one linear layer.

    The convolutions of torchvision's vgg16_bn. Its classifier of three layers is made for
    ImageNet; as usual for 32x32 images the head alone takes its place. On sides that 32 does
    not divide, such as 16, block5 does not pool. Source: Simonyan, Zisserman, arXiv:1409.1556,
    Table 1, D; used by DP-CutMixSL; static BN: HeteroFL, arXiv:2010.01264.
    """
    before = image_sides("vgg16", shape, multiple=16)[0]
    positive("vgg16", width=width)
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
    return stages | OrderedDict(flatten=nn.Flatten())


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with static BN and a shortcut, projected where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = StaticBatchNorm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = StaticBatchNorm(outputs)
        self.project: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.project = chain(
                conv=nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
                norm=StaticBatchNorm(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm1(self.conv1(x)).relu()
        out = self.norm2(self.conv2(out))
        return (out + (x if self.project is None else self.project(x))).relu()


def resnet18(*, shape: Shape, classes: int, width: int = 64) -> Stages:
    """ResNet-18 for small images: 3x3 stem without pooling, four stages of two blocks.

    torchvision's resnet18 takes a norm_layer, but its 7x7 stem and pooling are made for
    ImageNet; PM-SFL and SPM follow the common 3x3 form for 32x32 images.
    Source: He et al., arXiv:1512.03385; static BN: HeteroFL, arXiv:2010.01264.
    """
    channels = image_sides("resnet18", shape)[0]
    positive("resnet18", width=width)

    def stage(inputs: int, outputs: int, stride: int) -> nn.Module:
        return chain(
            block1=BasicBlock(inputs, outputs, stride), block2=BasicBlock(outputs, outputs, 1)
        )

    return OrderedDict(
        stem=chain(
            conv=nn.Conv2d(channels, width, 3, padding=1, bias=False),
            norm=StaticBatchNorm(width),
            relu=nn.ReLU(),
        ),
        layer1=stage(width, width, 1),
        layer2=stage(width, 2 * width, 2),
        layer3=stage(2 * width, 4 * width, 2),
        layer4=stage(4 * width, 8 * width, 2),
        pool=chain(mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten()),
    )
