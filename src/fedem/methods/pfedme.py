"""pFedMe: personal models as proximal points of the shared one, which descends the Moreau envelopes.

Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020 (Alg. 1).
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix, tree_map, tree_towards
from fedem.methods.base import Batch, Local, Method, register
from fedem.methods.mixer import Star
from fedem.methods.steps import OwnModel, square_distance, train_step, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class PFedMe(OwnModel):
    """v_t approximates argmin f_t(v) + pull/2 |v - w|^2 on a batch; then w <- w - learning_rate pull (w - v).

    Attributes:
        pull: lambda, the weight of the envelope.
        inner_steps: K, solver steps towards the proximal point for each batch.
        inner_rate: learning rate of those steps; 0 takes the schedule's.
        server_rate: beta of the server's step u <- (1 - beta) u + beta mean; 1 is the plain mean.
    """

    compressible: ClassVar[bool] = False

    pull: float = field(default=1.0, metadata={"above": 0})
    inner_steps: int = field(default=5, metadata={"min": 1})
    inner_rate: float = field(default=0.1, metadata={"min": 0})
    server_rate: float = field(default=1.0, metadata={"above": 0})

    def suitable_rate(self, curvature: float) -> float:
        return 1 / (curvature + self.pull)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """The own model starts from u: what the client found in an earlier round may be far from there."""
        return Local(shared, personal | add_prefix("own", shared), {}, {}), {}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """The proximal point of w by ``inner_steps`` steps from where the last batch left it, then w's own step."""
        received, own = trained_leaves(self.model, local.shared), take_prefix("own", local.personal)
        solver_state, rate = self.start(own), learning_rate
        if self.inner_rate:
            rate = torch.full_like(learning_rate, self.inner_rate)

        def pulled(candidate: Tree) -> Tensor:
            return self.pull / 2 * square_distance(candidate, received)

        for _ in range(self.inner_steps):
            own, solver_state = train_step(self.model, self.solver, own, solver_state, batch, rate, pulled)
        # learning_rate * pull above 1 would overshoot the proximal point.
        length = (learning_rate * self.pull).clamp(max=1)
        moved = tree_map(lambda w, v: w - length * (w - v), received, trained_leaves(self.model, own))
        return local._replace(shared=own | moved, personal=self.with_own(own, local.personal))

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        return tree_towards(shared, mean, self.server_rate)


register(Method("pfedme", PFedMe, Star, title="pFedMe", summary="own models as proximal points of the shared one",
                paper="Dinh et al. 2020", personal="a model", unseen="finds its proximal point",
                position=90))  # fmt: skip
