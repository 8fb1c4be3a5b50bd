"""The contract of a local solver: one step on one batch's objective, as pure functions that vmap can stack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad

from fedem.core.settings import Settings
from fedem.core.tree import Tree, tree_map

Objective = Callable[[Tree], tuple[Tensor, Tree]]
"""Parameters -> (value to minimise, whatever the pass changed besides: a model's buffers)."""
Stepped = tuple[Tree, Tree, Tree]
"""The new parameters, the solver's new state, and what the objective's pass changed besides."""


@dataclass(frozen=True)
class Solver(Settings, ABC):
    """One step of a local solver.

    Attributes:
        weight_decay: adds weight_decay/2 |parameters|^2 to every objective.
    """

    usual_rate: ClassVar[float] = 0.1
    """a learning rate to begin with"""

    weight_decay: float = field(default=0.0, metadata={"min": 0})

    @property
    def follows_gradients(self) -> bool:
        """Whether a step is the learning rate times a sum of gradients, so that :meth:`gain` is exact."""
        return False

    @property
    def differentiates_twice(self) -> bool:
        """Whether it asks for second derivatives."""
        return False

    @property
    def whole_steps(self) -> int:
        """Steps over all of a client's samples that it takes in a round; 0 when it follows the batches."""
        return 0

    @property
    def obeys_rate(self) -> bool:
        """Whether the learning rate sets how long its steps are."""
        return True

    def among(self, keys: Tensor) -> Iterator[tuple[Solver, Tensor]]:
        """Say which clients, of those with these ``keys`` ``[C]``, use which solver: positions in ascending order."""
        yield self, torch.arange(len(keys))

    def gain(self, step: Tensor) -> Tensor:
        """Return the length of step number ``step`` (from 1) along a constant gradient of one, over the rate."""
        return torch.ones_like(step)

    @abstractmethod
    def init(self, parameters: Tree) -> Tree:
        """Return the solver's state at the start of a round: momentum starts afresh."""

    @abstractmethod
    def step(self, objective: Objective, parameters: Tree, state: Tree, learning_rate: Tensor) -> Stepped:
        """Take one step from ``parameters``."""

    def _gradient(self, objective: Objective, parameters: Tree) -> tuple[Tree, Tree]:
        gradient, besides = grad(objective, has_aux=True)(parameters)
        if self.weight_decay:
            gradient = tree_map(lambda g, p: g.add(p, alpha=self.weight_decay), gradient, parameters)
        return gradient, besides
