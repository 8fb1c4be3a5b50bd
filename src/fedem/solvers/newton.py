"""Newton's method, for small convex models."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from fedem.solvers.base import Objective, Solver
from fedem.solvers.vectors import VectorObjective, pick
from fedem.tree import Tree


@dataclass(frozen=True)
class Newton(Solver):
    """Newton's method for small convex models: the exact M-step when given all samples and enough steps.

    Each step solves with the full Hessian and takes the best of ``num_trials`` halved step lengths, or stays where it
    is when none is better. It does not use the learning rate.

    Attributes:
        ridge: added to the Hessian's diagonal alone, so it steadies the step without moving the solution.
        num_trials: step lengths that are tried: 1, 1/2, 1/4, ...
        iterations: steps over all of a client's samples each round, whatever the batches; 0 follows the batches.

    """

    ridge: float = field(default=1e-10, metadata={"min": 0})
    num_trials: int = field(default=12, metadata={"min": 1})
    iterations: int = field(default=0, metadata={"min": 0})

    @property
    def differentiates_twice(self) -> bool:
        """Of course."""
        return True

    @property
    def whole_steps(self) -> int:
        """As many as asked for."""
        return self.iterations

    @property
    def obeys_rate(self) -> bool:
        """No: it tries lengths of its own."""
        return False

    def init(self, parameters: Tree) -> Tree:
        """Nothing to remember."""
        return {}

    def step(
        self, objective: Objective, parameters: Tree, memory: Tree, learning_rate: Tensor
    ) -> tuple[Tree, Tree, Tree]:
        """One damped Newton step."""
        problem = VectorObjective(objective, parameters, self.weight_decay)
        start = problem.start
        curvature = jacrev(grad(problem.value))(start) + self.ridge * torch.eye(
            len(start), dtype=start.dtype, device=start.device
        )
        # solve_ex: a singular Hessian must not stop the other clients of a stack; its trial steps just don't improve.
        direction = torch.linalg.solve_ex(curvature, grad(problem.value)(start)).result.nan_to_num()
        lengths = 0.5 ** torch.arange(self.num_trials, dtype=start.dtype, device=start.device)
        trials = start - torch.cat([lengths, lengths.new_zeros(1)])[:, None] * direction
        return problem.tree(pick(vmap(problem.value)(trials)) @ trials), memory, {}
