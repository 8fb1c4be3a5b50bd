"""A server that takes the mean of the clients' changes for a direction, and steps along it by an optimiser of its own.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021 (FedAdagrad,
FedAdam, FedYogi); Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019 (FedAvgM).

Near the server's u the cohort's mean change, d = mean - u, stands in for a negative gradient. There is no correction
for moments that start at zero, as there is none in the papers.

Shapes: every leaf is that of the one group, ``[1, ...]``, components and all; the rules go number by number.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.settings import Settings
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_map
from fedem.methods.mixer import Mixed, Mixer, Round, RoundPlan, Served, Start, Uploads, Welcome

_BASE, _MOMENTS = "base", "moments"  # prefixes of what the mixer remembers


@dataclass(frozen=True)
class ServerRule(Settings, ABC):
    """How a server steps along the mean of the clients' changes."""

    @abstractmethod
    def init(self, trained: Tree) -> Tree:
        """Return the moments before the first round, beside the leaves of u that are ``trained``."""

    @abstractmethod
    def step(self, changes: Tree, moments: Tree) -> tuple[Tree, Tree]:
        """Return what to add to u for the mean ``changes`` of its trained leaves, and the next moments."""


@final
@dataclass(frozen=True)
class FedAvgM(ServerRule):
    """FedAvgM (Hsu et al. 2019): momentum from round to round, ``m = momentum m + d`` and ``u += learning_rate m``.

    Attributes:
        learning_rate: how far the server goes along m. With 1 and a momentum of 0 it goes to the mean itself.
        momentum: share of m that the next round keeps. A steady change is followed 1 / (1 - momentum) times as fast.
    """

    # Plain averaging goes all the way; the momentum is that of both papers' experiments.
    learning_rate: float = field(default=1.0, metadata={"above": 0})
    momentum: float = field(default=0.9, metadata={"min": 0, "below": 1})

    def init(self, trained: Tree) -> Tree:
        return add_prefix("first", tree_map(torch.zeros_like, trained))

    def step(self, changes: Tree, moments: Tree) -> tuple[Tree, Tree]:
        first = tree_map(lambda m, d: torch.add(d, m, alpha=self.momentum), take_prefix("first", moments), changes)
        return tree_map(lambda m: self.learning_rate * m, first), add_prefix("first", first)


@dataclass(frozen=True)
class _Adaptive(ServerRule):
    """``u += learning_rate m / (sqrt(v) + tau)``: every number of u has a rate of its own; v starts at tau^2.

    Attributes:
        learning_rate: about how far the server moves, in a round, a number of u whose change is as it usually is.
        tau: added to the root of v: numbers of u whose changes are far smaller are moved in proportion to them.
    """

    # The paper chooses a rate for every task. Adagrad begins with longer steps, as they shorten.
    learning_rate: float = field(default=0.1, metadata={"above": 0})
    # As in the paper's experiments.
    tau: float = field(default=1e-3, metadata={"above": 0})

    def init(self, trained: Tree) -> Tree:
        return add_prefix("second", tree_map(lambda leaf: torch.full_like(leaf, self.tau**2), trained))

    def step(self, changes: Tree, moments: Tree) -> tuple[Tree, Tree]:
        second = tree_map(self._second, take_prefix("second", moments), changes)
        return tree_map(self._scaled, changes, second), add_prefix("second", second)

    @abstractmethod
    def _second(self, second: Tensor, change: Tensor) -> Tensor:
        """Return the next v."""

    def _scaled(self, direction: Tensor, second: Tensor) -> Tensor:
        return self.learning_rate * direction / (second.sqrt() + self.tau)


@final
@dataclass(frozen=True)
class FedAdagrad(_Adaptive):
    """FedAdagrad: ``v = v + d^2``, and ``u += learning_rate d / (sqrt(v) + tau)``, with ever shorter steps."""

    def _second(self, second: Tensor, change: Tensor) -> Tensor:
        return second + change.square()


