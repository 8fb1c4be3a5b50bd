"""The fastest mixing matrix: against closed forms, a semidefinite programme, and its own bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedem.core.errors import UserError
from fedem.graphs import Grid, Ring, check_mixing, fastest_mixing, second_modulus
from fedem.graphs import weights as fastest
from fedem.graphs.weights import canonical, from_edges, project, weigh

TOLERANCE = 1e-5


def path(count: int) -> NDArray[np.int64]:
    return np.column_stack([np.arange(count - 1), np.arange(1, count)])


def cycle(count: int) -> NDArray[np.int64]:
    return canonical(np.column_stack([np.arange(count), (np.arange(count) + 1) % count]))


def star(count: int) -> NDArray[np.int64]:
    return np.column_stack([np.zeros(count - 1, dtype=np.int64), np.arange(1, count)])


def random_graph(count: int, seed: int, probability: float) -> NDArray[np.int64]:
    """A random tree and, with ``probability`` each, the other edges."""
    rng = np.random.default_rng(seed)
    tree = np.column_stack([[rng.integers(child) for child in range(1, count)], np.arange(1, count)])
    others = np.column_stack(np.triu_indices(count, 1))
    return canonical(np.concatenate([tree, others[rng.random(len(others)) < probability]]))


def cycle_optimum(count: int) -> float:
    """By symmetry all weights are alike, w: the least over w of the largest |1 - 2 w (1 - cos(2 pi k / n))|."""
    heights = 2 - 2 * np.cos(2 * np.pi * np.arange(1, count) / count)
    # Where the smallest and the largest eigenvalue have the same modulus; w is at most 1/2.
    weight = min(0.5, 2 / (heights.min() + heights.max()))
    return float(np.abs(1 - weight * heights).max())


@pytest.mark.parametrize("count", [3, 4, 5, 8, 13, 20, 33, 50])
def test_known_optima(count: int) -> None:
    for edges, optimum in (
        (path(count), np.cos(np.pi / count)),
        (cycle(count), cycle_optimum(count)),
        (star(count), (count - 2) / (count - 1)),
    ):
        found = fastest_mixing(count, edges, TOLERANCE)
        check_mixing(torch.from_numpy(found.matrix), edges)
        assert found.value == pytest.approx(second_modulus(found.matrix), abs=1e-12)
        assert optimum - 1e-9 <= found.value <= optimum + TOLERANCE
        assert optimum - TOLERANCE - 1e-9 <= found.bound <= optimum + 1e-9


def test_a_path_has_even_weights() -> None:
    weights = np.diagonal(fastest_mixing(5, path(5), 1e-9).matrix, 1)
    np.testing.assert_allclose(weights, 0.5, atol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_complete_graphs_average_everything(count: int) -> None:
    edges = np.column_stack(np.triu_indices(count, 1))
    found = fastest_mixing(count, edges)
    assert np.array_equal(found.matrix, np.full((count, count), 1 / count))
    assert (found.value, found.bound) == (0, 0)
    np.testing.assert_allclose(weigh("metropolis", count, edges), 1 / count, atol=1e-15)
    np.testing.assert_allclose(weigh("max_degree", count, edges), 1 / count, atol=1e-15)


def fastest_mixing_sdp(num_nodes: int, edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Solve the same problem as a semidefinite programme (Boyd, Diaconis, Xiao 2004). ``[T, T]``."""
    cvxpy = pytest.importorskip("cvxpy")
    weights, value = cvxpy.Variable(len(edges), nonneg=True), cvxpy.Variable()
    incidence = np.zeros((num_nodes, len(edges)))
    incidence[edges.T, np.arange(len(edges))] = [[1.0], [-1.0]]
    matrix = np.eye(num_nodes) - incidence @ cvxpy.diag(weights) @ incidence.T
    centred, identity = matrix - 1 / num_nodes, np.eye(num_nodes)
    limits = [cvxpy.diag(matrix) >= 0, value * identity >> centred, centred >> -value * identity]
    problem = cvxpy.Problem(cvxpy.Minimize(value), limits)
    problem.solve(solver=cvxpy.CLARABEL)
    assert weights.value is not None, problem.status
    return from_edges(num_nodes, edges, np.maximum(0, weights.value))


@pytest.mark.parametrize(("count", "probability"), [(5, 0.3), (8, 0.1), (10, 0.5), (12, 0.25), (15, 0.4)])
def test_a_semidefinite_programme_finds_the_same(count: int, probability: float) -> None:
    edges = random_graph(count, count, probability)
    reference = fastest_mixing_sdp(count, edges)
    check_mixing(torch.from_numpy(reference), edges)
    assert fastest_mixing(count, edges).value == pytest.approx(second_modulus(reference), abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(0, 10**6), st.sampled_from([0.0, 0.2, 0.6]))
