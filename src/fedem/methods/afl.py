"""AFL: one model for the worst mixture of the clients.

Mohri, Sivek, Suresh: Agnostic Federated Learning, ICML 2019. A client is FedAvg's, and says its loss as well; the
server's weights climb towards those whose losses are large.
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix
from fedem.methods.base import Local, Method, Trained, register
from fedem.methods.mixer import Mixed, OneGroup, Round, Start, Uploads, weighted_means
from fedem.methods.steps import SingleModel, mean_loss


@final
@dataclass(frozen=True, eq=False)
class AFL(SingleModel):
    """One shared model; a client uploads it with f_t(u), u as received."""

    uploads_model: ClassVar[bool] = False

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Each sample's loss under u as received, ``[n]``."""
        return {"losses": self.model.losses(shared, inputs, targets)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        local, samples = super().begin(shared, personal, scores, mask)
        return local._replace(context={"loss": mean_loss(scores["losses"], mask)}), samples

    def finish(self, local: Local) -> Trained:
        return Trained(add_prefix("model", local.shared) | local.context, local.personal, local.shared)

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        return take_prefix("model", mean)


@final
@dataclass(frozen=True)
class Agnostic(OneGroup):
    """The server: one group; the memory is a distribution over the clients, and uploads have a leaf "loss".

    Attributes:
        climb_rate: gamma, the step of the weights: weights <- projection of (weights + gamma losses) on the simplex.
    """

    climb_rate: float = field(default=0.001, metadata={"min": 0})

    def init(self, start: Start) -> tuple[Tree, Tree]:
        count = len(start.keys)
        return super().init(start)[0], {"weights": torch.full((count,), 1 / count, dtype=torch.float64)}

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """Average by the weights, those of the cohort summing to one; then the weights climb by the cohort's losses."""
        clients = this.clients.to(memory["weights"].device)
        here = memory["weights"][clients]
        # Weights can all have become zero for a small cohort; then it counts equally.
        cohort = torch.where(here.sum() > 0, here, torch.ones_like(here))
        climbed = memory["weights"].clone()

        def watched() -> Uploads:
            for positions, trees in uploads:
                climbed[clients[positions.to(clients.device)]] += self.climb_rate * trees["loss"].double()
                yield positions, trees

        means = weighted_means((cohort / cohort.sum())[None], watched())
        mixed = Mixed(torch.zeros(1, dtype=torch.int64), means, len(this.clients))
        return mixed, {"weights": project_to_simplex(climbed)}


def project_to_simplex(point: Tensor) -> Tensor:
    """Return the nearest distribution (Held, Wolfe, Crowder 1974), ``[n] -> [n]``.

    >>> project_to_simplex(torch.tensor([0.6, 0.6, -1.0])).tolist()
    [0.5, 0.5, 0.0]
    """
    ordered = point.sort(descending=True).values
    thresholds = (ordered.cumsum(0) - 1) / torch.arange(1, len(point) + 1, dtype=point.dtype, device=point.device)
    positive = int((ordered > thresholds).sum())
    return (point - thresholds[positive - 1]).clamp(min=0)


register(Method("afl", AFL, Agnostic, title="AFL", summary="one model for the worst mixture of the clients",
                paper="Mohri et al. 2019", sent="a model; a loss up", position=130))  # fmt: skip
