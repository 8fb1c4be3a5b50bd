"""Convolutions in a form that stacks.

Stacked, a convolution is a grouped one to torch. On a GPU that has Triton it is ours (``kernels.py``), or a batched
product of matrices where its window is a single pixel; elsewhere torch's grouped one stays, as it does for one model.

:class:`_Convolution` and its two gradients are linear in each of two arguments, so each one's gradients are the other
two: derivatives of any order can be had.

Shapes: S stacked models, n samples of a batch, padding included, C input and O output channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad
from torch.nn.grad import conv2d_input, conv2d_weight

from fedem.models import layers
from fedem.models.layers import call, define

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Of a convolution, each down and across; ``depthwise`` where each channel is convolved by itself.

    There is the same padding on all sides, and ``more`` below and on the right.
    """

    window: Pair
    stride: Pair
    padding: Pair
    depthwise: bool
    more: Pair = (0, 0)

    def shrink(self, size: Pair) -> Pair:
        """Return the size of what is put out for images of ``size``."""
        sides = zip(size, *self[:3], self.more, strict=True)
        height, width = ((side + 2 * pad + more - window) // stride + 1 for side, window, stride, pad, more in sides)
        return height, width

    @property
    def is_pointwise(self) -> bool:
        """Whether each pixel is put out by itself: a product of matrices."""
        return self == Geometry((1, 1), (1, 1), (0, 0), depthwise=False)

    def cropped(self, size: Pair) -> tuple[Geometry, tuple[slice, slice]]:
        """Leave out the edges of the window that see nothing but padding of images of ``size``; say what is left."""
        sides = list(zip(size, self.shrink(size), *self[:3], strict=True))
        first = [max(0, pad - (outputs - 1) * stride) for _, outputs, _, stride, pad in sides]
        last = [min(window, side + pad) for side, _, window, _, pad in sides]
        (top, left), (bottom, right) = first, last
        padding = self.padding[0] - top, self.padding[1] - left
        less = self._replace(window=(bottom - top, right - left), padding=padding)
        if less.shrink(size) != self.shrink(size):
            return self, (slice(None), slice(None))
        return less, (slice(top, bottom), slice(left, right))


class StackableConv2d(nn.Conv2d):
    """``nn.Conv2d`` by kernels of our own where there are some.

    There may be ``more`` zeros below and on the right than there are on all sides.
    """

    more: Pair = (0, 0)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, O, H', W']``."""
        if not layers.has_kernels(inputs):
            return _by_torch(self, inputs, self.weight, self.bias)
        outputs = convolve(self, inputs, self.weight)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)[:, None, None]


def convolve(layer: nn.Conv2d, inputs: Tensor, weight: Tensor) -> Tensor:
    """Convolve as ``layer`` does, by another weight and without a bias."""
    kind = inputs.device.type
    if not layers.has_kernels(inputs) or inputs.ndim != 4 or not is_plain(layer):
        return _by_torch(layer, inputs, weight, None)
    if torch.is_autocast_enabled(kind):
        inputs, weight = (leaf.to(torch.get_autocast_dtype(kind)) for leaf in (inputs, weight))
    geometry, (down, across) = _cropped(layer, inputs, _more(layer))
    # Squeezed, whose gradient is a view: to select is to fill zeros, and to copy, on the way back.
    return call(_Convolution, inputs[None], weight[None, ..., down, across], geometry).squeeze(0)


def _by_torch(layer: nn.Conv2d, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve by torch's own function, whose window leaves out what sees nothing but padding.

    In bfloat16 on some CPUs torch does not write the gradient there, and what it returns is whatever was in memory.
    """
    inputs = _padded(inputs, _more(layer))
    if inputs.ndim == 4 and is_plain(layer):
        geometry, (down, across) = _cropped(layer, inputs, (0, 0))
        if geometry.window != layer.kernel_size:
            how = (geometry.stride, geometry.padding, 1, layer.groups)
            return conv2d(inputs, weight[..., down, across], bias, *how)
    return layer._conv_forward(inputs, weight, bias)


def _more(layer: nn.Conv2d) -> Pair:
    return layer.more if isinstance(layer, StackableConv2d) else (0, 0)


def _padded(images: Tensor, more: Sequence[int]) -> Tensor:
    return pad(images, (0, more[1], 0, more[0])) if any(more) else images


