"""The linear model: one affine map of the flattened input."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from fedem.models.base import ModelSpec


@dataclass(frozen=True)
class Linear(ModelSpec):
    """An affine map; logistic or softmax regression, or least squares, depending on the loss.

    Attributes:
        bias: whether there is a constant beside the linear map.

    """

    bias: bool = True

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Flatten, then map."""
        layer = nn.Linear(math.prod(input_shape), num_outputs, bias=self.bias)
        return layer if len(input_shape) == 1 else nn.Sequential(nn.Flatten(), layer)
