"""The contract of graphs: clients that average with their neighbours, without a server, and how fast they agree.

In round k they average with W^k, which is symmetric, doubly stochastic, non-negative, and positive on the graph's edges
and the diagonal alone. Whatever is random depends on the clients' keys, never on their positions: graphs are laid over
the clients in the order of their keys, and so are sums, so that not even rounding depends on who stands where.

How fast they agree are the constants p and tau of the paper's assumption. With Xi_{k+1} = Xi_k W^k, after a cycle of
tau rounds E|Xi W^0 ... W^{tau-1} (I - J)|_F^2 = tr(Xi X Xi'), where X comes from I - J by X <- E[W X W], from the last
round of the cycle to the first. So 1 - p is the largest eigenvalue of X.

Shapes: T clients, E edges, tau phases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.random import choose, derive, uniform
from fedem.core.settings import Settings
from fedem.graphs.weights import Edges, Matrix, canonical, check_mixing, degrees, num_components, second_modulus, weigh

MOST_WEIGHTS = 10**8  # weights at most in all matrices: 800 MB
_NUM_DRAWS = 300  # of a random matrix, for a mean over them
_MATCHING, _FAILURE, _DRAWS = 1, 2, 3  # purposes, folded into a round's key


@dataclass(frozen=True)
class Topology(Settings, ABC):
    """A graph of clients and how they average over it.

    Attributes:
        weights: how much of a neighbour's models a client takes. "fmmc": the weights that bring clients together
            fastest (:mod:`fedem.graphs.weights`); "metropolis": 1 / (1 + the larger degree of the two);
            "max_degree": 1 / (1 + the largest degree of all). Matchings average pairs evenly, whatever it says: then
            it must be left as it is.
        laziness: the share that a client keeps of its own models besides, W <- (1 - laziness) W + laziness I.
        activity: which edges are used in a round. "all"; "matchings": the edges of one colour, the colours in turn, no
            two edges of a colour having a client in common; "random_matching": a maximal matching drawn in each round.
        link_failure: the probability that an edge fails in a round, each by itself. Its weight then stays at both ends.
        scale: what is scaled by T n_t / n, so that clients count by their numbers of samples. "steps": every local
            step, as the paper does; "updates": what all steps of a round come to, for any method and solver; "none".
        start: whether all clients start from the same models ("alike") or each from its own ("apart").
    """

    remedy: ClassVar[str] = "another graph"  # where the graph is not connected; with names of settings in braces
    weights: str = field(default="fmmc", metadata={"choices": ("fmmc", "max_degree", "metropolis")})
    laziness: float = field(default=0.0, metadata={"min": 0, "below": 1})
    activity: str = field(default="all", metadata={"choices": ("all", "matchings", "random_matching")})
    link_failure: float = field(default=0.0, metadata={"min": 0, "below": 1})
    scale: str = field(default="updates", metadata={"choices": ("none", "steps", "updates")})
    start: str = field(default="alike", metadata={"choices": ("alike", "apart")})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activity != "all" and self.weights != "fmmc":
            said = f"{type(self).__name__}.weights is {self.weights!r} and activity is {self.activity!r}"
            raise UserError(f'{said}, where pairs average evenly; allowed: weights by default, or activity = "all".')

    @abstractmethod
    def edges(self, keys: Tensor, seed: int) -> list[Edges]:
        """Return the edges ``[E, 2]`` of each phase, between positions in ``keys`` ``[T]``: i < j, sorted, each once.

        There is one phase, unless the graph changes from round to round.
        """

    def matrices(self, keys: Tensor, seed: int) -> Tensor:
        """Return the mixing matrices of a cycle, ``[tau, T, T]`` float64, before anything random.

        For random matchings they say by positive weights who may meet, and :meth:`draw` says who does.
        """
        num_clients = len(keys)
        _check_size(num_clients, 1)
        ranks = keys.cpu().argsort(stable=True).argsort()
        phases = [canonical(ranks.numpy()[edges]) for edges in self.edges(keys, seed)]
        together = canonical(np.concatenate(phases))
        if (components := num_components(num_clients, together)) > 1:
            least, remedy = int(degrees(num_clients, together).min()), self.remedy.format(**vars(self))
            said = f"The graph has {components} components, and the client with the fewest neighbours has {least}"
            raise UserError(f"{said}; allowed: a connected graph, or clients could never agree. What helps: {remedy}.")
        if self.activity == "matchings":
            phases = [matching for edges in phases for matching in matchings(num_clients, edges)]
        _check_size(num_clients, len(phases))
        rule = {"matchings": "pairs", "random_matching": "metropolis"}.get(self.activity, self.weights)
        found = torch.empty(len(phases), num_clients, num_clients, dtype=torch.float64)
        for place, edges in enumerate(phases):
            matrix = torch.from_numpy(self._lazy(weigh(rule, num_clients, edges)))
            check_mixing(matrix, edges)
            found[place] = matrix[ranks][:, ranks]
        return found

    def draw(self, matrices: Tensor, round_index: int, keys: Tensor, key: int) -> Tensor:
        """Return the mixing matrix of a round, ``[T, T]`` float64; ``key`` is the source of its random numbers.

        ``matrices`` ``[tau, T, T]`` are those of :meth:`matrices` for clients with these ``keys`` ``[T]``.
        """
        given = matrices[round_index % len(matrices)]
        if self.activity != "random_matching" and not self.link_failure:
            return given
        keys, order = keys.cpu().sort(stable=True)
        matrix = given.cpu()[order][:, order].numpy()
        if self.activity == "random_matching":
            matrix = self._lazy(weigh("pairs", len(keys), random_matching(edges_of(matrix), keys, key)))
        if self.link_failure:  # the weight of an edge that fails goes back to the diagonal at both ends
            edges = edges_of(matrix)
            first, second = edges[edge_numbers(edges, keys, key, _FAILURE) < self.link_failure].T
            lost, matrix = matrix[first, second], matrix.copy()
            matrix[first, second] = matrix[second, first] = 0
            np.add.at(matrix, (first, first), lost)
            np.add.at(matrix, (second, second), lost)
        ranks = order.argsort()
        return torch.from_numpy(matrix)[ranks][:, ranks].to(given.device)

    def consensus(self, matrices: Tensor, keys: Tensor, num_present: int | None = None) -> Consensus:
        """Say how fast clients agree, ``num_present`` of whom, chosen at random, take part in a round; None for all.

        It is exact for links that fail; for random matchings, and where not everybody is present, expectations are
        means over draws. ``matrices`` and ``keys`` are as in :meth:`draw`.
        """
        present = None if num_present is None or num_present >= len(keys) else num_present
        is_estimate = present is not None or self.activity == "random_matching"
        rest, product = np.eye(len(keys)) - 1 / len(keys), np.eye(len(keys))
        for phase in reversed(range(len(matrices))):
            if is_estimate:
                outer, mean = np.zeros_like(rest), np.zeros_like(rest)
                # One draw is in memory at a time.
                for word in derive(derive(_DRAWS, phase), torch.arange(_NUM_DRAWS)).tolist():
                    drawn = self.draw(matrices, phase, keys, word).cpu()
                    if present is not None:  # the others keep what they have
                        chosen = choose(keys.cpu(), present, word)
                        part, drawn = among(drawn, chosen), torch.eye(len(keys), dtype=torch.float64)
                        drawn[chosen[:, None], chosen] = part
                    outer += drawn.numpy() @ rest @ drawn.numpy()
                    mean += drawn.numpy()
                rest, mean = outer / _NUM_DRAWS, mean / _NUM_DRAWS
            else:
                rest, mean = with_failures(matrices[phase].cpu().numpy(), self.link_failure, rest)
            product = mean @ product
        left = float(np.linalg.eigvalsh((rest + rest.T) / 2).max())
        return Consensus(1 - second_modulus(product), min(1.0, 1 - left), len(matrices), is_estimate)

    def _lazy(self, matrix: Matrix) -> Matrix:
        return (1 - self.laziness) * matrix + self.laziness * np.eye(len(matrix))


def _check_size(num_clients: int, num_phases: int) -> None:
    if (count := num_phases * num_clients**2) > MOST_WEIGHTS:
        made = f"{num_clients:,} clients and {num_phases:,} phases make {count:,} weights"
        raise UserError(f"{made}; allowed: at most {MOST_WEIGHTS:,}.")


def edges_of(matrix: Matrix) -> Edges:
    """List the edges that have weight."""
    return np.argwhere(np.triu(matrix, 1) > 0)


def edge_numbers(edges: Edges, keys: Tensor, *words: int) -> NDArray[np.float64]:
    """Draw a number in (0, 1) for each edge, by the keys ``[T]`` of its two ends. ``[E]``."""
    ends = keys[torch.from_numpy(edges)].reshape(-1, 2).sort(1).values
    return uniform(derive(derive(*words), ends[:, 0], ends[:, 1]), 1)[:, 0].numpy()


def matchings(num_nodes: int, edges: Edges) -> list[Edges]:
    """Colour the edges so that no two of a colour meet: each takes the first colour that is free at both its ends."""
    # There are at most twice as many colours as the largest degree, less one.
    free = np.ones((num_nodes, max(1, 2 * int(np.bincount(edges.flatten(), minlength=1).max()))), dtype=bool)
    colours = np.zeros(len(edges), dtype=np.int64)
    for position, (i, j) in enumerate(edges):
        colours[position] = colour = int((free[i] & free[j]).argmax())
        free[i, colour] = free[j, colour] = False
    return [edges[colours == colour] for colour in range(int(colours.max(initial=0)) + 1)]


def random_matching(edges: Edges, keys: Tensor, key: int) -> Edges:
    """Choose a maximal matching: the edges come in random order, and each is taken that meets none taken before."""
    # Those that come first at both their ends are taken at once, again and again: the same edges, and few passes.
    numbers, busy, taken = edge_numbers(edges, keys, key, _MATCHING), np.zeros(len(keys), dtype=bool), edges[:0]
    while len(edges):
        first = np.ones(len(keys))
        np.minimum.at(first, edges, numbers[:, None])
        chosen = edges[(first[edges] == numbers[:, None]).all(1)]
        taken = np.concatenate([taken, chosen])
        busy[chosen] = True
        free = ~busy[edges].any(1)
        edges, numbers = edges[free], numbers[free]
    return taken


def among(matrix: Tensor, present: Tensor) -> Tensor:
    """Restrict a mixing matrix to some clients, ``[T, T] -> [C, C]``: each keeps what it would give to the others."""
    part = matrix[present][:, present].clone()
    part.diagonal().add_(1 - part.sum(1))
    return part


class Consensus(NamedTuple):
    """How fast clients agree: in expectation a cycle of ``tau`` rounds leaves 1 - p of their squared distance at most.

    The spectral gap is 1 less the second largest modulus of an eigenvalue of E[W], of the product over a cycle where it
    has phases. Where expectations are estimates, means over draws, the chance in them makes both rather too small.
    """

    spectral_gap: float
    p: float
    tau: int
    is_estimate: bool


def with_failures(matrix: Matrix, probability: float, inner: Matrix) -> tuple[Matrix, Matrix]:
    """Return E[W X W] and E[W], where W is ``matrix`` and each edge fails with ``probability``, X is ``inner``.

    W = I - sum over the edges of w b (e_i - e_j)(e_i - e_j)' with independent b, 1 or 0: beside E[W] X E[W] there is
    the variance of each b by itself, times what the edge carries, (e_i - e_j)' X (e_i - e_j).
    """
    mean = (1 - probability) * matrix + probability * np.eye(len(matrix))
    first, second = edges_of(matrix).T
    diagonal = inner.diagonal()
    carried = diagonal[first] + diagonal[second] - inner[first, second] - inner[second, first]
    spread = np.zeros_like(matrix)
    spread[first, second] = probability * (1 - probability) * matrix[first, second] ** 2 * carried
    spread += spread.T
    return mean @ inner @ mean + np.diag(spread.sum(1)) - spread, mean
