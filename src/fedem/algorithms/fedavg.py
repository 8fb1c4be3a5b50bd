"""FedAvg: one model for all clients, averaged after local training.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017. With the mixer that lets nobody talk it is Local: each client trains a model of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedem.algorithms.base import Algorithm, Batch, Local, Mixture
from fedem.algorithms.training import start_memory, train_step
from fedem.mixture import uniform_log_weights
from fedem.tree import Tree, tree_map


@final
@dataclass(frozen=True, eq=False)
class FedAvg(Algorithm):
    """One shared model; nothing personal."""

    def init_shared(self, seed: int) -> Tree:
        """Draw one model."""
        return self.model.init(seed)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """The surrogate is the loss itself."""
        return Local(shared, personal, start_memory(self.model, self.solver, shared)), {}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """One solver step on the batch's mean loss."""
        shared, memory = train_step(
            self.model, self.solver, local.shared, local.memory, batch, batch.weights, learning_rate
        )
        return local._replace(shared=shared, memory=memory)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """The shared model alone."""
        return Mixture(tree_map(lambda leaf: leaf.unsqueeze(0), shared), uniform_log_weights(1, _float_leaf(shared)))

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree:
        """Nothing to fit: an unseen client takes the shared model."""
        return {}


def _float_leaf(tree: Tree) -> Tensor:
    return next(leaf for leaf in tree.values() if leaf.is_floating_point())
