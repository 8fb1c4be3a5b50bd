"""Max-pooling that stacks without copies.

torch's rule for vmap lays the models beside the samples; but a convolution's outputs have them beside the channels, and
putting them elsewhere copies the largest tensors of a network, forwards and backwards. Here they stay where they are.

Shapes: n samples, C channels, H x W pixels, h x w windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedem.models.functions import call

Window = int | tuple[int, int]
Geometry = tuple[Window, Window, Window, Window, bool]
"""kernel, stride, padding, dilation, whether windows may hang over the edge"""


class StackableMaxPool2d(nn.MaxPool2d):
    """``nn.MaxPool2d`` in a form that stacks."""

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C, h, w]``, or without n."""
        stride = self.kernel_size if self.stride is None else self.stride
        geometry = (self.kernel_size, stride, self.padding, self.dilation, self.ceil_mode)
        return max_pool(inputs, geometry) if inputs.ndim == 4 else max_pool(inputs[None], geometry)[0]


def is_plain(layer: nn.MaxPool2d) -> bool:
    """Say whether a pooling returns its maxima alone."""
    return not layer.return_indices


def max_pool(inputs: Tensor, geometry: Geometry) -> Tensor:
    """Return the largest number of each window, ``[n, C, H, W] -> [n, C, h, w]``."""
    pooled: Tensor = call(_MaxPool, inputs, geometry)[0]
    return pooled


def _beside_channels(leaf: Tensor, dim: int | None, size: int) -> Tensor:
    """Fold a stacked dimension into the channels, ``[n, C, ...] -> [n, size * C, ...]``."""
    stacked = leaf.unsqueeze(1).expand(-1, size, *leaf.shape[1:]) if dim is None else leaf.movedim(dim, 1)
    return stacked.flatten(1, 2)


def _pairs(*windows: Window) -> list[list[int]]:
    return [[window, window] if isinstance(window, int) else list(window) for window in windows]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(inputs: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        kernel, stride, padding, dilation, over = geometry
        pooled: tuple[Tensor, Tensor] = torch.ops.aten.max_pool2d_with_indices(
            inputs, *_pairs(kernel, stride, padding, dilation), over
        )
        return pooled

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Geometry], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.geometry = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return call(_Gradient, gradient, *ctx.saved_tensors, ctx.geometry), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None], inputs: Tensor, geometry: Geometry) -> tuple[Any, tuple[int, int]]:
        size = info.batch_size
        pooled = call(_MaxPool, _beside_channels(inputs, dims[0], size), geometry)
        return tuple(leaf.unflatten(1, (size, -1)) for leaf in pooled), (1, 1)


class _Gradient(torch.autograd.Function):
    """Its backward pass, with a rule of its own for the same reason."""

    @staticmethod
    def forward(gradient: Tensor, inputs: Tensor, indices: Tensor, geometry: Geometry) -> Tensor:
        kernel, stride, padding, dilation, over = geometry
        gradient = gradient.contiguous()
        result: Tensor
        if kernel == stride and padding == 0 and dilation == 1:
            # Windows that don't overlap: every number goes to one place, and putting it there is much faster.
            result = torch.ops.aten.max_unpool2d(gradient, indices, inputs.shape[-2:])
        else:
            result = torch.ops.aten.max_pool2d_with_indices_backward(
                gradient, inputs, *_pairs(kernel, stride, padding, dilation), over, indices
            )
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Geometry], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """It puts numbers where the maxima were, so backwards they are picked up there."""
        (indices,) = ctx.saved_tensors
        picked = gradient.flatten(-2).gather(-1, indices.flatten(-2)).reshape(indices.shape)
        return picked, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        *leaves, geometry = arguments
        size = info.batch_size
        folded = [_beside_channels(leaf, dim, size) for leaf, dim in zip(leaves, dims[:-1], strict=True)]
        return call(_Gradient, *folded, geometry).unflatten(1, (size, -1)), 1
