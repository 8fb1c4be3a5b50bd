"""Clients of equal size: alike, or with few labels each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedem.data.collection import Collection
from fedem.data.partitions.base import Dealing, labels_of


@final
@dataclass(frozen=True)
class Uniform(Dealing):
    """Samples dealt at random: all clients have one distribution, and their sizes differ by at most one."""

    def _deal(self, collection: Collection, rows: NDArray[np.int64], rng: Generator) -> NDArray[np.int64]:
        return np.arange(len(rows)) % self.num_clients


@final
@dataclass(frozen=True)
class Shards(Dealing):
    """Few labels a client (McMahan et al. 2017): samples sorted by label, cut into shards, and those dealt at random.

    The sizes of shards differ by at most one.

    Attributes:
        shards_per_client: about as many as a client then has labels, since few shards hold two.

    """

    shards_per_client: int = field(default=2, metadata={"min": 1})

    @property
    def _needed(self) -> int:
        return max(self.min_samples, self.shards_per_client)

    def _deal(self, collection: Collection, rows: NDArray[np.int64], rng: Generator) -> NDArray[np.int64]:
        count = self.num_clients * self.shards_per_client
        receivers = rng.permutation(count) % self.num_clients
        clients = np.empty_like(rows)
        by_label = np.argsort(labels_of(collection, rows), kind="stable")
        clients[by_label] = receivers[np.arange(len(rows)) * count // len(rows)]
        return clients
