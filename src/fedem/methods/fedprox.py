"""FedProx: FedAvg whose clients are held near the model they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor

from fedem.core.tree import Tree
from fedem.methods.base import Local, Method, register
from fedem.methods.mixer import Star
from fedem.methods.steps import Penalty, SingleModel, square_distance, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class FedProx(SingleModel):
    """A client minimises f_t(w) + mu/2 |w - u|^2.

    Attributes:
        mu: the proximal weight; 0 is FedAvg.
    """

    takes_label_shares: ClassVar[bool] = True

    mu: float = field(default=0.1, metadata={"min": 0})

    def suitable_rate(self, curvature: float) -> float:
        return 1 / (curvature + self.mu)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        local, samples = super().begin(shared, personal, scores, mask)
        return local._replace(context=trained_leaves(self.model, shared)), samples

    def penalty(self, local: Local) -> Penalty | None:
        return lambda candidate: self.mu / 2 * square_distance(candidate, local.context)


register(Method("fedprox", FedProx, Star, title="FedProx",
                summary="FedAvg, each client held near the model it received", paper="Li et al. 2020",
                position=60))  # fmt: skip
