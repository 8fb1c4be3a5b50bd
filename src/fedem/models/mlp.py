"""The multilayer perceptron."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn

from fedem.models.base import ModelSpec


@dataclass(frozen=True)
class MLP(ModelSpec):
    """Hidden layers of rectified units; the defaults are the "2NN" of McMahan et al. (2017).

    Attributes:
        hidden: units of each hidden layer.
        layers: how many hidden layers there are.
        dropout: rate after each hidden layer.

    """

    hidden: int = field(default=200, metadata={"min": 1})
    layers: int = field(default=2, metadata={"min": 1})
    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Flatten, then layer after layer."""
        parts: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for _ in range(self.layers):
            parts += [nn.Linear(width, self.hidden), nn.ReLU(), nn.Dropout(self.dropout)]
            width = self.hidden
        return nn.Sequential(*parts, nn.Linear(width, num_outputs))
