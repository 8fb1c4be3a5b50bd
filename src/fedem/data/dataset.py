"""Sources of data, and the data sets that they make: a federation and, when it is known, the truth behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedem.core.settings import Settings
from fedem.data.encoding import Encoding
from fedem.data.federation import Federation
from fedem.data.partitions import PARTITIONS, Assignment, Collection, Partition, fingerprint


class Truth(ABC):
    """The parameters that generated the data: M true components and each client's true mixture weights."""

    names: tuple[str, ...]
    components: Tensor  # [M, d]
    mixture_weights: Tensor  # [T, M], one row per name

    @abstractmethod
    def predict(self, inputs: Tensor, mixture_weights: Tensor) -> Tensor:
        """Return the true probabilities ``[n, K]`` of inputs ``[n, ...]`` under each row's weights ``[n, M]``."""

    def weights_of(self, names: tuple[str, ...]) -> Tensor:
        """Return the true mixture weights of the clients called ``names``, ``[len(names), M]``."""
        positions = {name: position for position, name in enumerate(self.names)}
        return self.mixture_weights[torch.tensor([positions[name] for name in names])]


class Dataset(NamedTuple):
    """A federation and what is known of it."""

    federation: Federation
    truth: Truth | None = None
    feature_names: tuple[str, ...] | None = None
    encoding: Encoding | None = None
    """how a table's columns became inputs and targets, so that new rows can"""
    partition_hash: str = ""
    """of who owns which samples, where a partition decided"""
    label_names: tuple[str, ...] | None = None
    """of the classes, whose positions are the targets, where they have names"""
    seed: int = 0
    """that the encoding was fitted with, if there is one: it decides which rows are for training"""
    unseen: float = 0.0
    """share of the clients that the encoding was fitted without"""

    def __repr__(self) -> str:
        return f"<Dataset of {self.federation!r}>"


@dataclass(frozen=True)
class DataSource(Settings, ABC):
    """A recipe for a data set: a frozen dataclass of its parameters. The same recipe and seed make the same data."""

    usual: ClassVar[str] = "natural"  # name of the partition that makes its clients, unless another is asked for

    @abstractmethod
    def make(self, seed: int, partition: Partition | None = None, unseen: float = 0.0) -> Dataset:
        """Make the data set.

        Args:
            seed: decides everything that is random.
            partition: makes the clients; the usual one with its own settings when not given.
            unseen: share of the clients that will be held out (by the same seed): nothing may be fitted on them.
        """


@dataclass(frozen=True)
class Pooled(DataSource):
    """Samples that a partition deals to clients, each of which splits its own at random.

    Attributes:
        validation: share of each client's samples for validation, by which the best state is chosen.
        test: share for testing. Together they must be below 1; at least one sample of a client is for training.
    """

    validation: float = field(default=0.2, metadata={"min": 0, "below": 1})
    test: float = field(default=0.2, metadata={"min": 0, "below": 1})

    @abstractmethod
    def collect(self) -> Collection:
        """Return all samples; nothing is read that can be mapped from a file."""

    def _split(self, collection: Collection, assignment: Assignment, seed: int) -> Federation:
        """Split every client's samples."""
        return Federation.from_pool(
            collection.pool, *assignment, collection.ids, validation=self.validation, test=self.test, seed=seed
        )

    def make(self, seed: int, partition: Partition | None = None, unseen: float = 0.0) -> Dataset:
        collection = self.collect()
        assignment = (PARTITIONS[self.usual]() if partition is None else partition).assign(collection, seed)
        federation = self._split(collection, assignment, seed)
        return Dataset(federation, partition_hash=fingerprint(assignment, collection))
