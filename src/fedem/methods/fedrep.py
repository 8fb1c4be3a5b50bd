"""FedRep: a shared representation below a last layer of each client's own, which is trained first.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.methods.base import Batch, Local, Method, Stage, register
from fedem.methods.mixer import Star
from fedem.methods.steps import SingleModel


@final
@dataclass(frozen=True, eq=False)
class FedRep(SingleModel):
    """In a round a client first trains its head, the last layer, with the body fixed; then the body, the head fixed.

    The solver starts afresh with the body. A client that trains for itself alone trains its head.

    Attributes:
        head_share: share of a round's steps that go to the head, rounded; the last step always goes to the body.
            With five passes over the samples, 0.8 are four for the head and one for the body.
    """

    parts_model: ClassVar[bool] = True

    head_share: float = field(default=0.8, metadata={"min": 0, "max": 1})

    def stages(self, num_steps: Tensor) -> Sequence[Stage]:
        head = torch.minimum((self.head_share * num_steps.double()).round().long(), num_steps - 1)
        return Stage(self.tune, head), Stage(self.step, num_steps - head, self._afresh)

    def _afresh(self, local: Local) -> Local:
        return local._replace(solver_state=self.start(local.shared))

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """Train the body."""
        return self.holding_step(local, batch, learning_rate, self._head)

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """Train the head; the body's statistics stay, too."""
        return self.holding_step(local, batch, learning_rate, frozenset(local.shared) - self._head)

    @cached_property
    def _head(self) -> frozenset[str]:
        return self.model.leaves_called("head")


register(Method("fedrep", FedRep, Star, title="FedRep",
                summary="a shared body, and a last layer of each client's own, trained before the body in each round",
                paper="Collins et al. 2021", personal="the last layer", sent="the other layers",
                unseen="takes the shared layers, and the mean of the others", local_layers="head",
                position=260))  # fmt: skip
