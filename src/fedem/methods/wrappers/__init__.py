"""Methods around others: whatever they don't say otherwise, they do as the method within."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

from torch import Tensor

from fedem.core.tree import Tree
from fedem.methods.base import Algorithm, Batch, Local, Mixture, Trained


@dataclass(frozen=True, eq=False)
class Wrapped(Algorithm):
    """A client of ``base``, whose declarations are not taken over: a subclass says what still holds."""

    base: Algorithm

    @classmethod
    def of(cls, base: Algorithm) -> Self:
        """Wrap ``base``."""
        return cls(base.model, base.solver, base)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A survey reads all samples, so it is only asked for where the method within has one.
        object.__setattr__(self, "has_survey", self.base.has_survey)

    def init_shared(self, seed: int) -> Tree:
        return self.base.init_shared(seed)

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        return self.base.init_personal(shared, key)

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        return self.base.score(shared, inputs, targets)

    def survey(self, shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        return self.base.survey(shared, personal, inputs, targets, mask)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        return self.base.begin(shared, personal, scores, mask)

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        return self.base.step(local, batch, learning_rate)

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        return self.base.tune(local, batch, learning_rate)

    def finish(self, local: Local) -> Trained:
        return self.base.finish(local)

    def summand(self, upload: Tree) -> Tree:
        return self.base.summand(upload)

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        return self.base.update(shared, mean, share)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return self.base.predictor(shared, personal)

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        return self.base.adapt(shared, scores, max_iterations)

    def check(self, inputs: Tensor) -> None:
        self.base.check(inputs)


@final
@dataclass(frozen=True, eq=False)
class FineTuned(Wrapped):
    """Any method's clients, training for themselves alone: a round ends with their u instead of an upload.

    Jiang, Konecny, Rush, Kannan: Improving Federated Learning Personalization via Model Agnostic Meta Learning, 2019,
    for FedAvg (FedAvg+).
    """

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        return self.base.tune(local, batch, learning_rate)

    def finish(self, local: Local) -> Trained:
        """Keep u, and v_t as it is: what the method would make of it at the end of a round is for the others."""
        shared = self.base.finish(local).shared
        return Trained(shared, local.personal, shared)
