"""The two plainest ways to group clients: all in one, and each on its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedem.mixing.base import Mixer, Served, Welcome
from fedem.tree import Tree, tree_map, tree_repeat


@dataclass(frozen=True)
class OneGroup(Mixer):
    """One shared tree that everybody reads."""

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """One group, nothing to remember."""
        return tree_repeat(shared, 1), {}

    def serve(self, shared: Tree, memory: Tree, clients: Tensor, key: int) -> Served:
        """The one tree for all."""
        return Served(shared, torch.zeros_like(clients))

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """The one tree there is."""
        return Welcome(shared)


@dataclass(frozen=True)
class OwnGroups(Mixer):
    """A shared tree for each client."""

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """All start alike; nothing to remember."""
        return tree_repeat(shared, len(keys)), {}

    def serve(self, shared: Tree, memory: Tree, clients: Tensor, key: int) -> Served:
        """Each its own."""
        return Served(shared, clients)

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """The mean of all models, to be fine-tuned."""
        return Welcome(mean_of_groups(shared), fine_tune=True)


def mean_of_groups(shared: Tree) -> Tree:
    """Return the mean of all groups, ``[1, ...]``; of integer leaves the largest."""
    return tree_map(
        lambda leaf: leaf.mean(0, keepdim=True) if leaf.is_floating_point() else leaf.amax(0, keepdim=True), shared
    )
