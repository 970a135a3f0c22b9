"""The network on which R-GAP's figure was published, as a user's module."""

from torch import Tensor, nn

CHANNELS, KERNELS = (12, 36, 36, 36, 64, 128), (4, 3, 3, 3, 3, 3)
STRIDES, PADDINGS = (2, 2, 1, 1, 2, 1), (2, 1, 1, 1, 1, 1)


class Cnn6(nn.Module):
    """Six convolutions without bias, each with an activation, and a linear head.

    Args:
        layers: Only the first so many convolutions.
        channels: Times those of the figure's network.
        activation: Name of a class in torch.nn.
        pool: Whether to pool after the first convolution.
        hidden: Units of a linear layer before the head; 0 for none.
    """

    def __init__(
        self, classes: int = 10, in_channels: int = 3, image_size: int = 32, *, layers: int = 6,
        channels: float = 1.0, activation: str = "LeakyReLU", pool: bool = False, hidden: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        phi = nn.LeakyReLU(0.2) if activation == "LeakyReLU" else getattr(nn, activation)()
        parts: list[nn.Module] = []
        before, side = in_channels, image_size
        for i in range(layers):
            after = round(CHANNELS[i] * channels)
            size, stride, padding = KERNELS[i], STRIDES[i], PADDINGS[i]
            parts += [nn.Conv2d(before, after, size, stride, padding, bias=False), phi]
            before, side = after, (side + 2 * padding - size) // stride + 1
            if pool and i == 0:
                parts.append(nn.MaxPool2d(2))
                side //= 2
        parts.append(nn.Flatten())
        width = before * side * side
        if hidden:
            parts += [nn.Linear(width, hidden), phi]
        self.body = nn.Sequential(*parts)
        self.head = nn.Linear(hidden or width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))
