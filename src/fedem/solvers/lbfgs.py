"""L-BFGS: Newton's method with a curvature learnt from the last few steps.

Liu, Nocedal: On the limited memory BFGS method for large scale optimization, Mathematical Programming 1989.

Shapes: d trained numbers, H pairs remembered, the newest last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import grad

from fedem.solvers.base import Objective, Solver
from fedem.solvers.vectors import VectorObjective, flatten, pick
from fedem.tree import Tree, tree_map

_LONGEST = 4.0


@dataclass(frozen=True)
class LBFGS(Solver):
    """Quasi-Newton steps: a few gradients each and no Hessian, so the model may be large. No learning rate is used.

    A step takes the best of ``num_trials`` lengths along the direction, or stays where it is when none is better.
    Both gradients of a curvature pair are taken over the same batch, so batches may change from step to step.

    Attributes:
        history: H, pairs of a step and the gradient's change over it that are remembered within a round.
        num_trials: step lengths that are tried: 1, 2, 4, then 1/2, 1/4, ...
        iterations: steps over all of a client's samples each round, whatever the batches; 0 follows the batches.

    """

    history: int = field(default=10, metadata={"min": 1})
    num_trials: int = field(default=10, metadata={"min": 4})
    iterations: int = field(default=0, metadata={"min": 0})

    @property
    def whole_steps(self) -> int:
        """As many as asked for."""
        return self.iterations

    @property
    def obeys_rate(self) -> bool:
        """No: it tries lengths of its own."""
        return False

    def init(self, parameters: Tree) -> Tree:
        """No pairs yet: ``steps`` and ``changes`` ``[H, d]``, 1 / <step, change> ``[H]`` or 0 where there is no pair.

        ``reach`` scales the trial lengths; it falls while none of them is short enough.
        """
        start = flatten(parameters)
        nothing = torch.zeros_like(start).expand(self.history, -1)
        return {
            "steps": nothing,
            "changes": nothing,
            "inverses": nothing[:, 0],
            "reach": torch.ones_like(start[0]),
        }

    def step(
        self, objective: Objective, parameters: Tree, memory: Tree, learning_rate: Tensor
    ) -> tuple[Tree, Tree, Tree]:
        """``p -= length H g``, H being the inverse Hessian as the remembered pairs have it."""
        problem = VectorObjective(objective, parameters, self.weight_decay)
        start = problem.start
        gradient, besides = grad(problem.evaluate, has_aux=True)(start)
        direction = memory["reach"] * _times_inverse_hessian(gradient, memory).nan_to_num()
        lengths = self._lengths(start)
        trials = start - lengths[:, None] * direction
        # One after the other: under vmap modules that change their buffers, or have no rule for it, would fail.
        chosen = pick(torch.stack([problem.value(trial) for trial in trials]))
        moved = chosen @ trials
        change = grad(problem.value)(moved) - gradient
        memory = _remember(memory, moved - start, change)
        stayed = chosen[-1] > 0
        reach = torch.where(stayed, memory["reach"] * lengths[-2], torch.ones_like(memory["reach"]))
        return problem.tree(moved), memory | {"reach": reach}, besides

    def _lengths(self, like: Tensor) -> Tensor:
        """Trial lengths in the order of preference, and last 0."""
        growing = [1.0, 2.0, _LONGEST]
        shrinking = [0.5**k for k in range(1, self.num_trials - len(growing) + 1)]
        return torch.tensor([*growing, *shrinking, 0.0], dtype=like.dtype, device=like.device)


def _times_inverse_hessian(gradient: Tensor, memory: Tree) -> Tensor:
    """The two-loop recursion, ``[d]``. A place without a pair has an inverse of zero and changes nothing."""
    steps, changes, inverses = memory["steps"], memory["changes"], memory["inverses"]
    tiny = torch.finfo(gradient.dtype).tiny
    direction, shares = gradient, []
    for k in reversed(range(len(inverses))):
        share = inverses[k] * (steps[k] @ direction)
        direction = direction - share * changes[k]
        shares.append(share)
    # Without a pair there is no scale to go by: a step of length one.
    curvature = inverses[-1] * changes[-1].square().sum()
    scale = torch.where(inverses[-1] > 0, 1 / curvature.clamp(min=tiny), 1 / gradient.norm().clamp(min=tiny))
    direction = scale * direction
    for k, share in enumerate(reversed(shares)):
        direction = direction + (share - inverses[k] * (changes[k] @ direction)) * steps[k]
    return direction


def _remember(memory: Tree, step: Tensor, change: Tensor) -> Tree:
    """Add a pair in place of the oldest, unless it shows too little curvature to tell from rounding."""
    product = step @ change
    useful = product > torch.finfo(step.dtype).eps * step.norm() * change.norm()
    pair = {"steps": step, "changes": change, "inverses": 1 / torch.where(useful, product, torch.ones_like(product))}
    return memory | tree_map(
        lambda new, old: torch.where(useful, torch.cat([old[1:], new[None]]), old),
        pair,
        memory,
    )
