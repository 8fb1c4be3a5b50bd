"""No server: clients average with their neighbours in a graph, by the rows of a mixing matrix (D-FedEM, D-SGD).

The paper's Alg. "Fully Decentralized Federated Surrogate Optimization": u_t <- sum_s W_ts u_s, with a matrix W for each
round that is symmetric and doubly stochastic, and local steps scaled by n_t / n so that the mean of all u_t descends
sum_t n_t / n f_t. Here the scale is T n_t / n, which is 1 for clients of equal size, so that a learning rate means the
same as with a server. It is put on every step, as the paper does, or on the sum of all steps of a round.

Shapes: T clients, C clients of the cohort, c of a chunk, E links of all phases, tau phases.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedem.core.tree import Tree, row_of
from fedem.graphs import Ring, Topology, among
from fedem.methods.base import Method, register
from fedem.methods.fedavg import FedAvg
from fedem.methods.fedem import FedEM
from fedem.methods.mixer import Mixed, OwnGroups, Round, RoundPlan, Start, Uploads, Welcome, weighted_means


class Turn(NamedTuple):
    """Who averages what with whom in a round."""

    matrix: Tensor  # [C, C]
    uploads: Uploads  # as they are averaged: perhaps scaled
    num_messages: int  # one for each direction of a link that is in use


@final
@dataclass(frozen=True)
class Graph(OwnGroups):
    """One group per client. The memory: the links and weights of all phases, the names, and how many rounds were mixed.

    A client that does not take part in a round neither trains nor talks: what its neighbours would have given to it,
    they keep.
    """

    adds_up: ClassVar[bool] = True
    over_graph: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    seeks_consensus: ClassVar[bool] = True

    topology: Topology = field(default_factory=Ring)

    @property
    def graph(self) -> Topology:
        return self.topology

    def check(self, keys: Tensor, seed: int) -> None:
        """Build the graph: it may be disconnected, or not exist for their number."""
        self.topology.matrices(keys, seed)

    def init(self, start: Start) -> tuple[Tree, Tree]:
        groups = start.draw_each() if self.topology.start == "apart" else super().init(start)[0]
        return groups, remember(self.topology.matrices(start.keys, start.seed), start.keys)

    def plan(self, shared: Tree, memory: Tree, this: Round) -> RoundPlan:
        return super().plan(shared, memory, this)._replace(scales=self.step_scales(this.sizes, this.average_size))

    def step_scales(self, sizes: Tensor, average_size: float) -> Tensor | None:
        """T n_t / n, where every step is scaled, ``[C]``; ``average_size`` is n / T."""
        return sizes.double() / average_size if self.topology.scale == "steps" else None

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """Everybody's mean over its neighbours."""
        turn, memory = self.turn(shared, memory, this, uploads)
        return Mixed(this.clients, weighted_means(turn.matrix, turn.uploads), turn.num_messages), memory

    def turn(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Turn, Tree]:
        """Return who averages what with whom in a round, and the next memory."""
        phase = int(memory["rounds"]) % int(memory["tau"])
        matrix = self.topology.draw(recall(memory, phase)[None], 0, memory["keys"].cpu(), this.key)
        matrix = among(matrix, this.clients)
        num_messages = int((matrix > 0).sum() - (matrix.diagonal() > 0).sum())
        if self.topology.scale == "updates":
            uploads = scaled(shared, this, uploads)
        return Turn(matrix, uploads, num_messages), memory | {"rounds": memory["rounds"] + 1}

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        """The mean over all clients, towards which they tend."""
        return super().welcome(shared, memory)._replace(fine_tune=False)

    def summary(self, memory: Tree, cohort_size: int) -> dict[str, float]:
        matrices = torch.stack([recall(memory, phase) for phase in range(int(memory["tau"]))])
        found = self.topology.consensus(matrices, memory["keys"].cpu(), cohort_size)
        figures = {f"consensus_{name}": getattr(found, name) for name in ("p", "tau", "is_estimate")}
        return {"spectral_gap": found.spectral_gap} | figures


def scaled(shared: Tree, this: Round, uploads: Uploads) -> Iterator[tuple[Tensor, Tree]]:
    """Stretch the change that each client's training made by T n_t / n; what is not trained stays as it is."""
    for positions, trees in uploads:
        stretched = dict(trees)
        for name in trees.keys() & this.trained:
            start = shared[name][this.clients[positions].to(shared[name].device)]
            scales = (this.sizes[positions].double() / this.average_size).to(start)
            stretched[name] = torch.lerp(start, trees[name], row_of(scales, start))
        yield positions, stretched


def remember(matrices: Tensor, keys: Tensor) -> Tree:
    """Keep mixing matrices ``[tau, T, T]`` by their links ``[E, 3]`` (phase and both ends) and weights ``[E]``."""
    links, rounds = matrices.triu(1).nonzero(), torch.zeros((), dtype=torch.int64)
    weights, tau = matrices[links.unbind(1)], torch.tensor(len(matrices))
    return {"links": links, "weights": weights, "tau": tau, "keys": keys, "rounds": rounds}


def recall(memory: Tree, phase: int) -> Tensor:
    """Return the mixing matrix of a phase, ``[T, T]`` on the CPU."""
    links, weights, count = memory["links"].cpu(), memory["weights"].cpu(), len(memory["keys"])
    here = links[:, 0] == phase
    first, second = links[here, 1:].T
    matrix = torch.zeros(count, count, dtype=torch.float64)
    matrix[first, second] = matrix[second, first] = weights[here]
    matrix.diagonal().copy_((1 - matrix.sum(1)).clamp(min=0))
    return matrix


register(
    Method("dfedem", FedEM, Graph, title="D-FedEM",
           summary="FedEM without a server: components averaged with neighbours in a graph", paper="Marfoq et al. 2021",
           personal="mixture weights", sent="M models to and from each neighbour", unseen="fits its mixture weights",
           position=20),
    Method("dsgd", FedAvg, Graph, title="D-SGD",
           summary="FedAvg without a server: models averaged with neighbours in a graph", paper="Lian et al. 2017",
           sent="a model to and from each neighbour", unseen="takes the mean of all models", position=30),
)  # fmt: skip
