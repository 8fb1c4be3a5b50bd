"""Clients as the data have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from fedem.data.collection import Assignment, Collection
from fedem.data.partitions.base import CLIENTS, NOBODY, Partition, assignment_of
from fedem.errors import UserError
from fedem.randomness import choose, client_keys


@final
@dataclass(frozen=True)
class Natural(Partition):
    """Writers, roles or whatever the samples came with, in the order of their names.

    Those that are kept are chosen by their names: with the same seed, a smaller choice is part of a larger one.

    Attributes:
        share: how much of the clients is kept, each with all its samples.
        min_samples: clients with fewer are left out beforehand.
        max_clients: how many are kept at most; 0: all.

    """

    min_samples: int = field(default=2, metadata={"min": 1})
    max_clients: int = field(default=0, metadata={"min": 0})

    def _assign(self, collection: Collection, seed: int) -> Assignment:
        if collection.owners is None:
            raise UserError(
                "These samples have no clients of their own, which the natural partition needs; "
                "allowed: a partition that deals samples, such as dirichlet or uniform."
            )
        owners = collection.owners.numpy()
        sizes = np.bincount(owners, minlength=len(collection.owner_names)).tolist()
        large = sorted(
            name for name, size in zip(collection.owner_names, sizes, strict=True) if size >= self.min_samples
        )
        if not large:
            raise UserError(
                f"partition.min_samples is {self.min_samples}; allowed: at most {max(sizes, default=0)}, "
                "what the largest client has."
            )
        count = max(1, round(self.share * len(large)))
        chosen = choose(client_keys(large), min(count, self.max_clients or count), CLIENTS, seed)
        names = [large[position] for position in chosen.tolist()]
        positions = {name: position for position, name in enumerate(names)}
        clients = np.array([positions.get(name, NOBODY) for name in collection.owner_names])[owners]
        return assignment_of(names, np.arange(len(owners)), clients)
