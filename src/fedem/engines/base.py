"""The seam between a method for one client and the many clients of a federation.

Shapes: G groups, C clients of the cohort, c clients finished together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedem.algorithms.base import Algorithm
from fedem.engines.batches import Batching
from fedem.samples import Samples
from fedem.settings import Settings
from fedem.solvers import Solver
from fedem.tree import Tree, tree_index

Tally = Callable[[Tree, Tree, Tensor, Tensor, Tensor], Tree]
"""(shared, personal, inputs, targets, mask) -> sums over the samples of one client, a number each."""


class Cohort(NamedTuple):
    """Some clients as an engine sees them: everything on its device, but for samples that do not fit there at once."""

    shared: Tree
    """``[G, ...]``"""
    reads: Tensor
    """``[C]`` int64: each client's group"""
    personal: Tree
    """``[C, ...]``"""
    samples: Samples
    """of the C clients, in the same order"""

    @property
    def device(self) -> torch.device:
        """Where the clients are trained."""
        return next(iter(self.shared.values())).device

    def take(self, members: Tensor) -> Cohort:
        """Return some of the clients, positions ``[c]`` in ascending order."""
        if len(members) == len(self.reads):
            return self
        where = members.to(self.device)
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

    @property
    def most_together(self) -> int:
        """How many clients were trained at once at most, so far."""
        return 1

    @abstractmethod
    def train(
        self,
        algorithm: Algorithm,
        cohort: Cohort,
        batching: Batching,
        keys: Tensor,
        learning_rate: float,
        scales: Tensor | None = None,
    ) -> Iterator[Finished]:
        """Train every client of the cohort for one round.

        Args:
            algorithm: the method.
            cohort: C clients.
            batching: how they walk through their samples.
            keys: ``[C]`` the clients' keys for this round.
            learning_rate: of the round.
            scales: ``[C]`` what it is multiplied by for each client; None for one.

        """

    @abstractmethod
    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        """Sum ``function`` over each client's samples, ``[C]`` float64 on the CPU; at least one must have samples."""


class SolverDeal:
    """Deals clients out to their solvers, and trains those with the same one together.

    It keeps the method with each solver that clients have had, since an engine records what comes back.
    """

    def __init__(self, algorithm: Algorithm):
        self._algorithm = algorithm
        self._variants: dict[Solver, Algorithm] = {algorithm.solver: algorithm}

    def train(
        self,
        engine: Engine,
        cohort: Cohort,
        batching: Batching,
        names: Tensor,
        keys: Tensor,
        learning_rate: float,
        num_steps: int | None = None,
        scales: Tensor | None = None,
    ) -> Iterator[Finished]:
        """Train every client of the cohort for one round.

        Args:
            engine: runs those with the same solver.
            cohort: C clients.
            batching: how they walk, unless their solver or ``num_steps`` says otherwise.
            names: ``[C]`` keys of the clients' names, which decide on their solvers.
            keys: ``[C]`` the clients' keys for this round.
            learning_rate: of the round.
            num_steps: exactly so many steps, when given.
            scales: ``[C]`` what the learning rate is multiplied by for each client; None for one.

        """
        for solver, members in self._algorithm.solver.among(names):
            algorithm = self._variants.setdefault(solver, self._algorithm.with_solver(solver))
            walk = Batching(0, local_steps=solver.whole_steps) if solver.whole_steps else batching
            if num_steps is not None:
                walk = replace(walk, local_steps=num_steps)
            theirs = None if scales is None else scales[members]
            for chunk in engine.train(algorithm, cohort.take(members), walk, keys[members], learning_rate, theirs):
                yield chunk._replace(positions=members[chunk.positions])
