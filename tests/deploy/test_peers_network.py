"""Peers as processes on this machine: they end where the simulator does, outlive each other, and refuse strangers."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from peering import SIZES, Deployment, Process, free_port, wait_for

from fedem.deploy.peers.meeting import KEY, host_meeting

pytestmark = pytest.mark.network


@pytest.mark.parametrize(
    ("graph", "processes"),
    [
        ({"name": "ring"}, [["ann"], ["bob"], ["cem"], ["dan"]]),
        ({"name": "erdos_renyi", "probability": 0.7}, [["bob"], ["dan", "ann"], ["cem"]]),
    ],
    ids=["ring", "two clients in one process"],
)
def test_peers_end_where_the_simulator_does(tmp_path: Path, graph: dict[str, Any], processes: list[list[str]]) -> None:
    deployment, store, count = Deployment(tmp_path, graph=graph), host_meeting(0), len(processes)
    with ExitStack() as stack:
        peers = [
            stack.enter_context(deployment.peer(store.port, clients, least=count, most=count)) for clients in processes
        ]
        for process in peers:
            assert process.ends() == 0, process.said()
    deployment.check_equals_simulator()
    last = [deployment.lines(name)[-1] for name in SIZES]
    # Averages are of everybody, and so everywhere the same.
    assert len({line["test_accuracy"] for line in last}) == 1
    assert len({line["own_train_loss"] for line in last}) == len(SIZES)


def test_peers_outlive_one_that_is_killed_and_take_it_back(tmp_path: Path) -> None:
    rounds, port = 100_000, free_port()
    deployment = Deployment(tmp_path, rounds)
    with ExitStack() as stack:
        stack.enter_context(Process(tmp_path, "meet", "--port", str(port)))
        three, lost = (
            [stack.enter_context(deployment.peer(port, [name], least=3, most=4)) for name in names]
            for names in (["ann", "bob", "cem"], ["dan"])
        )
        # The first meeting may have been without one of them.
        wait_for(lambda: len([line for line in deployment.lines("dan") if line["clients"] == 4]) > 3, three + lost)
        lost[0].kill()
        done = deployment.kept("dan").round
        wait_for(lambda: deployment.lines("ann")[-1]["clients"] == 3, three)
        alone = deployment.lines("ann")[-1]["round"]
        assert alone >= done
        wait_for(lambda: deployment.lines("bob")[-1]["round"] > alone + 3, three)
        assert deployment.kept("dan").round == done
        back = stack.enter_context(deployment.peer(port, ["dan"], least=3, most=4))
        wait_for(
            lambda: any(line["clients"] == 4 for line in deployment.lines("dan") if line["round"] > done),
            [*three, back],
        )
        # It goes on with the others, who have got further meanwhile.
        assert min(line["round"] for line in deployment.lines("dan") if line["round"] > done) > alone
        wait_for(lambda: deployment.lines("cem")[-1]["clients"] == 4, [*three, back])


def test_strangers_are_refused_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    deployment, other = Deployment(tmp_path, 100_000), Deployment(tmp_path / "other", 99_999)
    shutil.copy(deployment.plan / KEY, other.plan)
    store = host_meeting(0)
    with ExitStack() as stack:
        pair = [stack.enter_context(deployment.peer(store.port, [name])) for name in ("ann", "bob")]
        wait_for(lambda: deployment.lines("ann") and deployment.lines("bob"), pair)
        strangers = [
            stack.enter_context(deployment.peer(store.port, ["ann"], state=other.state)),
            stack.enter_context(deployment.peer(store.port, ["cem"], plan=other.plan)),
        ]
        assert [process.ends() for process in strangers] == [2, 2]
        assert "There is a client 'ann' already" in strangers[0].said()
        assert "The plan of client 'cem' is" in strangers[1].said()
        done = deployment.lines("bob")[-1]["round"]
        wait_for(lambda: deployment.lines("bob")[-1]["round"] > done + 3, pair)


def test_a_worker_ends_with_its_agent(tmp_path: Path) -> None:
    deployment, store = Deployment(tmp_path, 100_000), host_meeting(0)
    with ExitStack() as stack:
        killed = stack.enter_context(deployment.peer(store.port, ["ann"], least=1))
        wait_for(lambda: deployment.lines("ann"), [killed])
        second = stack.enter_context(deployment.peer(store.port, ["ann"], least=1))
        assert second.ends() == 2
        assert "ann.lock" in second.said()
        killed.kill_agent()
        wait_for(lambda: not killed.has_left_overs(), [], 20)
        assert "semaphore" not in killed.said()
        done = deployment.kept("ann").round
        again = stack.enter_context(deployment.peer(store.port, ["ann"], least=1))
        wait_for(lambda: deployment.lines("ann")[-1]["round"] > done, [again])
