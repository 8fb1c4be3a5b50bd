"""Scores: each client judged with its own predictor on its own samples, and the names that figures have in files.

Shapes: T clients, M components, n samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedem.core.em import mix, negative_log_likelihood
from fedem.core.tree import Tree
from fedem.data.dataset import Truth
from fedem.data.federation import PARTS, Federation
from fedem.data.samples import Samples
from fedem.engines import Engine
from fedem.methods.base import Algorithm, Mixture
from fedem.models.base import Model
from fedem.models.losses import CLASSES
from fedem.models.metrics import METRICS, Metric, find_metric, known_metric
from fedem.runs.neighbours import Memory, Neighbours, predict
from fedem.runs.outputs import client_outputs
from fedem.runs.personalize import Predictors

_ORACLE_ROWS = 1 << 17
LEFT_OUT = "bottom_decile_left_out"
_LEAST = 5  # test samples of a client that has a place in the deciles: the share right of fewer is hardly a score
_ABSURD = 100.0  # nats that a classifier loses on a sample it was trained on: a guess among 10^43 classes

_Pair = tuple[Tensor, Tensor]  # a client's predictions and targets, on the CPU
Record = dict[str, Any]  # figures by name: a line of metrics.jsonl, summary.json, a row of clients.csv


@dataclass(frozen=True, eq=False)
class Scores:
    """Per-client scores on one part of the data. Clients without samples there are left out of every average."""

    metric: str  # name of a metric (fedem.models.metrics.METRICS)
    weights: Tensor  # [T] training samples of each client: the weights of the average
    counts: Tensor  # [T] samples scored
    losses: Tensor  # [T] mean negative log-likelihood of each client's mixture; NaN without samples
    values: Tensor  # [T] the metric; NaN without samples, and where it is undefined
    undefined: Tensor | None = None  # [T] bool: clients with samples without a metric, also left out; None for none
    pooled: float | None = None  # of all clients' samples together, for a metric that is not a mean over samples
    others: tuple[Scores, ...] = ()  # by further metrics
    counted: Tensor | None = None  # [T] bool: clients that count in averages; None for all

    @property
    def by_metric(self) -> tuple[Scores, ...]:
        """The scores by each metric, this one first."""
        return (self, *self.others)

    @property
    def _there(self) -> Tensor:
        return self.counts > 0 if self.counted is None else (self.counts > 0) & self.counted

    @property
    def _scored(self) -> Tensor:
        return self._there if self.undefined is None else self._there & ~self.undefined

    def _weighted(self, per_client: Tensor, there: Tensor) -> float:
        return float((per_client[there] * self.weights[there]).sum() / self.weights[there].sum())

    @property
    def average(self) -> float:
        """The metric averaged over clients, weighted by their number of training samples as in the paper."""
        return self._weighted(self.values, self._scored)

    @property
    def unweighted(self) -> float:
        return float(self.values[self._scored].mean())

    @property
    def loss(self) -> float:
        """Negative log-likelihood a sample, weighted likewise; on the training part it is the paper's f(Theta, Pi)."""
        return self._weighted(self.losses, self._there)

    @property
    def bottom_decile(self) -> float:
        """The (T/10)-th worst client's metric, T/10 rounded up, of the T clients with five samples or more."""
        there = self._scored & (self.counts >= _LEAST)
        scored = self.values[there].sort(descending=not self.larger_is_better).values
        return float(scored[math.ceil(len(scored) / 10) - 1]) if len(scored) else math.nan

    @property
    def num_left_out(self) -> int:
        """The number of clients that have samples, but too few for the bottom decile."""
        return int((self._there & (self.counts < _LEAST)).sum())

    @property
    def num_undefined(self) -> int:
        """The number of clients that have samples, but for which the metric is undefined."""
        return 0 if self.undefined is None else int((self._there & self.undefined).sum())

    @property
    def larger_is_better(self) -> bool:
        return find_metric(self.metric).larger_is_better

    def improves(self, best: float | None) -> bool:
        if best is None or (math.isnan(best) and not math.isnan(self.average)):
            return True
        return self.average > best if self.larger_is_better else self.average < best


