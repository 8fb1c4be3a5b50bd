"""Layers that never leave their client, whatever the mixer: FedBN, where these are the batch normalisations.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

Shapes: T clients, C of them, g trees served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.mixing.base import Mixed, Mixer, Round, Served, Uploads, Welcome
from fedem.tree import Tree, add_prefix, take_prefix, tree_index, tree_map, tree_repeat


@final
@dataclass(frozen=True)
class LocalLayers(Mixer):
    """Another mixer, with some leaves of u kept by each client; its memory holds them, ``[T, ...]``.

    What a client uploads of them is averaged all the same, for clients unseen in training to begin with: nobody else
    reads it.
    """

    base: Mixer
    leaves: frozenset[str]

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """Everybody's own leaves start as the shared ones do."""
        groups, memory = self.base.init(shared, trained, keys, seed)
        own = tree_repeat({name: shared[name] for name in sorted(self.leaves)}, len(keys))
        return groups, add_prefix("base", memory) | add_prefix("local", own)

    def serve(self, shared: Tree, memory: Tree, clients: Tensor, key: int) -> Served:
        """What the other mixer serves, with each client's own leaves in it."""
        return self._with_own(self.base.serve(shared, take_prefix("base", memory), clients, key), memory, clients)

    def own(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        """Likewise."""
        return self._with_own(self.base.own(shared, take_prefix("base", memory), clients), memory, clients)

    def _with_own(self, served: Served, memory: Tree, clients: Tensor) -> Served:
        reads = served.reads.to(next(iter(served.shared.values())).device)

        def read(leaf: Tensor) -> Tensor:
            # What all share is shown to each, not copied.
            return leaf.expand(len(reads), *leaf.shape[1:]) if len(leaf) == 1 else leaf[reads]

        own = tree_index(take_prefix("local", memory), clients.to(reads.device))
        return Served(tree_map(read, served.shared) | own, torch.arange(len(clients)))

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """Keep each client's leaves as they come by."""
        kept = take_prefix("local", memory)

        def passing() -> Iterator[tuple[Tensor, Tree]]:
            for positions, trees in uploads:
                for name, old in kept.items():
                    kept[name] = old.index_copy(0, this.clients[positions].to(old.device), trees[name])
                yield positions, trees

        mixed, remembered = self.base.mix(shared, take_prefix("base", memory), this, passing())
        return mixed, add_prefix("base", remembered) | add_prefix("local", kept)

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """As the other mixer does: newcomers begin with the averages."""
        return self.base.welcome(shared, take_prefix("base", memory))

    def check(self, num_clients: int) -> None:
        """As the other mixer does."""
        self.base.check(num_clients)

    def num_steps(self, key: int) -> int | None:
        """As the other mixer does."""
        return self.base.num_steps(key)
