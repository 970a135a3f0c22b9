"""ResNet-18 for small images as it is published on: fresh statistics in eval mode."""

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from tests.conv64 import KeptNorm


class ResNet18(ResNet):
    """torchvision's, with a stem of 3 x 3 and without its pooling, as usual at 32 px."""

    def __init__(self, classes: int = 10, in_channels: int = 3) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2], classes, norm_layer=KeptNorm)
        self.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
        self.maxpool = nn.Identity()
