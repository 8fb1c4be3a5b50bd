"""Flower's FedAvg in its simulation with Ray, in its own environment.

There are as many nodes as a cohort has clients, and a message says which client a node is this round. As many of
Ray's workers run at a time as there are threads, one thread each.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.rivals.jobs import Clock, Job, Leaves, report, train_client

client_app = ClientApp()


@lru_cache(maxsize=1)
def _job(path: str, device: str) -> Job:
    """Read the job once in each of Ray's workers."""
    torch.set_num_threads(1)
    return Job.load(Path(path)).floats().to(device)


@client_app.train()
def train_node(message: Message, context: Context) -> Message:
    """Train the client that the message names."""
    from benchmarks.rivals import flwr  # Ray sends this function by value, and the module's cache should stay

    config: Any = message.content["config"]
    arrays: Any = message.content["arrays"]
    job, client = flwr._job(config["path"], config["device"]), int(config["client"])
    network = job.build()
    network.load_state_dict(arrays.to_torch_state_dict())
    train_client(network.to(config["device"]), job, client)
    metrics = MetricRecord({"num-examples": job.size(client)})
    return Message(
        RecordDict({"arrays": ArrayRecord(network.cpu().state_dict()), "metrics": metrics}), reply_to=message
    )


class _GivenCohorts(FedAvg):
    """FedAvg whose cohorts are those of the job."""

    def __init__(self, path: str, job: Job, clock: Clock):
        nodes = len(job.cohorts[0])
        super().__init__(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        self._path, self._cohorts, self._clock = path, iter(job.cohorts), clock

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Grid) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message, client in zip(messages, next(self._cohorts), strict=True):
            given = ConfigRecord({"path": self._path, "device": self._clock.device, "client": client})
            message.content = RecordDict({"arrays": arrays, "config": given})
        if server_round == 1:
            self._clock()
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        averaged = super().aggregate_train(server_round, replies)
        self._clock()
        return averaged


def train(job: Job, clock: Clock) -> Leaves:
    """Run the rounds in a simulation."""
    found: Leaves = {}
    server_app, threads = ServerApp(), torch.get_num_threads()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = _GivenCohorts(sys.argv[1], job, clock)
        result = strategy.start(grid, ArrayRecord(job.start), num_rounds=len(job.cohorts))
        found.update(result.arrays.to_torch_state_dict())

    resources = {"num_cpus": 1, "num_gpus": 0.0 if clock.device == "cpu" else 1 / threads}
    backend: Any = {"client_resources": resources, "init_args": {"num_cpus": threads, "include_dashboard": False}}
    run_simulation(server_app, client_app, num_supernodes=len(job.cohorts[0]), backend_config=backend)
    return found


if __name__ == "__main__":
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    report(train)