def _cropped(layer: nn.Conv2d, inputs: Tensor, more: Pair) -> tuple[Geometry, tuple[slice, slice]]:
    """Return a plain layer's geometry for these images, and the part of its window that sees them."""
    assert not isinstance(layer.padding, str), "is_plain() has seen to it"
    window, stride, padding = ((pair[0], pair[1]) for pair in (layer.kernel_size, layer.stride, layer.padding))
    return Geometry(window, stride, padding, layer.groups > 1, more).cropped((inputs.shape[2], inputs.shape[3]))


def is_plain(layer: nn.Conv2d) -> bool:
    """Say whether a convolution has no peculiarities: one group, or as many as channels."""
    groups = layer.groups == 1 or layer.groups == layer.in_channels == layer.out_channels
    known = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return groups and known and layer.dilation == (1, 1)


class _Convolution(torch.autograd.Function):
    """``[S, n, C, H, W], [S, O, C, *] -> [S, n, O, H', W']``."""

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        return torch.ops.fedem.convolve(inputs, weight, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Geometry], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.geometry = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        inputs, weight = ctx.saved_tensors
        size = (inputs.shape[-2], inputs.shape[-1])
        back = call(_InputGradient, gradient, weight, size, ctx.geometry) if ctx.needs_input_grad[0] else None
        return back, call(_WeightGradient, inputs, gradient, ctx.geometry), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, int | None, None], *given: Any) -> tuple[Tensor, int]:
        return _stacked(_Convolution, info.batch_size, dims[:2], *given)


class _InputGradient(torch.autograd.Function):
    """``[S, n, O, H', W'], [S, O, C, *] -> [S, n, C, H, W]``, with H and W given."""

    @staticmethod
    def forward(gradient: Tensor, weight: Tensor, size: Pair, geometry: Geometry) -> Tensor:
        return torch.ops.fedem.convolve_back(gradient, weight, size, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pair, Geometry], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.geometry = inputs[3]

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradient, weight = ctx.saved_tensors
        again = call(_Convolution, outer, weight, ctx.geometry)
        return again, call(_WeightGradient, outer, gradient, ctx.geometry), None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, int | None, None, None], *given: Any) -> tuple[Tensor, int]:
        return _stacked(_InputGradient, info.batch_size, dims[:2], *given)


class _WeightGradient(torch.autograd.Function):
    """``[S, n, C, H, W], [S, n, O, H', W'] -> [S, O, C, *]``."""

    @staticmethod
    def forward(inputs: Tensor, gradient: Tensor, geometry: Geometry) -> Tensor:
        return torch.ops.fedem.convolve_weight(inputs, gradient, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Geometry], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.geometry = inputs[2]

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, gradient = ctx.saved_tensors
        back = call(_InputGradient, gradient, outer, (inputs.shape[-2], inputs.shape[-1]), ctx.geometry)
        return back, call(_Convolution, inputs, outer, ctx.geometry), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, int | None, None], *given: Any) -> tuple[Tensor, int]:
        return _stacked(_WeightGradient, info.batch_size, dims[:2], *given)


def _stacked(function: Any, size: int, dims: tuple[int | None, ...], *given: Any) -> tuple[Tensor, int]:
    """Call ``function`` once for a mapped dimension of its first two arguments: as more models or, of one, samples."""
    first, second, *others = given
    if dims[1] is None and function is not _WeightGradient:  # one weight for all
        samples = first.movedim(dims[0], 1).flatten(1, 2)
        return call(function, samples, second, *others).unflatten(1, (size, -1)), 1
    pairs = zip((first, second), dims, strict=True)
    models = (leaf.expand(size, *leaf.shape) if dim is None else leaf.movedim(dim, 0) for leaf, dim in pairs)
    found = call(function, *(leaf.flatten(0, 1) for leaf in models), *others)
    return found.unflatten(0, (size, -1)), 0


def _last(images: Tensor) -> Tensor:
    """``[S, n, C, H, W] -> [S, n, H, W, C]``, contiguous."""
    return images.movedim(2, -1).contiguous()


def _rows(images: Tensor) -> Tensor:
    """``[S, n, C, H, W] -> [S, n H W, C]``."""
    return _last(images).flatten(1, 3)