@dataclass(frozen=True)
class _Averaging(_Adaptive):
    """``m = beta1 m + (1 - beta1) d``.

    Attributes:
        beta1: share of m, the running mean of the changes d, that a round keeps.
        beta2: share of v, which follows the squares of the changes, that a round keeps.
    """

    learning_rate: float = field(default=0.01, metadata={"above": 0})
    # Both as in the paper's experiments.
    beta1: float = field(default=0.9, metadata={"min": 0, "below": 1})
    beta2: float = field(default=0.99, metadata={"min": 0, "below": 1})

    def init(self, trained: Tree) -> Tree:
        return add_prefix("first", tree_map(torch.zeros_like, trained)) | super().init(trained)

    def step(self, changes: Tree, moments: Tree) -> tuple[Tree, Tree]:
        first, kept = take_prefix("first", moments), self.beta1
        first = tree_map(lambda m, d: kept * m + (1 - kept) * d, first, changes)
        second = tree_map(self._second, take_prefix("second", moments), changes)
        return tree_map(self._scaled, first, second), add_prefix("first", first) | add_prefix("second", second)


@final
@dataclass(frozen=True)
class FedAdam(_Averaging):
    """FedAdam: ``v = beta2 v + (1 - beta2) d^2``, and ``u += learning_rate m / (sqrt(v) + tau)``."""

    def _second(self, second: Tensor, change: Tensor) -> Tensor:
        return self.beta2 * second + (1 - self.beta2) * change.square()


@final
@dataclass(frozen=True)
class FedYogi(_Averaging):
    """FedYogi: as FedAdam with ``v = v - (1 - beta2) d^2 sign(v - d^2)``, which forgets large changes more slowly."""

    def _second(self, second: Tensor, change: Tensor) -> Tensor:
        square = change.square()
        return second - (1 - self.beta2) * square * (second - square).sign()


SERVER_RULES: dict[str, type[ServerRule]] = {
    "momentum": FedAvgM,
    "adagrad": FedAdagrad,
    "adam": FedAdam,
    "yogi": FedYogi,
}


@final
@dataclass(frozen=True)
class ServerSteps(Mixer):
    """A server that averages (``base``) and then, in place of the mean, takes a step of its own towards it.

    The trained leaves of u are stepped. Buffers, such as the statistics of batch normalisations, and counters are what
    the ``base`` makes of them. The memory holds the moments, leaf by leaf like u.
    """

    is_server_mean: ClassVar[bool] = True

    base: Mixer
    rule: ServerRule
    of_updates: bool = False  # whether means are of changes, as compressed messages have them, and not of models

    def __post_init__(self) -> None:
        super().__post_init__()
        # The step waits until all uploads are in the means, however these are made.
        object.__setattr__(self, "adds_up", self.base.adds_up)

    @property
    def plain(self) -> Mixer:
        return self.base.plain

    def init(self, start: Start) -> tuple[Tree, Tree]:
        groups, memory = self.base.init(start)
        trained = {name: leaf for name, leaf in groups.items() if name in start.trained}
        return groups, _joined(memory, self.rule.init(trained))

    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        return self.base.read(shared, take_prefix(_BASE, memory), clients)

    def plan(self, shared: Tree, memory: Tree, this: Round) -> RoundPlan:
        return self.base.plan(shared, take_prefix(_BASE, memory), this)

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        mixed, remembered = self.base.mix(shared, take_prefix(_BASE, memory), this, uploads)
        return mixed, _joined(remembered, take_prefix(_MOMENTS, memory))

    def advance(self, shared: Tree, memory: Tree, this: Round, mixed: Mixed) -> tuple[Mixed, Tree]:
        mixed, remembered = self.base.advance(shared, take_prefix(_BASE, memory), this, mixed)
        means = {name: leaf for name, leaf in mixed.means.items() if name in this.trained}
        changes = means if self.of_updates else {name: leaf - shared[name] for name, leaf in means.items()}
        steps, moments = self.rule.step(changes, take_prefix(_MOMENTS, memory))
        # u + step, written so that a step which is the change itself leads to the mean, to the bit.
        stepped = tree_map(lambda mean, step, change: mean + (step - change), means, steps, changes)
        return mixed._replace(means=mixed.means | stepped), _joined(remembered, moments)

    def share(self, this: Round, of_samples: float) -> float:
        return self.base.share(this, of_samples)

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        return self.base.welcome(shared, take_prefix(_BASE, memory))

    def check(self, keys: Tensor, seed: int) -> None:
        self.base.check(keys, seed)

    def summary(self, memory: Tree, cohort_size: int) -> dict[str, float]:
        return self.base.summary(take_prefix(_BASE, memory), cohort_size)


def _joined(base: Tree, moments: Tree) -> Tree:
    return add_prefix(_BASE, base) | add_prefix(_MOMENTS, moments)
