"""A method around another: whatever it doesn't say otherwise, it does as the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, final

from torch import Tensor

from fedem.core.tree import Tree
from fedem.methods.base import Algorithm, Batch, Local, Mixture
from fedem.solvers import Solver


@dataclass(frozen=True, eq=False)
class Wrapped(Algorithm):
    """A client of ``base``. What it keeps and uploads is for subclasses to say."""

    base: Algorithm

    def with_solver(self, solver: Solver) -> Self:
        """The wrapped method with another local solver."""
        return replace(self, solver=solver, base=self.base.with_solver(solver))

    def init_shared(self, seed: int) -> Tree:
        """As the method does."""
        return self.base.init_shared(seed)

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """As the method does."""
        return self.base.score(shared, inputs, targets)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """As the method does."""
        return self.base.begin(shared, personal, scores, mask)

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """As the method does."""
        return self.base.step(local, batch, learning_rate)

    @property
    def tuning_rate(self) -> float | None:
        """As the method has it."""
        return self.base.tuning_rate

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """As the method does."""
        return self.base.tune(local, batch, learning_rate)

    def keep(self, local: Local) -> tuple[Tree, Tree]:
        """As the method does."""
        return self.base.keep(local)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """As the method does."""
        return self.base.predictor(shared, personal)

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """As the method does."""
        return self.base.adapt(shared, scores, max_iterations)

    def check(self, inputs: Tensor) -> None:
        """As the method does."""
        self.base.check(inputs)


# Any method's clients, training for themselves alone: FedAvg+ and its like.
#
# Jiang, Konecny, Rush, Kannan: Improving Federated Learning Personalization via Model Agnostic Meta Learning, 2019, for
# FedAvg; here a wrapper for whatever method.


@final
@dataclass(frozen=True, eq=False)
class FineTuned(Wrapped):
    """A method whose round ends with what the client keeps instead of what it uploads."""

    @classmethod
    def of(cls, base: Algorithm) -> FineTuned:
        """Wrap ``base``."""
        return cls(base.model, base.solver, base)

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """The method's step of fine-tuning."""
        return self.base.tune(local, batch, learning_rate)

    def finish(self, local: Local) -> tuple[Tree, Tree]:
        """What the client keeps."""
        return self.base.keep(local)
