"""Learning rates by round. The schedule counts rounds of the run, never a client's own steps."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from fedem.core.settings import Settings


@dataclass(frozen=True)
class Schedule(Settings, ABC):
    """A learning rate for each round k = 0, ..., K - 1.

    Attributes:
        learning_rate: the rate of the first round; with inverse_sqrt a0, which is divided by sqrt(K). 0 chooses it from
            the data, by how much the clients' losses bend, and then backtracks.
        backtrack: whether a round after which clients are much worse than a constant predictor is made again with half
            the rate, which stays so.
    """

    depends_on_length: ClassVar[bool] = True  # whether a round's rate goes by K: such a run can't be made longer

    learning_rate: float = field(default=0.1, metadata={"min": 0})
    backtrack: bool = False

    @abstractmethod
    def rate(self, round_index: int, num_rounds: int) -> float:
        """Return the learning rate of round ``round_index`` (from 0) in a run of ``num_rounds``."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The same rate in every round."""

    depends_on_length: ClassVar[bool] = False

    def rate(self, round_index: int, num_rounds: int) -> float:
        return self.learning_rate


@dataclass(frozen=True)
class Step(Schedule):
    """Times ``factor`` at one half and again at three quarters of the run.

    Attributes:
        factor: by which the rate is multiplied, twice.
    """

    factor: float = field(default=0.1, metadata={"above": 0})

    def rate(self, round_index: int, num_rounds: int) -> float:
        passed = (2 * round_index >= num_rounds) + (4 * round_index >= 3 * num_rounds)
        return self.learning_rate * self.factor**passed


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from ``learning_rate`` down to zero: ``learning_rate (1 + cos(pi k / K)) / 2``."""

    def rate(self, round_index: int, num_rounds: int) -> float:
        return self.learning_rate * (1 + math.cos(math.pi * round_index / num_rounds)) / 2


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """The rate of the paper's convergence theorems: a0 / sqrt(K), the same in all K rounds."""

    def rate(self, round_index: int, num_rounds: int) -> float:
        return self.learning_rate / math.sqrt(num_rounds)


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant, "step": Step, "cosine": Cosine, "inverse_sqrt": InverseSqrt,
}  # fmt: skip
