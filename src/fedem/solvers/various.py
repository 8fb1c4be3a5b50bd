"""Different solvers across clients: the paper's convergence with black-box solvers asks only how well each solves.

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS 2021
(distributed surrogate optimisation with black-box solver). :mod:`fedem.inexactness` measures how well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from fedem.errors import unknown
from fedem.randomness import SOLVER, derive
from fedem.settings import names_of
from fedem.solvers.base import Objective, Solver
from fedem.solvers.gradient import SGD, Adam
from fedem.solvers.lbfgs import LBFGS
from fedem.solvers.newton import Newton
from fedem.tree import Tree

MEMBERS: dict[str, type[Solver]] = {"sgd": SGD, "adam": Adam, "lbfgs": LBFGS, "newton": Newton}


@dataclass(frozen=True)
class Various(Solver):
    """Each client has one of several solvers, by its name alone. All are given the same learning rate.

    Attributes:
        members: names of solvers, separated by commas; a name that stands twice gets twice as many clients.
        momentum: of those members that have one.
        iterations: of those members that count their steps and not the batches.

    """

    members: str = "sgd,lbfgs,newton"
    momentum: float = field(default=0.9, metadata={"min": 0, "below": 1})
    iterations: int = field(default=5, metadata={"min": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self._names:
            if name not in MEMBERS:
                raise unknown("member of Various.members", name, MEMBERS)

    @property
    def _names(self) -> list[str]:
        return [name.strip() for name in self.members.split(",")]

    @cached_property
    def solvers(self) -> tuple[Solver, ...]:
        """The members, each with those of our settings that it knows."""
        common = {name: getattr(self, name) for name in names_of(Various) if name != "members"}
        kinds = [MEMBERS[name] for name in self._names]
        return tuple(kind(**{key: common[key] for key in names_of(kind) if key in common}) for kind in kinds)

    @property
    def differentiates_twice(self) -> bool:
        """Where one of them does."""
        return any(solver.differentiates_twice for solver in self.solvers)

    @property
    def obeys_rate(self) -> bool:
        """Where all of them do."""
        return all(solver.obeys_rate for solver in self.solvers)

    def among(self, keys: Tensor) -> Iterator[tuple[Solver, Tensor]]:
        """Deal the clients out by hashing their keys; members that get nobody are left out."""
        chosen = derive(keys, SOLVER) % len(self.solvers)
        for index, solver in enumerate(self.solvers):
            positions = (chosen == index).nonzero().flatten()
            if len(positions):
                yield solver, positions

    def init(self, parameters: Tree) -> Tree:
        """Never called: clients train with one of the members."""
        raise AssertionError("Various only deals out its members; ask among() which clients have which")

    def step(
        self, objective: Objective, parameters: Tree, memory: Tree, learning_rate: Tensor
    ) -> tuple[Tree, Tree, Tree]:
        """Never called: clients train with one of the members."""
        raise AssertionError("Various only deals out its members; ask among() which clients have which")
