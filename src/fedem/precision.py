"""How exactly a GPU multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("tf32", "float32", "bfloat16")


@contextmanager
def products(name: str, device: torch.device) -> Iterator[None]:
    """Let a GPU take products of float32 numbers in TF32 (10 bits of each factor), or not; then set it back.

    "bfloat16" goes further, where a model computes (:class:`~fedem.models.base.Model`); its other products are in TF32.
    """
    if device.type != "cuda":
        yield
        return
    matrices, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name != "float32"
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matrices, convolutions
