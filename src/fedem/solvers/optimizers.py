"""Local solvers: one step on one batch's objective, as pure functions that vmap can stack.

Shapes: d trained numbers, K trial steps, H pairs that L-BFGS remembers, the newest last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from fedem.core.errors import UserError, unknown
from fedem.core.precision import model_gradient
from fedem.core.random import SOLVER, derive
from fedem.core.settings import Settings, names_of
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_map

Objective = Callable[[Tree], tuple[Tensor, Tree]]  # parameters -> the value to minimise, and what else changed: buffers
Stepped = tuple[Tree, Tree, Tree]  # the new parameters, the solver's new state, and what else the objective changed


@dataclass(frozen=True)
class Solver(Settings, ABC):
    """One step of a local solver.

    Attributes:
        weight_decay: adds weight_decay/2 |parameters|^2 to every objective.
    """

    usual_rate: ClassVar[float] = 0.1  # a learning rate to begin with
    follows_gradients: ClassVar[bool] = False  # whether steps are the rate times sums of gradients: ``gain`` is exact
    differentiates_twice: ClassVar[bool] = False  # whether it asks for second derivatives
    obeys_rate: ClassVar[bool] = True  # whether the learning rate sets how long its steps are

    weight_decay: float = field(default=0.0, metadata={"min": 0})

    @property
    def whole_steps(self) -> int:
        """Steps over all of a client's samples that it takes in a round; 0 when it follows the batches."""
        return getattr(self, "iterations", 0)

    def among(self, keys: Tensor) -> Iterator[tuple[Solver, Tensor]]:
        """Say which clients, of those with these ``keys`` ``[C]``, use which solver: positions in ascending order."""
        yield self, torch.arange(len(keys))

    def gain(self, step: Tensor) -> Tensor:
        """Return the length of step number ``step`` (from 1) along a constant gradient of one, over the rate."""
        return torch.ones_like(step)

    def init(self, parameters: Tree) -> Tree:
        """Return the solver's state at the start of a round, if it has one: momentum starts afresh."""
        return {}

    @abstractmethod
    def step(self, objective: Objective, parameters: Tree, state: Tree, learning_rate: Tensor) -> Stepped:
        """Take one step from ``parameters``."""

    def _gradient(self, objective: Objective, parameters: Tree) -> tuple[Tree, Tree]:
        gradient, besides = model_gradient(objective, has_aux=True)(parameters)
        if self.weight_decay:
            gradient = tree_map(lambda g, p: g.add(p, alpha=self.weight_decay), gradient, parameters)
        return gradient, besides


