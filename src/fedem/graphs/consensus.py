"""How fast averaging over a graph brings clients together: the constants p and tau of the paper's assumption.

With Xi_{k+1} = Xi_k W^k, after a cycle of tau rounds E|Xi W^0 ... W^{tau-1} (I - J)|_F^2 = tr(Xi X Xi'), where X comes
from I - J by X <- E[W X W], from the last round of the cycle to the first. So 1 - p is the largest eigenvalue of X.

Shapes: T clients, E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from fedem.graphs.activity import edges_of
from fedem.graphs.weights import Matrix, second_modulus

Expectation = Callable[[int, Matrix], tuple[Matrix, Matrix]]
"""A phase and X -> E[W X W] and E[W] in that phase, all ``[T, T]``."""


class Consensus(NamedTuple):
    """How fast clients agree."""

    spectral_gap: float
    """1 less the second largest modulus of an eigenvalue of E[W], of the product over a cycle where it has phases"""
    p: float
    """of the assumption: in expectation a cycle leaves at most 1 - p of the squared distance from the mean"""
    tau: int
    """rounds of a cycle"""
    is_estimate: bool
    """whether expectations are means over draws; the chance in them makes both figures rather too small"""


def consensus_of(expectation: Expectation, num_nodes: int, tau: int, is_estimate: bool) -> Consensus:
    """Say how fast clients agree whose matrices have these expectations."""
    rest, product = np.eye(num_nodes) - 1 / num_nodes, np.eye(num_nodes)
    for phase in reversed(range(tau)):
        rest, mean = expectation(phase, rest)
        product = mean @ product
    left = float(np.linalg.eigvalsh((rest + rest.T) / 2).max())
    return Consensus(1 - second_modulus(product), min(1.0, 1 - left), tau, is_estimate)


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


def over_draws(draws: Iterable[Matrix], inner: Matrix) -> tuple[Matrix, Matrix]:
    """Return the means of W X W and of W over draws of W, X being ``inner``; one draw is in memory at a time."""
    count, outer, mean = 0, np.zeros_like(inner), np.zeros_like(inner)
    for matrix in draws:
        count += 1
        outer += matrix @ inner @ matrix
        mean += matrix
    return outer / count, mean / count
