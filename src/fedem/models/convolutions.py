"""Convolutions in a form that stacks.

Shapes: n samples of a batch, padding included, C input and O output channels, H x W pixels.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


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
        return self._conv_forward(pad(inputs, (0, 0, 0, 0, 0, 1), value=1.0), weight, None)


def is_widened(layer: nn.Conv2d) -> bool:
    """Say whether a convolution has one input channel and no peculiarities."""
    plain = layer.in_channels == 1 and layer.padding_mode == "zeros" and layer.dilation == (1, 1)
    if not plain or isinstance(layer.padding, str):
        return False
    # The place that carries the bias must lie in the image for the last window as well as for the first.
    return all(2 * side < size for side, size in zip(layer.padding, layer.kernel_size, strict=True))
