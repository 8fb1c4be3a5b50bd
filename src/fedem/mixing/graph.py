"""No server: clients average with their neighbours in a graph, by the rows of a mixing matrix (D-FedEM, D-SGD).

The paper's Alg. "Fully Decentralized Federated Surrogate Optimization": u_t <- sum_s W_ts u_s, with a matrix W for each
round that is symmetric and doubly stochastic, and local steps scaled by n_t / n so that the mean of all u_t descends
sum_t n_t / n f_t. Here they are scaled by T n_t / n, which is 1 for clients of equal size: the factor T belongs to the
learning rate, and with it a rate means the same as with a server.

Shapes: T clients, C clients of the cohort, tau phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

from fedem.graphs import Ring, Topology
from fedem.mixing.base import Mixed, Round, Uploads, Welcome, weighted_means
from fedem.mixing.groups import OwnGroups, mean_of_groups
from fedem.tree import Tree


@final
@dataclass(frozen=True)
class Graph(OwnGroups):
    """A group a client. The memory: the mixing matrices of all phases, how many rounds were mixed, and the names.

    A client that does not take part in a round neither trains nor talks: what its neighbours would have given to it,
    they keep.
    """

    topology: Topology = field(default_factory=Ring)

    @property
    def starts_apart(self) -> bool:
        """Whether every client draws models of its own."""
        return self.topology.start == "apart"

    def check(self, keys: Tensor, seed: int) -> None:
        """Build the graph: it may be disconnected, or not exist for so many clients."""
        _matrices(self.topology, tuple(keys.tolist()), seed)

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """All start alike, unless the training draws for each."""
        groups, _ = super().init(shared, trained, keys, seed)
        matrices = _matrices(self.topology, tuple(keys.tolist()), seed)
        return groups, {"matrices": matrices, "keys": keys, "rounds": torch.zeros((), dtype=torch.int64)}

    def scales(self, sizes: Tensor) -> Tensor | None:
        """T n_t / n."""
        return sizes.double() / sizes.double().mean() if self.topology.scale_steps else None

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """Everybody's mean over its neighbours; a message for each direction of a link that is in use."""
        matrix = self.topology.draw(memory["matrices"].cpu(), int(memory["rounds"]), memory["keys"].cpu(), this.key)
        matrix = among(matrix, this.clients)
        num_messages = int((matrix > 0).sum() - (matrix.diagonal() > 0).sum())
        mixed = Mixed(this.clients, weighted_means(matrix, uploads), num_messages)
        return mixed, memory | {"rounds": memory["rounds"] + 1}

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """The mean over all clients, towards which they tend."""
        return Welcome(mean_of_groups(shared))

    def facts(self, memory: Tree) -> dict[str, float]:
        """How fast the graph brings clients together: the constants of the paper's assumption."""
        found = self.topology.consensus(memory["matrices"].cpu(), memory["keys"].cpu())
        return {"spectral_gap": found.spectral_gap, "consensus_p": found.p, "consensus_tau": found.tau}


def among(matrix: Tensor, clients: Tensor) -> Tensor:
    """Restrict a mixing matrix to some clients, ``[T, T] -> [C, C]``: each keeps what it would give to the others."""
    part = matrix[clients][:, clients].clone()
    part.diagonal().add_(1 - part.sum(1))
    return part


@lru_cache(maxsize=4)
def _matrices(topology: Topology, keys: tuple[int, ...], seed: int) -> Tensor:
    """Return the matrices, found once: those that mix fastest take seconds for hundreds of clients."""
    return topology.matrices(torch.tensor(keys), seed)
