"""Two instances of federated surrogate optimisation: plain majorisation-minimisation, and Moreau envelopes (pFedMe)."""

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedem.core.errors import UserError
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_map
from fedem.methods.base import Batch, Local, Mixture
from fedem.methods.steps import inner_product, mixture_of_one, square_distance, trained_leaves
from fedem.methods.surrogate import Fixed, Surrogate, draw_about
from fedem.solvers import Newton

_MOST_PARAMETERS = 2000  # whose Hessian can be solved with


@final
@dataclass(frozen=True, eq=False)
class QuadraticBound(Surrogate):
    """Each client bounds its loss by a parabola and goes to its lowest point; nothing is personal.

    g(u) = f(u0) + <grad f(u0), u - u0> + smoothness/2 |u - u0|^2, where f is a client's mean loss. A round is a step of
    gradient descent with rate 1/smoothness on everybody's loss; f never rises where its gradient is Lipschitz with a
    constant of at most ``smoothness``.

    Attributes:
        smoothness: L.
    """

    smoothness: float = field(default=1.0, metadata={"above": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver.weight_decay:
            decay = f"whose weight_decay is {self.solver.weight_decay:g}"
            raise UserError(f"QuadraticBound goes to the lowest point without a solver, {decay}; allowed: 0.")

    def _loss(self, shared: Tree, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (weights * self.model.losses(shared, inputs, targets)).sum()

    def survey(self, shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        weights = mask.to(self.model.dtype) / mask.sum()
        loss = grad_and_value(lambda leaves: self._loss(shared | leaves, inputs, targets, weights))
        gradient, value = loss(trained_leaves(self.model, shared))
        return {"value": value} | add_prefix("gradient", gradient)

    def objective(self, shared: Tree, personal: Tree, batch: Batch) -> Tensor:
        return self._loss(shared, batch.inputs, batch.targets, batch.weights)

    def fix(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> Fixed:
        return Fixed({}, scores | add_prefix("origin", trained_leaves(self.model, shared)))

    def minimise(self, shared: Tree, scores: Tree, fixed: Fixed, mask: Tensor) -> Tree:
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

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        return {}


@final
@dataclass(frozen=True, eq=False)
class MoreauEnvelope(Surrogate):
    """u: a model w. v_t: the client's own model, the proximal point of w, by Newton's method on all its samples.

    Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, as the appendix of the
    FedEM paper has it. With F_t a client's mean loss, u = w and v_t = theta, f_t(w, theta) = F_t(theta) + pull/2
    |theta - w|^2. Its minimum over theta is the Moreau envelope of F_t, and the minimiser the proximal point of w. f_t
    is its own surrogate. The distance of the definition's third condition is the Bregman divergence of
    F_t + pull/2 |.|^2, since w = theta + grad F_t(theta) / pull is a function of theta.
    :class:`~fedem.methods.pfedme.PFedMe` approximates the proximal point on each batch, for models of any size.

    Attributes:
        pull: lambda, the weight of the envelope.
        iterations: of Newton's method; for convex losses it doubles the correct digits in each once it is near.
    """

    pull: float = field(default=1.0, metadata={"above": 0})
    iterations: int = field(default=10, metadata={"min": 1})

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        return dict(shared)

    def survey(self, shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        weights = mask.to(self.model.dtype) / mask.sum()
        batch = Batch(inputs, targets, weights, {}, torch.zeros((), dtype=torch.int64))
        own, rate = dict(shared), torch.ones((), dtype=self.model.dtype, device=inputs.device)

        def objective(candidate: Tree) -> tuple[Tensor, Tree]:
            return self.objective(shared, shared | candidate, batch), {}

        for _ in range(self.iterations):
            own |= Newton().step(objective, trained_leaves(self.model, own), {}, rate)[0]
        return add_prefix("proximal", own)

    def objective(self, shared: Tree, personal: Tree, batch: Batch) -> Tensor:
        """F_t(theta) + pull/2 |theta - w|^2."""
        distance = square_distance(trained_leaves(self.model, personal), shared)
        losses = self.model.losses(personal, batch.inputs, batch.targets)
        return (batch.weights * losses).sum() + self.pull / 2 * distance

    def fix(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> Fixed:
        return Fixed({}, {})

    def minimise(self, shared: Tree, scores: Tree, fixed: Fixed, mask: Tensor) -> Tree:
        return take_prefix("proximal", scores)

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        return self.objective(shared, personal, batch)

    def draw_personal(self, shared: Tree, key: Tensor) -> Tree:
        return draw_about(shared, key, self.model.trainable)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return mixture_of_one(personal)

    def check(self, inputs: Tensor) -> None:
        super().check(inputs)
        if self.model.num_parameters > _MOST_PARAMETERS:
            size = f"this model has {self.model.num_parameters} trained numbers; allowed: at most {_MOST_PARAMETERS}"
            raise UserError(f"MoreauEnvelope finds proximal points by Newton's method: {size}, or method pfedme.")
        if not self.model.is_twice_differentiable:
            raise UserError("MoreauEnvelope needs second derivatives; allowed: models without recurrent layers.")
