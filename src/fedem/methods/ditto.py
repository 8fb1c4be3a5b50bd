"""Ditto: FedAvg's model, and beside it a model of each client's own that is pulled towards it.

Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021 (Alg. 1).
"""

from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from fedem.core.tree import Tree
from fedem.methods.base import Batch, Local, Method, register
from fedem.methods.mixer import Star
from fedem.methods.steps import OwnModel, Penalty, square_distance, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class Ditto(OwnModel):
    """v_t minimises f_t(v) + pull/2 |v - u|^2, u as received; u itself is trained as in FedAvg.

    Attributes:
        pull: lambda; 0 trains each client's model alone.
    """

    pull: float = field(default=0.1, metadata={"min": 0})

    def suitable_rate(self, curvature: float) -> float:
        return 1 / (curvature + self.pull)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        return self.begin_both(shared, personal, trained_leaves(self.model, shared)), {}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        return self.step_both(local, batch, learning_rate, self.penalty(local))

    def penalty(self, local: Local) -> Penalty | None:
        return lambda candidate: self.pull / 2 * square_distance(candidate, local.context)


register(Method("ditto", Ditto, Star, title="Ditto", summary="FedAvg, and own models pulled towards its model",
                paper="Li et al. 2021", personal="a model", unseen="trains its own model", position=170))  # fmt: skip
