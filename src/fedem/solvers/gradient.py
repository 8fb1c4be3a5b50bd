"""Solvers that follow gradients, a learning rate at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedem.errors import UserError
from fedem.solvers.base import Objective, Solver
from fedem.tree import Tree, add_prefix, take_prefix, tree_map


@dataclass(frozen=True)
class SGD(Solver):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD`` has it.

    Attributes:
        momentum: share of the last step's direction that is added to the gradient. Each round starts without.
        nesterov: step along the gradient and ``momentum`` times the new direction (Nesterov's step).

    """

    momentum: float = field(default=0.0, metadata={"min": 0, "below": 1})
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise UserError("SGD.nesterov is true but SGD.momentum is 0; Nesterov's step needs a momentum above 0.")

    @property
    def follows_gradients(self) -> bool:
        """It does."""
        return True

    def gain(self, step: Tensor) -> Tensor:
        """1 + momentum + momentum^2 + ..., as many terms as steps (one more with Nesterov's)."""
        return (1 - self.momentum ** (step + 1 if self.nesterov else step)) / (1 - self.momentum)

    def init(self, parameters: Tree) -> Tree:
        """Zero velocity."""
        return tree_map(torch.zeros_like, parameters) if self.momentum else {}

    def step(
        self, objective: Objective, parameters: Tree, memory: Tree, learning_rate: Tensor
    ) -> tuple[Tree, Tree, Tree]:
        """``v = momentum v + g``, then ``p -= learning_rate v``."""
        gradient, besides = self._gradient(objective, parameters)
        direction = gradient
        if self.momentum:
            memory = tree_map(lambda v, g: torch.add(g, v, alpha=self.momentum), memory, gradient)
            direction = (
                tree_map(lambda g, v: torch.add(g, v, alpha=self.momentum), gradient, memory)
                if self.nesterov
                else memory
            )
        return tree_map(lambda p, v: p - learning_rate * v, parameters, direction), memory, besides


@dataclass(frozen=True)
class Adam(Solver):
    """Adam (Kingma and Ba 2015) with its two moments, started afresh each round.

    Attributes:
        beta1: share of the first moment, the mean gradient, that a step keeps.
        beta2: share of the second moment, the mean squared gradient, that a step keeps.
        epsilon: added to the root of the second moment, by which steps are divided.

    """

    usual_rate: ClassVar[float] = 0.001

    beta1: float = field(default=0.9, metadata={"min": 0, "below": 1})
    beta2: float = field(default=0.999, metadata={"min": 0, "below": 1})
    epsilon: float = field(default=1e-8, metadata={"above": 0})

    def init(self, parameters: Tree) -> Tree:
        """Zero moments, and the powers of the two betas for the bias correction."""
        zeros = tree_map(torch.zeros_like, parameters)
        one = torch.ones_like(next(iter(parameters.values())).flatten()[0])
        return add_prefix("first", zeros) | add_prefix("second", zeros) | {"power1": one, "power2": one}

    def step(
        self, objective: Objective, parameters: Tree, memory: Tree, learning_rate: Tensor
    ) -> tuple[Tree, Tree, Tree]:
        """``p -= learning_rate m / (sqrt(s) + epsilon)``, both moments corrected for their start at zero."""
        gradient, besides = self._gradient(objective, parameters)
        power1, power2 = memory["power1"] * self.beta1, memory["power2"] * self.beta2
        first = tree_map(lambda m, g: self.beta1 * m + (1 - self.beta1) * g, take_prefix("first", memory), gradient)
        second = tree_map(
            lambda s, g: self.beta2 * s + (1 - self.beta2) * g.square(), take_prefix("second", memory), gradient
        )
        updated = tree_map(
            lambda p, m, s: p - learning_rate * (m / (1 - power1)) / ((s / (1 - power2)).sqrt() + self.epsilon),
            parameters,
            first,
            second,
        )
        memory = add_prefix("first", first) | add_prefix("second", second) | {"power1": power1, "power2": power2}
        return updated, memory, besides
