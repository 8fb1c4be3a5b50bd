"""Layers in forms that stack: same parameters, same values, for whatever number of models at once.

torch's own layers don't: dropout draws from a generator whose state depends on who is trained together, a linear layer
copies its inputs for every model, pooling copies them for its own order. What a layer must know of the batch besides
its inputs is a :class:`Pass`.

Shapes: n samples of a batch, padding included, C channels, H x W pixels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, library, nn

from fedem.core.random import derive

_LEVELS = 1 << 16  # a rate is rounded to 16 bits, so that one word serves four draws

Window = int | tuple[int, int]
Geometry = tuple[Window, Window, Window, Window, bool]  # kernel, stride, padding, dilation, and if windows may overhang


def call(function: Any, *arguments: Any) -> Any:
    """Call an autograd function, whose ``apply`` torch leaves untyped."""
    return function.apply(*arguments)


def has_kernels(images: Tensor) -> bool:
    """Whether many models convolve and normalise ``images`` by kernels of our own, which sum in float32."""
    return images.is_cuda and images.dtype != torch.float64 and _has_triton()


@cache
def _has_triton() -> bool:
    return torch.version.hip is None and find_spec("triton") is not None


_LIBRARY = library.Library("fedem", "DEF")


def define(name: str, operation: Callable[..., Any]) -> None:
    """Make a function an operation of torch's own kind: a recording then holds one entry for all that it does."""
    _LIBRARY.define(name + library.infer_schema(operation, mutates_args=()))
    _LIBRARY.impl(name, operation, "CompositeExplicitAutograd")


class StackableMaxPool2d(nn.MaxPool2d):
    """``nn.MaxPool2d`` with stacked models beside the channels, where a convolution's outputs have them.

    torch's rule for vmap lays them beside the samples, which copies the largest tensors of a network, both ways.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C, H', W']``, or without n."""
        stride = self.kernel_size if self.stride is None else self.stride
        geometry = (self.kernel_size, stride, self.padding, self.dilation, self.ceil_mode)
        return max_pool(inputs, geometry) if inputs.ndim == 4 else max_pool(inputs[None], geometry)[0]


def max_pool(inputs: Tensor, geometry: Geometry) -> Tensor:
    """Return the largest number of each window, ``[n, C, H, W] -> [n, C, H', W']``."""
    return call(_MaxPool, inputs, geometry)[0]


def _beside_channels(leaf: Tensor, dim: int | None, size: int) -> Tensor:
    """Fold a stacked dimension into the channels, ``[n, C, ...] -> [n, size * C, ...]``."""
    stacked = leaf.unsqueeze(1).expand(-1, size, *leaf.shape[1:]) if dim is None else leaf.movedim(dim, 1)
    return stacked.flatten(1, 2)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(inputs: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.max_pool2d_with_indices(inputs, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Geometry], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])
        ctx.geometry = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return call(_MaxPoolGradient, gradient, *ctx.saved_tensors, ctx.geometry), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int, None], inputs: Tensor, geometry: Geometry) -> tuple[Any, tuple[int, int]]:
        pooled = call(_MaxPool, _beside_channels(inputs, dims[0], info.batch_size), geometry)
        return tuple(leaf.unflatten(1, (info.batch_size, -1)) for leaf in pooled), (1, 1)


class _MaxPoolGradient(torch.autograd.Function):
    """Its backward pass, with a rule of its own for the same reason."""

    @staticmethod
    def forward(gradient: Tensor, inputs: Tensor, indices: Tensor, geometry: Geometry) -> Tensor:
        kernel, stride, padding, dilation, _ = geometry
        gradient = gradient.contiguous()
        if kernel == stride and padding == 0 and dilation == 1:
            # Windows that don't overlap: every number goes to one place, and putting it there is much faster.
            return torch.ops.aten.max_unpool2d(gradient, indices, inputs.shape[-2:])
        return torch.ops.aten.max_pool2d_with_indices_backward(gradient, inputs, *geometry, indices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Geometry], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """It puts numbers where the maxima were, so backwards they are picked up there."""
        (indices,) = ctx.saved_tensors
        return gradient.flatten(-2).gather(-1, indices.flatten(-2)).reshape(indices.shape), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        *leaves, geometry = arguments
        folded = [_beside_channels(leaf, dim, info.batch_size) for leaf, dim in zip(leaves, dims[:-1], strict=True)]
        return call(_MaxPoolGradient, *folded, geometry).unflatten(1, (info.batch_size, -1)), 1


