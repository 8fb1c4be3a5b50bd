"""Nobody talks: each client keeps what it trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedem.mixing.base import Mixed, Mixer, Round, Served, Uploads, Welcome, gather
from fedem.tree import Tree, tree_repeat


@final
@dataclass(frozen=True)
class Alone(Mixer):
    """A group a client; the mixing matrix is the identity."""

    def init(self, shared: Tree, keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """All start alike."""
        return tree_repeat(shared, len(keys)), {}

    def serve(self, shared: Tree, memory: Tree, clients: Tensor, key: int) -> Served:
        """Each its own."""
        return Served(shared, clients)

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """The identity, and no message."""
        return Mixed(this.clients, gather(uploads), 0), memory

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """None: nothing was learnt together."""
        return None
