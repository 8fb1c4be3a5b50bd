"""Nodes come and go: whose name it is, what stays of a round, and who gets a model in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shops

pytest.importorskip("flwr")

from flower_grid import Deployed, equal, node_info, simulated
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo

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


def _move(there: Deployed, old: int, new: int) -> None:
    """Have a node start again under another number after the first round."""

    def start_again(node: int, asked: Message, answer: Message) -> Message:
        if len(there.grid.sent) == 3:
            there.nodes[new] = there.nodes.pop(old)
        return answer

    there.grid.spoil = start_again


def test_without_keys_a_name_moves_when_its_node_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, run=EXACT)
    _move(there, 12, 15)
    equal(there.serve().shared, simulated(there.trainer).shared)
    assert f"Client {there.nodes[15]['client']!r} is at node 15 now, and no longer at node 12." in caplog.text


def test_the_same_key_is_the_same_owner_under_any_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = Deployed(tmp_path, run=EXACT)
    there.grid.keys = {11: ("a", ""), 12: ("b", ""), 13: ("c", ""), 15: ("b", "")}
    _move(there, 12, 15)
    equal(there.serve().shared, simulated(there.trainer).shared)
    assert "left out" not in caplog.text


def test_a_name_stays_with_its_key_while_its_node_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, name = Deployed(tmp_path, {"min-clients": 2}, run=EXACT), "shop A"
    there.grid.keys = {11: ("a", ""), 12: ("b", ""), 13: ("c", ""), 14: ("mallory", "")}
    victim = next(node for node, own in there.nodes.items() if own["client"] == name)
    away, other = there.nodes[victim], there.nodes[victim] | {"state": str(tmp_path / "elsewhere")}

    def swap(node: int, asked: Message, answer: Message) -> Message:
        match len(there.grid.sent):
            case 3:  # the first round is done
                del there.nodes[victim]
                there.nodes[14] = other
            case 6:  # so is the second, in which the other stood in for it
                there.nodes[victim] = away
        return answer

    there.grid.spoil = swap
    there.serve()
    assert [line["clients"] for line in there.lines] == [3, 2, 3]
    told = f"Client {name!r} is at node {victim}; node 14, which uses its name, is left out."
    assert caplog.text.count(told) == 1
    assert f"Client {name!r} is at node 14" not in caplog.text, "the owner is never shut out"


KEYS = [node_info(11, "a"), node_info(12, "b"), node_info(14, "mallory")]


def registry(nodes: list[NodeInfo], owners: dict[str, str] | None = None) -> ClientRegistry:
    made = ClientRegistry("token", owners or {})
    made.meet(nodes)
    return made


def test_what_is_kept_binds_a_name_when_the_run_is_continued(caplog: pytest.LogCaptureFixture) -> None:
    first = registry(KEYS)
    assert first.admits("a", 11)
    assert "a" not in first.owners.values()
    again = registry(KEYS[1:], first.owners)  # the owner has not come back yet
    assert not again.admits("a", 14)
    assert "Client 'a' is at a node that is not connected; node 14, which uses its name, is left out." in caplog.text
    again.meet([node_info(31, "a"), KEYS[2]])  # a new database of the SuperLink has other numbers
    assert again.admits("a", 31)
    assert not again.admits("a", 14)


def test_a_node_has_one_name() -> None:
    made = registry(KEYS)
    assert made.admits("a", 11)
    assert not made.admits("a", 14)
    assert made.admits("b", 11), "it was misnamed"
    assert made.admits("a", 14)
    assert not made.admits("a", 11)


def test_who_is_registered_under_a_name_has_it_whoever_came_first(caplog: pytest.LogCaptureFixture) -> None:
    owner, other = node_info(12, "b", "north"), node_info(13, "c", "south")
    made = registry([node_info(14, "mallory")])
    assert made.admits("north", 14), "nobody knows better yet"
    made.meet([owner, other, KEYS[2]])
    assert not made.admits("north", 14), "its owner is there, though it has not answered"
    assert not made.admits("north", 13)
    assert "Node 13 is registered as 'south'; its answers as 'north' are left out." in caplog.text
    assert made.admits("north", 12)
    assert "Client 'north' is at node 12 now, and no longer at node 14." in caplog.text
    made.meet([other, KEYS[2]])
    assert not made.admits("north", 14)


def test_a_second_key_registered_under_a_name_replaces_the_first_only_once_that_is_gone() -> None:
    lost, new = node_info(12, "b", "north"), node_info(15, "d", "north")
    made = registry([lost, new])
    assert made.admits("north", 12)
    assert not made.admits("north", 15)
    made.meet([new])
    assert made.admits("north", 15)
    made.meet([lost, new])
    assert not made.admits("north", 12)


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
