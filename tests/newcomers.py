"""Clients unseen in training, and local training by hand, that tests share."""

from __future__ import annotations

import pytest
import torch
from helpers import make_federation, stacked
from torch import Tensor

from fedem.core.em import negative_log_likelihood
from fedem.core.random import FINE_TUNE, derive
from fedem.core.tree import Tree
from fedem.data.samples import Samples
from fedem.engines import Batching, OneByOne
from fedem.engines.base import BatchPlan
from fedem.methods import METHODS
from fedem.models.base import component_of
from fedem.runs.evaluate import predict
from fedem.runs.personalize import Predictors
from fedem.runs.rounds import Training

SHARING = [method for method in METHODS if method != "local"]
every_method = pytest.mark.parametrize("method", METHODS)
every_sharing_method = pytest.mark.parametrize("method", SHARING)
both_engines = pytest.mark.parametrize("engine", [OneByOne(), stacked()], ids=["one_by_one", "stacked"])

NEWCOMERS = make_federation(sizes=(6, 3, 15), names=("fay", "gus", "hal"), seed=9)
INPUTS = NEWCOMERS.train.inputs


def predict_all(training: Training, found: Predictors) -> Tensor:
    """Everybody's predictions on the same inputs, ``[T, n, K]``."""
    mixtures = [found.of(training.algorithm, position) for position in range(len(found.reads))]
    return torch.stack([predict(training.algorithm.model, mixture, INPUTS) for mixture in mixtures])


def losses_of(training: Training, found: Predictors, samples: Samples) -> Tensor:
    """Everybody's mean loss on its own samples, ``[T]``."""
    model, means = training.algorithm.model, []
    for position in range(samples.num_clients):
        components, log_weights = found.of(training.algorithm, position)
        losses = torch.stack(
            [model.losses(component_of(components, m), *samples.client(position)) for m in range(len(log_weights))]
        )
        means.append(negative_log_likelihood(losses, log_weights).mean())
    return torch.stack(means)


def one_epoch_by_hand(
    training: Training, start: Tree, samples: Samples, keys: Tensor, position: int, rate: float
) -> Tree:
    """One pass of torch's own SGD over a client's samples, in the order that its key gives."""
    data = samples.client(position)
    layer = torch.nn.Linear(4, 1).double()
    layer.load_state_dict(start)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9, weight_decay=0.01)
    key = derive(keys[position], FINE_TUNE, 0)[None]
    plan = BatchPlan(Batching(4), samples.sizes[position : position + 1], key, torch.device("cpu"))
    for step in range(int(plan.steps)):
        rows = plan.batch(step, slice(1)).positions[0]
        optimizer.zero_grad()
        training.algorithm.model.loss.negative_log_likelihood(layer(data[0][rows]), data[1][rows]).mean().backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in layer.state_dict().items()}
