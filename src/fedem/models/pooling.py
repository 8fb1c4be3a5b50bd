"""Pooling in a form that stacks.

On a GPU that has Triton, images of many models are pooled by kernels of our own (``kernels.py``), channels last.

Shapes: n samples of a batch, C channels, H x W pixels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fedem.models import layers
from fedem.models.convolutions import Geometry, Pair
from fedem.models.layers import call, call_mapped, define

Side = int | tuple[int, int]
Windows = tuple[Side, Side, Side, Side, bool]  # kernel, stride, padding, dilation, and if windows may overhang
_MOST_PLACES = 128  # of a window, for a kernel that has a line for each and keeps its number in eight bits


class StackableMaxPool2d(nn.MaxPool2d):
    """``nn.MaxPool2d`` with stacked models beside the channels, where a convolution's outputs have them.

    torch's rule for vmap lays them beside the samples, which copies the largest tensors of a network, both ways.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C, H', W']``, or without n."""
        stride = self.kernel_size if self.stride is None else self.stride
        windows = (self.kernel_size, stride, self.padding, self.dilation, self.ceil_mode)
        return max_pool(inputs, windows) if inputs.ndim == 4 else max_pool(inputs[None], windows)[0]


def max_pool(inputs: Tensor, windows: Windows) -> Tensor:
    """Return the largest number of each window, ``[n, C, H, W] -> [n, C, H', W']``."""
    *pairs, dilation, overhang = windows
    window, stride, padding = map(_pair, pairs)
    has_kernel = dilation in (1, (1, 1)) and not overhang and math.prod(window) <= _MOST_PLACES
    if not has_kernel or not layers.has_kernels(inputs):
        return call(_MaxPool, inputs, windows)[0]
    return call(_Pool, inputs, Geometry(window, stride, padding, depthwise=True))[0]


def _pair(side: Side) -> Pair:
    return (side, side) if isinstance(side, int) else (side[0], side[1])  # a list, too


def _beside_channels(leaf: Tensor, dim: int | None, size: int) -> Tensor:
    """Fold a stacked dimension into the channels, ``[n, C, ...] -> [n, size * C, ...]``."""
    stacked = leaf.unsqueeze(1).expand(-1, size, *leaf.shape[1:]) if dim is None else leaf.movedim(dim, 1)
    return stacked.flatten(1, 2)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(inputs: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.max_pool2d_with_indices(inputs, *windows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Windows], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.windows = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return call(_MaxPoolGradient, gradient, *ctx.saved_tensors, ctx.windows), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None], inputs: Tensor, windows: Windows) -> tuple[Any, tuple[int, int]]:
        pooled = call(_MaxPool, _beside_channels(inputs, dims[0], info.batch_size), windows)
        return tuple(leaf.unflatten(1, (info.batch_size, -1)) for leaf in pooled), (1, 1)


class _MaxPoolGradient(torch.autograd.Function):
    """Its backward pass, with a rule of its own for the same reason."""

    @staticmethod
    def forward(gradient: Tensor, inputs: Tensor, indices: Tensor, windows: Windows) -> Tensor:
        kernel, stride, padding, dilation, _ = windows
        gradient = gradient.contiguous()
        if kernel == stride and padding == 0 and dilation == 1:
            # Windows that don't overlap: every number goes to one place, and putting it there is much faster.
            return torch.ops.aten.max_unpool2d(gradient, indices, inputs.shape[-2:])
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, inputs, *windows, indices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Windows], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """It puts numbers where the maxima were, so backwards they are picked up there."""
        (indices,) = ctx.saved_tensors
        return gradient.flatten(-2).gather(-1, indices.flatten(-2)).reshape(indices.shape), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        *leaves, windows = arguments
        folded = [_beside_channels(leaf, dim, info.batch_size) for leaf, dim in zip(leaves, dims[:-1], strict=True)]
        return call(_MaxPoolGradient, *folded, windows).unflatten(1, (info.batch_size, -1)), 1


class StackableMean2d(nn.AdaptiveAvgPool2d):
    """``nn.AdaptiveAvgPool2d`` that puts out one pixel: a mean, for which torch has a rule in any layout."""

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C, 1, 1]``."""
        return inputs.mean((-2, -1), keepdim=True)


class _Pool(torch.autograd.Function):
    """``[n, C, H, W] -> [n, C, H', W']``, and in which place of its window each number was."""

    @staticmethod
    def forward(inputs: Tensor, geometry: Geometry) -> Any:
        return torch.ops.fedem.pool(inputs, *geometry[:3])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Geometry], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.geometry, ctx.size = inputs[1], tuple(inputs[0].shape[-2:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return call(_PutBack, gradient, *ctx.saved_tensors, ctx.size, ctx.geometry), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None], *given: Any) -> tuple[Any, tuple[int, int]]:
        return call_mapped(_Pool, info.batch_size, dims, *given)


class _Moved(torch.autograd.Function):
    """Numbers moved to places or from there; which places, of what images, the way back needs to know."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pair, Geometry], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.size, ctx.geometry = inputs[2:]


class _PutBack(_Moved):
    """Put the numbers of ``[n, C, H', W']`` to their places in ``[n, C, H, W]``, where they add up."""

    @staticmethod
    def forward(numbers: Tensor, places: Tensor, size: Pair, geometry: Geometry) -> Tensor:
        return torch.ops.fedem.put_back(numbers, places, size, *geometry[:3])

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        return call(_PickUp, outer, *ctx.saved_tensors, ctx.size, ctx.geometry), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Any) -> tuple[Any, int]:
        return call_mapped(_PutBack, info.batch_size, dims, *given)


class _PickUp(_Moved):
    """Pick numbers up again from where :class:`_PutBack` puts them: each is the other's gradient."""

    @staticmethod
    def forward(images: Tensor, places: Tensor, size: Pair, geometry: Geometry) -> Tensor:
        return torch.ops.fedem.pick_up(images, places, *geometry[:3])

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        return call(_PutBack, outer, *ctx.saved_tensors, ctx.size, ctx.geometry), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Any) -> tuple[Any, int]:
        return call_mapped(_PickUp, info.batch_size, dims, *given)


def _last(images: Tensor) -> Tensor:
    """``[n, C, H, W] -> [n, H, W, C]``, contiguous."""
    return images.movedim(1, -1).contiguous()


def _pool(inputs: Tensor, window: list[int], stride: list[int], padding: list[int]) -> tuple[Tensor, Tensor]:
    from fedem.models import kernels

    found, places = kernels.pool(_last(inputs), None, _geometry(window, stride, padding))
    return found.movedim(-1, 1), places.movedim(-1, 1)


def _pick_up(images: Tensor, places: Tensor, window: list[int], stride: list[int], padding: list[int]) -> Tensor:
    from fedem.models import kernels

    found, _ = kernels.pool(_last(images), _last(places), _geometry(window, stride, padding))
    return found.movedim(-1, 1)


def _put_back(
    numbers: Tensor, places: Tensor, size: list[int], window: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    from fedem.models import kernels

    geometry = _geometry(window, stride, padding)
    return kernels.pool_back(_last(numbers), _last(places), (size[0], size[1]), geometry).movedim(-1, 1)


def _geometry(window: list[int], stride: list[int], padding: list[int]) -> Geometry:
    first, second, third = ((pair[0], pair[1]) for pair in (window, stride, padding))
    return Geometry(first, second, third, depthwise=True)


define("pool", _pool)
define("pick_up", _pick_up)
define("put_back", _put_back)
