"""Centralised EM with an exact M-step: the reference that FedEM approximates (Prop. 2 of the paper).

All samples are in one place, and each M-step is solved to the end by Newton's method; so it is for small convex models.

Shapes: M components, T clients, N samples of all clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedem.core.em import log_responsibilities, negative_log_likelihood, update_log_weights
from fedem.core.tree import Tree, tree_map, tree_stack
from fedem.data.samples import Samples
from fedem.models.base import Model
from fedem.solvers import Newton


class EMState(NamedTuple):
    """Components ``[M, ...]`` and log mixture weights ``[T, M]``."""

    components: Tree
    log_weights: Tensor


@dataclass(frozen=True, eq=False)
class CentralizedEM:
    """EM for f(Theta, Pi) + weight_decay / 2 |Theta|^2, with the minimiser in every step.

    Attributes:
        model: a model whose loss is convex in its parameters.
        weight_decay: keeps the minimisers finite where classes can be separated.
        max_newton_steps: an M-step ends after so many, or when a step moves nothing by more than ``tolerance``.
        tolerance: see there.
    """

    model: Model
    weight_decay: float = 0.0
    max_newton_steps: int = 50
    tolerance: float = 1e-10

    def objective(self, state: EMState, samples: Samples) -> float:
        """The function that EM minimises."""
        losses = self._losses(state.components, samples)
        likelihood = torch.cat(
            [negative_log_likelihood(part, weights) for part, weights in self._clients(losses, state, samples)]
        )
        penalty = sum(leaf.square().sum() for leaf in state.components.values())
        return float(likelihood.mean() + self.weight_decay / 2 * penalty)

    def steps(self, state: EMState, samples: Samples, num_iterations: int) -> Iterator[EMState]:
        """Iterate EM; yields the state after each half of the M-step: first the weights, then the components."""
        for _ in range(num_iterations):
            losses = self._losses(state.components, samples)
            posteriors = [
                log_responsibilities(part, weights) for part, weights in self._clients(losses, state, samples)
            ]
            weights = torch.stack([update_log_weights(p, torch.ones_like(p[0], dtype=torch.bool)) for p in posteriors])
            state = EMState(state.components, weights)
            yield state
            responsibilities = torch.cat(posteriors, dim=1).exp()
            state = EMState(self._minimise(state.components, samples, responsibilities), weights)
            yield state

    def _losses(self, components: Tree, samples: Samples) -> Tensor:
        return vmap(self.model.losses, in_dims=(0, None, None))(components, samples.inputs, samples.targets)

    def _clients(self, losses: Tensor, state: EMState, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(losses.split(samples.sizes.tolist(), dim=1), state.log_weights, strict=True)

    def _minimise(self, components: Tree, samples: Samples, responsibilities: Tensor) -> Tree:
        solver, rate = Newton(self.weight_decay), torch.tensor(1.0)
        solved = []
        for m, row in enumerate(responsibilities):

            def objective(parameters: Tree, row: Tensor = row) -> tuple[Tensor, Tree]:
                return (row * self.model.losses(parameters, samples.inputs, samples.targets)).mean(), {}

            parameters = tree_map(lambda leaf, m=m: leaf[m], components)
            for _ in range(self.max_newton_steps):
                moved_to, _, _ = solver.step(objective, parameters, {}, rate)
                moved = max(float((moved_to[name] - parameters[name]).abs().max()) for name in parameters)
                parameters = moved_to
                if moved <= self.tolerance:
                    break
            solved.append(parameters)
        return tree_stack(solved)
