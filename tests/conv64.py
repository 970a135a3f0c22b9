"""ConvNet64, on which Geiping et al. published, as a user's module."""

from __future__ import annotations

from torch import Tensor, nn

CHANNELS = (64, 128, 128, 256, 256, 256, 256, 256)


class KeptNorm(nn.BatchNorm2d):
    """Batch normalisation that stays in eval mode, as the authors attack it."""

    def train(self, mode: bool = True) -> KeptNorm:
        return super().train(False)


class ConvNet64(nn.Module):
    """Eight 3 x 3 convolutions, each with normalisation and ReLU, pooling by three after the sixth
    and the last: 2,904,970 parameters for ten classes of 3 x 32 x 32."""

    def __init__(self, classes: int = 10, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        before = in_channels
        for i, after in enumerate(CHANNELS):
            parts += [nn.Conv2d(before, after, 3, padding=1), KeptNorm(after), nn.ReLU()]
            if i in (5, 7):
                parts.append(nn.MaxPool2d(3))
            before = after
        self.body = nn.Sequential(*parts, nn.Flatten())
        self.head = nn.Linear(before * (image_size // 9) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))
