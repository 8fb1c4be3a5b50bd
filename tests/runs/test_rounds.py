"""What the server does with all groups at once: its step, and its look for numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import make_training
from hypothesis import given
from hypothesis import strategies as st

from fedem.core.tree import tree_index, tree_map
from fedem.methods.mixer import Mixed
from fedem.runs.rounds import not_finite, step_groups


@pytest.mark.parametrize("method", ["fedavg", "pfedme"])
def test_all_groups_in_their_order_step_as_in_any_other(method: str) -> None:
    training = make_training(method)
    shared = tree_map(lambda leaf: torch.cat([leaf] * 3), training.init().shared)
    means, order = tree_map(torch.randn_like, shared), torch.tensor([2, 0, 1])
    straight = step_groups(training.algorithm, shared, Mixed(torch.arange(3), means, 3), 0.5)
    around = step_groups(training.algorithm, shared, Mixed(order, tree_index(means, order), 3), 0.5)
    for name, leaf in shared.items():
        assert torch.equal(straight[name], around[name])
        assert not torch.equal(straight[name], leaf)
    doubled = tree_map(torch.Tensor.double, means)
    wider = step_groups(training.algorithm, shared, Mixed(torch.arange(3), doubled, 3), 0.5)
    assert all(wider[name].dtype == leaf.dtype for name, leaf in shared.items()), (
        "what is mixed finely is kept as it was"
    )


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])), max_size=5),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.integers(0, 99),
)
def test_a_leaf_that_is_not_finite_is_named(leaves: list[tuple[int, torch.dtype]], wrong: float, where: int) -> None:
    tree = {str(place): torch.full((size, 2), 1e38, dtype=dtype) for place, (size, dtype) in enumerate(leaves)}
    tree["counter"] = torch.tensor([torch.iinfo(torch.int64).max])
    assert not_finite(tree) is None
    if places := [name for name, (size, _) in zip(tree, leaves, strict=False) if size]:
        chosen = places[where % len(places)]
        tree[chosen][-1, 0] = wrong
        assert not_finite(tree) == chosen
        allowed = not_finite(tree, lambda leaf: ~leaf.isnan())
        assert allowed == (chosen if math.isnan(wrong) else None)


def test_nan_is_seen_beside_infinite_numbers_that_are_allowed() -> None:
    weights = {"log_weights": torch.tensor([0.0, -math.inf]), "own": torch.tensor([1.0, math.nan])}
    assert not_finite(weights, lambda leaf: ~leaf.isnan()) == "own"
    assert not_finite({}) is None
