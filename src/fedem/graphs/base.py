"""The contract of graphs: clients that average with their neighbours, without a server.

In round k they average with W^k, which is symmetric, doubly stochastic, non-negative, and positive on the graph's edges
and the diagonal alone. Whatever is random depends on the clients' keys, never on their positions: graphs are laid over
the clients in the order of their keys, and so are sums, so that not even rounding depends on who stands where.

Shapes: T clients, E edges, tau phases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedem.errors import UserError
from fedem.graphs.activity import among, edges_of, matchings, pairwise, random_matching, without_failures
from fedem.graphs.consensus import Consensus, consensus_of, over_draws, with_failures
from fedem.graphs.fastest import LARGEST_SHARE, fastest_mixing
from fedem.graphs.weights import Edges, Matrix, canonical, check_mixing, degrees, max_degree, metropolis, num_components
from fedem.randomness import choose, derive
from fedem.settings import Settings

MOST_WEIGHTS = 10**8
"""weights at most in all matrices: 800 MB"""

_NUM_DRAWS = 300
_DRAWS = 3  # a purpose, beside those of fedem.graphs.activity


@dataclass(frozen=True)
class Topology(Settings, ABC):
    """A graph of clients and how they average over it.

    Attributes:
        weights: how much of a neighbour's models a client takes. "fmmc": the weights that bring clients together
            fastest (:mod:`fedem.graphs.fastest`); "metropolis": 1 / (1 + the larger degree of the two);
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

    weights: str = field(default="fmmc", metadata={"choices": ("fmmc", "max_degree", "metropolis")})
    laziness: float = field(default=0.0, metadata={"min": 0, "below": 1})
    activity: str = field(default="all", metadata={"choices": ("all", "matchings", "random_matching")})
    link_failure: float = field(default=0.0, metadata={"min": 0, "below": 1})
    scale: str = field(default="updates", metadata={"choices": ("none", "steps", "updates")})
    start: str = field(default="alike", metadata={"choices": ("alike", "apart")})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activity != "all" and self.weights != "fmmc":
            raise UserError(
                f"{type(self).__name__}.weights is {self.weights!r} and activity is {self.activity!r}, where pairs "
                'average evenly; allowed: weights as it is by default, or activity = "all".'
            )

    @abstractmethod
    def edges(self, keys: Tensor, seed: int) -> list[Edges]:
        """Return the edges ``[E, 2]`` of each phase, between positions in ``keys`` ``[T]``: i < j, sorted, each once.

        There is one phase, unless the graph changes from round to round.
        """

    @property
    def remedy(self) -> str:
        """What helps where the graph is not connected."""
        return "another graph"

    def matrices(self, keys: Tensor, seed: int) -> Tensor:
        """Return the mixing matrices of a cycle, ``[tau, T, T]`` float64, before anything random.

        For random matchings they say by positive weights who may meet, and :meth:`draw` says who does.
        """
        num_clients = len(keys)
        self._check_size(num_clients, 1)
        ranks = keys.cpu().argsort(stable=True).argsort()
        phases = [canonical(ranks.numpy()[edges]) for edges in self.edges(keys, seed)]
        self._check_connected(num_clients, phases)
        if self.activity == "matchings":
            phases = [matching for edges in phases for matching in matchings(num_clients, edges)]
        self._check_size(num_clients, len(phases))
        found = torch.empty(len(phases), num_clients, num_clients, dtype=torch.float64)
        for place, edges in enumerate(phases):
            matrix = torch.from_numpy(self._lazy(self._weigh(num_clients, edges)))
            check_mixing(matrix, edges)
            found[place] = matrix[ranks][:, ranks]
        return found

    def draw(self, matrices: Tensor, round_index: int, keys: Tensor, key: int) -> Tensor:
        """Return the mixing matrix of a round, ``[T, T]`` float64.

        Args:
            matrices: ``[tau, T, T]``, of :meth:`matrices`.
            round_index: it decides the phase.
            keys: ``[T]``, the clients'.
            key: the source of the round's random numbers.

        """
        given = matrices[round_index % len(matrices)]
        if self.activity != "random_matching" and not self.link_failure:
            return given
        keys, order = keys.cpu().sort(stable=True)
        matrix: Matrix = given.cpu()[order][:, order].numpy()
        if self.activity == "random_matching":
            matrix = self._lazy(pairwise(len(keys), random_matching(edges_of(matrix), keys, key)))
        if self.link_failure:
            matrix = without_failures(matrix, keys, key, self.link_failure)
        ranks = order.argsort()
        return torch.from_numpy(matrix)[ranks][:, ranks].to(given.device)

    def consensus(self, matrices: Tensor, keys: Tensor, num_present: int | None = None) -> Consensus:
        """Say how fast clients agree.

        It is exact for links that fail; for random matchings, and where not everybody is present, expectations are
        means over draws.

        Args:
            matrices: ``[tau, T, T]``, of :meth:`matrices`.
            keys: ``[T]``, the clients'.
            num_present: clients in a round, chosen at random; None for all.

        """
        is_sampled = num_present is not None and num_present < len(keys)
        is_estimate = is_sampled or self.activity == "random_matching"

        def drawn(phase: int, word: int) -> Matrix:
            matrix = self.draw(matrices, phase, keys, word).cpu()
            if is_sampled and num_present is not None:
                present = choose(keys.cpu(), num_present, word)
                part, matrix = among(matrix, present), torch.eye(len(keys), dtype=torch.float64)
                matrix[present[:, None], present] = part
            return matrix.numpy()

        def expectation(phase: int, inner: Matrix) -> tuple[Matrix, Matrix]:
            if not is_estimate:
                return with_failures(matrices[phase].cpu().numpy(), self.link_failure, inner)
            words = derive(derive(_DRAWS, phase), torch.arange(_NUM_DRAWS)).tolist()
            return over_draws((drawn(phase, word) for word in words), inner)

        return consensus_of(expectation, len(keys), len(matrices), is_estimate)

    def _lazy(self, matrix: Matrix) -> Matrix:
        return (1 - self.laziness) * matrix + self.laziness * np.eye(len(matrix))

    def _weigh(self, num_clients: int, edges: Edges) -> Matrix:
        """Return the matrix of one phase's graph."""
        if self.activity == "matchings":
            return pairwise(num_clients, edges)
        if self.weights == "max_degree":
            return max_degree(num_clients, edges)
        if self.weights == "metropolis" or self.activity == "random_matching":
            return metropolis(num_clients, edges)
        if (components := num_components(num_clients, edges)) > 1:
            raise UserError(
                f'The graph of one of the rounds has {components} components; allowed for weights = "fmmc": one. '
                'Use weights = "metropolis", for which the graphs of all rounds must be connected together only.'
            )
        found = fastest_mixing(num_clients, edges)
        share = (found.value - found.bound) / (1 - found.value)
        if share > LARGEST_SHARE:
            raise UserError(
                f"After {found.iterations} iterations the spectral gap of the fastest mixing matrix of this graph is "
                f'known to within {share:.0%} only; allowed: {LARGEST_SHARE:.0%}. Use weights = "metropolis".'
            )
        return found.matrix

    def _check_connected(self, num_clients: int, phases: list[Edges]) -> None:
        """Refuse phases whose edges together leave clients apart."""
        together = canonical(np.concatenate(phases))
        if (components := num_components(num_clients, together)) > 1:
            least = int(degrees(num_clients, together).min())
            raise UserError(
                f"The graph has {components} components, and the client with the fewest neighbours has {least}; "
                f"allowed: a connected graph, or clients could never agree. What helps: {self.remedy}."
            )

    def _check_size(self, num_clients: int, num_phases: int) -> None:
        if num_phases * num_clients**2 > MOST_WEIGHTS:
            raise UserError(
                f"{num_clients:,} clients and {num_phases:,} phases make {num_phases * num_clients**2:,} weights; "
                f"allowed: at most {MOST_WEIGHTS:,}."
            )
