"""Means in which every client counts for each of several models by a mass of its own.

Clients upload models ``[K, ...]`` (or one of them) and masses ``[K]``; both are averaged, and the server divides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedem.tree import Tree, add_prefix, take_prefix, tree_map


def times_mass(models: Tree, mass: Tensor) -> Tree:
    """Return what a client adds to the means: each model times its mass, and the masses ``[K]``."""

    def weighed(leaf: Tensor) -> Tensor:
        rows = _rows(mass, leaf)
        # Counters are not averaged.
        return rows.to(leaf.dtype) * leaf if leaf.is_floating_point() else torch.where(rows > 0, leaf, 0)

    return add_prefix("model", tree_map(weighed, models)) | {"mass": mass}


def mean_by_mass(shared: Tree, mean: Tree) -> Tree:
    """Divide the mean of :func:`times_mass` by its mass; a model that nobody counts for stays as it is."""
    mass = mean["mass"]

    def divided(old: Tensor, new: Tensor) -> Tensor:
        rows = _rows(mass, old)
        if not old.is_floating_point():
            return torch.where(rows > 0, new, old)
        return torch.where(rows > 0, new / rows.clamp(min=torch.finfo(mass.dtype).tiny).to(new.dtype), old)

    return tree_map(divided, shared, take_prefix("model", mean))


def _rows(mass: Tensor, like: Tensor) -> Tensor:
    """Give ``[K]`` values as many dimensions as ``like`` ``[K, ...]`` has."""
    return mass.reshape(-1, *(1,) * (like.ndim - 1))
