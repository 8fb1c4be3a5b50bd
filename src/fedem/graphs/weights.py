"""Mixing matrices of a graph: by rules that need the degrees alone, and the fastest one; and what all must satisfy.

The fastest mixing matrix is the one whose second largest modulus of an eigenvalue is least (Boyd, Diaconis, Xiao:
Fastest Mixing Markov Chain on a Graph, SIAM Review 2004). The problem is to minimise |W - J|, the largest modulus of an
eigenvalue, J = 1/T everywhere, over the symmetric doubly stochastic W with weight on the edges and the diagonal alone.
It is convex, and solved here by the alternating direction method of multipliers with X = W - J: both steps have closed
forms or nearly so, and the multipliers give a bound, so the result is known to be optimal up to a stated gap. The best
matrix with one weight for all edges is tried first: it is the fastest one on rings, square tori and other graphs whose
edges are all alike, and its own bound proves it.

Shapes: T clients, E edges, each a pair of positions i < j.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.core.errors import UserError

Edges = NDArray[np.int64]  # [E, 2]: pairs of positions i < j, sorted, each once
Matrix = NDArray[np.float64]  # [T, T]
Vector = NDArray[np.float64]  # [T]
ROUNDING = 1e-9  # how far a sum of weights may be from 1, and a weight from its mirror image
MOST_NODES = 1000  # nodes at most: an iteration decomposes a [T, T] matrix, and hundreds of iterations are needed
MOST_ITERATIONS = 5000  # for up to 300 nodes; with more, as many as take the same time, as one costs T^3
LARGEST_SHARE = 0.01  # of the spectral gap (tiny on large sparse graphs) that the distance from the optimum may be
# Over-relaxation, the first penalty, and how often what is looked at: these change the time alone.
_RELAXATION, _PENALTY = 1.7, 0.1
_CHECK_EVERY, _ADAPT_EVERY, _ADAPT_UNTIL = 10, 20, 1000
_ROW_SUM_TOLERANCE = 1e-10


def canonical(pairs: NDArray[np.int64]) -> Edges:
    """Put pairs ``[e, 2]`` in order: the smaller position first, sorted, each once."""
    return np.unique(np.sort(np.asarray(pairs, dtype=np.int64).reshape(-1, 2), axis=1), axis=0)


def component_labels(num_nodes: int, edges: Edges) -> NDArray[np.int32]:
    """Return the number of each node's connected component, ``[num_nodes]``, counted from 0."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(num_nodes, num_nodes))
    return connected_components(links, directed=False)[1]


def num_components(num_nodes: int, edges: Edges) -> int:
    """Count the connected components."""
    return int(component_labels(num_nodes, edges).max()) + 1


def degrees(num_nodes: int, edges: Edges) -> NDArray[np.int64]:
    """Count each client's neighbours. ``[T]``."""
    return np.bincount(edges.flatten(), minlength=num_nodes)


def from_edges(num_nodes: int, edges: Edges, weights: NDArray[np.float64] | float) -> Matrix:
    """Put ``weights`` ``[E]``, or one for all, on the edges and what is missing to 1 on the diagonal."""
    first, second = edges.T
    matrix = np.zeros((num_nodes, num_nodes))
    matrix[first, second] = matrix[second, first] = weights
    matrix /= max(1.0, matrix.sum(1).max())  # weights that are solutions of a problem sum to 1 but for rounding
    np.fill_diagonal(matrix, np.maximum(0, 1 - matrix.sum(1)))
    return matrix


def weigh(rule: str, num_nodes: int, edges: Edges) -> Matrix:
    """Return the mixing matrix by a rule: "metropolis", "max_degree", "fmmc", or "pairs" for those of a matching."""
    if rule != "fmmc":
        larger = degrees(num_nodes, edges)[edges].max(1)  # of an edge's two ends
        # The ends of a matching's edges average evenly. Metropolis: each client must know its neighbours' degrees
        # alone; by the largest degree: all must know that one number.
        by_rule = {"pairs": 0.5, "metropolis": 1 / (1 + larger), "max_degree": 1 / (1 + larger.max(initial=0))}
        return from_edges(num_nodes, edges, by_rule[rule])
    found = fastest_mixing(num_nodes, edges)
    if (share := (found.value - found.bound) / (1 - found.value)) > LARGEST_SHARE:
        what = f"After {found.iterations} iterations the spectral gap of the fastest mixing matrix of this graph"
        known = f"is known to within {share:.0%} only; allowed: {LARGEST_SHARE:.0%}"
        raise UserError(f'{what} {known}. Use weights = "metropolis".')
    return found.matrix


