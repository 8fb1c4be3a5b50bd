"""MOCHA's server: every client's task is a combination of all clients' dual vectors, by a learnt matrix of relations.

See :mod:`fedem.algorithms.mocha` for the problem. Shapes: T clients, C clients of the cohort, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from fedem.mixing.base import Mixed, Round, Uploads, gather, refuse_pairs
from fedem.mixing.groups import OwnGroups
from fedem.tree import Tree, add_prefix, take_prefix, tree_flat, tree_map, tree_repeat


@final
@dataclass(frozen=True)
class Relations(OwnGroups):
    """A group a client: W = V Sigma / (2 lambda). The memory: everybody's dual vector, and Sigma = Omega^-1.

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
        """Sigma is T x T."""
        refuse_pairs("Method mocha", len(keys))

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """Unrelated tasks, Sigma = I/T; all dual vectors zero."""
        weights = {name: leaf for name, leaf in take_prefix("task", shared).items() if name in trained}
        sigma = torch.eye(len(keys), dtype=torch.float64) / len(keys)
        memory = add_prefix("dual", tree_repeat(tree_map(torch.zeros_like, weights), len(keys)))
        memory |= {"relations": sigma, "rounds": torch.zeros((), dtype=torch.int64)}
        return tree_repeat(shared, len(keys)) | {"stiffness": self._stiffness(sigma).to(shared["stiffness"])}, memory

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """Take the new dual vectors, update Sigma from the tasks when it is due, and compute all tasks again."""
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
        return tree_map(
            lambda leaf: (sigma.to(leaf.dtype) @ leaf.flatten(1) / (2 * self.penalty)).reshape(leaf.shape), dual
        )

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
    root: Tensor = (vectors * values) @ vectors.T / values.sum()
    return (1 - floor) * root + floor * identity
