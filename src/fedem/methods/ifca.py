"""IFCA: K shared models; each client trains the one that fits it best.

Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning, NeurIPS 2020 (model averaging).
The same alternation is HypCluster: Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization with Applications
to Federated Learning, 2020.

Shapes: K clusters, n samples of the client.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedem.core.em import uniform_log_weights
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_map
from fedem.methods.base import Local, Method, Mixture, Trained, register
from fedem.methods.mixer import Star
from fedem.methods.steps import NONE_SHARED, SingleModel, common_leaves, distinct_models, mean_by_mass, times_mass


@final
@dataclass(frozen=True, eq=False)
class IFCA(SingleModel):
    """u: K models. v_t: which of them is the client's, as log weights that are 0 there and -inf elsewhere.

    A client chooses when a round begins, and anew when it predicts: the models have moved on since.

    Attributes:
        num_clusters: K, how many models there are; 1 is FedAvg.
        shared_layers: layers that the models have in common, with commas between: "body" for all but the last one,
            "50%" for the first half, or names; every client trains them. "none": models are apart.
    """

    uploads_model: ClassVar[bool] = False
    chooses_anew: ClassVar[bool] = True

    num_clusters: int = field(default=3, metadata={"min": 1})
    shared_layers: str = field(default=NONE_SHARED, metadata={"each": str.strip})

    @cached_property
    def common(self) -> frozenset[str]:
        """The leaves of the shared layers."""
        return common_leaves(self.model, self.shared_layers)

    def init_shared(self, seed: int) -> Tree:
        return distinct_models(self.model, self.num_clusters, seed, self.common)

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """Undecided until the client has taken part: all alike, ``[K]``."""
        like = torch.empty(0, dtype=self.model.dtype, device=key.device)
        return {"log_weights": uniform_log_weights(self.num_clusters, like)}

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Each model's loss on each sample, ``[K, n]``."""
        return {"losses": self.model.component_losses(shared, inputs, targets)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """Choose the model with the least loss on all training samples, and train that one alone."""
        chosen = (scores["losses"] * mask).sum(1).argmin()
        indicator = one_hot(chosen, self.num_clusters).to(scores["losses"])
        own = {name: leaf.index_select(0, chosen[None]) for name, leaf in shared.items() if name not in self.common}
        model = tree_map(lambda leaf: leaf.squeeze(0), shared | own)
        return Local(model, {"log_weights": indicator.log()}, self.start(model), {"indicator": indicator}), {}

    def finish(self, local: Local) -> Trained:
        """Upload the one model, and which it is. In u it stands for all: only the chosen place counts."""
        upload = add_prefix("model", local.shared) | local.context
        return Trained(upload, local.personal, self._everywhere(local.shared))

    def _everywhere(self, model: Tree) -> Tree:
        """The model in all places ``[K, ...]``, what all have in common once."""
        return {name: leaf.expand(self._rows(name), *leaf.shape) for name, leaf in model.items()}

    def _rows(self, leaf: str) -> int:
        return 1 if leaf in self.common else self.num_clusters

    def summand(self, upload: Tree) -> Tree:
        """The model in its cluster's place, zeros in the others, ``[K, ...]``; and where it is."""
        return times_mass(self._everywhere(take_prefix("model", upload)), upload["indicator"])

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        return mean_by_mass(shared, mean)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return Mixture(shared, personal["log_weights"])

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        losses = scores["losses"]
        if losses.shape[1] == 0:
            return {"log_weights": uniform_log_weights(self.num_clusters, losses)}
        chosen = losses.masked_fill(~mask, 0).sum(1).argmin()
        return {"log_weights": one_hot(chosen, self.num_clusters).to(losses).log()}


register(Method("ifca", IFCA, Star, title="IFCA", summary="K models, each client trains the one that fits it best",
                paper="Ghosh et al. 2020", personal="its choice (sent)", sent="K models down, one up",
                unseen="joins the cluster with the least loss", aliases=("hypcluster",), position=160))  # fmt: skip
