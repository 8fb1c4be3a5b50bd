"""The floor under a round: its multiply-adds as large matrix products and nothing else.

Shapes: N samples of all clients, M components, d features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.measure import Effort, Timing, measure


def floor_seconds(inputs: Tensor, num_components: int, effort: Effort) -> Timing:
    """Time the products of a round on ``inputs`` ``[N, d]``.

    They are the E-step's forward pass (none with one component, where there is no E-step), the training's forward pass
    and its backward pass, N d M multiply-adds each. Each is written with the components on the left and on the right;
    the faster way counts.
    """
    num_samples, dimension = inputs.shape
    weights = torch.randn(num_components, dimension)
    residuals = torch.randn(num_components, num_samples)
    weights_right, residuals_right = weights.T.contiguous(), residuals.T.contiguous()
    forward = _faster(
        measure(lambda: weights @ inputs.T, effort),
        measure(lambda: inputs @ weights_right, effort),
    )
    backward = _faster(
        measure(lambda: residuals @ inputs, effort),
        measure(lambda: inputs.T @ residuals_right, effort),
    )
    passes = 2 if num_components > 1 else 1
    return Timing(tuple(passes * one + other for one, other in zip(forward.repeats, backward.repeats, strict=True)))


def _faster(first: Timing, second: Timing) -> Timing:
    return min(first, second, key=lambda timing: timing.median)
