"""ResNet-18 with static batch normalisation."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from bench.errors import UserError
from bench.models.network import Stages, StaticBatchNorm


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
            self.project = nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False),
                    norm=StaticBatchNorm(outputs),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm1(self.conv1(x)).relu()
        out = self.norm2(self.conv2(out))
        return (out + (x if self.project is None else self.project(x))).relu()


def resnet18(*, shape: tuple[int, ...], classes: int, width: int = 64) -> Stages:
    """ResNet-18 for small images: 3x3 stem without pooling, four stages of two blocks.

    torchvision's resnet18 takes a norm_layer, but its 7x7 stem and pooling are made for
    ImageNet; PM-SFL and SPM follow the common 3x3 form for 32x32 images.
    Source: He et al., arXiv:1512.03385; static BN: HeteroFL, arXiv:2010.01264.
    """
    if len(shape) != 3:
        raise UserError(
            f"model resnet18 takes images [channels, height, width], got samples of shape "
            f"{list(shape)}."
        )
    if width < 1:
        raise UserError(f"width of model resnet18 must be >= 1 (channels), got {width}.")

    def stage(inputs: int, outputs: int, stride: int) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                block1=BasicBlock(inputs, outputs, stride),
                block2=BasicBlock(outputs, outputs, 1),
            )
        )

    return OrderedDict(
        stem=nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(shape[0], width, 3, padding=1, bias=False),
                norm=StaticBatchNorm(width),
                relu=nn.ReLU(),
            )
        ),
        layer1=stage(width, width, 1),
        layer2=stage(width, 2 * width, 2),
        layer3=stage(2 * width, 4 * width, 2),
        layer4=stage(4 * width, 8 * width, 2),
        pool=nn.Sequential(OrderedDict(mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())),
        head=nn.Identity(),
    )
