"""The contract of partitions, and what those that deal samples have in common.

The order of a collection's rows plays no part. Samples to be dealt are first put in a random order, by hashes of the
seed and of their content. What is drawn afterwards, from a generator that knows the seed alone, goes by the places in
that order and by labels.

Shapes: N samples of a collection, n of them dealt, T clients, G groups of samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from fedem.arrays import describe
from fedem.data.collection import Assignment, Collection
from fedem.errors import UserError
from fedem.randomness import derive
from fedem.samples import offsets_of
from fedem.settings import Settings

# Purposes, beside those of fedem.randomness.
SAMPLES, CLIENTS, DRAWS = 101, 102, 103
NOBODY = -1
# The logarithm of a small share is of the order of -1 / concentration, which must not overflow.
CONCENTRATION = {"min": 1e-300}


@dataclass(frozen=True)
class Partition(Settings, ABC):
    """A recipe for clients: the same samples, recipe and seed make the same ones.

    Attributes:
        share: how much of the samples is kept, chosen uniformly.
        min_samples: no client has fewer; where one would, the partition is refused.

    """

    share: float = field(default=1.0, metadata={"above": 0, "max": 1})
    min_samples: int = field(default=1, metadata={"min": 1})

    def assign(self, collection: Collection, seed: int) -> Assignment:
        """Say who owns which samples; the rows of each client ascend."""
        if not 0 <= seed < 1 << 63:
            raise UserError(f"The seed is {seed}; allowed: at least 0 and below 2**63.")
        return self._assign(collection, seed)

    @abstractmethod
    def _assign(self, collection: Collection, seed: int) -> Assignment:
        """Assign by a seed that is allowed."""


@dataclass(frozen=True)
class Dealing(Partition):
    """Samples dealt to ``num_clients`` clients called "0", "1", ...; whose they were plays no part.

    With the same seed, all partitions of this kind keep the same ``share`` of the samples.

    Attributes:
        num_clients: T, to whom samples are dealt.

    """

    num_clients: int = field(default=100, metadata={"min": 1})

    def _assign(self, collection: Collection, seed: int) -> Assignment:
        count = round(self.share * len(collection.ids))
        if self.num_clients * self._needed > count:
            raise UserError(
                f"partition.num_clients is {self.num_clients}; allowed: at most {count // self._needed}, since "
                f"{count} of {len(collection.ids)} samples are dealt and each client needs at least {self._needed}."
            )
        tickets = derive(derive(SAMPLES, seed), collection.ids)
        rows = np.argsort(tickets.numpy(), kind="stable")[:count]
        clients = self._deal(collection, rows, np.random.default_rng((DRAWS, seed)))
        assignment = assignment_of([str(client) for client in range(self.num_clients)], rows, clients)
        smallest = int(assignment.offsets.diff().min())
        if smallest < self.min_samples:
            raise UserError(
                f"partition.min_samples is {self.min_samples}; allowed: at most {smallest}, "
                "what the smallest client gets here."
            )
        return assignment

    @property
    def _needed(self) -> int:
        """Samples without which there can't be a client."""
        return self.min_samples

    @abstractmethod
    def _deal(self, collection: Collection, rows: NDArray[np.int64], rng: Generator) -> NDArray[np.int64]:
        """Return the client of each of ``rows``, which are in random order, or ``NOBODY``. ``[n] -> [n]``."""


def assignment_of(names: Sequence[str], rows: NDArray[np.int64], clients: NDArray[np.int64]) -> Assignment:
    """Put ``rows`` ``[n]`` in the order of their ``clients`` ``[n]``, positions among ``names``."""
    owned = clients != NOBODY
    rows, clients = rows[owned], clients[owned]
    sizes = np.bincount(clients, minlength=len(names))
    in_order = rows[np.lexsort((rows, clients))]
    return Assignment(tuple(names), torch.from_numpy(in_order), offsets_of(torch.from_numpy(sizes)))


def labels_of(collection: Collection, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the labels of ``rows`` ``[n]``, numbered from 0 in their order without gaps. ``[n]``."""
    targets = collection.pool.targets
    if targets.is_floating_point() or targets.ndim != 1:
        raise UserError(
            f"The targets are {describe(targets)}; allowed, as this partition goes by labels: integers of shape [n]."
        )
    return np.unique(targets.numpy()[rows], return_inverse=True)[1]


def deal_counts(groups: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Deal ``counts`` ``[G, T]`` samples of each group to each client. Groups ``[n]`` -> clients ``[n]``."""
    rest = np.bincount(groups, minlength=len(counts)) - counts.sum(1)
    receivers = np.tile([*range(counts.shape[1]), NOBODY], len(counts))
    clients = np.empty_like(groups)
    clients[np.argsort(groups, kind="stable")] = np.repeat(receivers, np.column_stack([counts, rest]).flatten())
    return clients


def log_gammas(rng: Generator, concentration: float, *shape: int) -> NDArray[np.float64]:
    """Draw a symmetric Dirichlet's shares as logarithms, which no concentration makes underflow; not normalised."""
    # Gamma(a) is Gamma(a + 1) U^(1 / a), and minus the logarithm of a uniform U is exponential.
    return np.log(rng.standard_gamma(concentration + 1, shape)) - rng.standard_exponential(shape) / concentration


def normalized(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the shares, of sum 1 over the last dimension."""
    shares = np.exp(logs - logs.max(-1, keepdims=True))
    result: NDArray[np.float64] = shares / shares.sum(-1, keepdims=True)
    return result


def fingerprint(assignment: Assignment, collection: Collection) -> str:
    """Hash who owns which samples, whatever the order of rows and clients: 32 hexadecimal digits."""
    ids = collection.ids[assignment.rows].tensor_split(assignment.offsets[1:-1])
    digest = blake2b(digest_size=16)
    for name, own in sorted(zip(assignment.names, ids, strict=True), key=lambda pair: pair[0]):
        word = name.encode(errors="surrogatepass")
        digest.update(f"{len(word)} {len(own)} ".encode() + word + own.sort().values.numpy().tobytes())
    return digest.hexdigest()
