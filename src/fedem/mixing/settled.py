"""Clients fitted after training: who reads which tree is settled, and nobody trains any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedem.mixing.base import Mixed, Mixer, Round, Served, Uploads, Welcome
from fedem.tree import Tree


@final
@dataclass(frozen=True)
class Settled(Mixer):
    """Its memory names each client's group."""

    @property
    def no_welcome(self) -> str:
        """They are unseen ones themselves."""
        return "These clients were fitted after training; fit further ones from the run that they were fitted from."

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """There is no beginning."""
        raise AssertionError("clients fitted after training are made by personalisation alone")

    def serve(self, shared: Tree, memory: Tree, clients: Tensor, key: int) -> Served:
        """What was settled."""
        return Served(shared, memory["reads"].cpu()[clients])

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """There is no next round."""
        raise AssertionError("clients fitted after training are not trained again")

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """None: further clients start from the run that these were fitted with."""
        return None