def _alone(images: Tensor) -> Tensor:
    """``[1, n, C, H, W] -> [n, C, H, W]``, channels last in memory, as cuDNN has them."""
    return images[0].contiguous(memory_format=torch.channels_last)


def _convolve(
    inputs: Tensor,
    weight: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    depthwise: bool,
    more: list[int],
) -> Tensor:
    geometry = _geometry(window, stride, padding, depthwise, more)
    if geometry.is_pointwise:
        found = torch.bmm(_rows(inputs), weight.flatten(2).mT)
        return found.unflatten(1, (inputs.shape[1], *inputs.shape[-2:])).movedim(-1, 2)
    if len(inputs) == 1 and not depthwise:
        return conv2d(_padded(_alone(inputs), more), weight[0], None, stride, padding)[None]
    from fedem.models import kernels

    return kernels.convolve(_last(inputs), weight, geometry).movedim(-1, 2)


def _convolve_back(
    gradient: Tensor,
    weight: Tensor,
    size: list[int],
    window: list[int],
    stride: list[int],
    padding: list[int],
    depthwise: bool,
    more: list[int],
) -> Tensor:
    geometry = _geometry(window, stride, padding, depthwise, more)
    if geometry.is_pointwise:
        found = torch.bmm(_rows(gradient), weight.flatten(2))
        return found.unflatten(1, (gradient.shape[1], *size)).movedim(-1, 2)
    if len(gradient) == 1 and not depthwise:
        shape = [gradient.shape[1], weight.shape[2], size[0] + more[0], size[1] + more[1]]
        found = conv2d_input(shape, weight[0], _alone(gradient), stride, padding)
        return found[None, ..., : size[0], : size[1]]
    from fedem.models import kernels

    return kernels.convolve_back(_last(gradient), weight, (size[0], size[1]), geometry).movedim(-1, 2)


def _convolve_weight(
    inputs: Tensor,
    gradient: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    depthwise: bool,
    more: list[int],
) -> Tensor:
    geometry = _geometry(window, stride, padding, depthwise, more)
    if geometry.is_pointwise:
        return torch.bmm(_rows(gradient).mT, _rows(inputs))[..., None, None]
    if len(inputs) == 1 and not depthwise:
        shape = [gradient.shape[2], inputs.shape[2], *window]
        return conv2d_weight(_padded(_alone(inputs), more), shape, _alone(gradient), stride, padding)[None]
    from fedem.models import kernels

    return kernels.weight_gradient(_last(inputs), _last(gradient), geometry).contiguous()


def _geometry(window: list[int], stride: list[int], padding: list[int], depthwise: bool, more: list[int]) -> Geometry:
    first, second, third, last = ((pair[0], pair[1]) for pair in (window, stride, padding, more))
    return Geometry(first, second, third, depthwise, last)


define("convolve", _convolve)
define("convolve_back", _convolve_back)
define("convolve_weight", _convolve_weight)


class WidenedConv2d(nn.Conv2d):
    """``nn.Conv2d`` of one input channel, in training with a second one: ones, which carry the bias.

    Stacked, a convolution of one channel is a depthwise one to torch, whose kernels for that are several times slower;
    and the bias would be added apart.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, 1, H, W] -> [n, O, H', W']``."""
        if not self.training or self.bias is None:
            return super().forward(inputs)
        assert not isinstance(self.padding, str), "is_widened() has seen to it"
        above, left = self.padding
        # A place in a window that lies in the image wherever the window is.
        below, right = self.kernel_size[0] - 1 - above, self.kernel_size[1] - 1 - left
        carried = pad(self.bias[:, None, None, None], (left, right, above, below))
        weight = torch.cat([self.weight, carried], dim=1)
        return convolve(self, pad(inputs, (0, 0, 0, 0, 0, 1), value=1.0), weight)


def is_widened(layer: nn.Conv2d) -> bool:
    """Say whether a convolution has one input channel and no peculiarities."""
    plain = layer.in_channels == 1 and layer.padding_mode == "zeros" and layer.dilation == (1, 1)
    if not plain or isinstance(layer.padding, str):
        return False
    # The place that carries the bias must lie in the image for the last window as well as for the first.
    return all(2 * side < size for side, size in zip(layer.padding, layer.kernel_size, strict=True))
