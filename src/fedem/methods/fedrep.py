"""FedRep: a shared representation below a last layer of each client's own, which is trained first.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021.
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.tree import Tree, tree_map
from fedem.methods.base import Batch, Local, Method, register
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

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        local, samples = super().begin(shared, personal, scores, mask)
        count = scores["num_steps"]
        head_steps = torch.minimum((self.head_share * count.double()).round().long(), count - 1)
        return local._replace(context={"head_steps": head_steps, "step": torch.zeros_like(count)}), samples

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        step, head_steps = local.context["step"], local.context["head_steps"]
        turns = step == head_steps
        afresh = tree_map(lambda new, old: torch.where(turns, new, old), self.start(local.shared), local.solver_state)
        local = local._replace(solver_state=afresh)
        stepped = self.holding_step(local, batch, learning_rate, self._held(local.shared, step < head_steps))
        return stepped._replace(context=local.context | {"step": step + 1})

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        always = torch.ones_like(local.context["step"], dtype=torch.bool)
        return self.holding_step(local, batch, learning_rate, self._held(local.shared, always))

    def _held(self, shared: Tree, is_heads_turn: Tensor) -> Tree:
        """Say of every leaf whether it is fixed, the body's statistics too."""
        head = self.model.leaves_called("head")
        return {name: ~is_heads_turn if name in head else is_heads_turn for name in shared}


register(Method("fedrep", FedRep, Star, title="FedRep",
                summary="a shared body, and a last layer of each client's own, trained before the body in each round",
                paper="Collins et al. 2021", personal="the last layer", sent="the other layers",
                unseen="takes the shared layers, and the mean of the others", local_layers="head",
                position=260))  # fmt: skip
