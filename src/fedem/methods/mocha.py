"""MOCHA: a linear model for each client, tied together by a learnt matrix of relations.

Smith, Chiang, Sanjabi, Talwalkar: Federated Multi-Task Learning, NeurIPS 2017. The problem is

    min over W, Omega of  sum_t sum_i loss(w_t; x_ti, y_ti) + lambda tr(W Omega W^T),   Omega^-1 >= 0, tr(Omega^-1) = 1.

MOCHA works on the dual. A client's dual variables act through one vector v_t alone (the paper's X_t alpha_t), and the
tasks are W = V Sigma / (2 lambda) with Sigma = Omega^-1. The paper's data-local subproblem is a quadratic in the change
of v_t; its own dual is the proximal problem that a client solves here, with any local solver and any loss:

    min over w of  f_t(w) + <v_t, w> + |w - w_t|^2 / (2 c_t),   then  v_t <- v_t + (w - w_t) / c_t,

f_t being the sum over the client's samples and c_t = sigma' Sigma_tt / (2 lambda). Solved exactly, v_t = -grad f_t(w).
When the server learns Sigma anew, it keeps the tasks and takes the V that belongs to them: kept dual vectors would make
the tasks jump, by up to T times, and many rounds would be lost on the way back.

Shapes: T clients, C clients of the cohort, P parameters.
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_flat, tree_map
from fedem.methods.base import Batch, Local, Method, Mixture, Trained, register
from fedem.methods.mixer import Mixed, OwnGroups, Round, Start, Uploads, check_pairs, gather
from fedem.methods.steps import Penalty, SingleModel, inner_product, square_distance, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class Mocha(SingleModel):
    """u (a tree for each client): its task's model w_t, its dual vector v_t, and 1/c_t. The new v_t is uploaded."""

    uploads_model: ClassVar[bool] = False

    def init_shared(self, seed: int) -> Tree:
        """The zero model, to which the zero dual belongs; what is not trained is as given."""
        model = self.model.init(seed)
        zeros = tree_map(torch.zeros_like, trained_leaves(self.model, model))
        stiffness = {"stiffness": torch.zeros((), dtype=self.model.dtype)}
        return add_prefix("task", model | zeros) | add_prefix("dual", zeros) | stiffness

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """The proximal problem around w_t. Losses are means over batches, so the rest is divided by n_t."""
        task = take_prefix("task", shared)
        context = add_prefix("received", trained_leaves(self.model, task))
        context |= add_prefix("dual", take_prefix("dual", shared))
        context |= {"stiffness": shared["stiffness"], "share": 1 / mask.sum().to(self.model.dtype)}
        return Local(task, personal, self.start(task), context), {}

    def penalty(self, local: Local) -> Penalty | None:
        """(<v_t, w> + |w - w_t|^2 / (2 c_t)) / n_t."""
        received, dual = take_prefix("received", local.context), take_prefix("dual", local.context)
        share = local.context["share"]
        half = local.context["stiffness"] / 2
        return lambda w: share * (inner_product(w, dual) + half * square_distance(w, received))

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A step no longer than the proximal term's own curvature allows."""
        curvature = local.context["stiffness"] * local.context["share"]
        return super().step(local, batch, learning_rate / (1 + learning_rate * curvature))

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A client that trains for itself alone forgets the dual vector, which speaks for the others."""
        zeros = tree_map(torch.zeros_like, take_prefix("dual", local.context))
        alone = local._replace(context=local.context | add_prefix("dual", zeros))
        return self.step(alone, batch, learning_rate)._replace(context=local.context)

    def finish(self, local: Local) -> Trained:
        """v_t <- v_t + (w - w_t) / c_t."""
        received, stiffness = take_prefix("received", local.context), local.context["stiffness"]
        trained, dual = trained_leaves(self.model, local.shared), take_prefix("dual", local.context)
        dual = tree_map(lambda v, w, start: v + stiffness * (w - start), dual, trained, received)
        own = add_prefix("task", local.shared) | add_prefix("dual", dual) | {"stiffness": stiffness}
        return Trained(dual, local.personal, own)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return super().predictor(take_prefix("task", shared), personal)

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        """An unseen client fine-tunes the mean of all tasks."""
        return {}

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

    One group per client. The memory: Sigma = Omega^-1, and the number of rounds.

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
        sigma = torch.eye(count, dtype=torch.float64) / count
        memory = {"relations": sigma, "rounds": torch.zeros((), dtype=torch.int64)}
        return groups | {"stiffness": self._stiffness(sigma).to(shared["stiffness"])}, memory

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        clients = this.clients.to(memory["rounds"].device)
        dual = tree_map(lambda old, new: old.index_copy(0, clients, new), take_prefix("dual", shared), gather(uploads))
        sigma, rounds = memory["relations"], memory["rounds"] + 1
        tasks = _combined(sigma / (2 * self.penalty), dual)
        if self.relations_every and int(rounds) % self.relations_every == 0:
            sigma = relations_of(tree_flat(tasks, 1).double(), self.floor)
            dual = _combined(2 * self.penalty * torch.linalg.inv(sigma), tasks)
        means = shared | add_prefix("task", tasks) | add_prefix("dual", dual)
        means |= {"stiffness": self._stiffness(sigma).to(shared["stiffness"])}
        return Mixed(torch.arange(this.num_clients), means, len(clients)), {"relations": sigma, "rounds": rounds}

    def _stiffness(self, sigma: Tensor) -> Tensor:
        """1/c_t = 2 lambda / (sigma' Sigma_tt), with sigma' large enough for everybody to step at once, ``[T]``."""
        diagonal = sigma.diagonal()
        coupling = (sigma.abs().sum(1) / diagonal).max()
        return 2 * self.penalty / (coupling * diagonal)


def _combined(weights: Tensor, vectors: Tree) -> Tree:
    """Return the combinations of clients' vectors by the rows of ``weights``, ``[T, T]``."""
    return tree_map(lambda leaf: (weights @ leaf.flatten(1).double()).to(leaf).reshape(leaf.shape), vectors)


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
                paper="Smith et al. 2017", sent="a model and a dual vector down, a dual vector up",
                unseen="fine-tunes the mean of all models", position=110))  # fmt: skip
