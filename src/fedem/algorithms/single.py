"""Methods whose clients train one copy of one shared model; what they do besides is theirs to say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedem.algorithms.base import Algorithm, Batch, Local, Mixture
from fedem.algorithms.training import Penalty, mixture_of_one, start_memory, train_step
from fedem.tree import Tree


@dataclass(frozen=True, eq=False)
class SingleModel(Algorithm):
    """u is one model and nothing is personal, unless a subclass says otherwise."""

    def init_shared(self, seed: int) -> Tree:
        """Draw one model."""
        return self.model.init(seed)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """The surrogate is the loss itself."""
        return Local(shared, personal, start_memory(self.model, self.solver, shared), {}), {}

    def penalty(self, local: Local) -> Penalty | None:
        """Return what the surrogate adds to the loss as a function of the trained leaves; None for nothing."""
        return None

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """One solver step on the batch's mean loss and the penalty."""
        model, solver, penalty = self.model, self.solver, self.penalty(local)
        shared, memory = train_step(
            model, solver, local.shared, local.memory, batch, batch.weights, learning_rate, penalty
        )
        return local._replace(shared=shared, memory=memory)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """The shared model alone."""
        return mixture_of_one(shared)

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """Nothing to fit: an unseen client takes the shared model."""
        return {}
