"""Layers in forms that stack: same parameters, same values, for whatever number of models at once.

torch's own layers don't: dropout draws from a generator whose state depends on who is trained together, batch
normalisation sees the rows that pad a short batch, a linear layer copies its inputs for every model. A module is put
into these forms by :func:`make_stackable`; what they must know of the batch besides its inputs is a :class:`Pass`.

Shapes: n samples of a batch, padding included, C channels, H x W pixels, h x w windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, pad
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedem.core.errors import UserError
from fedem.core.random import derive
from fedem.models.lstm import StackableLSTM, call, stackable

_LEVELS = 1 << 16  # a rate is rounded to 16 bits, so that one word serves four draws

Window = int | tuple[int, int]
Geometry = tuple[Window, Window, Window, Window, bool]
"""kernel, stride, padding, dilation, whether windows may hang over the edge"""


class StackableMaxPool2d(nn.MaxPool2d):
    """``nn.MaxPool2d`` in a form that stacks without copies.

    torch's rule for vmap lays the models beside the samples; but a convolution's outputs have them beside the channels,
    and putting them elsewhere copies the largest tensors of a network, forwards and backwards. Here they stay where
    they are.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C, h, w]``, or without n."""
        stride = self.kernel_size if self.stride is None else self.stride
        geometry = (self.kernel_size, stride, self.padding, self.dilation, self.ceil_mode)
        return max_pool(inputs, geometry) if inputs.ndim == 4 else max_pool(inputs[None], geometry)[0]


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


@dataclass
class Pass:
    """What the layers must know of one training pass over a batch."""

    mask: Tensor | None  # [n] bool, false where a row is padding; None where no row is
    key: Tensor  # int64, the source of the pass's random numbers
    draws: int = 0  # layers that have drawn so far; each has a stream of its own

    def next_key(self) -> Tensor:
        """Return the key of the next layer that draws."""
        self.draws += 1
        return derive(self.key, self.draws)


_CURRENT: ContextVar[Pass] = ContextVar("pass")


@contextmanager
def training_pass(mask: Tensor | None, key: Tensor) -> Iterator[None]:
    """Tell the layers what batch they are about to see."""
    token = _CURRENT.set(Pass(mask, key))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def keyed_dropout(inputs: Tensor, rate: float, whole_channels: bool = False) -> Tensor:
    """Zero each number, or each channel, with probability ``rate``, and scale the others to keep the mean.

    What is zeroed depends on the pass's key and on the place: the row, and the position within it. So neither the
    padding below a batch nor the clients beside it change anything.
    """
    if rate == 1:
        return torch.zeros_like(inputs)
    shape = inputs.shape[:2] if whole_channels else inputs.shape
    places = shape[1:].numel()
    rows = derive(_CURRENT.get().next_key(), torch.arange(shape[0], device=inputs.device))
    words = derive(rows[:, None], torch.arange(-(-places // 4), device=inputs.device))
    # Each quarter of a word in turn to its top, where a signed comparison sees that quarter first.
    quarters = words[..., None] << torch.arange(0, 64, 16, device=inputs.device)
    kept = (quarters >= (round(rate * _LEVELS) - _LEVELS // 2) << 48).flatten(1)[:, :places].reshape(shape)
    if whole_channels:
        kept = kept.reshape(*shape, *(1,) * (inputs.ndim - 2))
    return inputs * (kept * torch.tensor(1 / (1 - rate), dtype=inputs.dtype))


class KeyedDropout(nn.Dropout):
    """``nn.Dropout`` by keys."""

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, ...]``, unchanged in evaluation mode."""
        return keyed_dropout(inputs, self.p) if self.training and self.p else inputs


