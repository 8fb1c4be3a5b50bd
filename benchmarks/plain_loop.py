"""One FedEM round as plain PyTorch: client after client, component after component.

Three variants that differ only in how a client's batches are made: with a ``DataLoader`` and a local solver for each
component in turn, as the paper's algorithm reads and a tutorial would write it; with a ``DataLoader`` whose batches
serve all components; and so with index tensors instead, the best that a plain loop does. With one component each is
FedAvg, without an E-step.

Shapes: T clients, M components, n samples of a client, B of a batch, d features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedem.data.samples import Samples

MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4

Batches = Iterable[Sequence[Tensor]]
"""Triples: inputs ``[B, d]``, targets ``[B]``, positions among the client's samples ``[B]``."""


class Client(NamedTuple):
    """One client's samples, and one pass over them in fresh random batches."""

    inputs: Tensor
    """``[n, d]``"""
    targets: Tensor
    """``[n]`` float"""
    batches: Callable[[], Batches]
    shares_batches: bool
    """whether one pass serves all components, or each makes a pass of its own"""


class Server(NamedTuple):
    """What the federation has learnt."""

    components: list[nn.Linear]
    weights: Tensor
    """``[T, M]``: each client's mixture weights"""


def plain_loop(samples: Samples, batch_size: int, shares_batches: bool = False) -> list[Client]:
    """Give each client a ``DataLoader``; ``batch_size`` 0 takes all of its samples at once."""

    def prepare(inputs: Tensor, targets: Tensor) -> Client:
        dataset = TensorDataset(inputs, targets, torch.arange(len(targets)))
        loader = DataLoader(dataset, batch_size=batch_size or len(targets), shuffle=True)
        return Client(inputs, targets, lambda: loader, shares_batches)

    return [prepare(*pair) for pair in _pairs(samples)]


def index_loop(samples: Samples, batch_size: int) -> list[Client]:
    """Cut each client's batches from a random permutation; ``batch_size`` 0 takes all of its samples at once."""

    def prepare(inputs: Tensor, targets: Tensor) -> Client:
        def batches() -> Iterator[Sequence[Tensor]]:
            for rows in torch.randperm(len(targets)).split(batch_size or len(targets)):
                yield inputs.index_select(0, rows), targets.index_select(0, rows), rows

        return Client(inputs, targets, batches, shares_batches=True)

    return [prepare(*pair) for pair in _pairs(samples)]


LOOPS: dict[str, Callable[[Samples, int], list[Client]]] = {
    "plain_loop": plain_loop,
    "shared_loop": partial(plain_loop, shares_batches=True),
    "index_loop": index_loop,
}


def _pairs(samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
    for position in range(samples.num_clients):
        inputs, targets = samples.client(position)
        yield inputs, targets.to(inputs.dtype)


def start(weight: Tensor, bias: Tensor, weights: Tensor) -> Server:
    """Begin with components of the given ``weight`` ``[M, 1, d]`` and ``bias`` ``[M, 1]``."""
    components = []
    for component_weight, component_bias in zip(weight, bias, strict=True):
        component = nn.Linear(weight.shape[2], 1)
        component.load_state_dict({"weight": component_weight, "bias": component_bias})
        components.append(component)
    return Server(components, weights)


def run_round(server: Server, clients: Sequence[Client], learning_rate: float, local_epochs: int = 1) -> Server:
    """Train every client from the server's components and average them, weighted by the clients' samples."""
    total = sum(len(client.targets) for client in clients)
    models, averages = copy.deepcopy(server.components), copy.deepcopy(server.components)
    new_weights = torch.empty_like(server.weights)
    with torch.no_grad():
        for average in averages:
            for parameter in average.parameters():
                parameter.zero_()
    for position, client in enumerate(clients):
        for model, component in zip(models, server.components, strict=True):
            model.load_state_dict(component.state_dict())
        posterior = None
        if len(models) > 1:
            posterior = responsibilities(sample_losses(models, client), server.weights[position])
        new_weights[position] = 1 if posterior is None else posterior.mean(0)
        _train_client(models, client, posterior, learning_rate, local_epochs)
        with torch.no_grad():
            for average, model in zip(averages, models, strict=True):
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.add_(parameter, alpha=len(client.targets) / total)
    return Server(averages, new_weights)


@torch.no_grad()
def sample_losses(models: Sequence[nn.Linear], client: Client) -> Tensor:
    """Return each component's loss on each sample in evaluation mode, ``[n, M]``."""
    columns = []
    for model in models:
        model.eval()
        columns.append(_losses(model, client.inputs, client.targets))
        model.train()
    return torch.stack(columns, dim=1)


def responsibilities(losses: Tensor, weights: Tensor) -> Tensor:
    """E-step: q(z = m) proportional to pi_m exp(-loss_m). ``[n, M], [M] -> [n, M]``."""
    return torch.softmax(weights.log() - losses, dim=1)


def _train_client(
    models: Sequence[nn.Linear], client: Client, posterior: Tensor | None, learning_rate: float, local_epochs: int
) -> None:
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
        for model in models
    ]
    everyone = range(len(models))
    for group in [everyone] if client.shares_batches else [[index] for index in everyone]:
        for _ in range(local_epochs):
            for inputs, targets, rows in client.batches():
                batch_posterior = None if posterior is None else posterior[rows]
                for index in group:
                    losses = _losses(models[index], inputs, targets)
                    loss = (losses if batch_posterior is None else batch_posterior[:, index] * losses).mean()
                    optimizers[index].zero_grad()
                    loss.backward()
                    optimizers[index].step()


def _losses(model: nn.Linear, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(-1), targets, reduction="none")
