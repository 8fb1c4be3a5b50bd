"""The constants p and tau of the consensus assumption: against all patterns of failures, and against gossip itself."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from fedem.core.random import client_keys
from fedem.graphs import Complete, ErdosRenyi, Grid, Ring, StarGraph, Topology, second_modulus
from fedem.graphs.base import edges_of, with_failures

KEYS = client_keys(list("abcdef"))


def patterns(matrix: np.ndarray, failure: float) -> list[tuple[float, np.ndarray]]:
    """All ways in which edges may fail: probability and matrix."""
    edges = edges_of(matrix)
    found = []
    for failed in product((False, True), repeat=len(edges)):
        left = matrix.copy()
        for i, j in edges[list(failed)]:
            left[[i, j], [i, j]] += matrix[i, j]
            left[i, j] = left[j, i] = 0
        found.append((failure ** sum(failed) * (1 - failure) ** (len(edges) - sum(failed)), left))
    return found


@pytest.mark.parametrize("activity", ["all", "matchings"])
@pytest.mark.parametrize("failure", [0.0, 0.3])
def test_p_is_what_all_patterns_of_failures_make(activity: str, failure: float) -> None:
    topology = Ring(activity=activity, link_failure=failure)
    matrices = topology.matrices(KEYS, 0)
    rest, mean = np.eye(6) - 1 / 6, np.eye(6)
    for matrix in reversed(matrices.numpy()):
        cases = patterns(matrix, failure)
        rest = sum(chance * left @ rest @ left for chance, left in cases)
        mean = sum(chance * left for chance, left in cases) @ mean
    found = topology.consensus(matrices, KEYS)
    assert found.p == pytest.approx(1 - np.linalg.eigvalsh(rest).max(), abs=1e-12)
    moduli = np.sort(np.abs(np.linalg.eigvals(mean)))
    assert found.spectral_gap == pytest.approx(1 - moduli[-2], abs=1e-9)
    assert (found.tau, found.is_estimate) == (len(matrices), False)


def test_expectations_with_failures_of_any_matrix() -> None:
    rng = np.random.default_rng(0)
    (matrix,) = StarGraph(weights="metropolis").matrices(KEYS, 0).numpy()
    inner = rng.normal(size=(6, 6))
    cases = patterns(matrix, 0.4)
    outer, mean = with_failures(matrix, 0.4, inner)
    np.testing.assert_allclose(outer, sum(chance * left @ inner @ left for chance, left in cases), atol=1e-12)
    np.testing.assert_allclose(mean, sum(chance * left for chance, left in cases), atol=1e-12)


@pytest.mark.parametrize("topology", [Ring(), Grid(), StarGraph(), Complete(), ErdosRenyi()], ids=str)
def test_without_randomness_p_is_the_squared_modulus(topology: Topology) -> None:
    matrices = topology.matrices(KEYS, 0)
    found = topology.consensus(matrices, KEYS)
    modulus = second_modulus(matrices[0])
    assert found.spectral_gap == pytest.approx(1 - modulus, abs=1e-12)
    assert found.p == pytest.approx(1 - modulus**2, abs=1e-12)


def test_one_client_agrees_with_itself() -> None:
    found = Complete().consensus(Complete().matrices(KEYS[:1], 0), KEYS[:1])
    assert (found.p, found.tau) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        Ring(link_failure=0.3),
        Ring(link_failure=0.3, activity="matchings"),
        Complete(activity="random_matching"),
        Grid(activity="random_matching", link_failure=0.2, laziness=0.1),
    ],
    ids=str,
)
def test_gossip_contracts_in_expectation_by_p(topology: Topology) -> None:
    """Vectors that are independent, of the draws that p came from too: no mean is left with much more than 1 - p."""
    matrices = topology.matrices(KEYS, 0)
    found = topology.consensus(matrices, KEYS)
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 6)))
    values -= values.mean(1, keepdim=True)
    left = torch.zeros(5, dtype=torch.float64)
    for cycle in range(500):
        moved = values
        for phase in range(found.tau):
            moved = moved @ topology.draw(matrices, phase, KEYS, 1000 + cycle * found.tau + phase)
        torch.testing.assert_close(moved.sum(1), torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)
        left += moved.square().sum(1) / 500
    ratios = left / values.square().sum(1)
    assert float(ratios.max()) <= (1 - found.p) * 1.1
    assert float(ratios.max()) >= (1 - found.p) * 0.2
    assert found.is_estimate == (topology.activity == "random_matching")


def test_the_estimate_for_random_matchings_is_near_the_truth() -> None:
    """On a complete graph of an even number all are matched, each pair alike: E[W X W] is known."""
    keys = KEYS[:4]
    topology = Complete(activity="random_matching")
    found = topology.consensus(topology.matrices(keys, 0), keys)
    # A perfect matching W is a projection, so W (I - J) W = W - J; the mean of the three W is I / 3 + (2 / 3) J.
    assert found.p == pytest.approx(2 / 3, abs=0.08)