def _judge(
    model: Model,
    outputs: Tensor,
    log_weights: Tensor,
    targets: Tensor,
    metrics: Sequence[Metric],
    near: tuple[Neighbours, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tree]:
    """Return a client's predictions ``[n, K]``, and its loss and the metrics that go by sample, ``[n]`` each.

    It has the ``outputs`` of its components, ``[M, n, K]``. What is ``near`` are its neighbours, and features and own
    places to ask them by (:meth:`~fedem.runs.neighbours.Neighbours.vote`). To the loss they are one more component.
    """
    losses = vmap(model.loss.negative_log_likelihood, in_dims=(0, None))(outputs, targets)
    predictions = mix(model.loss.probabilities(outputs), log_weights)
    per_sample = {"loss": negative_log_likelihood(losses, log_weights)}
    if near is not None:
        neighbours, features, own = near
        votes = neighbours.vote(model, features, predictions.shape[1], own)
        both = torch.stack([per_sample["loss"], model.loss.surprise(votes, targets)])
        shares = predictions.new_tensor([1 - neighbours.weight, neighbours.weight])
        per_sample["loss"] = negative_log_likelihood(both, shares.log())
        predictions = neighbours.mixed(predictions, votes)
    per_sample |= {each.name: each.per_sample(predictions, targets) for each in metrics if each.per_sample}
    return predictions, per_sample


def evaluate_each(
    model: Model,
    mixtures: Iterable[Mixture],
    samples: Samples,
    metrics: Sequence[Metric],
    weights: Tensor | None = None,
    neighbours_of: Callable[[int], Neighbours | None] | None = None,
    remembered: bool = False,
    counted: Tensor | None = None,
) -> Scores:
    """Score T predictors, each on its own client's samples.

    Clients count by ``weights`` ``[T]``, or else by these samples, and in averages only those that are ``counted``
    ``[T]``, all by default. Samples may be those that clients have ``remembered``. ``neighbours_of`` returns a client's
    neighbours by its position; None where nobody has any.
    """
    names = ["loss", *(each.name for each in metrics if each.per_sample)]
    sums = {name: torch.zeros(samples.num_clients, dtype=torch.float64) for name in names}
    found: list[list[_Pair]] = [[] for _ in range(samples.num_clients)]
    with torch.no_grad():
        for each in client_outputs(model, mixtures, samples, with_features=neighbours_of is not None):
            near, targets = None, each.samples.targets
            if neighbours_of is not None and (neighbours := neighbours_of(each.position)) is not None:
                # A sample that is remembered is not its own neighbour.
                places = torch.arange(each.start, each.start + len(targets), device=targets.device)
                own = places if remembered else None
                near = (neighbours, each.features, own) if neighbours.is_heard(own) else None
            predictions, per_sample = _judge(model, each.outputs, each.mixture.log_weights, targets, metrics, near)
            found[each.position].append((predictions.double().cpu(), targets.cpu()))
            for name, values in per_sample.items():
                sums[name][each.position] += float(values.sum(dtype=torch.float64))
    pairs = [_pair_of(pieces) for pieces in found]
    means = {name: totals / samples.sizes for name, totals in sums.items()}
    return _by_metric(metrics, samples.sizes if weights is None else weights, samples.sizes, means, pairs, counted)


def _pair_of(pieces: Sequence[_Pair]) -> _Pair:
    predictions, targets = zip(*pieces, strict=True) if pieces else ((torch.zeros(0),), (torch.zeros(0),))
    return torch.cat(predictions), torch.cat(targets)


def evaluate(
    algorithm: Algorithm,
    engine: Engine,
    found: Predictors,
    federation: Federation,
    metrics: Sequence[Metric] = (),
    counted: Tensor | None = None,
) -> dict[str, Scores]:
    """Score every client's own predictor on each part of its data that there is; by default with the loss's metric.

    In averages those count that are ``counted`` ``[T]``, all by default.
    """
    metrics = metrics or (METRICS[algorithm.model.loss.metric],)
    parts = {part: samples for part in PARTS if len(samples := federation.part(part))}
    how, weights = (algorithm, engine, found), federation.train.sizes
    return {
        part: evaluate_part(*how, samples, metrics, weights, part == "train", counted)
        for part, samples in parts.items()
    }


def evaluate_part(
    algorithm: Algorithm,
    engine: Engine,
    found: Predictors,
    samples: Samples,
    metrics: Sequence[Metric],
    weights: Tensor,
    remembered: bool = False,
    counted: Tensor | None = None,
) -> Scores:
    """Score every client's own predictor on some of its samples; arguments as in :func:`evaluate_each`."""
    model = algorithm.model

    def assess(shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        components, log_weights = algorithm.predictor(shared, personal)
        outputs = model.component_outputs(components, inputs)
        _, per_sample = _judge(model, outputs, log_weights, targets, metrics)
        return {name: (mask * values).sum(dtype=torch.float64) for name, values in per_sample.items()}

    if found.memory is not None:
        everybody = (found.of(algorithm, t) for t in range(samples.num_clients))
        return evaluate_each(model, everybody, samples, metrics, weights, found.neighbours, remembered, counted)
    with torch.no_grad():
        sums = engine.tally(algorithm, assess, found.cohort(samples))
        # Predictions are collected only for metrics that are not means over samples.
        collected = any(each.over_client for each in metrics)
        pairs = [_predicted(algorithm, found, samples, t) for t in range(len(samples.sizes)) if collected]
    means = {name: total / samples.sizes for name, total in sums.items()}
    return _by_metric(metrics, weights, samples.sizes, means, pairs, counted)


def _predicted(algorithm: Algorithm, found: Predictors, samples: Samples, position: int) -> _Pair:
    inputs, targets = samples.client(position).to(next(iter(found.shared.values())).device)
    if not len(targets):
        return torch.zeros(0), torch.zeros(0)
    return predict(algorithm.model, found.of(algorithm, position), inputs).double().cpu(), targets.cpu()


def _judged(metric: Metric, predictions: Tensor, targets: Tensor) -> float | None:
    """Return a metric over a client: NaN where predictions are not finite, None where it is undefined."""
    assert metric.over_client is not None
    if not len(targets):
        return None
    return metric.over_client(predictions, targets) if bool(predictions.isfinite().all()) else math.nan


def _by_metric(
    metrics: Sequence[Metric],
    weights: Tensor,
    counts: Tensor,
    means: Tree,
    pairs: list[_Pair],
    counted: Tensor | None = None,
) -> Scores:
    """Return the scores by the first metric, the others within; all but the T ``pairs`` are, or have, ``[T]`` each."""
    found: list[Scores] = []
    for metric in metrics:
        if metric.per_sample:
            found.append(Scores(metric.name, weights, counts, means["loss"], means[metric.name], counted=counted))
            continue
        known = [_judged(metric, *pair) for pair in pairs]
        among = [pair for t, pair in enumerate(pairs) if len(pair[1]) and (counted is None or counted[t])]
        columns = zip(*among, strict=True)
        known.append(_judged(metric, *map(torch.cat, columns)) if among else None)
        *values, pooled = (math.nan if value is None else value for value in known)
        undefined = torch.tensor([value is None for value in known[:-1]]) & (counts > 0)
        own = torch.tensor(values, dtype=torch.float64)
        found.append(Scores(metric.name, weights, counts, means["loss"], own, undefined, pooled, counted=counted))
    first, *others = found
    return replace(first, others=tuple(others))


def evaluate_oracle(truth: Truth, federation: Federation, metrics: Sequence[Metric] = ()) -> Scores | None:
    """Score the predictor that knows the true parameters on the test part; None when there is none."""
    samples = federation.test
    if len(samples) == 0:
        return None
    metrics = metrics or (METRICS["accuracy"],)
    weights = torch.repeat_interleave(truth.weights_of(federation.names), samples.sizes, dim=0)
    inputs, targets = samples.inputs.cpu(), samples.targets.cpu()
    pieces = zip(inputs.split(_ORACLE_ROWS), weights.cpu().split(_ORACLE_ROWS), strict=True)
    predictions = torch.cat([truth.predict(*piece) for piece in pieces])
    losses = -predictions.gather(1, targets[:, None]).squeeze(1).double().log()
    return judge(predictions, losses, samples, federation.train.sizes, metrics)


def judge(predictions: Tensor, losses: Tensor, samples: Samples, weights: Tensor, metrics: Sequence[Metric]) -> Scores:
    """Score given predictions ``[N, ...]`` of a part's samples, with a loss ``[N]`` each; clients have ``weights``."""
    targets, nothing = samples.targets.cpu(), torch.zeros(samples.num_clients, dtype=torch.float64)
    owner = torch.repeat_interleave(torch.arange(samples.num_clients), samples.sizes)
    per_sample = {"loss": losses}
    per_sample |= {each.name: each.per_sample(predictions, targets) for each in metrics if each.per_sample}
    means = {name: nothing.index_add(0, owner, values.double()) / samples.sizes for name, values in per_sample.items()}
    pairs = zip(*(column.split(samples.sizes.tolist()) for column in (predictions.double(), targets)), strict=True)
    return _by_metric(metrics, weights, samples.sizes, means, list(pairs))


def base_rate(federation: Federation) -> float | None:
    """Return the test accuracy of always guessing the most frequent class of the training rows, averaged likewise."""
    if not len(federation.test):
        return None
    guess = int(federation.train.targets.cpu().bincount().argmax())
    guesses = torch.zeros(len(federation.test), guess + 1, dtype=torch.float64)
    guesses[:, guess] = 1
    return judge(guesses, guesses[:, 0], federation.test, federation.train.sizes, (METRICS["accuracy"],)).average


def name_scores(scores: Mapping[str, Scores], deviation: float | None = None) -> Record:
    """Name every figure: ``test_accuracy``, ``test_loss``, ... and the test part's ``bottom_decile``.

    ``bottom_decile_left_out`` is the number of clients, if any, with fewer than five test samples: the decile is of
    the others.

    Where a metric is not a mean over samples, ``test_roc_auc_pooled`` is that of all clients' samples together, and
    ``test_roc_auc_undefined`` the number of clients, if any, for which it is undefined. Where targets were standardised
    by a ``deviation``, ``test_mae_in_units`` is in their own units.
    """
    record: Record = {}
    for part, entry in scores.items():
        for each in entry.by_metric:
            name = f"{part}_{each.metric}"
            record |= {name: each.average, f"{name}_unweighted": each.unweighted}
            record.setdefault(f"{part}_loss", entry.loss)
            if each.pooled is not None:
                record[f"{name}_pooled"] = each.pooled
            if count := each.num_undefined:
                record[f"{name}_undefined"] = count
            if deviation is not None and find_metric(each.metric).has_units:
                own = [key for key in (name, f"{name}_pooled") if key in record]
                record |= {f"{key}_in_units": deviation * record[key] for key in own}
    if "test" in scores:
        record["bottom_decile"] = scores["test"].bottom_decile
        if count := scores["test"].num_left_out:
            record[LEFT_OUT] = count
        record |= {f"bottom_decile_{each.metric}": each.bottom_decile for each in scores["test"].others}
    return record


def metrics_of(record: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Return the metrics that a summary or a round's record has scores by; the one that decides comes first."""
    words = (key.partition("_") for key in record)
    found = {name: metric for part, _, name in words if part in PARTS and (metric := known_metric(name)) is not None}
    return tuple(found.values()) or (METRICS["mean_squared_error"],)


def has_diverged(summary: Mapping[str, Any]) -> bool:
    """Whether clients lose so much on their training samples that they can't have learnt."""
    if summary.get("diverged"):
        return True
    # Written before runs said so themselves.
    loss, first = summary.get("train_loss"), metrics_of(summary)[0]
    return first.task == CLASSES and f"train_{first.name}" in summary and (loss is None or not loss < _ABSURD)


def name_weights(log_weights: Tensor) -> Record:
    """Name the mean of the clients' mixture weights ``[T, M]`` and their mean entropy in nats; nothing if M = 1."""
    if log_weights.shape[1] == 1:
        return {}
    weights = log_weights.double().exp()
    # 0 log 0 is 0.
    terms = weights * log_weights.double().clamp(min=torch.finfo(torch.float64).min)
    return {"weights_mean": weights.mean(0).tolist(), "weights_entropy": float(-terms.sum(1).mean())}


def name_memory(memory: Memory | None) -> Record:
    """Name how much neighbours count, the mean over clients; nothing where they have no say."""
    return {} if memory is None else {"neighbours_weight": memory.mean_weight}


def client_rows(
    role: str,
    names: tuple[str, ...],
    scores: Mapping[str, Scores],
    log_weights: Tensor,
    memory: Memory | None = None,
    hostile: Tensor | None = None,
) -> list[Record]:
    """Return one record per client: its scores on every part and, where it has several models, its mixture weights.

    Where it asks neighbours, also how much these count; where some are ``hostile`` ``[T]``, whether it is.
    """
    columns: dict[str, list[Any]] = {"client": list(names), "role": [role] * len(names)}
    if hostile is not None and bool(hostile.any()):
        columns["hostile"] = hostile.tolist()
    for part, entry in scores.items():
        columns[f"{part}_samples"] = entry.counts.tolist()
        columns[f"{part}_{entry.metric}"] = entry.values.tolist()
        columns[f"{part}_loss"] = entry.losses.tolist()
        columns |= {f"{part}_{each.metric}": each.values.tolist() for each in entry.others}
    if log_weights.shape[1] > 1:
        columns |= {f"weight_{m}": column for m, column in enumerate(log_weights.exp().T.tolist())}
    if memory is not None:
        columns["neighbours_weight"] = memory.weights.tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
