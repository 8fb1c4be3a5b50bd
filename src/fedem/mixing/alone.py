"""Nobody talks: each client keeps what it trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedem.mixing.base import Mixed, Round, Uploads, Welcome, gather
from fedem.mixing.groups import OwnGroups
from fedem.tree import Tree


@final
@dataclass(frozen=True)
class Alone(OwnGroups):
    """A group a client; the mixing matrix is the identity."""

    @property
    def no_welcome(self) -> str:
        """Nothing is shared."""
        return "Clients that train alone leave nothing to share with an unseen client; choose another method."

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """The identity, and no message."""
        return Mixed(this.clients, gather(uploads), 0), memory

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """None: nothing was learnt together."""
        return None
