"""A server that averages the uploads of those who took part, weighted by their number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from fedem.mixing.base import Mixed, Round, Uploads, by_samples, weighted_means
from fedem.mixing.groups import OneGroup
from fedem.tree import Tree


@final
@dataclass(frozen=True)
class Star(OneGroup):
    """One group that everyone reads and writes."""

    adds_up: ClassVar[bool] = True

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """n_t / n over the cohort alone: clients that did not take part have nothing new to say."""
        means = weighted_means(by_samples(this), uploads)
        return Mixed(torch.zeros(1, dtype=torch.int64), means, len(this.clients)), memory
