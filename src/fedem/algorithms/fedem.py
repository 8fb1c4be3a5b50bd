"""FedEM: M shared component models, private mixture weights (Alg. 1 of the paper).

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS 2021.

Shapes: M components, n samples of the client, B of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.func import vmap

from fedem.algorithms.base import Algorithm, Batch, Local, Mixture
from fedem.algorithms.training import distinct_models, start_memory, train_step
from fedem.mixture import fit_log_weights, log_responsibilities, uniform_log_weights, update_log_weights
from fedem.randomness import uniform
from fedem.tree import Tree


@final
@dataclass(frozen=True, eq=False)
class FedEM(Algorithm):
    """u: the M components. v_t: the log mixture weights. The surrogate is fixed by the responsibilities.

    Attributes:
        num_components: M.
        initial_weights: "random" draws each client's mixture weights uniformly from the simplex, as the paper does;
            "uniform" starts all at 1/M.

    """

    num_components: int = field(default=3, metadata={"min": 1})
    initial_weights: str = field(default="random", metadata={"choices": ("random", "uniform")})

    def init_shared(self, seed: int) -> Tree:
        """Draw M models, ``[M, ...]``."""
        return distinct_models(self.model, self.num_components, seed)

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """Log mixture weights ``[M]``."""
        like = torch.empty(0, dtype=self.model.dtype, device=key.device)
        if self.initial_weights == "uniform":
            return {"log_weights": uniform_log_weights(self.num_components, like)}
        # Normalised exponential draws are uniform on the simplex.
        exponentials = -uniform(key, self.num_components).log()
        return {"log_weights": (exponentials / exponentials.sum()).log().to(like)}

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Each component's loss on each sample, in evaluation mode, ``[M, n]``."""
        return {"losses": self.model.component_losses(shared, inputs, targets)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """E-step over all training samples, then the mixture weights (Eqs. 4 and 5)."""
        log_posterior = log_responsibilities(scores["losses"], personal["log_weights"])
        weights = update_log_weights(log_posterior, mask)
        memory = vmap(lambda component: start_memory(self.model, self.solver, component))(shared)
        return Local(shared, {"log_weights": weights}, memory, {}), {"responsibilities": log_posterior.exp()}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """One solver step for each component on its responsibility-weighted loss (Eq. 6)."""

        def one(component: Tree, memory: Tree, responsibilities: Tensor) -> tuple[Tree, Tree]:
            weights = batch.weights * responsibilities
            return train_step(self.model, self.solver, component, memory, batch, weights, learning_rate)

        shared, memory = self.model.over_components(one, (0, 0, 0))(
            local.shared, local.memory, batch.samples["responsibilities"]
        )
        return local._replace(shared=shared, memory=memory)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """The client's mixture of the components."""
        return Mixture(shared, personal["log_weights"])

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """Fit the mixture weights alone, from uniform; one iteration is the paper's rule for unseen clients."""
        return {"log_weights": fit_log_weights(scores["losses"], max_iterations)}
