"""How well clients solve their local problems: the paper's alpha, which black-box solvers are judged by.

In a round a client is to minimise, for each component, g(theta) = 1/n sum_i q_i loss_i(theta) + weight_decay/2
|theta|^2, the q_i being the component's responsibilities (all one for a single model). Its solver is
alpha-approximate when g(end) - g* <= alpha (g(start) - g*); the paper proves convergence for alphas that are small
enough. Here the smallest such alpha is measured, for convex models small enough for Newton's method.

Shapes: C clients, M components, n samples of a client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedem.algorithms.base import Algorithm
from fedem.algorithms.fedavg import FedAvg
from fedem.algorithms.fedem import FedEM
from fedem.algorithms.training import inner_product, trained_leaves
from fedem.engines import Cohort
from fedem.errors import UserError
from fedem.models.base import Model
from fedem.randomness import MIXER, SOLVER, choose, derive
from fedem.rounds import State, Training
from fedem.solvers import Newton, Solver
from fedem.tree import Tree, tree_cat, tree_index

MOST_PARAMETERS = 2000
_MOST_CLIENTS = 20
_MOST_STEPS, _TOLERANCE = 100, 1e-13
_MOST_NUMBERS = 1 << 26  # of all Hessians' backward passes at once


class Inexactness(NamedTuple):
    """How much of the way to its minimum each local problem had left after a round."""

    clients: Tensor
    """``[C]`` positions in the federation"""
    alphas: Tensor
    """``[C, M]`` float64; NaN where a client had nothing to gain, so that there is no ratio"""

    @property
    def mean(self) -> float | None:
        """Over clients and components; None when nobody had anything to gain."""
        known = self._known
        return float(known.mean()) if len(known) else None

    @property
    def max(self) -> float | None:
        """The alpha that holds for all clients and components."""
        known = self._known
        return float(known.max()) if len(known) else None

    def record(self) -> dict[str, float | None]:
        """Name both figures, as a round's record has them."""
        return {"alpha_mean": self.mean, "alpha_max": self.max}

    @property
    def _known(self) -> Tensor:
        return self.alphas[~self.alphas.isnan()]


def check_measurable(algorithm: Algorithm) -> None:
    """Refuse methods whose local problems are others, and models too large or too unsteady for an exact solution."""
    if not isinstance(algorithm, FedEM | FedAvg):
        raise UserError(
            f"Alpha can't be measured for {type(algorithm).__name__}; allowed: methods whose clients minimise "
            "(responsibility-weighted) losses, FedEM and those that train as FedAvg does."
        )
    model = algorithm.model
    if model.num_parameters > MOST_PARAMETERS:
        raise UserError(
            f"Alpha can't be measured for a model of {model.num_parameters} trained numbers; allowed: at most "
            f"{MOST_PARAMETERS}, as the exact solution needs a Hessian."
        )
    with torch.random.fork_rng(devices=[]):
        unsteady = next((type(part).__name__ for part in model.build().modules() if _is_unsteady(part)), None)
    if unsteady is not None:
        raise UserError(
            f"Alpha can't be measured for a model with {unsteady}, whose clients train another function than they are "
            "judged by; allowed: layers that do the same in training and in evaluation."
        )
    if model.not_stackable is not None:
        raise UserError(f"Alpha can't be measured for this model ({model.not_stackable}).")


def _is_unsteady(part: nn.Module) -> bool:
    """Whether a layer's outputs in training depend on chance or on the other samples of a batch."""
    if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
        return part.dropout > 0
    return isinstance(part, _BatchNorm) or (isinstance(part, _DropoutNd) and part.p > 0)


def choose_clients(training: Training, round_index: int) -> Tensor:
    """Choose at most 20 clients of a round's cohort by their names, ``[C]`` positions in ascending order."""
    cohort = training.sample(round_index)
    return cohort[choose(training.federation.keys[cohort], _MOST_CLIENTS, SOLVER, training.seed, round_index)]


