"""Any method's clients, training for themselves alone: FedAvg+ and its like.

Jiang, Konecny, Rush, Kannan: Improving Federated Learning Personalization via Model Agnostic Meta Learning, 2019, for
FedAvg; here a wrapper for whatever method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedem.algorithms.base import Algorithm, Batch, Local
from fedem.algorithms.wrapping import Wrapped
from fedem.tree import Tree


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
