"""Unseen clients with a part of their samples, and the entropy of mixture weights."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers import SIZES, make_federation
from scipy.stats import entropy

from fedem import Synthetic, train
from fedem.data.samples import thinned
from fedem.runs.evaluate import name_weights


def test_a_share_of_an_unseen_clients_samples_is_part_of_a_larger_share() -> None:
    federation = make_federation()
    shares = [thinned(federation.train, federation.keys, share, 3) for share in (0.0, 0.2, 0.5, 1.0)]
    assert shares[0].sizes.tolist() == [0] * 5
    assert shares[2].sizes.tolist() == [round(0.5 * size) for size in SIZES]
    for smaller, larger in pairwise(shares):
        for client in range(5):
            rows = {tuple(row) for row in larger.client(client).inputs.tolist()}
            assert {tuple(row) for row in smaller.client(client).inputs.tolist()} <= rows
    assert torch.equal(shares[3].inputs, federation.train.inputs)
    order = torch.tensor([3, 0, 4, 2, 1])
    again = thinned(federation.train.take(order), federation.keys[order], 0.5, 3)
    for place, client in enumerate(order.tolist()):
        assert torch.equal(again.client(place).inputs, shares[2].client(client).inputs)


@pytest.mark.slow
def test_more_samples_help_unseen_clients_and_none_leave_even_weights() -> None:
    data = Synthetic(num_clients=40, dimension=10, num_test=50, dirichlet=0.1).make(0)
    runs = {
        share: train(data, rounds=20, learning_rate=2.0, unseen=0.3, unseen_share=share).summary for share in (0.0, 1.0)
    }
    assert runs[0.0]["unseen_weights_entropy"] == pytest.approx(math.log(3))
    assert runs[1.0]["unseen_weights_entropy"] < runs[0.0]["unseen_weights_entropy"]
    assert runs[1.0]["unseen_test_loss"] < runs[0.0]["unseen_test_loss"]
    assert runs[0.0]["test_loss"] == runs[1.0]["test_loss"]
    assert "weights_entropy" not in train(data, "fedavg", rounds=1).summary


def test_the_entropy_is_scipys_and_the_mean_is_numpys() -> None:
    weights = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    found = name_weights(weights.log())
    assert found["weights_entropy"] == pytest.approx(entropy(weights.numpy(), axis=1).mean())
    assert found["weights_mean"] == pytest.approx(weights.numpy().mean(0))
    assert name_weights(torch.zeros(4, 1)) == {}
