"""Layers that never leave their client, whatever the mixer: the head (FedPer), the batch normalisations (FedBN), any.

Shapes: T clients, C of them, g trees served, K starts for newcomers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.core.tree import Tree, add_prefix, take_prefix, tree_index, tree_map, tree_repeat, tree_sorted
from fedem.graphs import Topology
from fedem.methods.mixer import Mixed, Mixer, Round, RoundPlan, Served, Star, Start, Uploads, Welcome, gather


@final
@dataclass(frozen=True)
class LocalLayers(Mixer):
    """Another mixer, which never sees some leaves of u: each client keeps them to itself.

    The memory holds them, ``[T, ...]``, and their average over the last cohort, ``[1, ...]``, for clients unseen in
    training to begin with: nobody else reads it. It is by samples, unless a server that averages counts otherwise.
    """

    base: Mixer
    leaves: frozenset[str]

    @property
    def graph(self) -> Topology | None:
        return self.base.graph

    @property
    def local_leaves(self) -> frozenset[str]:
        return self.leaves

    def init(self, start: Start) -> tuple[Tree, Tree]:
        common, local = self._split(start.shared)
        groups, memory = self.base.init(start._replace(shared=common, trained=start.trained - self.leaves))
        return groups, _joined(memory, tree_repeat(local, len(start.keys)), tree_repeat(local, 1))

    def _split(self, tree: Tree) -> tuple[Tree, Tree]:
        local = {name: leaf for name, leaf in tree.items() if name in self.leaves}
        return {name: leaf for name, leaf in tree.items() if name not in local}, local

    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        return self._with_local(self.base.read(shared, take_prefix("base", memory), clients), memory, clients)

    def plan(self, shared: Tree, memory: Tree, this: Round) -> RoundPlan:
        plan = self.base.plan(shared, take_prefix("base", memory), this)
        return plan._replace(downloads=self._with_local(plan.downloads, memory, this.clients))

    def _with_local(self, found: Served, memory: Tree, clients: Tensor) -> Served:
        reads = found.reads.to(next(iter(found.shared.values())).device)

        def read(leaf: Tensor) -> Tensor:
            # What all share is shown to each, not copied.
            return leaf.expand(len(reads), *leaf.shape[1:]) if len(leaf) == 1 else leaf[reads]

        local = tree_index(take_prefix("local", memory), clients.to(reads.device))
        return Served(tree_sorted(tree_map(read, found.shared) | local), torch.arange(len(clients)))

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        held: list[tuple[Tensor, Tree]] = []

        def passing() -> Iterator[tuple[Tensor, Tree]]:
            for positions, trees in uploads:
                common, local = self._split(trees)
                held.append((positions, local))
                yield positions, common

        mixed, remembered = self.base.mix(shared, take_prefix("base", memory), this, passing())
        before, now = take_prefix("local", memory), gather(held)
        local = tree_map(lambda old, new: old.index_copy(0, this.clients.to(old.device), new), before, now)
        server = self.base.plain if self.base.is_server_mean else Star()
        average = server.mix({}, {}, this, held)[0].means
        return mixed, _joined(remembered, local, average)

    def advance(self, shared: Tree, memory: Tree, this: Round, mixed: Mixed) -> tuple[Mixed, Tree]:
        mixed, remembered = self.base.advance(shared, take_prefix("base", memory), this, mixed)
        return mixed, _joined(remembered, take_prefix("local", memory), take_prefix("average", memory))

    def share(self, this: Round, of_samples: float) -> float:
        return self.base.share(this, of_samples)

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        """As the other mixer does, with the averages; what newcomers then train of these leaves they keep."""
        start = self.base.welcome(shared, take_prefix("base", memory))
        if start.refusal:
            return start
        learn_common, count = start.learn, len(next(iter(start.shared.values())))

        def learn(kept: Tensor, uploads: Tree) -> tuple[Tensor, Tree]:
            assert learn_common is not None, "only where the other mixer keeps something of newcomers"
            common, local = self._split(uploads)
            kept, trees = learn_common(kept, common)
            return kept, tree_sorted(trees | local)

        average = tree_map(lambda leaf: leaf.expand(count, *leaf.shape[1:]), take_prefix("average", memory))
        return start._replace(shared=tree_sorted(start.shared | average), learn=None if learn_common is None else learn)

    def check(self, keys: Tensor, seed: int) -> None:
        self.base.check(keys, seed)

    def summary(self, memory: Tree, cohort_size: int) -> dict[str, float]:
        return self.base.summary(take_prefix("base", memory), cohort_size)


def _joined(base: Tree, local: Tree, average: Tree) -> Tree:
    return add_prefix("base", base) | add_prefix("local", local) | add_prefix("average", average)
