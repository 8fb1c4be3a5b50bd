"""An ensemble: M FedAvg models from different starts, whose predictions are averaged.

Lakshminarayanan, Pritzel, Blundell: Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles, NeurIPS
2017. Nothing is personal, so it is the control for FedEM with a small sharpness: what several models give without any
division of the samples among them.

Shapes: M models.
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor
from torch.func import vmap

from fedem.core.em import uniform_log_weights
from fedem.core.tree import Tree, tree_floats, tree_repeat
from fedem.methods.base import Batch, Local, Method, Mixture, register
from fedem.methods.mixer import Star
from fedem.methods.steps import SingleModel, distinct_models, train_step


@final
@dataclass(frozen=True, eq=False)
class Ensemble(SingleModel):
    """u: M models, each trained on all samples as FedAvg trains its one, on the same batches.

    Attributes:
        num_components: M, how many models there are; 1 is FedAvg.
    """

    takes_label_shares: ClassVar[bool] = True
    has_several_models: ClassVar[bool] = True

    num_components: int = field(default=3, metadata={"min": 1})

    def init_shared(self, seed: int) -> Tree:
        """FedEM's components of the same seed; one alone is FedAvg's model."""
        if self.num_components == 1:
            return tree_repeat(self.model.init(seed), 1)
        return distinct_models(self.model, self.num_components, seed)

    def start(self, parameters: Tree) -> Tree:
        """A solver's state for each model, ``[M, ...]``."""
        return vmap(super().start)(parameters)

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """FedAvg's step for each model."""

        def one(component: Tree, state: Tree) -> tuple[Tree, Tree]:
            return train_step(self.model, self.solver, component, state, batch, learning_rate)

        shared, solver_state = self.model.over_components(one, (0, 0))(local.shared, local.solver_state)
        return local._replace(shared=shared, solver_state=solver_state)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        like = next(iter(tree_floats(shared).values()))
        return Mixture(shared, uniform_log_weights(self.num_components, like))


register(Method("ensemble", Ensemble, Star, title="Ensemble",
                summary="M FedAvg models from different starts, predictions averaged",
                paper="Lakshminarayanan et al. 2017", sent="M models", unseen="takes the ensemble as it is",
                position=230))  # fmt: skip