def test_the_bound_is_below_and_the_rules_are_above(count: int, seed: int, probability: float) -> None:
    edges = random_graph(count, seed, probability)
    found = fastest_mixing(count, edges, 1e-4)
    check_mixing(torch.from_numpy(found.matrix), edges)
    assert 0 <= found.bound <= found.value <= found.bound + 1e-4
    for rule in ("metropolis", "max_degree"):
        check_mixing(torch.from_numpy(weigh(rule, count, edges)), edges)
        assert found.bound <= second_modulus(weigh(rule, count, edges)) + 1e-12
    assert found.value <= second_modulus(weigh("metropolis", count, edges)) + 1e-12


def test_the_search_improves_upon_the_rule_it_starts_from() -> None:
    edges = random_graph(40, 3, 0.1)
    found = fastest_mixing(40, edges, 1e-4)
    assert found.value - found.bound <= 1e-4
    assert found.value < second_modulus(weigh("metropolis", 40, edges)) - 0.01


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(0, 10**6), st.sampled_from([0.01, 1.0, 100.0]))
def test_a_projection_is_nearest(count: int, seed: int, scale: float) -> None:
    """The line from the projection to the target makes no acute angle with one to any other feasible matrix."""
    edges = random_graph(count, seed, 0.3)
    support = np.eye(count, dtype=bool)
    support[edges[:, 0], edges[:, 1]] = support[edges[:, 1], edges[:, 0]] = True
    target = np.random.default_rng(seed).normal(scale=scale, size=(count, count))
    target += target.T
    nearest, _ = project(target, support, np.zeros(count))
    check_mixing(torch.from_numpy(nearest), edges)
    for other in (np.eye(count), weigh("metropolis", count, edges), weigh("max_degree", count, edges)):
        assert ((target - nearest) * (other - nearest)).sum() <= 1e-7 * (1 + scale) ** 2


def test_the_second_modulus_of_matrices_that_are_known() -> None:
    assert second_modulus(np.eye(3)) == pytest.approx(1)
    assert second_modulus(torch.full((4, 4), 0.25, dtype=torch.float64)) == pytest.approx(0)
    assert second_modulus(np.array([[0.0, 1.0], [1.0, 0.0]])) == pytest.approx(1)
    turn = np.roll(0.5 * np.eye(3), 1, axis=1) + 0.5 * np.eye(3)  # not symmetric: eigenvalues (1 + e^(2 pi i / 3)) / 2
    assert second_modulus(turn) == pytest.approx(0.5)


def test_an_early_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "MOST_ITERATIONS", 10)
    fastest._search.cache_clear()
    (edges,) = Grid(torus=False).edges(torch.arange(40), 0)
    found = fastest_mixing(40, edges, TOLERANCE)
    assert found.iterations == 10
    assert found.bound + TOLERANCE < found.value
    with pytest.raises(UserError, match=r"After 10 iterations.*known to within \d+% only; allowed: 1%.*metropolis"):
        Grid(torus=False).matrices(torch.arange(40), 0)
    fastest._search.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [3, 50, 200, 351, 1000])
def test_large_rings_are_proven_optimal_to_a_small_part_of_their_tiny_gap(num_clients: int) -> None:
    (edges,) = Ring().edges(torch.arange(num_clients), 0)
    found = fastest_mixing(num_clients, edges)
    lowest, highest = (
        2 - 2 * np.cos(2 * np.pi / num_clients),
        2 - 2 * np.cos(2 * np.pi * (num_clients // 2) / num_clients),
    )
    assert found.value == pytest.approx((highest - lowest) / (highest + lowest), abs=1e-12)
    assert found.value - found.bound <= 1e-4 * (1 - found.value)


def test_what_was_found_is_remembered_and_can_not_be_spoilt() -> None:
    (edges,) = Grid(torus=False).edges(torch.arange(12), 0)
    first = fastest_mixing(12, edges)
    kept = first.matrix.copy()
    first.matrix[:] = 0
    assert np.array_equal(fastest_mixing(12, edges).matrix, kept)


def test_refusals() -> None:
    with pytest.raises(UserError, match=r"1,001 clients.*at most 1,000.*metropolis"):
        fastest_mixing(1001, path(1001))
    with pytest.raises(UserError, match="2 components"):
        fastest_mixing(4, np.array([[0, 1], [2, 3]]))
