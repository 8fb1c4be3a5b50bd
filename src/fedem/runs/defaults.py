"""What the data decide where nobody has: batches, passes over them, and the length of steps.

Shapes: T clients, n samples of a client.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import grad

from fedem.core.random import CURVATURE, choose
from fedem.core.tree import Tree, tree_map, tree_to
from fedem.data.federation import Federation
from fedem.engines import Batching
from fedem.models import Model

TARGET_STEPS = 8  # of a median client in a round
_BATCHES = (8, 128)  # the smallest and the largest batch that is chosen
_MOST_EPOCHS = 5
_CLIENTS, _ITERATIONS = 16, 12  # of the power method; for models whose single pass is costly a quarter of each
_PROBE = 1e-3  # how far from the start gradients are compared


def settle_batches(batching: Batching, sizes: Tensor, by_data: bool = True) -> Batching:
    """Choose what is left open so that a median client takes some :data:`TARGET_STEPS` steps in a round.

    Not ``by_data``, it is as if nothing had been said: small batches ask for a rate that suits them, so a rate that
    was given had larger ones in mind.

    >>> settle_batches(Batching(-1, 0), torch.tensor([20, 30, 600]))
    Batching(batch_size=8, local_epochs=2, local_steps=0, drop_short=False)
    """
    if not by_data:
        usual = Batching()
        size = batching.batch_size if batching.batch_size >= 0 else usual.batch_size
        return replace(batching, batch_size=size, local_epochs=batching.local_epochs or usual.local_epochs)
    median = float(sizes[sizes > 0].double().median())
    if batching.batch_size < 0:
        size = 2 ** round(math.log2(max(1.0, median / TARGET_STEPS)))
        batching = replace(batching, batch_size=min(max(size, _BATCHES[0]), _BATCHES[1]))
    if batching.local_epochs == 0:
        steps = math.ceil(median / (batching.batch_size or median))
        batching = replace(batching, local_epochs=min(max(1, round(TARGET_STEPS / steps)), _MOST_EPOCHS))
    return batching


def curvature(model: Model, federation: Federation, batching: Batching, seed: int, device: torch.device) -> float:
    """Return the largest second derivative of a client's mean loss over a batch, near where training starts.

    By the power method on differences of gradients, which every model has, for some clients; the largest is returned.
    """
    # In double precision, where differences are exact enough.
    exact = Model(model.build, model.loss, torch.float64)
    start = tree_to(exact.init(seed), device)
    fewer = 4 if model.is_large else 1
    able = (federation.train.sizes > 0).nonzero().flatten()
    some = able[choose(federation.keys[able], min(_CLIENTS // fewer, len(able)), CURVATURE, seed)]
    largest = 0.0
    for position in some.tolist():
        inputs, targets = federation.train.client(position)
        width = int(batching.widths(torch.tensor(len(targets))))
        rows = torch.linspace(0, len(targets) - 1, width).round().long().unique().to(inputs.device)
        batch = inputs[rows].to(device), targets[rows].to(device)
        largest = max(largest, _largest_eigenvalue(exact, start, *batch, _ITERATIONS // fewer))
    return largest


def _largest_eigenvalue(model: Model, start: Tree, inputs: Tensor, targets: Tensor, iterations: int) -> float:
    trained = {name: leaf for name, leaf in start.items() if name in model.trainable}

    def objective(leaves: Tree) -> Tensor:
        key = torch.tensor(0, device=inputs.device)
        return model.training_losses(start | leaves, inputs, targets, None, key)[0].mean()

    def gradient(direction: Tree, length: float) -> Tree:
        return grad(objective)({name: leaf + length * direction[name] for name, leaf in trained.items()})

    direction = _unit(grad(objective)(trained))
    size = 0.0
    for _ in range(iterations):
        bent = tree_map(lambda a, b: (a - b) / (2 * _PROBE), gradient(direction, _PROBE), gradient(direction, -_PROBE))
        size = _norm(bent)
        if not 0 < size < math.inf:
            return 0.0
        direction = _unit(bent)
    return size


def _norm(tree: Tree) -> float:
    return math.sqrt(sum(float(leaf.square().sum()) for leaf in tree.values()))


def _unit(tree: Tree) -> Tree:
    size = _norm(tree)
    return tree_map(lambda leaf: leaf / size, tree) if size > 0 else tree_map(torch.ones_like, tree)
