"""An objective as a function of one vector, for solvers that know curvature.

Shapes: d trained numbers, K trial steps.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fedem.solvers.base import Objective
from fedem.tree import Tree


class VectorObjective:
    """An objective with its weight decay, over all trained leaves laid behind each other, ``[d]``."""

    def __init__(self, objective: Objective, parameters: Tree, weight_decay: float):
        self._objective, self._weight_decay = objective, weight_decay
        self._shapes = {name: leaf.shape for name, leaf in parameters.items()}
        self.start = flatten(parameters)
        """the parameters as they came, ``[d]``"""

    def tree(self, vector: Tensor) -> Tree:
        """Return a vector as the leaves that it stands for."""
        pieces = vector.split([prod(shape) for shape in self._shapes.values()])
        return {name: piece.reshape(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}

    def evaluate(self, vector: Tensor) -> tuple[Tensor, Tree]:
        """Objective + weight_decay/2 |vector|^2, and what the pass changed besides."""
        value, besides = self._objective(self.tree(vector))
        return value + self._weight_decay / 2 * vector.square().sum(), besides

    def value(self, vector: Tensor) -> Tensor:
        """The value alone."""
        return self.evaluate(vector)[0]


def flatten(parameters: Tree) -> Tensor:
    """Lay all leaves behind each other, ``[d]``."""
    return torch.cat([leaf.flatten() for leaf in parameters.values()])


def pick(values: Tensor) -> Tensor:
    """Choose the first of K trials whose value is the least, up to rounding. ``[K] -> [K]``, one and zeros.

    Near a minimum the values of all trials agree to rounding, where steps do not yet: the order of the trials decides
    there and not the last bits, so that an engine which adds up otherwise goes the same way.
    """
    known = values.nan_to_num(nan=torch.inf)
    least = known.min()
    slack = 8 * torch.finfo(values.dtype).eps * least.abs()
    return torch.nn.functional.one_hot((known <= least + slack).to(torch.int8).argmax(), len(values)).to(values)
