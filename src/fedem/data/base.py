"""What a data set hands over: a federation and, when it is known, the truth behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedem.federation import Federation
from fedem.settings import Settings


class Truth(ABC):
    """The parameters that generated the data: M true components and each client's true mixture weights."""

    names: tuple[str, ...]
    components: Tensor
    """``[M, d]``"""
    mixture_weights: Tensor
    """``[T, M]``, a row a name"""

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


@dataclass(frozen=True)
class DataSource(Settings, ABC):
    """A recipe for a data set: a frozen dataclass of its parameters. The same recipe and seed make the same data."""

    @abstractmethod
    def make(self, seed: int) -> Dataset:
        """Make the data set."""
