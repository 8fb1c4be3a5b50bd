"""APFL: each client predicts with a blend of the shared model and one of its own, in parameter space.

Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, 2020 (Alg. 1).
"""

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from fedem.core.precision import model_gradient
from fedem.core.tree import Tree, take_prefix, tree_map
from fedem.methods.base import Batch, Local, Method, Mixture, register
from fedem.methods.mixer import Star
from fedem.methods.steps import OwnModel, batch_loss, mixture_of_one, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class APFL(OwnModel):
    """The predictor is alpha v + (1 - alpha) w; v is trained through it, w as in FedAvg.

    Attributes:
        alpha: the share of the own model at the start; 0 is FedAvg, 1 is Local.
        adaptive: whether alpha follows its gradient, once a round at its first batch.
    """

    alpha: float = field(default=0.5, metadata={"min": 0, "max": 1})
    adaptive: bool = True

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        share = torch.full((), self.alpha, dtype=self.model.dtype, device=key.device)
        return super().init_personal(shared, key) | {"alpha": share}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        return self.begin_both(shared, personal, {"moved": torch.zeros_like(personal["alpha"])}), {}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A step on w; one on v by the gradient at the blend; in the first step of a round, one on alpha."""
        own, alpha = take_prefix("own", local.personal), local.personal["alpha"]
        if self.adaptive:

            def loss(share: Tensor) -> Tensor:
                leaves = own | _blend(share, trained_leaves(self.model, own), local.shared)
                return batch_loss(self.model, leaves, batch)[0]

            moved = (alpha - learning_rate * model_gradient(loss)(alpha)).clamp(0, 1)
            alpha = torch.where(local.context["moved"] > 0, alpha, moved)
        context = {"moved": torch.ones_like(local.context["moved"])}
        local = local._replace(personal=local.personal | {"alpha": alpha}, context=context)
        return self.step_both(local, batch, learning_rate, place=lambda leaves: _blend(alpha, leaves, local.shared))

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        own = self.own_model(shared, personal)
        return mixture_of_one(own | _blend(personal["alpha"], trained_leaves(self.model, own), shared))


def _blend(alpha: Tensor, own: Tree, shared: Tree) -> Tree:
    return tree_map(lambda v, w: alpha * v + (1 - alpha) * w, own, shared)


register(Method("apfl", APFL, Star, title="APFL", summary="a blend of the shared model and an own one",
                paper="Deng et al. 2020", personal="a model, its share", unseen="trains its own model and share",
                position=100))  # fmt: skip
