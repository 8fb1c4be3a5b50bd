"""Every aggregation is one matrix: new group g = sum over the cohort of weight[g, c] * upload[c].

Shapes: G groups in all, g groups written this round, C clients of the cohort, T clients of the federation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedem.tree import Tree


class Mixing(NamedTuple):
    """How one round's uploads become the next shared trees. Groups that are not written keep theirs."""

    groups: Tensor
    """``[g]`` int64: which groups are written"""
    weights: Tensor
    """``[g, C]``, dense or sparse: rows that sum to one"""

    def apply(self, shared: Tree, uploads: Iterable[tuple[Tensor, Tree]]) -> Tree:
        """Mix uploads as they come, a few clients at a time.

        Args:
            shared: ``[G, ...]``
            uploads: pairs of positions in the cohort ``[c]`` and the trees uploaded from there ``[c, ...]``.

        Returns:
            the next shared trees ``[G, ...]``; integer leaves (counters) take the largest value uploaded

        """
        device = next(iter(shared.values())).device
        groups = self.groups.to(device)
        mixed = {name: leaf.index_fill(0, groups, 0) for name, leaf in shared.items()}
        for positions, trees in uploads:
            rows, weights = self._columns(positions)
            written, weights = groups[rows.to(device)], weights.to(device)
            for name, leaf in trees.items():
                if leaf.is_floating_point():
                    part = (weights.to(leaf.dtype) @ leaf.flatten(1)).reshape(-1, *leaf.shape[1:])
                    mixed[name].index_add_(0, written, part)
                else:
                    largest = torch.stack([leaf[row].amax(0) for row in weights > 0])
                    mixed[name][written] = torch.maximum(mixed[name][written], largest)
        return mixed

    def _columns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that the clients at ``positions`` write to, and the dense block of their weights."""
        block = self.weights.index_select(1, positions.cpu())
        if not block.is_sparse:
            return torch.arange(len(block)), block
        rows = block.coalesce().indices()[0].unique()
        return rows, block.index_select(0, rows).to_dense()


@dataclass(frozen=True)
class Mixer(ABC):
    """Who averages with whom. Each group has one shared tree; a client reads one group."""

    @abstractmethod
    def num_groups(self, num_clients: int) -> int:
        """G."""

    @abstractmethod
    def reads(self, clients: Tensor) -> Tensor:
        """Return the group that each of ``clients`` (positions, ``[C]``) reads, ``[C]`` int64."""

    @abstractmethod
    def plan(self, cohort: Tensor, sizes: Tensor) -> Mixing:
        """Return this round's mixing for the ``cohort`` (positions, ``[C]``) with training ``sizes`` ``[C]``."""

    @abstractmethod
    def group_for_unseen(self) -> int | None:
        """Return the group that a client unseen in training reads; None when there is none for it."""

    @abstractmethod
    def num_messages(self, cohort: Tensor) -> int:
        """Count the uploads of a round; there are as many downloads."""
