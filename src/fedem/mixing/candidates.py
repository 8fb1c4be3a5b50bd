"""FedFOMO's server: it keeps everybody's model and sends each client its own and those of a few others.

Shapes: T clients, C clients of the cohort, P candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from fedem.mixing.base import Mixed, Mixer, Round, Served, Uploads, Welcome, gather, refuse_pairs
from fedem.mixing.groups import mean_of_groups
from fedem.randomness import derive, uniform
from fedem.tree import Tree, tree_cat, tree_index, tree_map, tree_repeat


@final
@dataclass(frozen=True)
class Candidates(Mixer):
    """A group a client. The memory: how much each client has gained from each other, ``[T, T]``.

    Attributes:
        num_candidates: P, models of others sent to a client in a round (all others when there are no more).
        exploration: share of rounds in which a client's candidates are chosen at random, and not for past gains.

    """

    num_candidates: int = field(default=5, metadata={"min": 1})
    exploration: float = field(default=0.3, metadata={"min": 0, "max": 1})

    def check(self, keys: Tensor, seed: int) -> None:
        """The gains are T x T."""
        refuse_pairs("Method fedfomo", len(keys))

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """All start alike; nobody has gained anything."""
        gains = torch.zeros(len(keys), len(keys), dtype=torch.float64)
        return tree_repeat(shared, len(keys)), {"gains": gains, "keys": keys}

    def _choose(self, memory: Tree, clients: Tensor, key: int) -> Tensor:
        """Return the candidates of each client, ``[C, P]``: those it gained most from, or others by chance."""
        gains, keys = memory["gains"][clients], memory["keys"]
        mine = derive(derive(key), keys[clients])
        greedy = uniform(mine, 1) >= self.exploration
        chance = uniform(derive(mine[:, None], keys), 1).squeeze(-1)
        # Chance decides alone, or among equal gains.
        rank = torch.where(greedy, gains, 0) + 1e-9 * chance
        rank = rank.scatter(1, clients[:, None], -torch.inf)
        return rank.topk(min(self.num_candidates, len(keys) - 1), dim=1).indices

    def serve(self, shared: Tree, memory: Tree, clients: Tensor, key: int) -> Served:
        """The own model, and the candidates after it, ``[C, 1 + P, ...]``."""
        here = clients.to(memory["keys"].device)
        rows = torch.cat([here[:, None], self._choose(memory, here, key)], dim=1)
        return Served(tree_index(shared, rows), torch.arange(len(clients)))

    def own(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        """The own model without candidates."""
        return Served(tree_map(lambda leaf: leaf[:, None], shared), clients)

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """Keep the models, and add up who helped whom."""
        trees = gather(uploads)
        clients = this.clients.to(memory["keys"].device)
        helped = torch.zeros(len(clients), len(memory["keys"]), dtype=torch.float64, device=clients.device)
        helped.scatter_(1, self._choose(memory, clients, this.key), trees["weights"].double())
        gains = memory["gains"].index_add(0, clients, helped)
        return Mixed(this.clients, trees, len(clients)), memory | {"gains": gains}

    def welcome(self, shared: Tree, memory: Tree) -> Welcome | None:
        """The mean of all models, and those that helped others most; to be fine-tuned."""
        count = min(self.num_candidates, len(memory["keys"]) - 1)
        best = tree_index(shared, memory["gains"].sum(0).topk(count).indices)
        together = tree_cat([mean_of_groups(shared), best])
        return Welcome(tree_map(lambda leaf: leaf[None], together), fine_tune=True)
