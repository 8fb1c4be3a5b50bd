"""Layers that never leave their client, whatever the mixer: FedBN, where these are the batch normalisations.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

Shapes: T clients, C of them, g trees served, K starts for newcomers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix, tree_index, tree_map, tree_repeat, tree_sorted
from fedem.methods.mixer import Mixed, Mixer, Round, Served, Uploads, Welcome, by_samples, gather, weighted_means


@final
@dataclass(frozen=True)
class LocalLayers(Mixer):
    """Another mixer, which never sees some leaves of u: each client keeps its own of them.

    The memory holds them, ``[T, ...]``, and their average over the last cohort by samples, ``[1, ...]``, for clients
    unseen in training to begin with: nobody else reads it.
    """

    base: Mixer
    leaves: frozenset[str]

    @property
    def no_welcome(self) -> str:
        """The other mixer's reason."""
        return self.base.no_welcome

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """Everybody's own leaves start as those of the one initial tree."""
        common, own = self._split(shared)
        groups, memory = self.base.init(common, trained - self.leaves, keys, seed)
        return groups, _joined(memory, tree_repeat(own, len(keys)), tree_repeat(own, 1))

    def _split(self, tree: Tree) -> tuple[Tree, Tree]:
        """Part what the other mixer sees from what each client keeps."""
        own = {name: leaf for name, leaf in tree.items() if name in self.leaves}
        return {name: leaf for name, leaf in tree.items() if name not in own}, own

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
        return Served(tree_sorted(tree_map(read, served.shared) | own), torch.arange(len(clients)))

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """Keep each client's leaves as they come by."""
        held: list[tuple[Tensor, Tree]] = []

        def passing() -> Iterator[tuple[Tensor, Tree]]:
            for positions, trees in uploads:
                common, own = self._split(trees)
                held.append((positions, own))
                yield positions, common

        mixed, remembered = self.base.mix(shared, take_prefix("base", memory), this, passing())
        local = tree_map(
            lambda old, new: old.index_copy(0, this.clients.to(old.device), new),
            take_prefix("local", memory),
            gather(held),
        )
        return mixed, _joined(remembered, local, weighted_means(by_samples(this), held))

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """As the other mixer does, with the averages; what newcomers then train of these leaves they keep."""
        start = self.base.welcome(shared, take_prefix("base", memory))
        if start is None:
            return None
        learn_common, count = start.learn, len(next(iter(start.shared.values())))

        def learn(kept: Tensor, uploads: Tree) -> tuple[Tensor, Tree]:
            assert learn_common is not None, "only where the other mixer keeps something of newcomers"
            common, own = self._split(uploads)
            kept, trees = learn_common(kept, common)
            return kept, tree_sorted(trees | own)

        average = tree_map(lambda leaf: leaf.expand(count, *leaf.shape[1:]), take_prefix("average", memory))
        return start._replace(shared=tree_sorted(start.shared | average), learn=None if learn_common is None else learn)

    @property
    def starts_apart(self) -> bool:
        """As the other mixer does."""
        return self.base.starts_apart

    def check(self, keys: Tensor, seed: int) -> None:
        """As the other mixer does."""
        self.base.check(keys, seed)

    def scales(self, sizes: Tensor) -> Tensor | None:
        """As the other mixer does."""
        return self.base.scales(sizes)

    def facts(self, memory: Tree, cohort_size: int) -> dict[str, float]:
        """As the other mixer does."""
        return self.base.facts(take_prefix("base", memory), cohort_size)

    def num_steps(self, key: int) -> int | None:
        """As the other mixer does."""
        return self.base.num_steps(key)


def _joined(base: Tree, local: Tree, average: Tree) -> Tree:
    """Put the other mixer's memory, everybody's own leaves and their average into one tree."""
    return add_prefix("base", base) | add_prefix("local", local) | add_prefix("average", average)
