"""The seam between a method for one client and the many clients of a federation.

Shapes: G groups, C clients of the cohort, c clients finished together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedem.algorithms.base import Algorithm
from fedem.engines.batches import Batching
from fedem.samples import Samples
from fedem.settings import Settings
from fedem.tree import Tree, tree_index

Tally = Callable[[Tree, Tree, Tensor, Tensor, Tensor], Tree]
"""(shared, personal, inputs, targets, mask) -> sums over the samples of one client, a number each."""


class Cohort(NamedTuple):
    """Some clients as an engine sees them: everything on the engine's device but ``samples.offsets``."""

    shared: Tree
    """``[G, ...]``"""
    reads: Tensor
    """``[C]`` int64: each client's group"""
    personal: Tree
    """``[C, ...]``"""
    samples: Samples
    """of the C clients, in the same order"""

    def take(self, members: Tensor) -> Cohort:
        """Return some of the clients, positions ``[c]`` in ascending order."""
        if len(members) == len(self.reads):
            return self
        where = members.to(self.samples.inputs.device)
        return Cohort(self.shared, self.reads[members], tree_index(self.personal, where), self.samples.take(members))


class Finished(NamedTuple):
    """Some clients after their round."""

    positions: Tensor
    """``[c]`` int64, in the cohort"""
    uploads: Tree
    """``[c, ...]``"""
    personal: Tree
    """``[c, ...]``"""


@dataclass(frozen=True)
class Engine(Settings, ABC):
    """Runs a method for many clients. All engines agree up to rounding."""

    @abstractmethod
    def train(
        self, algorithm: Algorithm, cohort: Cohort, batching: Batching, keys: Tensor, learning_rate: float
    ) -> Iterator[Finished]:
        """Train every client of the cohort for one round; ``keys`` ``[C]`` are the clients' keys for this round."""

    @abstractmethod
    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        """Sum ``function`` over each client's samples, ``[C]`` float64 on the CPU; at least one must have samples."""
