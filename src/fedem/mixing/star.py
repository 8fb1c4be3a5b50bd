"""A server that averages the uploads of those who took part, weighted by their number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.mixing.base import Mixed, Mixer, Round, Served, Uploads, Welcome, by_samples, weighted_means
from fedem.tree import Tree, tree_repeat


@final
@dataclass(frozen=True)
class Star(Mixer):
    """One group that everyone reads and writes."""

    def init(self, shared: Tree, keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """One group, nothing to remember."""
        return tree_repeat(shared, 1), {}

    def serve(self, shared: Tree, memory: Tree, clients: Tensor, key: int) -> Served:
        """The one tree for all."""
        return Served(shared, torch.zeros_like(clients))

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """n_t / n over the cohort alone: clients that did not take part have nothing new to say."""
        means = weighted_means(by_samples(this), uploads)
        return Mixed(torch.zeros(1, dtype=torch.int64), means, len(this.clients)), memory

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """The one tree there is."""
        return Welcome(shared)
