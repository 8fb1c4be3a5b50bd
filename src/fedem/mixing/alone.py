"""Nobody talks: each client keeps what it trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedem.mixing.base import Mixer, Mixing


@final
@dataclass(frozen=True)
class Alone(Mixer):
    """A group a client; the mixing matrix is the identity."""

    def num_groups(self, num_clients: int) -> int:
        """T."""
        return num_clients

    def reads(self, clients: Tensor) -> Tensor:
        """Return each client's own group."""
        return clients

    def plan(self, cohort: Tensor, sizes: Tensor) -> Mixing:
        """Return the identity."""
        return Mixing(cohort, None)

    def group_for_unseen(self) -> int | None:
        """None: nothing was learnt together."""
        return None

    def num_messages(self, cohort: Tensor) -> int:
        """None."""
        return 0
