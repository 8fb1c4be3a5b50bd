"""Ditto: FedAvg's model, and beside it a model of each client's own that is pulled towards it.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021 (Alg. 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix
from fedem.methods.base import Batch, Local
from fedem.methods.steps import OwnModel, square_distance, start_memory, train_step, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class Ditto(OwnModel):
    """v_t minimises f_t(v) + pull/2 |v - u|^2, u as received; u itself is trained as in FedAvg.

    Attributes:
        pull: lambda; 0 trains each client's model alone.

    """

    pull: float = field(default=0.1, metadata={"min": 0})

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """Two models to train, and u as it was received."""
        own, personal = self.begun(shared, personal)
        memory = add_prefix("shared", start_memory(self.model, self.solver, shared))
        memory |= add_prefix("own", start_memory(self.model, self.solver, own))
        return Local(shared, personal, memory, trained_leaves(self.model, shared)), {}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A step on the shared model, and one on the own model with its pull."""
        shared_memory, own_memory = (take_prefix(name, local.memory) for name in ("shared", "own"))
        model, solver, weights = self.model, self.solver, batch.weights
        shared, shared_memory = train_step(model, solver, local.shared, shared_memory, batch, weights, learning_rate)
        own, own_memory = train_step(
            model,
            solver,
            take_prefix("own", local.personal),
            own_memory,
            batch,
            weights,
            learning_rate,
            lambda candidate: self.pull / 2 * square_distance(candidate, local.context),
        )
        memory = add_prefix("shared", shared_memory) | add_prefix("own", own_memory)
        return local._replace(shared=shared, personal=self.trained(own, local.personal), memory=memory)
