"""pfl's FedAvg on its simulated backend, in its own environment."""

from __future__ import annotations

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.rivals.jobs import Clock, Job, Leaves, report


class _WithLoss(nn.Sequential):
    """A network as pfl wants it."""

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {}  # nothing is evaluated on the way


class _AfterRounds:
    """A callback as pfl wants it."""

    def __init__(self, clock: Clock):
        self._clock = clock

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._clock()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self._clock()
        return False, Metrics()

    def on_train_end(self, *, model: PyTorchModel) -> None:
        pass


def train(given: Job, clock: Clock) -> Leaves:
    """Hand pfl the cohorts' clients in their order; it evaluates nothing on the way."""
    job, network = given.floats().to(clock.device), _WithLoss(*given.build()).to(clock.device)
    # The model comes first: it tells pfl which framework its data are of.
    model = PyTorchModel(network, torch.optim.SGD, central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0))
    datasets = [Dataset(job.client(position)) for position in range(len(job.offsets) - 1)]
    order = iter([client for cohort in job.cohorts for client in cohort])
    data = FederatedDataset(datasets.__getitem__, lambda: next(order))
    FederatedAveraging().run(
        # The first round is one that pfl evaluates, too: with no clients for that, there is nothing to do.
        NNAlgorithmParams(len(job.cohorts), len(job.cohorts) + 1, len(job.cohorts[0]), val_cohort_size=0),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=job.learning_rate, local_batch_size=job.batch_size),
        callbacks=[_AfterRounds(clock)],
    )
    return dict(network.state_dict())


if __name__ == "__main__":
    report(train)
