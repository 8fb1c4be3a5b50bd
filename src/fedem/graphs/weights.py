"""Mixing matrices of a graph by rules that need the degrees alone, and what every mixing matrix must satisfy.

Shapes: T clients, E edges, each a pair of positions i < j.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.errors import UserError

Edges = NDArray[np.int64]
"""``[E, 2]``: pairs of positions i < j, sorted, each once"""
Matrix = NDArray[np.float64]
"""``[T, T]``"""

ROUNDING = 1e-9
"""how far a sum of weights may be from 1, and a weight from its mirror image"""


def canonical(pairs: NDArray[np.int64]) -> Edges:
    """Put pairs ``[e, 2]`` in order: the smaller position first, sorted, each once."""
    return np.unique(np.sort(np.asarray(pairs, dtype=np.int64).reshape(-1, 2), axis=1), axis=0)


def num_components(num_nodes: int, edges: Edges) -> int:
    """Count the connected components."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(num_nodes, num_nodes))
    return int(connected_components(links, directed=False, return_labels=False))


def degrees(num_nodes: int, edges: Edges) -> NDArray[np.int64]:
    """Count each client's neighbours. ``[T]``."""
    return np.bincount(edges.flatten(), minlength=num_nodes)


def from_edges(num_nodes: int, edges: Edges, weights: NDArray[np.float64]) -> Matrix:
    """Put ``weights`` ``[E]`` on the edges and what is missing to 1 on the diagonal."""
    matrix = np.zeros((num_nodes, num_nodes))
    matrix[edges[:, 0], edges[:, 1]] = matrix[edges[:, 1], edges[:, 0]] = weights
    matrix /= max(1.0, matrix.sum(1).max())  # weights that are solutions of a problem sum to 1 but for rounding
    np.fill_diagonal(matrix, np.maximum(0, 1 - matrix.sum(1)))
    return matrix


def metropolis(num_nodes: int, edges: Edges) -> Matrix:
    """Weigh an edge by 1 / (1 + the larger degree of its ends): each client must know its neighbours' degrees alone."""
    return from_edges(num_nodes, edges, 1 / (1 + degrees(num_nodes, edges)[edges].max(1)))


def max_degree(num_nodes: int, edges: Edges) -> Matrix:
    """Weigh all edges by 1 / (1 + the largest degree of all): all must know that one number."""
    largest = degrees(num_nodes, edges).max(initial=0)
    return from_edges(num_nodes, edges, np.full(len(edges), 1 / (1 + largest)))


def second_modulus(matrix: Matrix | Tensor) -> float:
    """Return the second largest modulus of the eigenvalues of a doubly stochastic matrix ``[T, T]``."""
    array = np.asarray(matrix, dtype=np.float64)
    rest = array - 1 / len(array)  # the eigenvalue 1 of the constant vector becomes 0, and no other changes
    symmetric = np.array_equal(rest, rest.T)
    return float(np.abs(np.linalg.eigvalsh(rest) if symmetric else np.linalg.eigvals(rest)).max())


def check_mixing(matrix: Tensor, edges: Edges | None) -> None:
    """Refuse a matrix ``[T, T]`` that is not symmetric, non-negative and of row sums 1, or with weight off the edges.

    Args:
        matrix: the mixing matrix.
        edges: who may average with whom, beside each with itself; None for everybody with everybody.

    """
    if matrix.ndim != 2 or len(matrix) != matrix.shape[-1] or not len(matrix):
        raise UserError(f"The mixing matrix has the shape {list(matrix.shape)}; allowed: a square [T, T].")
    if not bool(matrix.isfinite().all()):
        raise UserError("The mixing matrix holds values that are not finite; allowed: numbers from 0 to 1.")
    _refuse((matrix - matrix.T).abs() > ROUNDING, matrix, "is not symmetric", "the same weight both ways")
    _refuse(matrix < 0, matrix, "has a negative weight", "at least 0")
    sums = matrix.sum(1)
    if float((sums - 1).abs().max()) > ROUNDING:
        row = int((sums - 1).abs().argmax())
        raise UserError(f"Row {row} of the mixing matrix sums to {float(sums[row])}; allowed: 1.")
    if edges is not None:
        allowed = torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)
        first, second = torch.from_numpy(edges).T
        allowed[first, second] = allowed[second, first] = True
        _refuse((matrix != 0) & ~allowed, matrix, "has weight where the graph has no edge", "0 there")


def _refuse(wrong: Tensor, matrix: Tensor, what: str, allowed: str) -> None:
    """Raise for the first entry that is ``wrong``, if there is one."""
    places = wrong.nonzero().tolist()
    if places:
        i, j = places[0]
        raise UserError(
            f"The mixing matrix {what}: it is {float(matrix[i, j])} at ({i}, {j}) and {float(matrix[j, i])} at "
            f"({j}, {i}); allowed: {allowed}."
        )
