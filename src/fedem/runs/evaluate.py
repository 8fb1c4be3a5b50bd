"""Who is scored how: each client with its own predictor, on its own samples.

Shapes: T clients, M components, n samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedem.core.em import mix, negative_log_likelihood
from fedem.core.tree import Tree
from fedem.data.dataset import Truth
from fedem.data.federation import PARTS, Federation
from fedem.engines import Cohort, Engine
from fedem.methods.base import Algorithm, Mixture
from fedem.models.base import Model
from fedem.runs.personalize import Predictors

_ORACLE_ROWS = 1 << 17
_PREDICT_ROWS = 1 << 13


@dataclass(frozen=True, eq=False)
class Scores:
    """Per-client scores on one part of the data. Clients without samples there are left out of every average."""

    metric: str
    """"accuracy" (larger is better) or "mean_squared_error" (smaller is better)"""
    weights: Tensor
    """``[T]`` training samples of each client: the weights of the average"""
    counts: Tensor
    """``[T]`` samples scored"""
    losses: Tensor
    """``[T]`` mean negative log-likelihood of each client's mixture; NaN without samples"""
    values: Tensor
    """``[T]`` mean metric; NaN without samples"""

    def _weighted(self, per_client: Tensor) -> float:
        there = self.counts > 0
        return float((per_client[there] * self.weights[there]).sum() / self.weights[there].sum())

    @property
    def average(self) -> float:
        """The metric averaged over clients, weighted by their number of training samples as in the paper."""
        return self._weighted(self.values)

    @property
    def unweighted(self) -> float:
        """The metric averaged over clients, each counting the same."""
        return float(self.values[self.counts > 0].mean())

    @property
    def loss(self) -> float:
        """Negative log-likelihood a sample, weighted likewise; on the training part it is the paper's f(Theta, Pi)."""
        return self._weighted(self.losses)

    @property
    def bottom_decile(self) -> float:
        """The (T/10)-th worst client's metric, T/10 rounded up."""
        scored = self.values[self.counts > 0].sort(descending=not self.larger_is_better).values
        return float(scored[math.ceil(len(scored) / 10) - 1])

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger metric is better."""
        return self.metric == "accuracy"


def predict(model: Model, mixture: Mixture, inputs: Tensor) -> Tensor:
    """Return one client's predictions: the components' probabilities (or means), mixed. ``[n, K]``."""
    pieces = [
        mix(model.loss.probabilities(model.component_outputs(mixture.components, some)), mixture.log_weights)
        for some in inputs.split(_PREDICT_ROWS)
    ]
    return torch.cat(pieces)


def evaluate(algorithm: Algorithm, engine: Engine, found: Predictors, federation: Federation) -> dict[str, Scores]:
    """Score every client's own predictor on each part of its data that there is."""
    model, loss = algorithm.model, algorithm.model.loss

    def assess(shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        components, log_weights = algorithm.predictor(shared, personal)
        outputs = model.component_outputs(components, inputs)
        losses = vmap(loss.negative_log_likelihood, in_dims=(0, None))(outputs, targets)
        predictions = mix(loss.probabilities(outputs), log_weights)
        return {
            "loss": (mask * negative_log_likelihood(losses, log_weights)).sum(dtype=torch.float64),
            "value": (mask * loss.score(predictions, targets)).sum(dtype=torch.float64),
        }

    scores: dict[str, Scores] = {}
    for part in PARTS:
        samples = federation.part(part)
        if len(samples):
            with torch.no_grad():
                sums = engine.tally(algorithm, assess, Cohort(*found, samples))
            losses, values = (sums[name] / samples.sizes for name in ("loss", "value"))
            scores[part] = Scores(loss.metric, federation.train.sizes, samples.sizes, losses, values)
    return scores


def evaluate_oracle(truth: Truth, federation: Federation) -> Scores | None:
    """Score the predictor that knows the true parameters on the test part; None when there is none."""
    samples = federation.test
    if len(samples) == 0:
        return None
    weights = torch.repeat_interleave(truth.weights_of(federation.names), samples.sizes, dim=0)
    probability = torch.cat(
        [
            truth.predict(inputs, rows).gather(1, torch.stack([targets, 1 - targets], dim=1))
            for inputs, targets, rows in zip(
                *(flat.cpu().split(_ORACLE_ROWS) for flat in (samples.inputs, samples.targets, weights)), strict=True
            )
        ]
    )
    owner = torch.repeat_interleave(torch.arange(federation.num_clients), samples.sizes)
    per_client = torch.zeros(2, federation.num_clients, dtype=torch.float64)
    per_client[0].index_add_(0, owner, -probability[:, 0].double().log())
    per_client[1].index_add_(0, owner, (probability[:, 0] > probability[:, 1]).double())
    losses, values = per_client / samples.sizes
    return Scores("accuracy", federation.train.sizes, samples.sizes, losses, values)


# Scores as named figures: what a line of metrics.jsonl, summary.json and a row of clients.csv say.

Record = dict[str, Any]

_ABSURD = 100.0
"""nats that a classifier loses on a sample it was trained on: a guess among 10^43 classes"""


def name_scores(scores: Mapping[str, Scores]) -> Record:
    """Name every figure: ``test_accuracy``, ``test_loss``, ... and the test part's ``bottom_decile``."""
    record: Record = {}
    for part, entry in scores.items():
        record[f"{part}_{entry.metric}"] = entry.average
        record[f"{part}_{entry.metric}_unweighted"] = entry.unweighted
        record[f"{part}_loss"] = entry.loss
    if "test" in scores:
        record["bottom_decile"] = scores["test"].bottom_decile
    return record


def has_diverged(summary: Mapping[str, Any]) -> bool:
    """Whether classifiers lose so much on their training samples that they can't have learnt."""
    loss = summary.get("train_loss")
    return "train_accuracy" in summary and (loss is None or not loss < _ABSURD)


def name_weights(log_weights: Tensor) -> Record:
    """Name the mean of the clients' mixture weights ``[T, M]`` and their mean entropy in nats; nothing if M = 1."""
    if log_weights.shape[1] == 1:
        return {}
    # 0 log 0 is 0.
    weights = log_weights.double().exp()
    terms = weights * log_weights.double().clamp(min=torch.finfo(torch.float64).min)
    return {"weights_mean": weights.mean(0).tolist(), "weights_entropy": float(-terms.sum(1).mean())}


def client_rows(role: str, names: tuple[str, ...], scores: Mapping[str, Scores], log_weights: Tensor) -> list[Record]:
    """Return a record a client: its scores on every part and, where it mixes several models, its mixture weights."""
    columns: dict[str, list[Any]] = {"client": list(names), "role": [role] * len(names)}
    for part, entry in scores.items():
        columns[f"{part}_samples"] = entry.counts.tolist()
        columns[f"{part}_{entry.metric}"] = entry.values.tolist()
        columns[f"{part}_loss"] = entry.losses.tolist()
    if log_weights.shape[1] > 1:
        columns |= {f"weight_{m}": column for m, column in enumerate(log_weights.exp().T.tolist())}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
