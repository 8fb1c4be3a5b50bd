"""SCAFFOLD: FedAvg whose clients correct their drift by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020 (Alg. 1, option II).
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix, tree_map, tree_towards
from fedem.methods.base import Batch, Local, Method, Mixture, Trained, register
from fedem.methods.mixer import Star
from fedem.methods.steps import Penalty, SingleModel, inner_product, require_gradient_steps, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class Scaffold(SingleModel):
    """u: the model and the control c. v_t: the client's control c_t. A local gradient is corrected by c - c_t.

    The paper averages clients equally; here they count by their samples, in the controls as in the models.

    Attributes:
        server_rate: eta_g, the length of the server's step towards the clients' mean; 1 takes the mean.
    """

    uploads_model: ClassVar[bool] = False
    needs_share: ClassVar[bool] = True

    server_rate: float = field(default=1.0, metadata={"above": 0})

    def check(self, inputs: Tensor) -> None:
        """The controls are read off the steps, so a step must be a multiple of a gradient."""
        require_gradient_steps("scaffold", self.solver)

    def init_shared(self, seed: int) -> Tree:
        model = self.model.init(seed)
        control = tree_map(torch.zeros_like, trained_leaves(self.model, model))
        return add_prefix("model", model) | add_prefix("control", control)

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        return tree_map(torch.zeros_like, take_prefix("control", shared))

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        model = take_prefix("model", shared)
        correction = tree_map(lambda c, mine: c - mine, take_prefix("control", shared), personal)
        context = add_prefix("correction", correction) | add_prefix("received", trained_leaves(self.model, model))
        zero = torch.zeros((), dtype=self.model.dtype, device=mask.device)
        context |= {"steps": zero, "travelled": zero}
        return Local(model, personal, self.start(model), context), {}

    def penalty(self, local: Local) -> Penalty | None:
        """<c - c_t, w>, whose gradient is the correction."""
        correction = take_prefix("correction", local.context)
        return lambda candidate: inner_product(candidate, correction)

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A corrected step. K eta is how far the steps would have gone along a gradient of one."""
        stepped = super().step(local, batch, learning_rate)
        steps = local.context["steps"] + 1
        travelled = local.context["travelled"] + learning_rate * self.solver.gain(steps)
        return stepped._replace(context=local.context | {"steps": steps, "travelled": travelled})

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A client that trains for itself alone wants no correction."""
        return self.plain_step(local, batch, learning_rate)

    def finish(self, local: Local) -> Trained:
        """Upload the model and the change of c_t, where c_t <- c_t - c + (u - w) / (K eta)."""
        received, correction = (take_prefix(name, local.context) for name in ("received", "correction"))
        # A learning rate of zero moves nothing and shows nothing.
        scale = 1 / local.context["travelled"].clamp(min=torch.finfo(self.model.dtype).tiny)
        trained = trained_leaves(self.model, local.shared)
        personal = tree_map(lambda extra, u, w: (u - w) * scale - extra, correction, received, trained)
        change = tree_map(lambda new, old: new - old, personal, local.personal)
        model = add_prefix("model", local.shared)
        return Trained(model | add_prefix("control", change), personal, model)

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """U <- u + eta_g (mean - u); c <- c + share * mean change, the share being the paper's |S|/N by samples."""
        model = tree_towards(take_prefix("model", shared), take_prefix("model", mean), self.server_rate)
        old, change = take_prefix("control", shared), take_prefix("control", mean)
        control = tree_map(lambda c, extra: c + share * extra, old, change)
        return add_prefix("model", model) | add_prefix("control", control)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return super().predictor(take_prefix("model", shared), personal)

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        return tree_map(torch.zeros_like, take_prefix("control", shared))


register(Method("scaffold", Scaffold, Star, title="SCAFFOLD",
                summary="FedAvg, the clients' drift corrected by control variates", paper="Karimireddy et al. 2020",
                personal="a control", sent="a model and a control", position=150))  # fmt: skip
