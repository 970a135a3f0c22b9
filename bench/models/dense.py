"""Logistic regression and multi-layer perceptrons."""

from collections import OrderedDict
from math import prod

from torch import nn

from bench.models.network import Shape, Stages, chain


def logistic(*, shape: Shape, classes: int) -> Stages:
    """Softmax regression on the flattened sample."""
    return OrderedDict(flatten=nn.Flatten())


def _perceptron(shape: Shape, widths: tuple[int, ...]) -> Stages:
    stages: Stages = OrderedDict(flatten=nn.Flatten())
    before = prod(shape)
    for i, width in enumerate(widths, start=1):
        stages[f"hidden{i}"] = chain(linear=nn.Linear(before, width), relu=nn.ReLU())
        before = width
    return stages


def mlp3(*, shape: Shape, classes: int) -> Stages:
    """Hidden layers of 256 and 128. Source: SelectiveShield, Table 7."""
    return _perceptron(shape, (256, 128))


def mlp_spm(*, shape: Shape, classes: int) -> Stages:
    """One hidden layer of 256. Source: SPM, Sec. 5.1."""
    return _perceptron(shape, (256,))
