"""AFL: one model for the worst mixture of the clients.

Mohri, Sivek, Suresh: Agnostic Federated Learning, ICML 2019. A client is FedAvg's, and says its loss as well; the
server's weights climb towards those whose losses are large (:class:`fedem.mixing.agnostic.Agnostic`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedem.algorithms.base import Local
from fedem.algorithms.single import SingleModel
from fedem.algorithms.training import mean_loss
from fedem.tree import Tree, add_prefix, take_prefix


@final
@dataclass(frozen=True, eq=False)
class AFL(SingleModel):
    """One shared model; a client uploads it with f_t(u), u as received."""

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Each sample's loss under u as received, ``[n]``."""
        return {"losses": self.model.losses(shared, inputs, targets)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """f_t(u)."""
        local, samples = super().begin(shared, personal, scores, mask)
        return local._replace(context={"loss": mean_loss(scores["losses"], mask)}), samples

    def finish(self, local: Local) -> tuple[Tree, Tree]:
        """The model and the loss."""
        return add_prefix("model", local.shared) | local.context, local.personal

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """The mean of the models."""
        return take_prefix("model", mean)
