"""Batch normalisation in a form that stacks: over the rows of a batch that are not padding.

On a GPU that has Triton, batches of many models are normalised by kernels of our own (``kernels.py``).

Shapes: S stacked models, n samples of a batch, padding included, C channels, R rows: the pixels of all samples.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, hardtanh
from torch.nn.modules.batchnorm import _BatchNorm

from fedem.core.errors import UserError
from fedem.models import layers
from fedem.models.layers import CURRENT_PASS, call, call_mapped, define


class MaskedBatchNorm(_BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` and ``3d`` over the rows of a batch that are not padding.

    It computes in the type of its statistics, whatever torch.autocast made of the inputs, and puts out theirs: stacked
    ones of two types have no rule, and sums of squares in few bits would be no statistics.
    """

    # They are there (:func:`make_stackable`).
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, ...]``."""
        if layers.has_kernels(inputs):
            tracked = self.training
            return self._tracked_by_kernels(inputs, CURRENT_PASS.get().mask) if tracked else self._rescaled(inputs)
        return self._normalised(inputs.to(self.running_mean.dtype)).to(inputs.dtype)

    def _normalised(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return self._by(inputs, own=False)
        mask = CURRENT_PASS.get().mask
        if mask is None and self.momentum is not None and len(inputs) * inputs.shape[2:].numel() > 1:
            self.num_batches_tracked.add_(1)
            return self._by(inputs, own=True)
        return self._masked(inputs, torch.ones(len(inputs), device=inputs.device) if mask is None else mask)

    def _by(self, inputs: Tensor, own: bool) -> Tensor:
        """Normalise by the batch's own statistics, all rows counting, or by the running ones."""
        kept = self.running_mean, self.running_var
        return batch_norm(inputs, *kept, self.weight, self.bias, own, self.momentum or 0.0, self.eps)

    def _masked(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Normalise by the statistics of the rows in ``mask`` ``[n]``."""
        running_mean, running_variance = self.running_mean, self.running_var
        channels, rows = (1, -1, *(1,) * (inputs.ndim - 2)), (-1, *(1,) * (inputs.ndim - 1))
        dims = [0, *range(2, inputs.ndim)]
        weights = mask.to(inputs.dtype).view(rows)
        count = weights.sum() * inputs.shape[2:].numel()
        # A channel with a single number is normalised by the running statistics, which then stay as they are.
        lonely = count <= 1
        mean = torch.where(lonely, running_mean, (weights * inputs).sum(dims) / count)
        centred = inputs - mean.view(channels)
        spread = (weights * centred.square()).sum(dims)
        variance = torch.where(lonely, running_variance, spread / count)
        # As torch has it: the running variance is the unbiased one.
        unbiased = torch.where(lonely, running_variance, spread.detach() / (count - 1).clamp(min=1))
        self._track(mean.detach(), unbiased, lonely)
        outputs = centred * torch.rsqrt(variance + self.eps).view(channels)
        return outputs if self.weight is None else outputs * self.weight.view(channels) + self.bias.view(channels)

    def _tracked_by_kernels(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """Normalise by the statistics of the rows in ``mask`` ``[n]`` (None: all), and track these."""
        stacked = (leaf[None] for leaf in (inputs, *self._scales, self.running_mean, self.running_var))
        found = call(_Normalisation, *stacked, None if mask is None else mask[None], self.eps)
        outputs, mean, variance = (leaf.squeeze(0) for leaf in found)
        rows = mean.new_full((), len(inputs)) if mask is None else mask.sum().to(mean.dtype)
        count = rows * inputs.shape[2:].numel()
        lonely = count <= 1
        unbiased = torch.where(lonely, self.running_var, variance * count / (count - 1).clamp(min=1))
        self._track(mean, unbiased, lonely)
        return outputs

    def _rescaled(self, inputs: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
        """Normalise by the running statistics and cut off at two bounds, by a kernel."""
        given = (leaf[None] for leaf in (inputs, *self._scales, self.running_mean, self.running_var))
        outputs: Tensor = call(_Rescaling, *given, self.eps, low, high)
        return outputs.squeeze(0)

    @property
    def _scales(self) -> tuple[Tensor, Tensor]:
        """What normalised numbers are multiplied by, and what is added to them."""
        like = self.running_mean
        return (self.weight, self.bias) if self.affine else (torch.ones_like(like), torch.zeros_like(like))

    def _track(self, mean: Tensor, variance: Tensor, lonely: Tensor) -> None:
        """Bring the running statistics forward by a batch's, unless it was ``lonely``."""
        self.num_batches_tracked.add_((~lonely).long())
        tracked = self.num_batches_tracked.clamp(min=1).to(mean.dtype)
        pace = 1 / tracked if self.momentum is None else torch.full_like(tracked, self.momentum)
        pace = torch.where(lonely, 0.0, pace)
        self.running_mean.add_(pace * (mean - self.running_mean))
        self.running_var.add_(pace * (variance - self.running_var))


class FixedBatchNorm(MaskedBatchNorm):
    """Batch normalisation by running statistics that stay as they are, such as those of a file's weights.

    Samples do not see each other, and evaluation does what training did. The activation behind it may be its own
    (:func:`~fedem.models.folding.join_activations`): ``bounds`` are what it cuts its outputs off at.
    """

    bounds: tuple[float, float] = (-math.inf, math.inf)

    @property
    def is_bounded(self) -> bool:
        return self.bounds != FixedBatchNorm.bounds

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, ...]``."""
        if layers.has_kernels(inputs):
            return self._rescaled(inputs, *self.bounds)
        outputs = self._by(inputs.to(self.running_mean.dtype), own=False).to(inputs.dtype)
        return hardtanh(outputs, *self.bounds) if self.is_bounded else outputs


NORMALISATIONS = ("batch", "group", "fixed")
_MOST_GROUPS = 32  # of channels, as Wu and He (Group Normalization, 2018) have them


def normalised_by(kind: str, module: nn.Module) -> nn.Module:
    """Put another of ``NORMALISATIONS`` in the place of ``module``'s batch normalisations; changes it in place."""
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.BatchNorm2d) and kind == "group":
            # As many groups of equal size as there may be, of two channels or more: a single number has no deviation.
            groups = math.gcd(part.num_features // 2, _MOST_GROUPS)
            module.set_submodule(name, nn.GroupNorm(groups, part.num_features, part.eps))
        elif isinstance(part, nn.BatchNorm2d) and kind == "fixed":
            module.get_submodule(name).__class__ = FixedBatchNorm
    return module


class _Normalisation(torch.autograd.Function):
    """Normalise ``[S, n, C, ...]`` by the statistics of its rows in ``mask`` ``[S, n]``.

    Takes scales, shifts and running statistics ``[S, C]``, which stand in where a model has a single row. Returns also
    the means and variances that it was normalised by.
    """

    @staticmethod
    def forward(*given: Any) -> Any:
        return torch.ops.fedem.normalise(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        images, weight, _, _, _, mask, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(images, weight, mask, *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, mask, mean, variance = ctx.saved_tensors
        given = gradient, images, weight, mean, variance, mask, ctx.eps
        return *call(_NormalisationGradient, *given), None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Any) -> Any:
        return call_mapped(_Normalisation, info.batch_size, dims, *given)


class _Last(torch.autograd.Function):
    """A backward pass that has none of its own."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise UserError(
            "The gradient of a batch normalisation was differentiated again; allowed: methods of first derivatives."
        )


class _NormalisationGradient(_Last):
    """Its backward pass: the gradients of the inputs, of the scales and of the shifts."""

    @staticmethod
    def forward(*given: Any) -> Any:
        return torch.ops.fedem.normalise_back(*given)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Any) -> Any:
        return call_mapped(_NormalisationGradient, info.batch_size, dims, *given)


class _Rescaling(torch.autograd.Function):
    """Normalise ``[S, n, C, ...]`` by given means and variances ``[S, C]``, scale, shift, and cut off at two bounds."""

    @staticmethod
    def forward(*given: Any) -> Tensor:
        return torch.ops.fedem.rescale(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *leaves, eps, low, high = inputs
        ctx.how = eps, low, high
        ctx.save_for_backward(*leaves)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *call(_RescalingGradient, gradient, *ctx.saved_tensors, *ctx.how), *(None,) * 5

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Any) -> Any:
        return call_mapped(_Rescaling, info.batch_size, dims, *given)


class _RescalingGradient(_Last):
    """Its backward pass: the gradients of the inputs, of the scales and of the shifts."""

    @staticmethod
    def forward(*given: Any) -> Any:
        return torch.ops.fedem.rescale_back(*given)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Any) -> Any:
        return call_mapped(_RescalingGradient, info.batch_size, dims, *given)


def _rows(images: Tensor) -> Tensor:
    """``[S, n, C, ...] -> [S, R, C]``, contiguous."""
    return images.movedim(2, -1).contiguous().flatten(1, -2)


def _like(rows: Tensor, images: Tensor) -> Tensor:
    """Undo :func:`_rows`, for images of that shape, without moving anything in memory."""
    return rows.unflatten(1, (images.shape[1], *images.shape[3:])).movedim(-1, 2)


def _counted(images: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Return which rows count, ``[S, R]`` (None: all), and how many do, ``[S, 1]``."""
    pixels = images.shape[3:].numel()
    if mask is None:
        return None, torch.full((len(images), 1), float(images.shape[1] * pixels), device=images.device)
    return mask.repeat_interleave(pixels, dim=1).contiguous(), mask.sum(1, keepdim=True).float() * pixels


def _normalise(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    mask: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from fedem.models import kernels

    rows, (counted, count) = _rows(images), _counted(images, mask)
    means, variances = kernels.moments(rows, counted)
    mean, variance = torch.where(count > 1, means, running_mean), torch.where(count > 1, variances, running_variance)
    scale = weight * torch.rsqrt(variance + eps)
    return _like(kernels.normalise(rows, mean, scale, bias.contiguous()), images), mean, variance


def _normalise_back(
    gradient: Tensor,
    images: Tensor,
    weight: Tensor,
    mean: Tensor,
    variance: Tensor,
    mask: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from fedem.models import kernels

    rows, slopes, (counted, count) = _rows(images), _rows(gradient), _counted(images, mask)
    inverse = torch.rsqrt(variance + eps)
    plain, crossed = kernels.sums(rows, slopes, mean)
    # Where statistics are given, as for a model with a single row, nothing flows back through them.
    scale, share = weight * inverse, torch.where(count > 1, 1 / count, 0.0)
    level, slope = scale * share * plain, scale * share * inverse.square() * crossed
    back = kernels.normalise_back(rows, slopes, counted, mean, scale, level, slope)
    return _like(back, images), crossed * inverse, plain


def _rescale(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    low: float,
    high: float,
) -> Tensor:
    from fedem.models import kernels

    return _like(kernels.rescale(_rows(images), _dense(mean, variance, weight, bias), eps, (low, high)), images)


def _rescale_back(
    gradient: Tensor,
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from fedem.models import kernels

    leaves = _dense(mean, variance, weight, bias)
    back, of_weight, of_bias = kernels.rescale_back(_rows(gradient), _rows(images), leaves, eps, (low, high))
    return _like(back, images), of_weight, of_bias


def _dense(*leaves: Tensor) -> tuple[Tensor, ...]:
    return tuple(leaf.contiguous() for leaf in leaves)


define("normalise", _normalise)
define("normalise_back", _normalise_back)
define("rescale", _rescale)
define("rescale_back", _rescale_back)
