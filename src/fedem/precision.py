"""How exactly a GPU multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("tf32", "float32", "bfloat16")


@contextmanager
def products(name: str, device: torch.device) -> Iterator[None]:
    """Let a GPU take products of float32 numbers in TF32 (10 bits of each factor), or not; then set it back.

    Meanwhile convolutions sum in the same order each time: the same run gives the same bits, at the same speed.

    "bfloat16" goes further, where a model computes (:class:`~fedem.models.base.Model`); its other products are in TF32.
    """
    if device.type != "cuda":
        yield
        return
    matrices, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matrices.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
    try:
        matrices.allow_tf32 = convolutions.allow_tf32 = name != "float32"
        convolutions.deterministic = True
        yield
    finally:
        matrices.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before
