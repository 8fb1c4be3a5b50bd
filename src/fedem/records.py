"""Scores as named figures: what a line of metrics.jsonl, summary.json and a row of clients.csv say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedem.evaluate import Scores

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
