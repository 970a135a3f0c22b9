"""How exactly a GPU multiplies."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def whole_float32() -> Iterator[None]:
    """Inside, float32 products and convolutions keep all 24 bits on a GPU, as on a CPU.

    By default torch lets cuDNN convolve with 11 (TF32), which moves gradients by parts in a
    thousand. The settings are the process's and are put back.
    """
    cudnn: Any = torch.backends.cudnn
    products = torch.get_float32_matmul_precision()
    before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        cudnn.allow_tf32 = before[0] == "tf32"
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before
