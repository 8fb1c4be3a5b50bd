"""Federated surrogate optimisation: a method given by its objective and by a surrogate of it.

All clients together minimise f(u, v) = sum_t n_t / n f_t(u, v_t). Near (u0, v0) a client has a partial first-order
surrogate g of f_t, as the paper defines it:

1. g >= f_t everywhere;
2. r = g - f_t has a Lipschitz gradient in u; r and its gradient in u vanish at (u0, v0);
3. for v minimising g(u, .), g(u, v0) - g(u, v) is a function of v0 and v alone, which is zero only where they agree.

:func:`fedem.surrogates.check` tries the three conditions; :func:`fedem.surrogates.optimise` runs the rounds.

Shapes: n samples of the client, B samples of a batch.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.random import derive, uniform
from fedem.core.tree import Tree
from fedem.methods.base import Algorithm, Batch, Local, Mixture
from fedem.methods.steps import mixture_of_one, trained_leaves


class Fixed(NamedTuple):
    """What fixes a surrogate for a round."""

    columns: Tree  # of each sample, [..., n]; a batch has its own among ``samples``
    context: Tree  # of the client


@dataclass(frozen=True, eq=False)
class Surrogate(Algorithm):
    """A method for one client, given by f_t and g. u is one model, unless a subclass draws another.

    Losses are those of evaluation mode, so layers must do the same in training; an own ``step`` may lift that.
    """

    @abstractmethod
    def objective(self, shared: Tree, personal: Tree, batch: Batch) -> Tensor:
        """f_t(u, v) over a batch, a number: samples count by ``batch.weights``, which sum to one."""

    @abstractmethod
    def fix(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> Fixed:
        """Build g near (u, v); arguments as in ``begin``."""

    @abstractmethod
    def minimise(self, shared: Tree, scores: Tree, fixed: Fixed, mask: Tensor) -> Tree:
        """Return the v that minimises g(u, .); the scores are those under this u, which need not be where g was built.

        Its leaves are of the same kinds as those of ``init_personal``; none where nothing is personal.
        """

    @abstractmethod
    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        """g(u, v) over a batch, a number like the objective; ``batch.samples`` has what was fixed for each sample."""

    def draw_personal(self, shared: Tree, key: Tensor) -> Tree:
        """Draw any v, to try the conditions at; ``key`` and leaves are as in ``init_personal``."""
        return self.init_personal(shared, key)

    def between(self, first: Tree, second: Tree, share: float) -> Tree:
        """Return the v that lies ``share`` of the way from ``first`` to ``second``, likewise."""
        return {name: torch.lerp(leaf, second[name], share) for name, leaf in first.items()}

    def init_shared(self, seed: int) -> Tree:
        return self.model.init(seed)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        fixed = self.fix(shared, personal, scores, mask)
        personal = self.minimise(shared, scores, fixed, mask)
        return Local(shared, personal, self.start(shared), fixed.context), fixed.columns

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """One solver step on g in the trained leaves of u."""

        def objective(candidate: Tree) -> tuple[Tensor, Tree]:
            return self.majorant(local.shared | candidate, local.personal, local.context, batch), {}

        leaves = trained_leaves(self.model, local.shared)
        trained, solver_state, _ = self.solver.step(objective, leaves, local.solver_state, learning_rate)
        return local._replace(shared=local.shared | trained, solver_state=solver_state)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return mixture_of_one(shared)

    def check(self, inputs: Tensor) -> None:
        """Refuse layers that do something else in training, such as dropout and batch normalisation."""
        several = inputs[torch.arange(32) % len(inputs)]  # enough samples for dropout to show
        model, parameters = self.model, self.model.init(0)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            trained, _ = model.training_outputs(parameters, several, None, torch.zeros((), dtype=torch.int64))
            if not torch.allclose(trained, model.outputs(parameters, several), rtol=1e-4, atol=1e-6):
                problem = "takes one function for f in training and in evaluation, and this model is two"
                allowed = "layers that do the same in both, so no dropout and no batch normalisation"
                raise UserError(f"{type(self).__name__} {problem}; allowed: {allowed}.")


def draw_about(tree: Tree, key: Tensor, names: Iterable[str], width: float = 1.0) -> Tree:
    """Add normal draws of this ``width`` to the leaves of ``tree`` called ``names``."""
    drawn = dict(tree)
    for number, name in enumerate(sorted(names)):
        leaf = tree[name]
        draws = (2 * uniform(derive(key, number), leaf.numel()) - 1).erfinv() * 2**0.5
        drawn[name] = leaf + width * draws.reshape(leaf.shape).to(leaf)
    return drawn
