"""fluke's FedAVG with its own clients and server, in its own environment."""

from __future__ import annotations

from importlib import import_module

from torch import library

try:
    import_module("torchvision")  # which fluke imports
except RuntimeError:
    # Its compiled part is for another build of torch. fluke needs only the rest, which asks for these names alone.
    _NAMES = library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _NAMES.define(f"{name}(Tensor x) -> Tensor")

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from torch import nn

from benchmarks.rivals.jobs import Clock, Job, Leaves, report


class _AfterRounds:
    """An observer as fluke wants it: it is told of the events that it has a method for."""

    def __init__(self, clock: Clock):
        self._clock = clock

    def end_round(self, round: int) -> None:
        self._clock()


def train(given: Job, clock: Clock) -> Leaves:
    """Give every client its samples, shuffled in each round, and let fluke run."""
    job, network = given.floats(), given.build()
    FlukeENV().set_device(clock.device)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    classes, count = int(job.targets.max()) + 1, len(job.offsets) - 1
    clients = [
        Client(
            position,
            FastDataLoader(
                *job.client(position),
                num_labels=classes,
                batch_size=job.batch_size,
                shuffle=True,
                skip_singleton=False,
            ),
            None,
            OptimizerConfigurator(DDict(name="SGD", lr=job.learning_rate)),
            nn.CrossEntropyLoss(),
            local_epochs=1,
            persistency=False,
        )
        for position in range(count)
    ]
    server, cohorts = Server(network, None, clients, weighted=True), iter(job.cohorts)
    server.get_eligible_clients = lambda share: [clients[position] for position in next(cohorts)]
    federation = FedAVG(count, None, DDict(), clients=clients, server=server)
    federation.attach(_AfterRounds(clock))
    clock()
    federation.run(len(job.cohorts), len(job.cohorts[0]) / count)
    return dict(server.model.state_dict())


if __name__ == "__main__":
    report(train)
