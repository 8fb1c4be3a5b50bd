"""What uploads give away: how far each component moved shows a client's mixture weights, which it does not send."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import simulated

from fedem.core.tree import tree_index
from fedem.deploy.node import Node
from fedem.deploy.plan import Plan
from fedem.runs.config import Config
from fedem.runs.trainer import Trainer

SOURCE = {"name": "synthetic", "num_clients": 40, "dimension": 20, "num_validation": 0, "num_test": 10}
SOURCE |= {"size_mean": 5.0, "size_sigma": 0.5}
ROUNDS = 20


def test_norms_of_the_components_updates_show_the_mixture_weights() -> None:
    config = Config.build({"data": SOURCE, "method": {"name": "fedem"}, "run": {"rounds": ROUNDS + 1, "device": "cpu"}})
    dataset = config.make_data()
    plan, trainer = Plan.make(config, dataset), Trainer.prepare(config, dataset)
    state = simulated(trainer, ROUNDS)
    before = tree_index(state.shared, 0)
    norms, weights = [], []
    for number, name in enumerate(dataset.federation.names):
        node = Node(plan, name, dataset.federation)
        upload, personal = node.train(before, tree_index(state.personal, number), ROUNDS, plan.rate(ROUNDS))
        # All that the server needs is the upload and what it had sent.
        moved = torch.stack([(upload[leaf] - before[leaf]).flatten(1).square().sum(1) for leaf in before]).sum(0).sqrt()
        norms.append((moved / moved.sum()).numpy())
        (log_weights,) = personal.values()
        weights.append(log_weights.exp().numpy())
    correlation = float(np.corrcoef(np.ravel(norms), np.ravel(weights))[0, 1])
    largest = float(np.mean(np.argmax(norms, 1) == np.argmax(weights, 1)))
    print(
        f"correlation {correlation:.3f}, weights' standard deviation {np.std(weights):.2f}; same largest: {largest:.0%}"
    )
    assert np.sum(weights, 1) == pytest.approx(1, abs=1e-5)
    # Chance gives 0 and a third.
    assert correlation > 0.9
    assert largest > 0.8