def measure(training: Training, state: State, clients: Tensor | None = None) -> Inexactness:
    """Let clients train for the round that follows ``state``, which is left as it is, and judge their solutions.

    Args:
        training: of a method and a model that :func:`check_measurable` lets pass.
        state: where the round starts.
        clients: ``[C]`` positions; those of :func:`choose_clients` when not given.

    """
    check_measurable(training.algorithm)
    clients = choose_clients(training, state.round) if clients is None else clients
    key = int(derive(training.seed, MIXER, state.round))
    samples = training.federation.train.take(clients).to(training.device)
    served = training.mixer.serve(state.shared, state.memory, clients, key)
    cohort = Cohort(*served, tree_index(state.personal, clients.to(training.device)), samples)
    rate, num_steps = training.schedule.rate(state.round, training.num_rounds), training.mixer.num_steps(key)
    judge = _Judge.of(training.algorithm)
    alphas: dict[int, Tensor] = {}
    for chunk in training.train_cohort(cohort, clients, state.round, rate, num_steps):
        for row, position in enumerate(chunk.positions.tolist()):
            shared = tree_index(cohort.shared, int(cohort.reads[position]))
            personal, upload = tree_index(cohort.personal, position), tree_index(chunk.uploads, row)
            alphas[position] = judge.alphas(shared, upload, personal, *samples.client(position))
    return Inexactness(clients, torch.stack([alphas[position] for position in range(len(clients))]).cpu())


@dataclass(frozen=True, eq=False)
class _Judge:
    """Judges one client after the other, in double precision."""

    algorithm: Algorithm
    resolution: float
    """gains below it, relative to g, are lost in the rounding of those who train"""

    @classmethod
    def of(cls, algorithm: Algorithm) -> _Judge:
        model = algorithm.model
        double = Model(model.build, model.loss, torch.float64)
        resolution = max(1e-10, 10 * torch.finfo(model.dtype).eps)
        return cls(replace(algorithm, model=double, solver=Newton(algorithm.solver.weight_decay)), resolution)

    def alphas(self, shared: Tree, upload: Tree, personal: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
        """(g(end) - g*) / (g(start) - g*) of each component, ``[M]``; NaN where g(start) is g*."""
        algorithm = self.algorithm
        shared, upload, personal = (_double(tree) for tree in (shared, upload, personal))
        everything = torch.ones(len(targets), dtype=torch.bool, device=targets.device)
        _, fixed = algorithm.begin(shared, personal, algorithm.score(shared, inputs, targets), everything)
        # A single model is responsible for every sample.
        weights = fixed["log_responsibilities"].exp() if fixed else everything.double()[None]
        problems = _Problems(algorithm.model, algorithm.solver, inputs, targets, weights.repeat(2, 1))
        both = tree_cat([algorithm.predictor(tree, personal).components for tree in (shared, upload)])
        first, last = problems.values(both).chunk(2)
        # From both ends: where one lies so far out that its Hessian vanishes, the other still finds the minimum.
        least = torch.minimum(*problems.minima(both).chunk(2))
        gain = first - least
        return torch.where(gain > self.resolution * first.abs().clamp(min=1), (last - least) / gain, torch.nan)


@dataclass(frozen=True, eq=False)
class _Problems:
    """One client's P problems, each with a point to start from: its components, before and after the round."""

    model: Model
    solver: Solver
    inputs: Tensor
    targets: Tensor
    weights: Tensor  # [P, n]

    def _loss(self, component: Tree, weights: Tensor) -> Tensor:
        return (weights * self.model.losses(component, self.inputs, self.targets)).mean()

    def _value(self, component: Tree, weights: Tensor) -> Tensor:
        trained = trained_leaves(self.model, component)
        return self._loss(component, weights) + self.solver.weight_decay / 2 * inner_product(trained, trained)

    def _step(self, component: Tree, weights: Tensor) -> Tree:
        trained, rate = trained_leaves(self.model, component), torch.ones(())
        moved, _, _ = self.solver.step(lambda leaves: (self._loss(component | leaves, weights), {}), trained, {}, rate)
        return component | moved

    def values(self, components: Tree) -> Tensor:
        """Return g of each component, ``[P, ...] -> [P]``."""
        values: Tensor = vmap(self._value)(components, self.weights)
        return values

    def minima(self, components: Tree) -> Tensor:
        """Return the least g that Newton's method finds from each component, ``[P, ...] -> [P]``."""
        size = self.model.num_parameters
        step = vmap(self._step, chunk_size=max(1, _MOST_NUMBERS // (size * max(size, len(self.targets)))))
        first = least = self.values(components)
        for _ in range(_MOST_STEPS):
            components = step(components, self.weights)
            values = self.values(components)
            if not bool((values < least - _TOLERANCE * first.abs()).any()):
                break
            least = torch.minimum(least, values)
        return least


def _double(tree: Tree) -> Tree:
    return {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in tree.items()}
