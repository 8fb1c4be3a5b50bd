"""Graphs that are drawn or laid out: one class each.

Shapes: T clients, E edges.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedem.errors import UserError
from fedem.graphs.activity import edge_numbers
from fedem.graphs.base import Topology
from fedem.graphs.weights import Edges, canonical, num_components
from fedem.randomness import derive

_GRAPH = 201  # a purpose, beside those of fedem.randomness
_DRAWS = 100
"""of a random graph, until it is connected"""


@dataclass(frozen=True)
class Laid(Topology):
    """A graph over the clients in the order of their keys, the same in all rounds."""

    def edges(self, keys: Tensor, seed: int) -> list[Edges]:
        """Lay the graph over the clients."""
        in_order, order = keys.cpu().sort(stable=True)
        return [canonical(order.numpy()[self._pairs(in_order, seed)])]

    @abstractmethod
    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        """Return pairs ``[E, 2]`` of places in ``keys``, which ascend."""


@final
@dataclass(frozen=True)
class ErdosRenyi(Laid):
    """Each pair of clients is an edge with ``probability``, each by itself; one that falls apart is drawn anew.

    Attributes:
        probability: of an edge; also the share of all pairs that are edges, on average.

    """

    probability: float = field(default=0.5, metadata={"above": 0, "max": 1})

    @property
    def remedy(self) -> str:
        """More edges or other ones."""
        return f"a graph.probability larger than {self.probability}, or another run.seed"

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        pairs = _all_pairs(len(keys))
        best, least = pairs[:0], len(keys) + 1
        for again in range(_DRAWS):
            drawn = pairs[edge_numbers(pairs, keys, seed, _GRAPH, *([again] if again else [])) < self.probability]
            if (components := num_components(len(keys), drawn)) < least:
                best, least = drawn, components
            if least <= 1:
                break
        return best


@final
@dataclass(frozen=True)
class Complete(Laid):
    """Everybody is everybody's neighbour."""

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        return _all_pairs(len(keys))


@final
@dataclass(frozen=True)
class Ring(Laid):
    """Two neighbours each."""

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        return _circle(np.arange(len(keys)), True)


@final
@dataclass(frozen=True)
class StarGraph(Laid):
    """One client, the first by key, is everybody's neighbour. It is no server: it trains like the others."""

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        others = np.arange(1, len(keys))
        return np.column_stack([np.zeros_like(others), others])


@final
@dataclass(frozen=True)
class Grid(Laid):
    """Rows and columns, as near to a square as the number of clients allows; on a ``torus`` opposite sides meet.

    Attributes:
        torus: whether the last of a row or column is a neighbour of the first.

    """

    torus: bool = True

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        count = len(keys)
        num_rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
        if num_rows == 1 and count > 3:
            raise UserError(
                f"There are {count} clients; allowed for a grid: numbers that are rows times columns, {count - 1} and "
                f"{count + 1} for example. A ring takes any number."
            )
        places = np.arange(count).reshape(num_rows, -1)
        return np.concatenate([_circle(places.T, self.torus), _circle(places, self.torus)])


@final
@dataclass(frozen=True)
class SmallWorld(Laid):
    """A ring where everybody has the same number of neighbours, and then ends of edges are moved at random.

    Watts, Strogatz: Collective dynamics of 'small-world' networks, Nature 1998.

    Attributes:
        neighbours: of each client on the ring, half of them on either side: an even number, below that of the clients.
        rewiring: probability that one end of an edge moves to a client drawn at random.

    """

    neighbours: int = field(default=4, metadata={"min": 2})
    rewiring: float = field(default=0.1, metadata={"min": 0, "max": 1})

    @property
    def remedy(self) -> str:
        """More edges or other ones."""
        settings = f"graph.neighbours above {self.neighbours}, graph.rewiring below {self.rewiring}"
        return f"{settings}, or another run.seed"

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        from networkx import watts_strogatz_graph

        if self.neighbours % 2 or self.neighbours >= len(keys):
            raise UserError(
                f"SmallWorld.neighbours is {self.neighbours}; allowed: an even number below that of the clients "
                f"({len(keys)})."
            )
        graph = watts_strogatz_graph(len(keys), self.neighbours, self.rewiring, seed=_seed(seed))
        return np.array(graph.edges, dtype=np.int64)


@final
@dataclass(frozen=True)
class Regular(Laid):
    """All clients have the same number of neighbours; drawn at random among such graphs, nearly uniformly.

    Attributes:
        degree: neighbours of each client, fewer than there are clients; one of the two numbers must be even.

    """

    degree: int = field(default=4, metadata={"min": 1})

    @property
    def remedy(self) -> str:
        """More edges or other ones."""
        return f"a graph.degree larger than {self.degree}, or another run.seed"

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        from networkx import random_regular_graph

        if self.degree >= len(keys) or self.degree * len(keys) % 2:
            raise UserError(
                f"Regular.degree is {self.degree}; allowed: below the number of clients ({len(keys)}), and one of the "
                "two even."
            )
        graph = random_regular_graph(self.degree, len(keys), seed=_seed(seed))
        return np.array(graph.edges, dtype=np.int64)


def _all_pairs(count: int) -> NDArray[np.int64]:
    return np.column_stack(np.triu_indices(count, 1))


def _circle(places: NDArray[np.int64], closed: bool) -> NDArray[np.int64]:
    """Pair each place with the next one along the first dimension, the last with the first where it is ``closed``."""
    following = np.roll(places, -1, axis=0)
    pairs = np.stack([places, following], axis=-1)[: None if closed else -1].reshape(-1, 2)
    different: NDArray[np.bool_] = pairs[:, 0] != pairs[:, 1]  # a circle of one has no edge
    return pairs[different]


def _seed(seed: int) -> int:
    """Derive a seed for a generator that knows no keys."""
    return int(derive(seed, _GRAPH)) % 2**32
