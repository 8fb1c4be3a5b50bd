"""Shares of labels drawn from a Dirichlet distribution over the clients.

Shapes: n samples, T clients, G groups of labels.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedem.data.collection import Collection
from fedem.data.partitions.base import CONCENTRATION, Dealing, deal_counts, labels_of, log_gammas, normalized
from fedem.errors import UserError

_ATTEMPTS = 100


@dataclass(frozen=True)
class Concentrated(Dealing):
    """Groups of labels, each dealt to the clients in shares from a symmetric Dirichlet(``alpha``) over them.

    How many samples of a group each client gets is multinomial with these shares, as in the paper's own code. Where a
    client would have fewer than ``min_samples``, all shares are drawn again, as is common. So the clients follow that
    law given that none is too small; samples moved to small clients would bring labels that no Dirichlet drew.

    Attributes:
        min_samples: no client has fewer; where one would, all shares are drawn again.
        alpha: concentration of the shares; the smaller, the fewer clients have most of a label.

    """

    min_samples: int = field(default=10, metadata={"min": 1})
    alpha: float = field(default=0.4, metadata=CONCENTRATION)

    def _deal(self, collection: Collection, rows: NDArray[np.int64], rng: Generator) -> NDArray[np.int64]:
        groups = self._groups(labels_of(collection, rows), rng)
        sizes = np.bincount(groups)
        for _ in range(_ATTEMPTS):
            counts = rng.multinomial(sizes, normalized(log_gammas(rng, self.alpha, len(sizes), self.num_clients)))
            if counts.sum(0).min() >= self.min_samples:
                return deal_counts(groups, counts)
        raise UserError(
            f"With partition.alpha {self.alpha:g}, each of {_ATTEMPTS} draws left one of {self.num_clients} clients "
            f"with fewer than {self.min_samples} samples; allowed: a smaller partition.min_samples or "
            "partition.num_clients, or a larger partition.alpha."
        )

    @abstractmethod
    def _groups(self, labels: NDArray[np.int64], rng: Generator) -> NDArray[np.int64]:
        """Return the group of each sample, from 0 to G - 1. ``[n] -> [n]``."""


@final
@dataclass(frozen=True)
class Dirichlet(Concentrated):
    """Every label dealt by itself in Dirichlet shares: the paper's EMNIST and CIFAR-10 (after Wang et al. 2020)."""

    def _groups(self, labels: NDArray[np.int64], rng: Generator) -> NDArray[np.int64]:
        return labels


@final
@dataclass(frozen=True)
class LabelGroups(Concentrated):
    """Labels put at random into ``num_groups`` groups, as equal as can be: what the paper's own code does for CIFAR-10.

    The labels of a group have the same shares.

    Attributes:
        num_groups: G, at most as many as there are labels.

    """

    num_groups: int = field(default=3, metadata={"min": 1})

    def _groups(self, labels: NDArray[np.int64], rng: Generator) -> NDArray[np.int64]:
        num_labels = int(labels.max()) + 1
        if self.num_groups > num_labels:
            raise UserError(
                f"partition.num_groups is {self.num_groups}; allowed: at most {num_labels}, the number of labels."
            )
        groups: NDArray[np.int64] = (rng.permutation(num_labels) % self.num_groups)[labels]
        return groups
