"""What every peer works out for itself: who stays, from which round, over which matrix, and who sends what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedem.core.random import client_keys
from fedem.deploy.peers.neighbours import PeerGraph, PresentClient, refusals, round_to_go_on_with, routes
from fedem.graphs import GRAPHS, Complete, ErdosRenyi, Grid, Regular, Ring, Topology, check_mixing

NAMES = [f"client{number}" for number in range(7)]


def client(
    name: str, rank: int, *, version: str = "1", plan: str = "p", run: str = "", met: bool = False, done: int = 0
) -> PresentClient:
    return PresentClient(name, 10, done, version, plan, run, met, rank)


def refused(*present: PresentClient) -> dict[int, str]:
    return refusals(present, Path("state"))


def test_newcomers_must_fit_in() -> None:
    assert refused(client("ann", 0), client("bob", 1), client("cem", 1)) == {}
    # Those who have met stay, whatever their rank.
    found = refused(client("ann", 0), client("bob", 1, plan="q"), client("ann", 2, met=True))
    assert found.keys() == {0, 1}
    assert "'ann'" in found[0]
    assert "'bob' is q" in found[1]
    assert refused(client("ann", 0, plan="q"), client("bob", 1, met=True)).keys() == {0}
    found = refused(client("ann", 0), client("bob", 1, version="2"))
    assert found.keys() == {1}
    assert "'bob' has fedem 2, and the others have 1" in found[1]


def test_one_old_state_does_not_pass_for_the_run() -> None:
    old, fresh = client("ann", 0, run="x", done=9), [client("bob", 1), client("cem", 2)]
    found = refused(old, *fresh)
    assert found.keys() == {0}
    assert "'ann' has done 9 rounds" in found[0]
    assert "in state;" in found[0]
    # Most of a run go on with it, and somebody new joins them.
    assert refused(old, client("bob", 1, run="x", done=8), client("cem", 2)) == {}
    assert refused(old, client("bob", 1)) == {}
    # Whatever newcomers bring, those who are at work stay.
    working = client("dan", 3, run="y", met=True)
    assert refused(old, client("bob", 1, run="x", done=8), working, client("cem", 2)).keys() == {0, 1}
    # Strangers to the plan have no vote.
    assert refused(client("eve", 0, run="y", met=True), *(client(n, 1, plan="q", run="x") for n in "fg")).keys() == {1}


@given(st.lists(st.tuples(st.sampled_from(["", "x", "y"]), st.booleans()), min_size=1, max_size=7))
def test_whoever_is_left_is_of_one_run(kept: list[tuple[str, bool]]) -> None:
    present = [
        # Those who have met are of one run.
        client(str(rank), rank, run="z" if met else run, met=met, done=len(run))
        for rank, (run, met) in enumerate(kept)
    ]
    leaving = refusals(present, Path("state"))
    left = [one for one in present if one.rank not in leaving]
    assert left
    assert len({one.run for one in left} - {""}) <= 1
    assert all(one in left for one in present if one.met or not one.run)
    # Nobody else must leave when those who are left meet again.
    assert refusals(left, Path("state")) == {}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_nobody_goes_back(rounds: list[int]) -> None:
    found = round_to_go_on_with(client(str(rank), rank, done=done) for rank, done in enumerate(rounds))
    assert found in rounds
    assert all(found >= done for done in rounds)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "file"])
@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_any_number_of_survivors_has_a_matrix(name: str, count: int) -> None:
    found = PeerGraph.over(GRAPHS[name](), NAMES[:count], 0)
    matrix = found.matrix(0, 0)
    check_mixing(matrix, None)
    assert len(matrix) == count


def test_without_a_loss_the_matrix_is_the_simulators() -> None:
    topology, keys = ErdosRenyi(probability=0.6, link_failure=0.2), client_keys(NAMES)
    found = PeerGraph.over(topology, NAMES, 3)
    assert found.remark == ""
    assert torch.equal(found.matrix(5, 9), topology.draw(topology.matrices(keys, 3), 5, keys, 9))


@pytest.mark.parametrize("settings", [{}, {"activity": "matchings"}, {"activity": "random_matching"}])
def test_a_graph_that_falls_apart_is_mixed_in_its_pieces(settings: dict[str, Any]) -> None:
    topology = ErdosRenyi(probability=0.05, **settings)
    keys = client_keys(NAMES)
    (edges,) = topology.edges(keys, 1)
    found = PeerGraph.over(topology, NAMES, 1)
    assert len(found.components) > 1
    assert f"{len(found.components)} pieces" in found.remark
    assert sorted(torch.cat([piece.members for piece in found.components]).tolist()) == list(range(len(NAMES)))
    linked = torch.eye(len(NAMES), dtype=torch.bool)
    linked[edges[:, 0], edges[:, 1]] = linked[edges[:, 1], edges[:, 0]] = True
    total = torch.zeros(len(NAMES), len(NAMES), dtype=torch.float64)
    for number in range(30):
        matrix = found.matrix(number, number)
        check_mixing(matrix, None)
        assert not bool((matrix > 0)[~linked].any())
        total += matrix
    # The fastest weights may leave a client none of its own.
    assert torch.equal((total > 0) | torch.eye(len(NAMES), dtype=torch.bool), linked)


@pytest.mark.parametrize("topology", [Grid(), Regular(degree=3)])
def test_where_there_is_no_such_graph_they_take_a_ring(topology: Topology) -> None:
    found = PeerGraph.over(topology, NAMES[:5], 0)
    assert "ring" in found.remark
    assert torch.equal(found.matrix(0, 0), Ring().matrices(client_keys(NAMES[:5]), 0)[0])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(0, 1000))
def test_what_one_sends_the_other_expects(ranks: list[int], seed: int) -> None:
    linked = torch.rand(len(ranks), len(ranks), generator=torch.Generator().manual_seed(seed)) < 0.4
    matrix = (linked | linked.T | torch.eye(len(ranks), dtype=torch.bool)).double()
    plans = {rank: routes(matrix, ranks, rank) for rank in set(ranks)}
    for rank, (sends, receives) in plans.items():
        for other, rows in sends.items():
            assert plans[other][1][rank] == rows
        there = {row for row, owner in enumerate(ranks) if owner == rank} | {
            row for rows in receives.values() for row in rows
        }
        for row, owner in enumerate(ranks):
            if owner == rank:
                assert set(matrix[row].nonzero().flatten().tolist()) <= there
    assert routes(torch.ones(3, 3), [0, 0, 1], 1) == ({0: [2]}, {0: [0, 1]})


def test_a_complete_graph_of_survivors_is_a_mean() -> None:
    matrix = PeerGraph.over(Complete(), NAMES[:4], 0).matrix(0, 0)
    torch.testing.assert_close(matrix, torch.full((4, 4), 0.25, dtype=torch.float64))
