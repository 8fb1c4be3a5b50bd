"""Which edges are used in a round: matchings, in turn or at random, and links that fail.

Shapes: T clients, E edges.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.graphs.weights import Edges, Matrix, from_edges
from fedem.randomness import derive, uniform

# Purposes, folded into a round's key.
_MATCHING, _FAILURE = 1, 2


def edges_of(matrix: Matrix) -> Edges:
    """List the edges that have weight."""
    return np.argwhere(np.triu(matrix, 1) > 0)


def edge_numbers(edges: Edges, keys: Tensor, *words: int) -> NDArray[np.float64]:
    """Draw a number in (0, 1) for each edge, by the keys ``[T]`` of its two ends. ``[E]``."""
    ends = keys[torch.from_numpy(edges)].reshape(-1, 2).sort(1).values
    return uniform(derive(derive(*words), ends[:, 0], ends[:, 1]), 1)[:, 0].numpy()


def matchings(num_nodes: int, edges: Edges) -> list[Edges]:
    """Colour the edges so that no two of a colour meet: each takes the first colour that is free at both its ends.

    There are at most twice as many colours as the largest degree, less one.
    """
    free = np.ones((num_nodes, max(1, 2 * int(np.bincount(edges.flatten(), minlength=1).max()))), dtype=bool)
    colours = np.zeros(len(edges), dtype=np.int64)
    for position, (i, j) in enumerate(edges):
        colours[position] = colour = int((free[i] & free[j]).argmax())
        free[i, colour] = free[j, colour] = False
    return [edges[colours == colour] for colour in range(int(colours.max(initial=0)) + 1)]


def pairwise(num_nodes: int, matching: Edges) -> Matrix:
    """Average the pairs of a matching evenly; all others keep what they have."""
    return from_edges(num_nodes, matching, np.full(len(matching), 0.5))


def random_matching(edges: Edges, keys: Tensor, key: int) -> Edges:
    """Choose a maximal matching: the edges come in random order, and each is taken that meets none taken before.

    Those that come first at both their ends are taken at once, again and again: the same edges, and few passes.
    """
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


def without_failures(matrix: Matrix, keys: Tensor, key: int, probability: float) -> Matrix:
    """Let each edge fail with ``probability``; its weight goes back to the diagonal at both ends."""
    edges = edges_of(matrix)
    first, second = edges[edge_numbers(edges, keys, key, _FAILURE) < probability].T
    lost = matrix[first, second]
    left = matrix.copy()
    left[first, second] = left[second, first] = 0
    np.add.at(left, (first, first), lost)
    np.add.at(left, (second, second), lost)
    return left
