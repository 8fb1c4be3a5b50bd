"""Graphs of clients: what each looks like, the matrices of a round, and that nothing depends on positions."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.random import client_keys
from fedem.graphs import (
    GRAPHS,
    Complete,
    ErdosRenyi,
    Grid,
    Regular,
    Ring,
    SmallWorld,
    StarGraph,
    Topology,
    check_mixing,
)
from fedem.graphs.base import edge_numbers, matchings, random_matching
from fedem.graphs.weights import canonical, degrees, num_components

KEYS = client_keys([f"client {i}" for i in range(12)])
ORDER = torch.from_numpy(np.random.default_rng(0).permutation(12))
LAID = [kind() for name, kind in GRAPHS.items() if name != "file"]
VARIANTS = [
    *(
        {"weights": weights, "link_failure": failure}
        for weights, failure in product(("fmmc", "metropolis"), (0.0, 0.3))
    ),
    {"weights": "max_degree", "laziness": 0.25},
    {"activity": "matchings", "link_failure": 0.3},
    {"activity": "random_matching", "laziness": 0.5},
    {"activity": "random_matching", "link_failure": 0.3},
]


def names(topology: Topology) -> str:
    return type(topology).__name__


def union(topology: Topology, keys: Tensor, seed: int = 0) -> np.ndarray:
    return canonical(np.concatenate(topology.edges(keys, seed)))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("topology", LAID, ids=names)
def test_every_round_mixes_and_positions_do_not_matter(topology: Topology, variant: dict[str, object]) -> None:
    topology = replace(topology, **variant)
    matrices, permuted = topology.matrices(KEYS, 0), topology.matrices(KEYS[ORDER], 0)
    assert matrices.dtype == torch.float64
    assert torch.equal(matrices[:, ORDER][:, :, ORDER], permuted)
    edges = union(topology, KEYS)
    for round_index in range(len(matrices) + 1):
        drawn = topology.draw(matrices, round_index, KEYS, 7 + round_index)
        check_mixing(drawn, edges)
        assert torch.equal(drawn[ORDER][:, ORDER], topology.draw(permuted, round_index, KEYS[ORDER], 7 + round_index))
    assert topology.consensus(matrices, KEYS).p > 0


@pytest.mark.parametrize("topology", LAID, ids=names)
def test_edges_are_in_order(topology: Topology) -> None:
    (edges,) = topology.edges(KEYS, 0)
    assert edges.dtype == np.int64
    assert np.array_equal(edges, canonical(edges))
    assert (edges[:, 0] < edges[:, 1]).all()
    assert num_components(12, edges) == 1


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (Ring(), [2] * 12),
        (Grid(), [4] * 12),
        (Grid(torus=False), [2] * 4 + [3] * 6 + [4] * 2),
        (Complete(), [11] * 12),
        (StarGraph(), [1] * 11 + [11]),
        (Regular(degree=5), [5] * 12),
        (SmallWorld(neighbours=6, rewiring=0.0), [6] * 12),
    ],
    ids=str,
)
def test_degrees(topology: Topology, expected: list[int]) -> None:
    assert sorted(degrees(12, union(topology, KEYS))) == expected


def test_the_centre_of_a_star_is_the_first_by_key() -> None:
    assert int(degrees(12, union(StarGraph(), KEYS)).argmax()) == int(KEYS.argmin())


def test_few_clients() -> None:
    for count, topology in product((1, 2, 3), (Ring(), Grid(), Grid(torus=False), Complete(), StarGraph())):
        matrices = topology.matrices(KEYS[:count], 0)
        assert matrices.shape == (1, count, count)
        check_mixing(matrices[0], union(topology, KEYS[:count]))


def test_an_edge_is_drawn_with_its_probability_whoever_else_is_there() -> None:
    keys = client_keys([str(i) for i in range(300)])
    edges = union(ErdosRenyi(probability=0.3), keys)
    pairs = 300 * 299 / 2
    assert abs(len(edges) - 0.3 * pairs) < 4 * (pairs * 0.3 * 0.7) ** 0.5
    fewer = union(ErdosRenyi(probability=0.3), keys[:100])
    assert np.array_equal(fewer, edges[(edges < 100).all(1)])


def test_a_random_graph_that_falls_apart_is_drawn_anew() -> None:
    """And only then: one that holds together is the first that was drawn."""
    keys, pairs = KEYS[:5].sort().values, np.array(list(combinations(range(5), 2)))
    apart = 0
    for seed in range(40):
        first = pairs[edge_numbers(pairs, keys, seed, 201) < 0.5]
        found = union(ErdosRenyi(), keys, seed)
        assert num_components(5, found) == 1
        if num_components(5, first) == 1:
            assert np.array_equal(found, canonical(first))
        else:
            apart += 1
    assert 0 < apart < 30


@pytest.mark.parametrize("topology", [ErdosRenyi(), SmallWorld(rewiring=0.5), Regular()], ids=names)
def test_random_graphs_depend_on_the_seed(topology: Topology) -> None:
    assert not np.array_equal(union(topology, KEYS, 0), union(topology, KEYS, 1))
    assert np.array_equal(union(topology, KEYS, 1), union(topology, KEYS, 1))


def test_rules_for_the_weights() -> None:
    """A star of 4: its centre has three neighbours."""
    for weights in ("metropolis", "max_degree"):
        matrix = StarGraph(weights=weights).matrices(KEYS[:4], 0)[0]
        assert matrix[matrix > 0].sort().values.tolist() == pytest.approx([0.25] * 7 + [0.75] * 3)
    (lazy,) = Complete(laziness=0.5).matrices(KEYS[:4], 0)
    assert torch.equal(lazy, 0.5 * torch.eye(4, dtype=torch.float64) + 0.125)


@pytest.mark.parametrize("topology", LAID, ids=names)
def test_matchings_colour_every_edge_once(topology: Topology) -> None:
    edges = union(topology, KEYS)
    coloured = matchings(12, edges)
    assert np.array_equal(canonical(np.concatenate(coloured)), edges)
    assert sum(map(len, coloured)) == len(edges)
    assert all(degrees(12, matching).max() == 1 for matching in coloured)
    assert degrees(12, edges).max() <= len(coloured) < 2 * degrees(12, edges).max()


def test_a_random_matching_is_maximal_and_pairs_average_evenly() -> None:
    topology = ErdosRenyi(probability=0.3, activity="random_matching")
    matrices, edges = topology.matrices(KEYS, 1), union(topology, KEYS, 1)
    drawn = torch.stack([topology.draw(matrices, 0, KEYS, key) for key in range(200)])
    assert set(drawn.unique().tolist()) == {0.0, 0.5, 1.0}
    alone = torch.diagonal(drawn, dim1=1, dim2=2) == 1
    assert not bool((alone[:, edges[:, 0]] & alone[:, edges[:, 1]]).any())
    assert bool((drawn.mean(0)[edges[:, 0], edges[:, 1]] > 0).all())  # every edge has its day


def test_a_random_matching_takes_edges_one_after_the_other() -> None:
    edges = union(ErdosRenyi(), KEYS)
    for key in range(20):
        taken: list[list[int]] = []
        for edge in edges[np.argsort(edge_numbers(edges, KEYS, key, 1))].tolist():
            if not set(edge) & {end for other in taken for end in other}:
                taken.append(edge)
        assert canonical(random_matching(edges, KEYS, key)).tolist() == sorted(taken)


def test_links_fail_as_often_as_they_should_and_apart() -> None:
    topology = Ring(link_failure=0.2, weights="metropolis")
    matrices, edges = topology.matrices(KEYS, 0), union(topology, KEYS)
    drawn = torch.stack([topology.draw(matrices, key, KEYS, key) for key in range(2000)])
    failed = (drawn[:, edges[:, 0], edges[:, 1]] == 0).double()
    np.testing.assert_allclose(failed.mean(0), 0.2, atol=4 * (0.2 * 0.8 / 2000) ** 0.5)
    correlations = np.corrcoef(failed.T.numpy()) - np.eye(12)
    assert np.abs(correlations).max() < 5 / 2000**0.5


def test_rounds_without_randomness_are_the_matrices_in_turn() -> None:
    topology = Ring(activity="matchings")
    matrices = topology.matrices(KEYS, 0)
    for round_index in range(2 * len(matrices)):
        assert torch.equal(topology.draw(matrices, round_index, KEYS, 5), matrices[round_index % len(matrices)])


@pytest.mark.parametrize(
    ("topology", "count", "match"),
    [
        (ErdosRenyi(probability=0.01), 12, r"components.*has 0.*larger than 0\.01.*run\.seed"),
        (Regular(degree=1), 12, "6 components.*degree larger than 1"),
        (Regular(degree=3), 5, r"degree is 3.*\(5\)"),
        (Regular(degree=4), 4, "degree is 4"),
        (SmallWorld(neighbours=3), 12, "neighbours is 3.*even"),
        (SmallWorld(neighbours=4), 4, r"neighbours is 4.*\(4\)"),
        (Grid(), 11, "11 clients.*10 and 12"),
        (Ring(weights="metropolis"), 10_001, "10,001 clients.*at most 100,000,000"),
        (Complete(activity="matchings"), 470, "511 phases"),
        (Ring(), 1001, "1,001 clients.*metropolis"),
    ],
    ids=str,
)
def test_refusals(topology: Topology, count: int, match: str) -> None:
    with pytest.raises(UserError, match=match):
        topology.matrices(torch.arange(count), 0)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"weights": "fastest"}, "fmmc"),
        ({"laziness": 1.0}, "laziness is 1.0"),
        ({"link_failure": -0.1}, "link_failure is -0.1"),
        ({"activity": "some"}, "matchings"),
        ({"activity": "matchings", "weights": "metropolis"}, "pairs average evenly"),
    ],
    ids=str,
)
def test_settings_that_are_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(UserError, match=match):
        Ring(**settings)


@pytest.mark.parametrize(
    ("rows", "edges", "match"),
    [
        ([[0.5, 0.5]], None, "shape"),
        ([[0.5, 0.5], [0.4, 0.6]], None, r"not symmetric.*\(0, 1\)"),
        ([[1.5, -0.5], [-0.5, 1.5]], None, "negative"),
        ([[0.5, 0.4], [0.4, 0.6]], None, "Row 0.*0.9"),
        ([[float("nan"), 0.5], [0.5, 0.5]], None, "finite"),
        ([[0.5, 0.5], [0.5, 0.5]], np.empty((0, 2), dtype=np.int64), r"no edge.*\(0, 1\)"),
    ],
)
def test_what_is_no_mixing_matrix(rows: list[list[float]], edges: np.ndarray | None, match: str) -> None:
    with pytest.raises(UserError, match=match):
        check_mixing(torch.tensor(rows, dtype=torch.float64), edges)
