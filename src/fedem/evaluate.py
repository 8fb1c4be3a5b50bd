"""Who is scored how: each client with its own predictor, on its own samples.

Shapes: T clients, M components, n samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from fedem.algorithms.base import Algorithm, Mixture
from fedem.data.base import Truth
from fedem.engines import Cohort, Engine
from fedem.errors import UserError
from fedem.federation import Samples
from fedem.mixing.base import Mixer
from fedem.mixture import mix, negative_log_likelihood
from fedem.models.base import Model
from fedem.rounds import State
from fedem.tree import Tree, tree_index, tree_stack

_ORACLE_ROWS = 1 << 17


@dataclass(frozen=True, eq=False)
class Scores:
    """Per-client scores on one part of the data. Clients without samples there are left out of every average."""

    metric: str
    """"accuracy" (larger is better) or "mean_squared_error" (smaller is better)"""
    counts: Tensor
    """``[T]``"""
    losses: Tensor
    """``[T]`` mean negative log-likelihood of each client's mixture; NaN without samples"""
    values: Tensor
    """``[T]`` mean metric; NaN without samples"""

    def _weighted(self, per_client: Tensor) -> float:
        there = self.counts > 0
        return float((per_client[there] * self.counts[there]).sum() / self.counts.sum())

    @property
    def average(self) -> float:
        """The metric averaged over clients, weighted by their number of samples."""
        return self._weighted(self.values)

    @property
    def unweighted(self) -> float:
        """The metric averaged over clients, each counting the same."""
        return float(self.values[self.counts > 0].mean())

    @property
    def loss(self) -> float:
        """The paper's f(Theta, Pi): negative log-likelihood a sample, over all samples."""
        return self._weighted(self.losses)

    @property
    def bottom_decile(self) -> float:
        """The (T/10)-th worst client's metric, T/10 rounded up."""
        scored = self.values[self.counts > 0].sort(descending=self.metric != "accuracy").values
        return float(scored[math.ceil(len(scored) / 10) - 1])

    def better_than(self, other: Scores) -> bool:
        """Whether the weighted average is strictly better."""
        return self.average > other.average if self.metric == "accuracy" else self.average < other.average


def predict(model: Model, mixture: Mixture, inputs: Tensor) -> Tensor:
    """Return one client's predictions: the components' probabilities (or means), mixed. ``[n, K]``."""
    outputs = vmap(model.outputs, in_dims=(0, None))(mixture.components, inputs)
    return mix(model.loss.probabilities(outputs), mixture.log_weights)


def evaluate(algorithm: Algorithm, mixer: Mixer, engine: Engine, state: State, samples: Samples) -> Scores | None:
    """Score every client's own predictor on its ``samples`` (T clients); None when there are no samples at all."""
    if len(samples) == 0:
        return None
    clients = torch.arange(samples.num_clients)
    device = next(iter(state.shared.values())).device
    cohort = Cohort(state.shared, mixer.reads(clients), state.personal, samples.to(device))
    return _scores(algorithm, engine, cohort)


def _scores(algorithm: Algorithm, engine: Engine, cohort: Cohort) -> Scores:
    loss = algorithm.model.loss

    def assess(shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        components, log_weights = algorithm.predictor(shared, personal)
        outputs = vmap(algorithm.model.outputs, in_dims=(0, None))(components, inputs)
        losses = vmap(loss.negative_log_likelihood, in_dims=(0, None))(outputs, targets)
        predictions = mix(loss.probabilities(outputs), log_weights)
        return {
            "loss": (mask * negative_log_likelihood(losses, log_weights)).sum(dtype=torch.float64),
            "value": (mask * loss.score(predictions, targets)).sum(dtype=torch.float64),
        }

    sums = engine.tally(assess, cohort)
    counts = cohort.samples.sizes
    return Scores(loss.metric, counts, sums["loss"] / counts, sums["value"] / counts)


def personalize(
    algorithm: Algorithm, mixer: Mixer, state: State, samples: Samples, max_iterations: int | None = None
) -> tuple[Tree, Tree]:
    """Fit clients unseen in training on their ``samples``, the shared tree fixed.

    Args:
        algorithm: the method.
        mixer: says which group they read.
        state: of the federation that was trained.
        samples: of the new clients; a client may have none.
        max_iterations: one for the paper's single update; None for convergence.

    Returns:
        the shared tree they read ``[...]`` and their personal trees ``[T, ...]``
    """
    group = mixer.group_for_unseen()
    if group is None:
        raise UserError("Clients that train alone leave nothing to share with an unseen client; choose another method.")
    shared = tree_index(state.shared, group)
    device = next(iter(shared.values())).device
    trees = []
    for position in range(samples.num_clients):
        inputs, targets = (part.to(device) for part in samples.client(position))
        trees.append(algorithm.adapt(shared, algorithm.score(shared, inputs, targets), max_iterations))
    return shared, tree_stack(trees)


def evaluate_unseen(
    algorithm: Algorithm, engine: Engine, shared: Tree, personal: Tree, samples: Samples
) -> Scores | None:
    """Score clients that :func:`personalize` fitted."""
    if len(samples) == 0:
        return None
    device = next(iter(shared.values())).device
    reads = torch.zeros(samples.num_clients, dtype=torch.int64)
    one_group = {name: leaf[None] for name, leaf in shared.items()}
    return _scores(algorithm, engine, Cohort(one_group, reads, personal, samples.to(device)))


def evaluate_oracle(truth: Truth, names: tuple[str, ...], samples: Samples) -> float | None:
    """Accuracy of the predictor that knows the true parameters, over all samples; None without samples."""
    if len(samples) == 0:
        return None
    weights = torch.repeat_interleave(truth.weights_of(names), samples.sizes, dim=0)
    parts = zip(*(flat.split(_ORACLE_ROWS) for flat in (samples.inputs, samples.targets, weights)), strict=True)
    correct = sum(int((truth.predict(inputs, rows).argmax(1) == targets).sum()) for inputs, targets, rows in parts)
    return correct / len(samples)
