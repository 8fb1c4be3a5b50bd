"""Batch normalisation in a form that stacks: over the rows of a batch that are not padding.

Shapes: n samples of a batch, padding included, C channels.
"""

import torch
from torch import Tensor
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from fedem.models.layers import CURRENT_PASS


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
        running_mean, running_variance, tracked = self.running_mean, self.running_var, self.num_batches_tracked
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
        tracked.add_((~lonely).long())
        pace = 1 / tracked.clamp(min=1).to(count.dtype) if self.momentum is None else count.new_full((), self.momentum)
        pace = torch.where(lonely, 0.0, pace)
        # As torch has it: the running variance is the unbiased one.
        unbiased = torch.where(lonely, running_variance, spread.detach() / (count - 1).clamp(min=1))
        running_mean.add_(pace * (mean.detach() - running_mean))
        running_variance.add_(pace * (unbiased - running_variance))
        outputs = centred * torch.rsqrt(variance + self.eps).view(channels)
        return outputs if self.weight is None else outputs * self.weight.view(channels) + self.bias.view(channels)