@dataclass(frozen=True)
class SGD(Solver):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD`` has it.

    Attributes:
        momentum: share of the last step's direction that is added to the gradient. Each round starts without.
        nesterov: step along the gradient and ``momentum`` times the new direction (Nesterov's step).
    """

    follows_gradients: ClassVar[bool] = True

    momentum: float = field(default=0.0, metadata={"min": 0, "below": 1})
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise UserError("SGD.nesterov is true but SGD.momentum is 0; Nesterov's step needs a momentum above 0.")

    def gain(self, step: Tensor) -> Tensor:
        """1 + momentum + momentum^2 + ..., as many terms as steps (one more with Nesterov's)."""
        return (1 - self.momentum ** (step + 1 if self.nesterov else step)) / (1 - self.momentum)

    def init(self, parameters: Tree) -> Tree:
        return tree_map(torch.zeros_like, parameters) if self.momentum else {}

    def step(self, objective: Objective, parameters: Tree, state: Tree, learning_rate: Tensor) -> Stepped:
        """``v = momentum v + g``, then ``p -= learning_rate v``."""
        gradient, besides = self._gradient(objective, parameters)
        direction = gradient
        if self.momentum:
            direction = state = tree_map(lambda v, g: torch.add(g, v, alpha=self.momentum), state, gradient)
        if self.nesterov:
            direction = tree_map(lambda g, v: torch.add(g, v, alpha=self.momentum), gradient, state)
        # In one pass over the numbers, which is what a step of a large model costs beside its gradient.
        return tree_map(lambda p, v: p.addcmul(v, learning_rate, value=-1), parameters, direction), state, besides


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

    def step(self, objective: Objective, parameters: Tree, state: Tree, learning_rate: Tensor) -> Stepped:
        """``p -= learning_rate m / (sqrt(s) + epsilon)``, both moments corrected for their start at zero."""
        gradient, besides = self._gradient(objective, parameters)
        power1, power2 = state["power1"] * self.beta1, state["power2"] * self.beta2
        first = tree_map(lambda m, g: self.beta1 * m + (1 - self.beta1) * g, take_prefix("first", state), gradient)
        squares, second = tree_map(torch.square, gradient), take_prefix("second", state)
        second = tree_map(lambda s, g: self.beta2 * s + (1 - self.beta2) * g, second, squares)

        def moved(p: Tensor, m: Tensor, s: Tensor) -> Tensor:
            return p - learning_rate * (m / (1 - power1)) / ((s / (1 - power2)).sqrt() + self.epsilon)

        state = add_prefix("first", first) | add_prefix("second", second) | {"power1": power1, "power2": power2}
        return tree_map(moved, parameters, first, second), state, besides


class VectorObjective:
    """An objective with its weight decay as a function of one vector: all trained leaves behind each other, ``[d]``."""

    def __init__(self, objective: Objective, parameters: Tree, weight_decay: float):
        self._objective, self._weight_decay = objective, weight_decay
        self.start = torch.cat([leaf.flatten() for leaf in parameters.values()])
        self._shapes = {name: leaf.shape for name, leaf in parameters.items()}

    def tree(self, vector: Tensor) -> Tree:
        pieces = vector.split([prod(shape) for shape in self._shapes.values()])
        return {name: piece.reshape(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}

    def evaluate(self, vector: Tensor) -> tuple[Tensor, Tree]:
        """Objective + weight_decay/2 |vector|^2, and what the pass changed besides."""
        value, besides = self._objective(self.tree(vector))
        return value + self._weight_decay / 2 * vector.square().sum(), besides

    def value(self, vector: Tensor) -> Tensor:
        return self.evaluate(vector)[0]


def pick(values: Tensor) -> Tensor:
    """Choose the first of K trials whose value is the least, up to rounding. ``[K] -> [K]``, one and zeros.

    Near a minimum the order of the trials decides and not the last bits, which differ between engines.
    """
    known = values.nan_to_num(nan=torch.inf)
    least = known.min()
    slack = 8 * torch.finfo(values.dtype).eps * least.abs()
    return torch.nn.functional.one_hot((known <= least + slack).to(torch.int8).argmax(), len(values)).to(values)


@dataclass(frozen=True)
class LBFGS(Solver):
    """Quasi-Newton steps: a few gradients each and no Hessian, so the model may be large. No learning rate is used.

    Liu, Nocedal: On the limited memory BFGS method for large scale optimization, Mathematical Programming 1989. A step
    takes the best of ``num_trials`` lengths along the direction, or stays where it is when none is better. Both
    gradients of a curvature pair are taken over the same batch, so batches may change from step to step.

    Attributes:
        history: H, pairs of a step and the gradient's change over it that are remembered within a round.
        num_trials: step lengths that are tried: 1, 2, 4, then 1/2, 1/4, ...
        iterations: steps over all of a client's samples each round, whatever the batches; 0 follows the batches.
    """

    obeys_rate: ClassVar[bool] = False

    history: int = field(default=10, metadata={"min": 1})
    num_trials: int = field(default=10, metadata={"min": 4})
    iterations: int = field(default=0, metadata={"min": 0})

    def init(self, parameters: Tree) -> Tree:
        """No pairs yet: ``steps`` and ``changes`` ``[H, d]``, 1 / <step, change> ``[H]`` or 0 where there is no pair.

        ``reach`` scales the trial lengths; it falls while none of them is short enough.
        """
        nothing = torch.cat([torch.zeros_like(leaf).flatten() for leaf in parameters.values()]).expand(self.history, -1)
        reach = torch.ones_like(nothing[0, 0])
        return {"steps": nothing, "changes": nothing, "inverses": nothing[:, 0], "reach": reach}

    def step(self, objective: Objective, parameters: Tree, state: Tree, learning_rate: Tensor) -> Stepped:
        """``p -= length H g``, H being the inverse Hessian as the remembered pairs have it."""
        problem = VectorObjective(objective, parameters, self.weight_decay)
        start = problem.start
        gradient, besides = model_gradient(problem.evaluate, has_aux=True)(start)
        direction = state["reach"] * _times_inverse_hessian(gradient, state).nan_to_num()
        # In the order of preference, and last 0.
        lengths = [1.0, 2.0, 4.0, *(0.5**k for k in range(1, self.num_trials - 2)), 0.0]
        trials = torch.stack([start - length * direction for length in lengths])
        # One after the other: under vmap modules that change their buffers, or have no rule for it, would fail.
        chosen = pick(torch.stack([problem.value(trial) for trial in trials]))
        moved = chosen @ trials
        state = _remember(state, moved - start, model_gradient(problem.value)(moved) - gradient)
        reach = torch.where(chosen[-1] > 0, state["reach"] * lengths[-2], torch.ones_like(state["reach"]))
        return problem.tree(moved), state | {"reach": reach}, besides


def _times_inverse_hessian(gradient: Tensor, state: Tree) -> Tensor:
    """The two-loop recursion, ``[d]``. A place without a pair has an inverse of zero and changes nothing."""
    steps, changes, inverses = state["steps"], state["changes"], state["inverses"]
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


def _remember(state: Tree, step: Tensor, change: Tensor) -> Tree:
    """Add a pair in place of the oldest, unless it shows too little curvature to be more than rounding."""
    product = step @ change
    useful = product > torch.finfo(step.dtype).eps * step.norm() * change.norm()
    pair = {"steps": step, "changes": change, "inverses": 1 / torch.where(useful, product, torch.ones_like(product))}
    return state | tree_map(lambda new, old: torch.where(useful, torch.cat([old[1:], new[None]]), old), pair, state)


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

    differentiates_twice: ClassVar[bool] = True
    obeys_rate: ClassVar[bool] = False

    ridge: float = field(default=1e-10, metadata={"min": 0})
    num_trials: int = field(default=12, metadata={"min": 1})
    iterations: int = field(default=0, metadata={"min": 0})

    def step(self, objective: Objective, parameters: Tree, state: Tree, learning_rate: Tensor) -> Stepped:
        problem = VectorObjective(objective, parameters, self.weight_decay)
        start = problem.start
        ridge = self.ridge * torch.eye(len(start), dtype=start.dtype, device=start.device)
        curvature = jacrev(grad(problem.value))(start) + ridge
        # solve_ex: a singular Hessian must not stop the other clients of a stack; its trial steps just don't improve.
        direction = torch.linalg.solve_ex(curvature, grad(problem.value)(start)).result.nan_to_num()
        lengths = 0.5 ** torch.arange(self.num_trials, dtype=start.dtype, device=start.device)
        trials = start - torch.cat([lengths, lengths.new_zeros(1)])[:, None] * direction
        return problem.tree(pick(vmap(problem.value)(trials)) @ trials), state, {}


_MEMBERS: dict[str, type[Solver]] = {"sgd": SGD, "adam": Adam, "lbfgs": LBFGS, "newton": Newton}


@dataclass(frozen=True)
class Various(Solver):
    """Each client has one of several solvers, by its name alone. All are given the same learning rate.

    The paper's convergence with black-box solvers asks only how well each solves (:mod:`fedem.runs.measures`).

    Attributes:
        members: names of solvers, separated by commas; a name that stands twice gets twice as many clients.
        momentum: of those members that have one.
        iterations: of those members that count their steps and not the batches.
    """

    members: str = "sgd,lbfgs,newton"
    momentum: float = field(default=0.9, metadata={"min": 0, "below": 1})
    iterations: int = field(default=5, metadata={"min": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "differentiates_twice", any(solver.differentiates_twice for solver in self.solvers))
        object.__setattr__(self, "obeys_rate", all(solver.obeys_rate for solver in self.solvers))

    @cached_property
    def solvers(self) -> tuple[Solver, ...]:
        """The members, each with those of our settings that it knows."""
        common = {name: getattr(self, name) for name in names_of(Various) if name != "members"}
        names = [name.strip() for name in self.members.split(",")]
        for name in names:
            if name not in _MEMBERS:
                raise unknown("member of Various.members", name, _MEMBERS)
        kinds = [_MEMBERS[name] for name in names]
        return tuple(kind(**{key: common[key] for key in names_of(kind) if key in common}) for kind in kinds)

    def among(self, keys: Tensor) -> Iterator[tuple[Solver, Tensor]]:
        """Deal the clients out by hashing their keys; members that get nobody are left out."""
        chosen = derive(keys, SOLVER) % len(self.solvers)
        for index, solver in enumerate(self.solvers):
            positions = (chosen == index).nonzero().flatten()
            if len(positions):
                yield solver, positions

    def init(self, parameters: Tree) -> Tree:
        raise AssertionError("Various only deals out its members; ask among() which clients have which")

    def step(self, objective: Objective, parameters: Tree, state: Tree, learning_rate: Tensor) -> Stepped:
        raise AssertionError("Various only deals out its members; ask among() which clients have which")


SOLVERS = _MEMBERS | {"various": Various}
