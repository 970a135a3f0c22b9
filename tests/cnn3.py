"""The network on which attacks on local training were published, as a user's module."""

import torch
from torch import Tensor, nn


class Cnn3(nn.Module):
    """Two convolutions with average pooling and a hidden layer (eth-sri/fedavg_leakage, "cnn3"), on
    pixels that are standardised as CIFAR-100's."""

    mean: Tensor
    std: Tensor

    def __init__(self, classes: int = 100, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        self.mean = torch.tensor([0.5071, 0.4866, 0.4409])[:in_channels, None, None]
        self.std = torch.tensor([0.2673, 0.2564, 0.2762])[:in_channels, None, None]
        blocks: list[nn.Module] = []
        for before, after in ((in_channels, 64), (64, 128)):
            blocks += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
        width = 128 * (image_size // 4) ** 2
        head = [nn.Linear(width, 200), nn.ReLU(), nn.Linear(200, classes)]
        self.layers = nn.Sequential(*blocks, nn.Flatten(), *head)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x - self.mean) / self.std)
