"""A server that averages the uploads of those who took part, weighted by their number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.mixing.base import Mixer, Mixing


@final
@dataclass(frozen=True)
class Star(Mixer):
    """One group that everyone reads and writes."""

    def num_groups(self, num_clients: int) -> int:
        """One."""
        return 1

    def reads(self, clients: Tensor) -> Tensor:
        """All zeros."""
        return torch.zeros_like(clients)

    def plan(self, cohort: Tensor, sizes: Tensor) -> Mixing:
        """n_t / n over the cohort alone: clients that did not take part have nothing new to say."""
        return Mixing(torch.zeros(1, dtype=torch.int64), (sizes.double() / sizes.sum())[None])

    def group_for_unseen(self) -> int | None:
        """The one there is."""
        return 0

    def num_messages(self, cohort: Tensor) -> int:
        """One a client."""
        return len(cohort)
