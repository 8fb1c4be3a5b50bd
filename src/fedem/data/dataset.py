"""Sources of data, and the data sets that they make: a federation and, when it is known, the truth behind it."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedem.core.settings import Settings
from fedem.data.encoding import Encoding
from fedem.data.federation import Federation
from fedem.data.partitions import Assignment, Collection, Partition


@dataclass(frozen=True)
class Truth:
    """The parameters that generated the data: M true components and each client's true mixture weights.

    The label of x given component m is 1 with probability E[sigmoid(<x, theta_m> + noise_scale * e)], e ~ N(0, 1).
    """

    names: tuple[str, ...]
    components: Tensor  # [M, d]
    mixture_weights: Tensor  # [T, M], one row per name
    noise_scale: float
    input_means: Tensor | None = None  # [M, d], where x - input_means[m] ~ U([-1, 1]^d); None where x says nothing of m

    def predict(self, inputs: Tensor, mixture_weights: Tensor) -> Tensor:
        """Return the true probabilities ``[n, 2]`` of inputs ``[n, d]`` under each row's weights ``[n, M]``."""
        # The noise is integrated by the trapezoidal rule, which converges exponentially here once its steps are shorter
        # than the sigmoid's width.
        nodes = np.linspace(-7, 7, 1 + math.ceil(14 / 0.8 * max(1.0, self.noise_scale)))
        density = np.exp(-(nodes**2) / 2)
        logits = inputs.to(self.components.dtype) @ self.components.T
        positive = torch.zeros_like(logits)
        for node, weight in zip(nodes.tolist(), (density / density.sum()).tolist(), strict=True):
            positive += weight * torch.sigmoid(logits + self.noise_scale * node)
        mixed = (self._posterior(inputs, mixture_weights) * positive).sum(1)
        return torch.stack([1 - mixed, mixed], dim=1)

    def _posterior(self, inputs: Tensor, mixture_weights: Tensor) -> Tensor:
        """Return p(m | x), ``[n, M]``: the weights of those components that x may come from."""
        if self.input_means is None:
            return mixture_weights
        # A little more than the cube, for rounding.
        inside = torch.stack([((inputs - mean).abs() <= 1 + 1e-5).all(1) for mean in self.input_means], dim=1)
        possible = mixture_weights * inside
        return possible / possible.sum(1, keepdim=True)

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

    @property
    def cut(self) -> dict[str, Any]:
        """How each client's samples are split, as :meth:`Federation.from_clients` takes it."""
        return {}

    @abstractmethod
    def make(self, seed: int, partition: Partition | None = None, unseen: float = 0.0) -> Dataset:
        """Make the data set; ``seed`` decides everything that is random.

        Clients are made by ``partition``, or by the usual one. Nothing may be fitted on a share ``unseen`` of them that
        will be held out, by the same seed.
        """


@dataclass(frozen=True)
class Pooled(DataSource):
    """Samples that a partition deals to clients, each of which splits its own.

    Attributes:
        validation: share of each client's samples for validation, by which the best state is chosen.
        test: share for testing. Together they must be below 1; at least one sample of a client is for training.
    """

    validation: float = field(default=0.2, metadata={"min": 0, "below": 1})
    test: float = field(default=0.2, metadata={"min": 0, "below": 1})

    @property
    def cut(self) -> dict[str, Any]:
        return {"validation": self.validation, "test": self.test}

    def _split(self, collection: Collection, assignment: Assignment, seed: int) -> Federation:
        how = self.cut | {"seed": seed, "order": collection.order}
        return Federation.from_pool(collection.pool, *assignment, collection.ids, **how)
