"""Nodes come and go: whose name it is, what stays of a round, and who gets a model in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shops

pytest.importorskip("flwr")

from flower_grid import Deployed, equal, simulated
from flwr.app import Message

from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.deploy.flower.server import ClientRegistry
from fedem.runs.result import Result

EXACT = {"dtype": "float64", "evaluate_every": 0}


def impostor(there: Deployed, folder: Path) -> dict[str, Any]:
    """Return a node with the name of node 12's client, and with other samples."""
    client = there.nodes[12]["client"]
    data = shops.write_shops(folder / "other.csv", shops.make_shops(30, names=(client,)))
    return {"data": str(data), "client": client, "state": str(folder / "elsewhere")}


def test_a_name_stays_with_the_node_that_had_it_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, run=EXACT)
    other = impostor(there, tmp_path)

    def join(node: int, asked: Message, answer: Message) -> Message:
        there.nodes[14] = other  # whose answers come first from the next round on
        return answer

    there.grid.spoil = join
    state = there.serve()
    assert there.grid.sent.count((14, "train")) == 2
    equal(state.shared, simulated(there.trainer).shared)
    told = f"Client {other['client']!r} is at node 12; node 14, which uses its name, is left out."
    assert caplog.text.count(told) == 1
    assert "3 clients keep their models; 4 nodes were asked." in caplog.text


def test_a_server_that_goes_on_knows_the_names(tmp_path: Path) -> None:
    there = Deployed(tmp_path, run=EXACT)

    def fail(node: int, asked: Message, answer: Message) -> Message:
        if asked.metadata.group_id == "1":
            raise KeyboardInterrupt
        return answer

    there.grid.spoil = fail
    with pytest.raises(KeyboardInterrupt):
        there.serve()
    there.grid.spoil = lambda node, asked, answer: answer
    there.nodes[14] = impostor(there, tmp_path)
    equal(there.serve(**{"continue": True}).shared, simulated(there.trainer).shared)


def test_a_name_moves_when_its_node_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, run=EXACT)

    def start_again(node: int, asked: Message, answer: Message) -> Message:
        # With a new key a node has a new number; what its client keeps is where it was.
        if len(there.grid.sent) == 3:
            there.nodes[15] = there.nodes.pop(12)
        return answer

    there.grid.spoil = start_again
    equal(there.serve().shared, simulated(there.trainer).shared)
    assert f"Client {there.nodes[15]['client']!r} is at node 15 now; node 12 is not connected" in caplog.text


def test_a_node_has_one_name(caplog: pytest.LogCaptureFixture) -> None:
    registry = ClientRegistry("token", {})
    registry.connected = frozenset({11, 14})
    assert registry.admits("a", 11)
    assert not registry.admits("a", 14)
    again = ClientRegistry("token", registry.nodes)
    again.connected = registry.connected
    assert not again.admits("a", 14)
    assert again.admits("b", 11), "it was misnamed"
    assert again.admits("a", 14)
    assert not again.admits("a", 11)
    assert "'a'" not in str(again.nodes)


def _let_leave(there: Deployed, leaving: int, after: int) -> None:
    """Have a node go once so many rounds of single clients have been asked for."""

    def leave(node: int, asked: Message, answer: Message) -> Message:
        if [kind for _, kind in there.grid.sent].count("train") == after:
            there.nodes.pop(leaving, None)
        return answer

    there.grid.spoil = leave


def test_a_round_that_nobody_scores_is_done_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, {"min-clients": 3, "wait": 0.01}, run=EXACT | {"evaluate_every": 1})
    gone = there.nodes[12]
    _let_leave(there, 12, after=6)
    with pytest.raises(UserError, match="`continue = true` goes on after round 2"):
        there.serve()
    assert "Round 2 is not scored: 2 nodes are connected, needed 3." in caplog.text
    assert Result.load(there.run_folder).state().round == 2
    there.grid.spoil, there.nodes[12] = (lambda node, asked, answer: answer), gone
    equal(there.serve(**{"continue": True}).shared, simulated(there.trainer).shared)
    assert there.grid.sent.count((12, "train")) == 3
    assert ["test_accuracy" in line for line in there.lines] == [True, False, True]


def test_who_was_away_at_the_end_gets_its_model_when_the_run_is_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = Deployed(tmp_path, run=EXACT)
    away = there.nodes[12]
    _let_leave(there, 12, after=9)
    there.serve()
    assert "2 clients keep their models; 2 nodes were asked." in caplog.text
    assert there.kept(away["client"]).shared is None
    there.grid.spoil, there.nodes[12], lines = (lambda node, asked, answer: answer), away, there.lines
    state, known = there.serve(**{"continue": True}), simulated(there.trainer)
    assert "3 clients keep their models; 3 nodes were asked." in caplog.text
    assert there.lines == lines
    equal(there.kept(away["client"]).shared or {}, tree_index(state.shared, 0))
    for position, name in enumerate(there.trainer.federation.names):
        equal(there.kept(name).personal, tree_index(known.personal, position))
