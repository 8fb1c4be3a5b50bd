"""FedAvg as a user of Flower would write it: flwr's own strategy, and clients that train with plain torch.

It is copied into an app's folder (see :mod:`benchmarks.flower`), so it imports nothing of ours.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# In two lines, since flwr looks for the names without running the file.
client_app = ClientApp()
server_app = ServerApp()


class TimedFedAvg(FedAvg):
    """flwr's FedAvg that writes a line when a round is done."""

    def __init__(self, out: Path, nodes: int):
        super().__init__(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        self._out, self._since = out, time.perf_counter()

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Grid) -> Any:
        """Choose the nodes; the round's time runs from here."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._since = time.perf_counter()
        return messages

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Average, and note how long the round took and what went up."""
        kept = list(replies)
        averaged = super().aggregate_train(server_round, kept)
        seconds = time.perf_counter() - self._since
        up = sum(reply.content["arrays"].count_bytes() for reply in kept if reply.has_content())
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": server_round, "seconds": seconds, "bytes_up": up}) + "\n")
        return averaged


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the rounds; the record holds ``copies`` models, each trained by itself."""
    settings = context.run_config
    model = _model(int(settings["dimension"]), int(settings["hidden"]))
    arrays = {
        f"{copy}/{name}": leaf for copy in range(int(settings["copies"])) for name, leaf in _leaves(model).items()
    }
    strategy = TimedFedAvg(Path(str(settings["out"])), int(settings["nodes"]))
    strategy.start(grid, ArrayRecord(arrays), num_rounds=int(settings["rounds"]), timeout=120)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Make one pass over the client's samples with each model that came."""
    arrays = message.content["arrays"]
    assert isinstance(arrays, ArrayRecord)
    received, settings = arrays.to_torch_state_dict(), context.run_config
    with np.load(str(context.node_config["data"])) as archive:
        inputs, targets = torch.from_numpy(archive["x"]).float(), torch.from_numpy(archive["y"]).float()
    keep = int(0.6 * len(targets))
    inputs, targets = inputs[:keep], targets[:keep]
    trained: dict[str, torch.Tensor] = {}
    for copy in range(int(settings["copies"])):
        model = _model(inputs.shape[1], int(settings["hidden"]))
        model.load_state_dict({name: received[f"{copy}/{name}"] for name in _leaves(model)})
        solver = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch, labels in DataLoader(TensorDataset(inputs, targets), int(settings["batch"]), shuffle=True):
            solver.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(batch)[:, 0], labels).backward()
            solver.step()
        trained |= {f"{copy}/{name}": leaf for name, leaf in _leaves(model).items()}
    content = RecordDict({"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": keep})})
    return Message(content, reply_to=message)


def _model(dimension: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(dimension, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
    )


def _leaves(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())
