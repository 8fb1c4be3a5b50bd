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
    weights: Tensor | None
    """``[g, C]``: rows that sum to one; None is the identity, which very many clients could not write out"""

    def apply(self, shared: Tree, uploads: Iterable[tuple[Tensor, Tree]]) -> Tree:
        """Mix uploads as they come, a few clients at a time.

        Args:
            shared: ``[G, ...]``
            uploads: pairs of positions in the cohort ``[c]`` and the trees uploaded from there ``[c, ...]``.

        Returns:
            the next shared trees ``[G, ...]``; integer leaves (counters) never fall below the largest uploaded
        """
        device = next(iter(shared.values())).device
        groups = self.groups.to(device)
        mixed = {
            name: leaf.index_fill(0, groups, 0) if leaf.is_floating_point() else leaf.clone()
            for name, leaf in shared.items()
        }
        for positions, trees in uploads:
            if self.weights is None:
                mine = groups[positions.to(device)]
                mixed = {name: leaf.index_copy_(0, mine, trees[name]) for name, leaf in mixed.items()}
                continue
            weights = self.weights[:, positions.to(self.weights.device)].to(device)
            for name, leaf in trees.items():
                if leaf.is_floating_point():
                    part = (weights.to(leaf.dtype) @ leaf.flatten(1)).reshape(-1, *leaf.shape[1:])
                    mixed[name].index_add_(0, groups, part)
                else:
                    for group, members in zip(groups.tolist(), weights > 0, strict=True):
                        mixed[name][group] = torch.cat([mixed[name][group][None], leaf[members]]).amax(0)
        return mixed


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
