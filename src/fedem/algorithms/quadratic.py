"""Plain majorisation-minimisation: each client bounds its loss by a parabola and goes to its lowest point."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from torch import Tensor
from torch.func import grad_and_value

from fedem.algorithms.base import Batch, Local
from fedem.algorithms.surrogate import Fixed, Surrogate
from fedem.algorithms.training import inner_product, trained_leaves
from fedem.errors import UserError
from fedem.tree import Tree, add_prefix, take_prefix, tree_map


@final
@dataclass(frozen=True, eq=False)
class QuadraticBound(Surrogate):
    """g(u) = f(u0) + <grad f(u0), u - u0> + smoothness/2 |u - u0|^2, where f is a client's mean loss.

    A round is a step of gradient descent with rate 1/smoothness on everybody's loss; f never rises where its gradient
    is Lipschitz with a constant of at most ``smoothness``. Nothing is personal.

    Attributes:
        smoothness: L.

    """

    smoothness: float = field(default=1.0, metadata={"above": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver.weight_decay:
            raise UserError(
                f"QuadraticBound goes to the lowest point without a solver, whose weight_decay is "
                f"{self.solver.weight_decay:g}; allowed: 0."
            )

    def _loss(self, shared: Tree, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (weights * self.model.losses(shared, inputs, targets)).sum()

    def survey(self, shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        """f(u0) and its gradient."""
        weights = mask.to(self.model.dtype) / mask.sum()
        gradient, value = grad_and_value(lambda leaves: self._loss(shared | leaves, inputs, targets, weights))(
            trained_leaves(self.model, shared)
        )
        return {"value": value} | add_prefix("gradient", gradient)

    def objective(self, shared: Tree, personal: Tree, batch: Batch) -> Tensor:
        """The mean loss."""
        return self._loss(shared, batch.inputs, batch.targets, batch.weights)

    def fix(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> Fixed:
        """The value and the slope there, and where that is."""
        return Fixed({}, scores | add_prefix("origin", trained_leaves(self.model, shared)))

    def minimise(self, shared: Tree, scores: Tree, fixed: Fixed, mask: Tensor) -> Tree:
        """Nothing is personal."""
        return {}

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        """The parabola, the same for every batch."""
        origin, gradient = take_prefix("origin", context), take_prefix("gradient", context)
        away = tree_map(lambda at, leaf: leaf - at, origin, shared)
        return context["value"] + inner_product(away, gradient) + self.smoothness / 2 * inner_product(away, away)

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """Go to the lowest point, u0 - grad f(u0) / smoothness."""
        origin, gradient = take_prefix("origin", local.context), take_prefix("gradient", local.context)
        lowest = tree_map(lambda at, slope: at - slope / self.smoothness, origin, gradient)
        return local._replace(shared=local.shared | lowest)

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """Nothing to fit: an unseen client takes the shared model."""
        return {}
