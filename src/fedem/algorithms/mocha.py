"""MOCHA: a linear model for each client, tied together by a learnt matrix of relations.

Smith, Chiang, Sanjabi, Talwalkar: Federated Multi-Task Learning, NeurIPS 2017. The problem is

    min over W, Omega of  sum_t sum_i loss(w_t; x_ti, y_ti) + lambda tr(W Omega W^T),   Omega^-1 >= 0, tr(Omega^-1) = 1.

MOCHA works on the dual. A client's dual variables act through one vector v_t alone (the paper's X_t alpha_t), and the
tasks are W = V Sigma / (2 lambda) with Sigma = Omega^-1. The paper's data-local subproblem is a quadratic in the change
of v_t; its own dual is the proximal problem that a client solves here, with any local solver and any loss:

    min over w of  f_t(w) + <v_t, w> + |w - w_t|^2 / (2 c_t),   then  v_t <- v_t + (w - w_t) / c_t,

f_t being the sum over the client's samples and c_t = sigma' Sigma_tt / (2 lambda). Solved exactly, v_t = -grad f_t(w).
The server's side is :class:`fedem.mixing.relations.Relations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.algorithms.base import Batch, Local, Mixture
from fedem.algorithms.single import SingleModel
from fedem.algorithms.training import (
    Penalty,
    inner_product,
    mixture_of_one,
    square_distance,
    start_memory,
    trained_leaves,
)
from fedem.errors import UserError
from fedem.tree import Tree, add_prefix, take_prefix, tree_map


@final
@dataclass(frozen=True, eq=False)
class Mocha(SingleModel):
    """u (a tree for each client): its task's model w_t and 1/c_t. v_t: the dual vector, uploaded after each round."""

    def init_shared(self, seed: int) -> Tree:
        """The zero model, to which the zero dual belongs; what is not trained is as given."""
        model = self.model.init(seed)
        task = model | tree_map(torch.zeros_like, trained_leaves(self.model, model))
        return add_prefix("task", task) | {"stiffness": torch.zeros((), dtype=self.model.dtype)}

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """A dual vector of zero."""
        return tree_map(torch.zeros_like, trained_leaves(self.model, take_prefix("task", shared)))

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """The proximal problem around w_t. Losses are means over batches, so the rest is divided by n_t."""
        task = take_prefix("task", shared)
        context = add_prefix("received", trained_leaves(self.model, task))
        context["stiffness"] = shared["stiffness"]
        context["share"] = 1 / mask.sum().to(self.model.dtype)
        return Local(task, personal, start_memory(self.model, self.solver, task), context), {}

    def penalty(self, local: Local) -> Penalty | None:
        """(<v_t, w> + |w - w_t|^2 / (2 c_t)) / n_t."""
        received, share = take_prefix("received", local.context), local.context["share"]
        stiffness = local.context["stiffness"]
        return lambda candidate: (
            share * (inner_product(candidate, local.personal) + stiffness / 2 * square_distance(candidate, received))
        )

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A step no longer than the proximal term's own curvature allows."""
        curvature = local.context["stiffness"] * local.context["share"]
        return super().step(local, batch, learning_rate / (1 + learning_rate * curvature))

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A client that trains for itself alone forgets the dual vector, which speaks for the others."""
        alone = local._replace(personal=tree_map(torch.zeros_like, local.personal))
        return self.step(alone, batch, learning_rate)._replace(personal=local.personal)

    def finish(self, local: Local) -> tuple[Tree, Tree]:
        """v_t <- v_t + (w - w_t) / c_t."""
        received, stiffness = take_prefix("received", local.context), local.context["stiffness"]
        trained = trained_leaves(self.model, local.shared)
        dual = tree_map(lambda v, w, start: v + stiffness * (w - start), local.personal, trained, received)
        return dual, dual

    def keep(self, local: Local) -> tuple[Tree, Tree]:
        """The task's model as it was fine-tuned."""
        return add_prefix("task", local.shared) | {"stiffness": local.context["stiffness"]}, local.personal

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """The task's model."""
        return mixture_of_one(take_prefix("task", shared))

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """An unseen client has no dual vector yet; it fine-tunes the mean of all tasks."""
        return self.init_personal(shared, torch.zeros((), dtype=torch.int64))

    def check(self, inputs: Tensor) -> None:
        """The outputs must be linear in the parameters."""
        trees = [self.model.init(seed) for seed in (0, 1)]
        trained = [trained_leaves(self.model, tree) for tree in trees]
        together = tree_map(torch.add, *trained)
        apart = torch.stack([self.model.outputs(trees[0] | tree, inputs) for tree in trained]).sum(0)
        if not torch.allclose(self.model.outputs(trees[0] | together, inputs), apart, rtol=1e-3, atol=1e-4):
            raise UserError(
                "Method mocha trains linear models alone, and this is none; choose another method or model."
            )