class KeyedChannelDropout(nn.Dropout):
    """``nn.Dropout1d``, ``2d`` and ``3d`` by keys."""

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, ...]``, unchanged in evaluation mode."""
        return keyed_dropout(inputs, self.p, whole_channels=True) if self.training and self.p else inputs


class MaskedBatchNorm(_BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` and ``3d`` over the rows of a batch that are not padding.

    A channel with a single number can't be normalised by its own batch: it is by the running statistics, which then
    stay as they are.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, ...]``."""
        if not self.training:
            return self._by(inputs, own=False)
        mask = _CURRENT.get().mask
        if mask is None and self.momentum is not None and len(inputs) * inputs.shape[2:].numel() > 1:
            self._kept()[2].add_(1)
            return self._by(inputs, own=True)
        return self._masked(inputs, torch.ones(len(inputs), device=inputs.device) if mask is None else mask)

    def _kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the running mean and variance and the number of batches, which are there (:func:`make_stackable`)."""
        mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None
        assert variance is not None
        assert count is not None
        return mean, variance, count

    def _by(self, inputs: Tensor, own: bool) -> Tensor:
        """Normalise by the batch's own statistics, all rows counting, or by the running ones."""
        mean, variance, _ = self._kept()
        return batch_norm(inputs, mean, variance, self.weight, self.bias, own, self.momentum or 0.0, self.eps)

    def _masked(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Normalise by the statistics of the rows in ``mask`` ``[n]``."""
        running_mean, running_variance, tracked = self._kept()
        inputs = inputs.to(running_mean.dtype)
        channels, rows = (1, -1, *(1,) * (inputs.ndim - 2)), (-1, *(1,) * (inputs.ndim - 1))
        dims = [0, *range(2, inputs.ndim)]
        weights = mask.to(inputs.dtype).view(rows)
        count = weights.sum() * inputs.shape[2:].numel()
        lonely = count <= 1
        mean = torch.where(lonely, running_mean, (weights * inputs).sum(dims) / count)
        centred = inputs - mean.view(channels)
        spread = (weights * centred.square()).sum(dims)
        variance = torch.where(lonely, running_variance, spread / count)
        tracked.add_((~lonely).long())
        pace = (
            1 / tracked.clamp(min=1).to(count.dtype) if self.momentum is None else count.new_zeros(()) + self.momentum
        )
        pace = torch.where(lonely, 0.0, pace)
        # As torch has it: the running variance is the unbiased one.
        unbiased = torch.where(lonely, running_variance, spread.detach() / (count - 1).clamp(min=1))
        running_mean.add_(pace * (mean.detach() - running_mean))
        running_variance.add_(pace * (unbiased - running_variance))
        outputs = centred * torch.rsqrt(variance + self.eps).view(channels)
        return outputs if self.weight is None else outputs * self.weight.view(channels) + self.bias.view(channels)


class FoldedLinear(nn.Linear):
    """``nn.Linear`` whose weight stands on the left.

    Under vmap over components torch folds them into the rows of one matrix product only when the stacked factor is the
    left one and contiguous; else it copies the inputs once for each component. So the weight stands on the left, and
    the gradient that comes back is laid out afresh (it is far smaller than the inputs).
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


class WidenedConv2d(nn.Conv2d):
    """``nn.Conv2d`` of one input channel, in training with a second one: ones, which carry the bias.

    Stacked, a convolution of one channel is a depthwise one to torch, whose kernels for that are several times slower;
    and the bias would be added apart.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, 1, H, W] -> [n, O, h, w]``."""
        if not self.training or self.bias is None:
            return super().forward(inputs)
        # A place in a window that lies in the image wherever the window is.
        below, right = (size - 1 - side for size, side in zip(self.kernel_size, self._sides, strict=True))
        carried = pad(self.bias[:, None, None, None], (self._sides[1], right, self._sides[0], below))
        weight = torch.cat([self.weight, carried], dim=1)
        outputs: Tensor = self._conv_forward(pad(inputs, (0, 0, 0, 0, 0, 1), value=1.0), weight, None)
        return outputs

    @property
    def _sides(self) -> tuple[int, int]:
        """Pixels of padding above and to the left."""
        assert not isinstance(self.padding, str), "is_widened() has seen to it"
        return self.padding[0], self.padding[1]


def is_widened(layer: nn.Conv2d) -> bool:
    """Say whether a convolution has one input channel and no peculiarities."""
    plain = layer.in_channels == 1 and layer.padding_mode == "zeros" and layer.dilation == (1, 1)
    if not plain or isinstance(layer.padding, str):
        return False
    # The place that carries the bias must lie in the image for the last window as well as for the first.
    return all(2 * side < size for side, size in zip(layer.padding, layer.kernel_size, strict=True))


_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FoldedLinear,
    nn.Dropout: KeyedDropout,
    nn.Dropout1d: KeyedChannelDropout,
    nn.Dropout2d: KeyedChannelDropout,
    nn.Dropout3d: KeyedChannelDropout,
    nn.BatchNorm1d: MaskedBatchNorm,
    nn.BatchNorm2d: MaskedBatchNorm,
    nn.BatchNorm3d: MaskedBatchNorm,
    nn.SyncBatchNorm: MaskedBatchNorm,
    nn.Conv2d: WidenedConv2d,
    nn.MaxPool2d: StackableMaxPool2d,
    nn.LSTM: StackableLSTM,
}
_ONLY_IF: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.Conv2d: is_widened,
    nn.MaxPool2d: lambda layer: not layer.return_indices,
    nn.LSTM: stackable,
}


def make_stackable(module: nn.Module) -> nn.Module:
    """Put the layers of ``module``, in place, into forms that stack; subclasses of a user's own are left alone."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and not part.track_running_stats:
            raise UserError(
                f"Part {name!r} ({type(part).__name__}) keeps no running statistics, so what it predicts for a sample "
                "would depend on the samples beside it; allowed: track_running_stats=True."
            )
        if any(is_lazy(leaf) for leaf in part.parameters(recurse=False)):
            raise UserError(
                f"Part {name!r} ({type(part).__name__}) has no shape before its first input; allowed: layers of given "
                "sizes."
            )
        kind = type(part)
        if kind in _FORMS and _ONLY_IF.get(kind, lambda _: True)(part):
            part.__class__ = _FORMS[kind]
    return module
