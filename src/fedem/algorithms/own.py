"""Methods whose clients have a model of their own, v_t, beside the shared one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedem.algorithms.base import Mixture
from fedem.algorithms.single import SingleModel
from fedem.algorithms.training import mixture_of_one
from fedem.tree import Tree, add_prefix, take_prefix, tree_map


@dataclass(frozen=True, eq=False)
class OwnModel(SingleModel):
    """Until a client has first trained, its own model is u, and that is what it starts from: u as it is by then."""

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """A place for the model, which nobody has trained."""
        return add_prefix("own", shared) | {"trained": torch.zeros((), dtype=torch.bool, device=key.device)}

    def own(self, shared: Tree, personal: Tree) -> Tree:
        """Return the client's own model."""
        return tree_map(lambda v, u: torch.where(personal["trained"], v, u), take_prefix("own", personal), shared)

    def begun(self, shared: Tree, personal: Tree) -> tuple[Tree, Tree]:
        """Return the own model that a round starts from, and v_t with it."""
        own = self.own(shared, personal)
        return own, personal | add_prefix("own", own)

    def trained(self, own: Tree, personal: Tree) -> Tree:
        """Return v_t with the own model after a step."""
        return personal | add_prefix("own", own) | {"trained": torch.ones_like(personal["trained"])}

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """The own model."""
        return mixture_of_one(self.own(shared, personal))

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """An unseen client trains its own model by the method's own steps, u fixed."""
        return None
