"""What a search tries: every combination once, or draws that can be repeated; the paper's values; where edges are."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedem
from fedem.studies.tuning import RATE, Search, edge_of, next_values, paper_rate, read_grids, usual_grids


def test_a_grid_is_gone_through_once() -> None:
    grids = {RATE: (0.1, 0.3), "method.mu": (1, 0.1, 0.01)}
    tried: list[tuple[dict[str, Any], float | None]] = []
    for _ in range(6):
        tried.append((next_values(grids, "grid", 0, tried, True), None))
    assert [tuple(values.values()) for values, _ in tried] == list(product(*grids.values()))


@given(st.integers(0, 2**63 - 1), st.sampled_from(["random", "tpe"]), st.integers(0, 3))
def test_draws_stay_within_what_is_listed_and_can_be_repeated(seed: int, sampler: str, before: int) -> None:
    grids = {"a.rate": (1e-3, 1.0), "a.share": (0.0, 0.5), "a.size": (4, 64), "a.word": ("x", "y"), "a.flag": (True,)}
    tried: list[tuple[dict[str, Any], float | None]] = []
    for number in range(before):
        tried.append((next_values(grids, sampler, seed, tried, False), None if number % 2 else float(number)))
    values = next_values(grids, sampler, seed, tried, False)
    assert values == next_values(grids, sampler, seed, tried, False)
    assert all(values != other for other, _ in tried)
    assert 1e-3 <= values["a.rate"] <= 1.0
    assert 0 <= values["a.share"] <= 0.5
    assert isinstance(values["a.size"], int)
    assert 4 <= values["a.size"] <= 64
    assert values["a.word"] in ("x", "y")
    assert values["a.flag"] is True


def test_random_draws_are_even_over_the_decades() -> None:
    logs = [math.log10(next_values({RATE: (1e-3, 1.0)}, "random", seed, [], True)[RATE]) for seed in range(300)]
    # Of a uniform law on [-3, 0]: five standard errors of the mean, whose variance is 9/12/300.
    assert abs(np.mean(logs) + 1.5) < 5 * math.sqrt(9 / 12 / 300)


@pytest.mark.parametrize("maximize", [True, False])
def test_tpe_comes_near_a_known_optimum_and_keeps_away_from_failures(maximize: bool) -> None:
    sign = -1 if maximize else 1
    tried: list[tuple[dict[str, Any], float | None]] = []
    for _ in range(40):
        values = next_values({RATE: (1e-4, 1e2)}, "tpe", 0, tried, maximize)
        away = math.log10(values[RATE]) + 2
        tried.append((values, None if away > 2 else sign * away**2))
    late = [math.log10(values[RATE]) for values, _ in tried[20:]]
    assert abs(np.median(late) + 2) < 0.5
    assert sum(score is None for _, score in tried[20:]) <= 4, "a third of the range fails"


@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=6, unique=True), st.integers(0, 5))
def test_the_edge_of_a_grid_is_its_least_and_its_largest_value(values: list[float], position: int) -> None:
    chosen = sorted(values)[position % len(values)]
    edges = {min(values): "lower", max(values): "upper"}
    assert edge_of(values, chosen, "grid") == edges.get(chosen)


def test_the_edge_of_a_range_is_its_last_tenth_and_words_have_none() -> None:
    assert edge_of((1e-3, 1e-1, 1.0), 10**-2.8, "random") == "lower"
    assert edge_of((1e-3, 1.0), 10**-2.6, "tpe") is None
    assert edge_of((0.0, 1.0), 0.95, "tpe") == "upper"
    assert edge_of(("a", "b"), "a", "grid") is None
    assert edge_of((False, True), True, "grid") is None
    assert edge_of((0.3,), 0.3, "grid") is None


@pytest.mark.parametrize("method", fedem.METHODS)
def test_every_method_has_grids_that_it_takes(method: str) -> None:
    grids = usual_grids(method)
    Search(({"method": {"name": method}},), grids).check()
    assert np.allclose(np.log10(grids[RATE]), [-0.5, -1, -1.5, -2, -2.5, -3])
    weights = [values for key, values in grids.items() if key != RATE]
    assert len(weights) == (method in ("fedprox", "pfedme", "ditto", "mocha"))
    assert all(np.allclose(np.log10(values), [1, 0, -1, -2, -3]) for values in weights)
    assert RATE not in usual_grids(method, {"schedule": {"learning_rate": 1.0}})


def test_the_papers_learning_rates() -> None:
    assert paper_rate("cifar100", "fedem") == pytest.approx(10**-0.5)
    assert paper_rate("cifar10", "pfedme") == pytest.approx(0.1)
    assert paper_rate("femnist", "clustered") == pytest.approx(10**-1.5)
    assert paper_rate("synthetic", "local") is None
    assert paper_rate("file", "fedem") is None


def test_grids_are_read_as_toml_or_words() -> None:
    assert read_grids(["solver.name=sgd,adam", "batching.batch_size = 8, 16"]) == {
        "solver.name": ("sgd", "adam"),
        "batching.batch_size": (8, 16),
    }


def test_a_table_of_ones_own_is_searched_for_its_model_batches_decay_and_components() -> None:
    own = {"data": {"name": "file"}}
    every = {"model.name", "batching.batch_size", "solver.weight_decay"}
    assert set(usual_grids("fedavg", own)) == every
    assert set(usual_grids("fedem", own)) == every | {"method.num_components"}
    assert set(usual_grids("fedavg", own, {"model": {"name": "mlp"}})) == every - {"model.name"}
    Search(({"method": {"name": "fedem"}}, own), usual_grids("fedem", own)).check()
