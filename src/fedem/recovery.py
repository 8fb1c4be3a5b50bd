"""How much of a known truth was recovered: components up to their order, and clusters.

Shapes: M components (learnt), R true ones, T clients, d parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Recovery:
    """Learnt components matched with true ones, each at most once, at the least total cosine distance."""

    matching: tuple[tuple[int, int], ...]
    """pairs (learnt, true)"""
    component_distances: tuple[float, ...]
    """cosine distance of each pair"""
    weight_distance: float
    """cosine distance between the matrices of mixture weights, columns matched"""
    cluster_accuracy: float
    """share of clients whose largest weight lies on the component that is truly their largest"""


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """1 - cosine of the angle between rows, ``[M, d], [R, d] -> [M, R]``."""
    return 1 - torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T


def recover(components: Tensor, weights: Tensor, true_components: Tensor, true_weights: Tensor) -> Recovery:
    """Match and compare.

    Args:
        components: ``[M, d]``
        weights: ``[T, M]``
        true_components: ``[R, d]``
        true_weights: ``[T, R]``

    """
    from scipy.optimize import linear_sum_assignment

    distances = cosine_distance(components.double().cpu(), true_components.double())
    learnt, true = (torch.from_numpy(index) for index in linear_sum_assignment(distances.numpy()))
    matched, reference = weights.double().cpu()[:, learnt], true_weights.double()[:, true]
    flat = cosine_distance(matched.reshape(1, -1), reference.reshape(1, -1))
    translation = torch.full((components.shape[0],), -1)  # an unmatched component is nobody's cluster
    translation[learnt] = true
    hits = translation[weights.cpu().argmax(1)] == true_weights.argmax(1)
    return Recovery(
        tuple(zip(learnt.tolist(), true.tolist(), strict=True)),
        tuple(distances[learnt, true].tolist()),
        float(flat),
        float(hits.double().mean()),
    )
