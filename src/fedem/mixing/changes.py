"""A server that tells its clients what changed, in fewer bytes than what there is now.

Shapes: one group, so every leaf is ``[1, ...]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.compression import read_update, write_update
from fedem.mixing.base import Mixed, Round, Uploads, by_samples, weighted_means
from fedem.mixing.groups import OneGroup
from fedem.tree import Tree, add_prefix, take_prefix, tree_map, tree_repeat


@final
@dataclass(frozen=True)
class Changes(OneGroup):
    """A star whose clients upload updates of u; the server adds to u only what its message says of their mean.

    So whoever holds the last round's u and reads the message holds the new one, to the last bit. The memory has the
    message ("news") and what it left unsaid ("rest"), which nobody but the server ever sees.

    Attributes:
        form: how the message is written.
        leading: how many first dimensions of u have a scale for each index.

    """

    form: str
    leading: int

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """One group; nothing has changed yet, and nothing is left unsaid."""
        groups = tree_repeat(shared, 1)
        still = tree_map(torch.zeros_like, groups)
        return groups, self._written(still, {name: leaf for name, leaf in still.items() if name in trained})

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """n_t / n over the cohort alone, as far as the message says it."""
        means, rest = weighted_means(by_samples(this), uploads), take_prefix("rest", memory)
        memory = self._written(means, rest)
        dtype = next(iter(rest.values())).dtype
        said = read_update(take_prefix("news", memory), dtype)
        return Mixed(torch.zeros(1, dtype=torch.int64), said, len(this.clients)), memory

    def _written(self, means: Tree, rest: Tree) -> Tree:
        message, rest = write_update(means, rest, self.form, 1 + self.leading)
        return add_prefix("news", message) | add_prefix("rest", rest)

    def news(self, memory: Tree) -> Tree | None:
        """The message."""
        return take_prefix("news", memory)
