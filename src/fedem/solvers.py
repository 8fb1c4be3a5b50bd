"""Local solvers: one step on one batch's objective, as pure functions that vmap can stack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from fedem.errors import UserError
from fedem.settings import Settings
from fedem.tree import Tree, add_prefix, take_prefix, tree_map

Objective = Callable[[Tree], tuple[Tensor, Tree]]
"""Parameters -> (value to minimise, whatever the pass changed besides: a model's buffers)."""


@dataclass(frozen=True)
class Solver(Settings, ABC):
    """One step of a local solver. ``weight_decay`` adds weight_decay/2 |parameters|^2 to every objective."""

    usual_rate: ClassVar[float] = 0.1
    """a learning rate to begin with"""

    weight_decay: float = field(default=0.0, metadata={"min": 0})

    @abstractmethod
    def init(self, parameters: Tree) -> Tree:
        """Return the solver's memory at the start of a round: momentum starts afresh."""

    @abstractmethod
    def step(
        self, objective: Objective, parameters: Tree, memory: Tree, learning_rate: Tensor
    ) -> tuple[Tree, Tree, Tree]:
        """Return the new parameters, the new memory and what the objective's pass changed besides."""

    def _gradient(self, objective: Objective, parameters: Tree) -> tuple[Tree, Tree]:
        gradient, besides = grad(objective, has_aux=True)(parameters)
        if self.weight_decay:
            gradient = tree_map(lambda g, p: g.add(p, alpha=self.weight_decay), gradient, parameters)
        return gradient, besides


@dataclass(frozen=True)
class SGD(Solver):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD`` has it."""

    momentum: float = field(default=0.0, metadata={"min": 0, "below": 1})
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise UserError("SGD.nesterov is true but SGD.momentum is 0; Nesterov's step needs a momentum above 0.")

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
    """Adam (Kingma and Ba 2015) with its two moments, started afresh each round."""

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


@dataclass(frozen=True)
class Newton(Solver):
    """Newton's method for small convex models: the exact M-step when given all samples and enough steps.

    Each step solves with the full Hessian and takes the best of ``num_trials`` halved step lengths, or stays where it
    is when none is better. It does not use the learning rate. ``ridge`` is added to the Hessian's diagonal alone, so it
    steadies the step without moving the solution.
    """

    ridge: float = field(default=1e-10, metadata={"min": 0})
    num_trials: int = field(default=12, metadata={"min": 1})

    def init(self, parameters: Tree) -> Tree:
        """Nothing to remember."""
        return {}

    def step(
        self, objective: Objective, parameters: Tree, memory: Tree, learning_rate: Tensor
    ) -> tuple[Tree, Tree, Tree]:
        """One damped Newton step."""
        shapes = {name: leaf.shape for name, leaf in parameters.items()}

        def unflatten(vector: Tensor) -> Tree:
            pieces = vector.split([prod(shape) for shape in shapes.values()])
            return {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}

        def value(vector: Tensor) -> Tensor:
            return objective(unflatten(vector))[0] + self.weight_decay / 2 * vector.square().sum()

        start = torch.cat([leaf.flatten() for leaf in parameters.values()])
        curvature = jacrev(grad(value))(start) + self.ridge * torch.eye(
            len(start), dtype=start.dtype, device=start.device
        )
        # solve_ex: a singular Hessian must not stop the other clients of a stack; its trial steps just don't improve.
        direction = torch.linalg.solve_ex(curvature, grad(value)(start)).result.nan_to_num()
        lengths = 0.5 ** torch.arange(self.num_trials, dtype=start.dtype, device=start.device)
        trials = start - torch.cat([lengths, lengths.new_zeros(1)])[:, None] * direction
        values = vmap(value)(trials).nan_to_num(nan=torch.inf)
        best = torch.nn.functional.one_hot(values.argmin(), len(trials)).to(trials)
        return unflatten(best @ trials), memory, {}


SOLVERS: dict[str, type[Solver]] = {"sgd": SGD, "adam": Adam, "newton": Newton}
