"""MOCHA: a linear model for each client, tied together by a learnt matrix of relations.

Smith, Chiang, Sanjabi, Talwalkar: Federated Multi-Task Learning, NeurIPS 2017. The problem is

    min over W, Omega of  sum_t sum_i loss(w_t; x_ti, y_ti) + lambda tr(W Omega W^T),   Omega^-1 >= 0, tr(Omega^-1) = 1.

MOCHA works on the dual. A client's dual variables act through one vector v_t alone (the paper's X_t alpha_t), and the
tasks are W = V Sigma / (2 lambda) with Sigma = Omega^-1. The paper's data-local subproblem is a quadratic in the change
of v_t; its own dual is the proximal problem that a client solves here, with any local solver and any loss:

    min over w of  f_t(w) + <v_t, w> + |w - w_t|^2 / (2 c_t),   then  v_t <- v_t + (w - w_t) / c_t,

f_t being the sum over the client's samples and c_t = sigma' Sigma_tt / (2 lambda). Solved exactly, v_t = -grad f_t(w).

Shapes: T clients, C clients of the cohort, P parameters.
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_flat, tree_map, tree_repeat
from fedem.methods.base import Batch, Local, Method, Mixture, Trained, register
from fedem.methods.mixer import Mixed, OwnGroups, Round, Start, Uploads, check_pairs, gather
from fedem.methods.steps import Penalty, SingleModel, inner_product, square_distance, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class Mocha(SingleModel):
    """u (a tree for each client): its task's model w_t and 1/c_t. v_t: the dual vector, uploaded after each round."""

    uploads_model: ClassVar[bool] = False

    def init_shared(self, seed: int) -> Tree:
        """The zero model, to which the zero dual belongs; what is not trained is as given."""
        model = self.model.init(seed)
        task = model | tree_map(torch.zeros_like, trained_leaves(self.model, model))
        return add_prefix("task", task) | {"stiffness": torch.zeros((), dtype=self.model.dtype)}

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        return tree_map(torch.zeros_like, trained_leaves(self.model, take_prefix("task", shared)))

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """The proximal problem around w_t. Losses are means over batches, so the rest is divided by n_t."""
        task = take_prefix("task", shared)
        context = add_prefix("received", trained_leaves(self.model, task))
        context |= {"stiffness": shared["stiffness"], "share": 1 / mask.sum().to(self.model.dtype)}
        return Local(task, personal, self.start(task), context), {}

    def penalty(self, local: Local) -> Penalty | None:
        """(<v_t, w> + |w - w_t|^2 / (2 c_t)) / n_t."""
        received, share, dual = take_prefix("received", local.context), local.context["share"], local.personal
        half = local.context["stiffness"] / 2
        return lambda w: share * (inner_product(w, dual) + half * square_distance(w, received))

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A step no longer than the proximal term's own curvature allows."""
        curvature = local.context["stiffness"] * local.context["share"]
        return super().step(local, batch, learning_rate / (1 + learning_rate * curvature))

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A client that trains for itself alone forgets the dual vector, which speaks for the others."""
        alone = local._replace(personal=tree_map(torch.zeros_like, local.personal))
        return self.step(alone, batch, learning_rate)._replace(personal=local.personal)

    def finish(self, local: Local) -> Trained:
        """v_t <- v_t + (w - w_t) / c_t."""
        received, stiffness = take_prefix("received", local.context), local.context["stiffness"]
        trained = trained_leaves(self.model, local.shared)
        dual = tree_map(lambda v, w, start: v + stiffness * (w - start), local.personal, trained, received)
        return Trained(dual, dual, add_prefix("task", local.shared) | {"stiffness": stiffness})

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return super().predictor(take_prefix("task", shared), personal)

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """An unseen client has no dual vector yet; it fine-tunes the mean of all tasks."""
        return self.init_personal(shared, torch.zeros((), dtype=torch.int64))

    def check(self, inputs: Tensor) -> None:
        trees = [self.model.init(seed) for seed in (0, 1)]
        trained = [trained_leaves(self.model, tree) for tree in trees]
        together = tree_map(torch.add, *trained)
        apart = torch.stack([self.model.outputs(trees[0] | tree, inputs) for tree in trained]).sum(0)
        if not torch.allclose(self.model.outputs(trees[0] | together, inputs), apart, rtol=1e-3, atol=1e-4):
            raise UserError("Method mocha trains linear models alone; choose another method, or a linear model.")


@final
@dataclass(frozen=True)
class Relations(OwnGroups):
    """The server: every client's task is a combination of all clients' dual vectors, W = V Sigma / (2 lambda).

    One group per client. The memory: everybody's dual vector, and Sigma = Omega^-1.

    Attributes:
        penalty: lambda, the weight of the regulariser tr(W Omega W') of all tasks' models W.
        relations_every: rounds between updates of Sigma, enough for the tasks to settle; 0 never updates it, and the
            tasks stay unrelated.
        floor: the least eigenvalue of Sigma relative to its mean one, so that no direction is ruled out for ever.
    """

    penalty: float = field(default=1.0, metadata={"above": 0})
    relations_every: int = field(default=30, metadata={"min": 0})
    floor: float = field(default=1e-3, metadata={"above": 0, "max": 1})

    def check(self, keys: Tensor, seed: int) -> None:
        check_pairs("Method mocha", len(keys))

    def init(self, start: Start) -> tuple[Tree, Tree]:
        """Unrelated tasks, Sigma = I/T; all dual vectors zero."""
        (groups, _), shared, count = super().init(start), start.shared, len(start.keys)
        weights = {name: leaf for name, leaf in take_prefix("task", shared).items() if name in start.trained}
        sigma = torch.eye(count, dtype=torch.float64) / count
        memory = add_prefix("dual", tree_repeat(tree_map(torch.zeros_like, weights), count))
        memory |= {"relations": sigma, "rounds": torch.zeros((), dtype=torch.int64)}
        return groups | {"stiffness": self._stiffness(sigma).to(shared["stiffness"])}, memory

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        clients = this.clients.to(memory["rounds"].device)
        dual = tree_map(lambda old, new: old.index_copy(0, clients, new), take_prefix("dual", memory), gather(uploads))
        sigma, rounds = memory["relations"], memory["rounds"] + 1
        if self.relations_every and int(rounds) % self.relations_every == 0:
            sigma = relations_of(tree_flat(self._tasks(sigma, dual), 1).double(), self.floor)
        means = shared | add_prefix("task", self._tasks(sigma, dual))
        means |= {"stiffness": self._stiffness(sigma).to(shared["stiffness"])}
        memory = add_prefix("dual", dual) | {"relations": sigma, "rounds": rounds}
        return Mixed(torch.arange(this.num_clients), means, len(clients)), memory

    def _tasks(self, sigma: Tensor, dual: Tree) -> Tree:
        """W = V Sigma / (2 lambda)."""
        scale = 2 * self.penalty
        return tree_map(lambda leaf: (sigma.to(leaf.dtype) @ leaf.flatten(1) / scale).reshape(leaf.shape), dual)

    def _stiffness(self, sigma: Tensor) -> Tensor:
        """1/c_t = 2 lambda / (sigma' Sigma_tt), with sigma' large enough for everybody to step at once, ``[T]``."""
        diagonal = sigma.diagonal()
        coupling = (sigma.abs().sum(1) / diagonal).max()
        return 2 * self.penalty / (coupling * diagonal)


def relations_of(tasks: Tensor, floor: float) -> Tensor:
    """Return Sigma = (W W^T)^(1/2) / tr, the minimiser of tr(W^T Sigma^-1 W) with trace 1. ``[T, P] -> [T, T]``.

    Tasks of zero say nothing and leave Sigma = I/T. Zhang, Yeung: A Convex Formulation for Learning Task Relationships
    in Multi-Task Learning, UAI 2010.
    """
    count = len(tasks)
    identity = torch.eye(count, dtype=tasks.dtype, device=tasks.device) / count
    vectors, values, _ = torch.linalg.svd(tasks, full_matrices=False)
    if float(values.sum()) == 0:
        return identity
    root = (vectors * values) @ vectors.T / values.sum()
    return (1 - floor) * root + floor * identity


register(Method("mocha", Mocha, Relations, title="MOCHA", summary="linear models tied by a learnt matrix of relations",
                paper="Smith et al. 2017", personal="a dual vector (sent)", sent="a model down, a dual vector up",
                unseen="fine-tunes the mean of all models", position=110))  # fmt: skip