def second_modulus(matrix: Matrix | Tensor) -> float:
    """Return the second largest modulus of the eigenvalues of a doubly stochastic matrix ``[T, T]``."""
    array = np.asarray(matrix, dtype=np.float64)
    rest = array - 1 / len(array)  # the eigenvalue 1 of the constant vector becomes 0, and no other changes
    symmetric = np.array_equal(rest, rest.T)
    return float(np.abs(np.linalg.eigvalsh(rest) if symmetric else np.linalg.eigvals(rest)).max())


def check_mixing(matrix: Tensor, edges: Edges | None) -> None:
    """Refuse a matrix ``[T, T]`` that is not symmetric, non-negative and of row sums 1, or with weight off the edges.

    ``edges`` say who may average with whom, beside each with itself; None for everybody with everybody.
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
    if wrong.any():
        i, j = wrong.nonzero()[0].tolist()
        both = f"it is {float(matrix[i, j])} at ({i}, {j}) and {float(matrix[j, i])} at ({j}, {i})"
        raise UserError(f"The mixing matrix {what}: {both}; allowed: {allowed}.")


class Fastest(NamedTuple):
    """A mixing matrix ``[T, T]`` and its second largest modulus of an eigenvalue, with a bound.

    No mixing matrix of this graph has a ``value`` below ``bound``, up to rounding.
    """

    matrix: Matrix
    value: float
    bound: float
    iterations: int


def fastest_mixing(num_nodes: int, edges: Edges, tolerance: float = 1e-5) -> Fastest:
    """Find the fastest mixing matrix of a connected graph.

    It stops once the value is proven to be within ``tolerance`` of the optimum and within 1% of the spectral gap, or
    after ``MOST_ITERATIONS``: the result has both the value and the bound. Results are cached.
    """
    if num_nodes > MOST_NODES:
        said = f'There are {num_nodes:,} clients; allowed for weights = "fmmc": at most {MOST_NODES:,}'
        raise UserError(f'{said}. Use weights = "metropolis", which costs nothing.')
    if (components := num_components(num_nodes, edges)) > 1:
        said = f'The graph of one of the rounds has {components} components; allowed for weights = "fmmc": one'
        mend = 'Use weights = "metropolis", for which the graphs of all rounds must be connected together only'
        raise UserError(f"{said}. {mend}.")
    if 2 * len(edges) == num_nodes * (num_nodes - 1):
        return Fastest(np.full((num_nodes, num_nodes), 1 / num_nodes), 0.0, 0.0, 0)
    found = _search(num_nodes, np.ascontiguousarray(edges, dtype=np.int64).tobytes(), tolerance)
    return found._replace(matrix=found.matrix.copy())


@lru_cache(maxsize=8)
def _search(num_nodes: int, edge_bytes: bytes, tolerance: float) -> Fastest:
    edges = np.frombuffer(edge_bytes, dtype=np.int64).reshape(-1, 2)
    mean, matrix = 1 / num_nodes, weigh("metropolis", num_nodes, edges)
    support = matrix > 0
    even, even_dual = _evenly(num_nodes, edges)
    best = min(matrix, even, key=second_modulus)
    value, bound = second_modulus(best), max(0.0, _lower_bound(even_dual, support))
    # Scaled: U of the constraint X = W - J, and those of the row sums.
    multipliers, row_multipliers = np.zeros_like(matrix), np.zeros(num_nodes)
    penalty, iteration, most = _PENALTY, 0, MOST_ITERATIONS * min(1, (300 / num_nodes) ** 3)
    norm = np.linalg.norm
    while value - bound > min(tolerance, LARGEST_SHARE * (1 - value)) and iteration < most:
        iteration, before = iteration + 1, matrix
        centred, cut = _shrink(matrix - mean - multipliers, 1 / penalty)
        target = _RELAXATION * centred + (1 - _RELAXATION) * (matrix - mean) + mean + multipliers
        matrix, row_multipliers = project(target, support, row_multipliers)
        multipliers = target - matrix
        if iteration % _CHECK_EVERY == 0:
            # What is found, made feasible to the last bit, may be the best; likewise the bound.
            feasible = from_edges(num_nodes, edges, matrix[edges[:, 0], edges[:, 1]])
            if (found := second_modulus(feasible)) < value:
                best, value = feasible, found
            bound = max(bound, _lower_bound(penalty * cut, support))
        # Changing the penalty for ever might keep the iterations from converging.
        if iteration % _ADAPT_EVERY == 0 and iteration <= _ADAPT_UNTIL:
            # Both residuals relative to their own scale, times the product of the two scales.
            primal = norm(centred + mean - matrix) * norm(multipliers)
            dual = norm(matrix - before) * norm(matrix - mean)
            factor = 2.0 if primal > 2 * dual else 0.5 if dual > 2 * primal else 1.0
            penalty *= factor
            multipliers = multipliers / factor
    return Fastest(best, value, min(bound, value), iteration)


def _evenly(num_nodes: int, edges: Edges) -> tuple[Matrix, Matrix]:
    """Find the best matrix I - w L with one weight w for all edges, L being the Laplacian, and a dual matrix for it.

    The eigenvalues 1 - w l lie between those of the least and the greatest positive l, whose moduli the best w makes
    equal, unless some client's own weight would be negative. The dual is of the two eigenspaces, or of the first one:
    whatever symmetry the graph has, they have it too.
    """
    laplacian = num_nodes * (np.eye(num_nodes) - from_edges(num_nodes, edges, 1 / num_nodes))
    values, vectors = np.linalg.eigh(laplacian)
    least, greatest = float(values[1]), float(values[-1])
    largest_weight = 1 / float(degrees(num_nodes, edges).max())
    weight = min(largest_weight, 2 / (least + greatest))
    share = greatest / (least + greatest) if weight < largest_weight else 1.0

    def projection(value: float) -> Matrix:
        near = vectors[:, np.abs(values - value) <= 1e-9 * greatest]
        return near @ near.T / near.shape[1]

    dual = share * projection(least) - (1 - share) * projection(greatest)
    return from_edges(num_nodes, edges, weight), dual


def _shrink(matrix: Matrix, radius: float) -> tuple[Matrix, Matrix]:
    """Minimise radius |X| + |X - matrix|_F^2 / 2 over the symmetric X with X 1 = 0.

    The moduli of the eigenvalues are cut at the height above which they sum to ``radius``. Returns X, and what was cut
    off, of nuclear norm ``radius`` at most: ``radius`` times a subgradient of |X|.
    """
    matrix = matrix - matrix.mean(0)
    matrix -= matrix.mean(1)[:, None]
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    moduli = np.sort(np.abs(values))[::-1]
    heights = (moduli.cumsum() - radius) / np.arange(1, len(moduli) + 1)
    height = max(0.0, float(heights.max()))  # the mean excess of the k largest is greatest for the right k
    excess = np.sign(values) * np.maximum(np.abs(values) - height, 0)
    there = excess != 0
    cut = (vectors[:, there] * excess[there]) @ vectors[:, there].T
    return (matrix + matrix.T) / 2 - cut, cut


def project(target: Matrix, support: NDArray[np.bool_], start: Vector) -> tuple[Matrix, Vector]:
    """Find the nearest matrix that is symmetric, non-negative, of row sums 1 and zero off the ``support``.

    It is max(0, target + y 1' + 1 y') on the support, where y minimises the convex |that|_F^2 / 4 - sum(y): the row
    sums less 1 are its gradient. Newton's method with a line search finds y in a few steps.

    ``target`` and ``support`` ``[T, T]`` are symmetric, the diagonal belongs to the support, and ``start`` ``[T]`` is a
    guess of y. Returns the matrix and y.
    """
    from scipy.linalg import solve

    def at(y: Vector) -> tuple[Matrix, float]:
        found = np.where(support, np.maximum(target + y[:, None] + y, 0), 0)
        return found, float((found * found).sum() / 4 - y.sum())

    y, diagonal = start, np.diag_indices(len(start))
    matrix, height = at(y)
    for _ in range(100):
        gradient = matrix.sum(1) - 1
        if (error := float(np.abs(gradient).max())) <= _ROW_SUM_TOLERANCE:
            break
        curvature = (matrix > 0).astype(np.float64)
        # Two sides of a bipartite graph may move against each other freely: a little is added lest it be singular.
        curvature[diagonal] += curvature.sum(1) + 1e-6 * min(1.0, error) + 1e-12
        step = -solve(curvature, gradient, assume_a="pos", overwrite_a=True, check_finite=False)
        length, slope = 1.0, float(gradient @ step)
        matrix, lower = at(y + step)
        # The last term is rounding, below which no descent can be seen.
        while lower > height + 1e-4 * length * slope + 1e-14 * (1 + abs(height)) and length > 1e-9:
            length /= 2
            matrix, lower = at(y + length * step)
        y, height = y + length * step, lower
    return matrix, y


def _lower_bound(dual: Matrix, support: NDArray[np.bool_]) -> float:
    """Bound the optimum by a matrix Y of nuclear norm 1 at most: |W - J| >= <Y, W> - <Y, J>, and the least of that.

    A doubly stochastic W is a mean of permutations, so the least is an assignment; for a symmetric Y that of W, of its
    transpose and of their mean are the same.
    """
    from scipy.optimize import linear_sum_assignment

    norm = float(np.abs(np.linalg.eigvalsh(dual)).sum())
    cost = np.where(support, dual / max(1.0, norm), np.inf)
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].sum() - dual.mean() * len(dual) / max(1.0, norm))
