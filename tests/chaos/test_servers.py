"""A server's app and nodes' apps killed at random moments, with Flower's messages handed over in one process.

A SuperLink takes seconds for a round, so that few moments of one are met; ``test_networks.py`` has a few of those.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import Deployed
from flwr.app import Context, Message
from helpers import same_states
from killing import KILLED, Child, one_in

from fedem.core.errors import counted
from fedem.deploy.history import History
from fedem.deploy.kept import Kept, kept_path
from fedem.runs.checkpoints import MANIFEST
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import State

RUN: dict[str, Any] = {"rounds": 5, "evaluate_every": 2, "dtype": "float64"}
ON = {"continue": True}
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch"),
]


def _deploy(folder: Path, **sections: dict[str, Any]) -> Deployed:
    folder.mkdir()
    return Deployed(folder, run=RUN, **sections)


def _files(there: Deployed) -> Iterator[Path]:
    for node in there.nodes.values():
        path = kept_path(there.folder / "state", "trial", node["client"])
        if path.exists():
            yield path


def _check_whole(there: Deployed) -> None:
    """No file is torn: what the clients keep, the checkpoint, and those of the rounds that can be gone back to."""
    for path in _files(there):
        Kept.load(path)
    folder = RunFolder(there.run_folder)
    if (folder.checkpoints / MANIFEST).exists():
        folder.load()
    for number in History(folder).rounds():
        assert History(folder).at(number).load()[0]["last"].round == number


def _trees_of(kept: Kept) -> list[Any]:
    return [kept.round, kept.joined, kept.personal, kept.shared, *kept.earlier]


def _check_same(one: Deployed, other: Deployed) -> None:
    """The server and everybody's files are the same to the last bit; only the run's own name differs."""
    first, second = (RunFolder(there.run_folder).load()[0]["last"] for there in (one, other))
    assert same_states(first, second)
    for node in one.nodes.values():
        trees = [_trees_of(there.kept(node["client"])) for there in (one, other)]
        torch.testing.assert_close(trees[0], trees[1], rtol=0, atol=0)
    lines = [[line | {"seconds": 0} for line in there.lines] for there in (one, other)]
    assert lines[0] == lines[1]
    assert History(RunFolder(one.run_folder)).rounds() == History(RunFolder(other.run_folder)).rounds()
    assert not list(other.folder.rglob("*.tmp"))


WAYS: list[dict[str, dict[str, Any]]] = [
    {},
    {"compression": {"updates": "int8"}},
    {"method": {"name": "ditto"}, "server": {"name": "adam"}},
]


def test_a_server_that_is_killed_goes_on_from_its_checkpoint_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, kills, runs, wanted = random.Random(4), 0, 0, one_in(2, least=3)
    while kills < wanted:
        way, log = WAYS[runs % len(WAYS)], tmp_path / f"log-{runs}"
        whole, cut = (_deploy(tmp_path / f"{name}-{runs}", **way) for name in ("whole", "cut"))
        started = time.monotonic()
        assert Child.start(log, whole.serve).wait() == 0, log.read_text()
        seconds, runs = time.monotonic() - started, runs + 1
        code = KILLED
        while code == KILLED:
            more = ON if (cut.run_folder / "config.toml").exists() else {}
            # What is left takes less and less time, so that also the end of a run is met.
            server = Child.start(log, lambda cut=cut, more=more: cut.serve(**more))
            code = server.kill_after(chance.uniform(0, 0.6 * seconds))
            kills += code == KILLED
            _check_whole(cut)
        assert code == 0, log.read_text()
        _check_same(whole, cut)
    with capsys.disabled():
        print(f"\n{counted(kills, 'kill')} of a server's app, in {counted(runs, 'run')}: all ended in the same bits")


class MortalNodes:
    """The apps of nodes: each message is answered by a process of its own, and some of these are killed."""

    def __init__(self, there: Deployed, chance: random.Random, log: Path):
        self.fates: dict[tuple[int, str], str] = {}
        self._there, self._app, self._chance, self._log, self._seconds = there, there.grid.app, chance, log, 0.0

    def __call__(self, message: Message, context: Context) -> Message | None:
        before, answer, started = self._content(), self._there.folder / "answer", time.monotonic()
        child = Child.start(self._log, lambda: answer.write_bytes(pickle.dumps(self._app(message, context))))
        is_training = message.metadata.message_type == "train"
        is_hunted = is_training and self._seconds > 0 and self._chance.random() < 0.5
        code = child.kill_after(self._chance.uniform(0, 1.5 * self._seconds)) if is_hunted else child.wait()
        if code == KILLED:
            _check_whole(self._there)
            fate = "before" if self._content() == before else "after"
            self.fates[message.metadata.dst_node_id, message.metadata.group_id] = fate
            return None
        assert code == 0, self._log.read_text()
        if is_training:
            self._seconds = time.monotonic() - started  # about what the next one takes
        found: Message = pickle.loads(answer.read_bytes())
        return found

    def _content(self) -> list[bytes]:
        return [path.read_bytes() for path in _files(self._there)]


class Replayed:
    """The apps of nodes that were killed before or after they kept what they had learnt, which nobody heard of."""

    def __init__(self, there: Deployed, fates: dict[tuple[int, str], str]):
        self._app, self._fates = there.grid.app, fates

    def __call__(self, message: Message, context: Context) -> Message | None:
        metadata, fate = message.metadata, None
        if metadata.message_type == "train":
            fate = self._fates.get((metadata.dst_node_id, metadata.group_id))
        if fate == "before":
            return None
        answer: Message = self._app(message, context)
        return answer if fate is None else None


def test_rounds_go_on_without_a_node_that_is_killed_and_it_takes_part_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, runs, wanted = random.Random(5), 0, one_in(2, least=3)
    fates: list[str] = []
    while len(fates) < wanted:
        way = WAYS[runs % len(WAYS)]
        mortal, expected = (_deploy(tmp_path / f"{name}-{runs}", **way) for name in ("mortal", "expected"))
        runs += 1
        nodes = MortalNodes(mortal, chance, tmp_path / "log")
        _serve(mortal, nodes)
        _serve(expected, Replayed(expected, nodes.fates))
        _check_same(expected, mortal)
        fates += nodes.fates.values()
        lost = [[group for _, group in nodes.fates].count(str(done)) for done in range(RUN["rounds"])]
        took_part = [line["clients"] for line in mortal.lines]
        assert took_part == [len(mortal.nodes) - count for count in lost], "all others, and it in other rounds"
    with capsys.disabled():
        of = (
            f"{counted(len(fates), 'kill')} of a node's app, {fates.count('after')} of them after it had kept its round"
        )
        print(f"\n{of}: rounds went on without it, and all ended as they should")


def _serve(there: Deployed, app: Any) -> State:
    there.grid.app = app
    return there.serve()