class StackableMean2d(nn.AdaptiveAvgPool2d):
    """``nn.AdaptiveAvgPool2d`` that puts out one pixel: a mean, for which torch has a rule in any layout."""

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C, 1, 1]``."""
        return inputs.mean((-2, -1), keepdim=True)


@dataclass
class Pass:
    """What the layers must know of one training pass over a batch."""

    mask: Tensor | None  # [n] bool, false where a row is padding; None where no row is
    key: Tensor  # int64, the source of the pass's random numbers
    draws: int = 0  # layers that have drawn so far; each has a stream of its own


CURRENT_PASS: ContextVar[Pass] = ContextVar("pass")


@contextmanager
def training_pass(mask: Tensor | None, key: Tensor) -> Iterator[None]:
    """Tell the layers what batch they are about to see."""
    token = CURRENT_PASS.set(Pass(mask, key))
    try:
        yield
    finally:
        CURRENT_PASS.reset(token)


def keyed_dropout(inputs: Tensor, rate: float, whole_channels: bool = False) -> Tensor:
    """Zero each number, or each channel, with probability ``rate``, and scale the others to keep the mean."""
    # What is zeroed depends on the pass's key and on the place: the row, and the position within it. So neither the
    # padding below a batch nor the clients beside it change anything.
    if rate == 1:
        return torch.zeros_like(inputs)
    shape = inputs.shape[:2] if whole_channels else inputs.shape
    places = shape[1:].numel()
    current = CURRENT_PASS.get()
    current.draws += 1
    rows = derive(current.key, current.draws, torch.arange(shape[0], device=inputs.device))
    words = derive(rows[:, None], torch.arange(-(-places // 4), device=inputs.device))
    # Each quarter of a word in turn to its top, where a signed comparison sees that quarter first.
    quarters = words[..., None] << torch.arange(0, 64, 16, device=inputs.device)
    kept = (quarters >= (round(rate * _LEVELS) - _LEVELS // 2) << 48).flatten(1)[:, :places]
    kept = kept.reshape(*shape, *(1,) * (inputs.ndim - len(shape)))
    return inputs * (kept * torch.tensor(1 / (1 - rate), dtype=inputs.dtype))


class KeyedAugmentation(nn.Module):
    """In training, each image moved by up to ``shift`` pixels each way and, if ``flips``, every other one mirrored.

    What is moved in from outside is 0, the mean of standardised pixels. By keys, as dropout is.
    """

    def __init__(self, flips: bool, shift: int):
        super().__init__()
        self.flips, self.shift = flips, shift

    def forward(self, images: Tensor) -> Tensor:
        """``[n, C, H, W]``, unchanged in evaluation mode."""
        if not self.training:
            return images
        count, channels, height, width = images.shape
        current, device = CURRENT_PASS.get(), images.device
        current.draws += 1
        words = derive(current.key, current.draws, torch.arange(count, device=device))
        down, across = ((words >> bits & 0xFFFF) % (2 * self.shift + 1) - self.shift for bits in (16, 32))
        rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
        mirrored = (words & 1 if self.flips else torch.zeros_like(words))[:, None]
        rows = rows + down[:, None]
        columns = torch.where(mirrored == 1, width - 1 - columns, columns) + across[:, None]
        inside = [(place >= 0) & (place < side) for place, side in ((rows, height), (columns, width))]
        above = rows.clamp(0, height - 1)[:, None, :, None].expand(-1, channels, -1, width)
        beside = columns.clamp(0, width - 1)[:, None, None, :].expand(-1, channels, height, -1)
        moved = images.gather(2, above).gather(3, beside)
        return moved * (inside[0][:, None, :, None] & inside[1][:, None, None, :])


class KeyedDropout(nn.Dropout):
    """``nn.Dropout`` by keys."""

    whole_channels = False

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, ...]``, unchanged in evaluation mode."""
        return keyed_dropout(inputs, self.p, self.whole_channels) if self.training and self.p else inputs


class KeyedChannelDropout(KeyedDropout):
    """``nn.Dropout1d``, ``2d`` and ``3d`` by keys, ``[n, C, ...]``."""

    whole_channels = True


class FoldedLinear(nn.Linear):
    """``nn.Linear`` whose weight stands on the left, and whose gradient that comes back is laid out afresh.

    Under vmap over components torch folds them into the rows of one matrix product only when the stacked factor is the
    left one and contiguous; else it copies the inputs, far larger than that gradient, once for each component.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., d] -> [..., K]``."""
        rows = inputs if inputs.ndim == 2 else inputs.reshape(-1, inputs.shape[-1])
        outputs = self.weight @ rows.mT
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradient.reshape(-1).reshape(gradient.shape))
        if self.bias is not None:
            outputs = outputs + self.bias[:, None]
        # Contiguous as nn.Linear's output is: what follows may want to view it.
        outputs = outputs.mT.contiguous()
        return outputs if inputs.ndim == 2 else outputs.reshape(*inputs.shape[:-1], self.out_features)
