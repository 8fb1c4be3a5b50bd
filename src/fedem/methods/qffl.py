"""q-FFL: clients with larger losses weigh more, by a power q.

Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020 (q-FedAvg, Alg. 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix, tree_map
from fedem.methods.base import Batch, Local, Method, Trained, register
from fedem.methods.mixer import Star
from fedem.methods.steps import SingleModel, mean_loss, require_gradient_steps, square_distance, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class QFFL(SingleModel):
    """The objective is sum_t n_t/n f_t(u)^(q+1) / (q+1).

    Attributes:
        q: 0 is FedAvg; the larger, the more the worst clients count.
    """

    uploads_model: ClassVar[bool] = False

    q: float = field(default=1.0, metadata={"min": 0})

    def check(self, inputs: Tensor) -> None:
        """The smoothness is one over the learning rate, so a step must be a multiple of a gradient."""
        require_gradient_steps("qffl", self.solver)

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Each sample's loss under u as received, ``[n]``."""
        return {"losses": self.model.losses(shared, inputs, targets)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        local, samples = super().begin(shared, personal, scores, mask)
        context = add_prefix("received", trained_leaves(self.model, shared))
        context["loss"] = mean_loss(scores["losses"], mask)
        context["rate"] = torch.zeros((), dtype=self.model.dtype, device=mask.device)
        return local._replace(context=context), samples

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """FedAvg's step; the learning rate is 1/L."""
        stepped = super().step(local, batch, learning_rate)
        return stepped._replace(context=local.context | {"rate": learning_rate.expand_as(local.context["rate"])})

    def finish(self, local: Local) -> Trained:
        """With d = L (u - w): upload f^q d, and h = q f^(q-1) |d|^2 + L f^q."""
        received, trained = take_prefix("received", local.context), trained_leaves(self.model, local.shared)
        # A loss of zero, to a power below zero, would be infinite.
        loss = local.context["loss"].clamp(min=torch.finfo(self.model.dtype).eps)
        smoothness = 1 / local.context["rate"].clamp(min=torch.finfo(self.model.dtype).tiny)
        power = loss**self.q
        steepness = self.q * loss ** (self.q - 1) * smoothness**2 * square_distance(received, trained)
        push = tree_map(lambda u, w: power * smoothness * (u - w), received, trained)
        buffers = {name: leaf for name, leaf in local.shared.items() if name not in trained}
        upload = add_prefix("push", push) | add_prefix("buffers", buffers)
        upload["curvature"] = steepness + smoothness * power
        return Trained(upload, local.personal, local.shared)

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """U <- u - sum f^q d / sum h."""
        push = take_prefix("push", mean)
        moved = tree_map(lambda d, u: u - d / mean["curvature"], push, {name: shared[name] for name in push})
        return shared | take_prefix("buffers", mean) | moved


register(Method("qffl", QFFL, Star, title="q-FFL", summary="one model, clients with larger losses weigh more",
                paper="Li et al. 2020", sent="a model; a number up", position=140))  # fmt: skip
