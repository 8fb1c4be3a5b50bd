"""Layers in forms that stack: same parameters, same values, for whatever number of models at once.

torch's own layers don't: dropout draws from a generator whose state depends on who is trained together, a linear layer
copies its inputs for every model. What a layer must know of the batch besides
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
from torch.utils._pytree import tree_map

from fedem.core.random import derive

_LEVELS = 1 << 16  # a rate is rounded to 16 bits, so that one word serves four draws


def call(function: Any, *arguments: Any) -> Any:
    """Call an autograd function, whose ``apply`` torch leaves untyped."""
    return function.apply(*arguments)


def call_mapped(function: Any, size: int, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    """Call an autograd function once for a mapped dimension, as more of what its tensors have first.

    Returns what ``vmap`` of such a function does: the outputs, and where the dimension is in each.
    """

    def folded(leaf: Any, dim: int | None) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return (leaf.expand(size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)).flatten(0, 1)

    found = call(function, *map(folded, arguments, dims))
    return tree_map(lambda leaf: leaf.unflatten(0, (size, -1)), found), tree_map(lambda _: 0, found)


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
    return inputs * (kept.to(inputs.dtype) * (1 / (1 - rate)))


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


class Enlarged(nn.Module):
    """Images ``times`` as large each way, as ``nn.Upsample`` makes them by bilinear interpolation.

    On a GPU the latter has as many threads as an image has pixels, each of which passes over all images.
    """

    def __init__(self, times: int):
        super().__init__()
        self.times = times

    def forward(self, images: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C, times H, times W]``."""
        for dim in (3, 2):
            first, last = images.narrow(dim, 0, 1), images.narrow(dim, images.shape[dim] - 1, 1)
            inner = images.shape[dim] - 1
            before = torch.cat([first, images.narrow(dim, 0, inner)], dim)
            after = torch.cat([images.narrow(dim, 1, inner), last], dim)
            # New pixels lie between the middles of old ones.
            places = [(place + 0.5) / self.times - 0.5 for place in range(self.times)]
            parts = [torch.lerp(images, before if place < 0 else after, abs(place)) for place in places]
            images = torch.stack(parts, dim + 1).flatten(dim, dim + 1)
        return images


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
