"""A SuperLink, its server's app and SuperNodes killed at random moments, beside a node that is slow and then lies."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import descendants, one_in
from loopbacks import LIMIT, be_patient, checkpointed, left_over, prepare, until
from patience import patient

from fedem.core.errors import UserError, counted
from fedem.core.tree import tree_index
from fedem.deploy.kept import Kept, kept_path
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import State
from fedem.runs.trainer import run

pytest.importorskip("flwr")

from fedem.deploy.flower.trial import CONNECTED, Client, Loopback, Program, draw_clients, start_nodes

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows who started whom"),
]
EXPERIMENT = "chaos"
SLOW = 20.0  # seconds that the first round waits, on an idle machine: more than a node takes that is not held
STRIKES = 2
ODD = """
import pathlib, sys, time

# Every Python program of this node starts here; the one that trains answers the first round only after the test has
# removed a file, and later ones with another lie each.
if any(word.endswith("flwr-clientapp") for word in sys.orig_argv):
    from fedem.deploy.node import Node

    honest = Node.train

    def train(self, *arguments):
        upload, personal = honest(self, *arguments)
        shared, before, round_index, *rest = arguments
        while round_index == 0 and pathlib.Path({held!r}).exists():
            time.sleep(0.1)
        if round_index % 2:
            Node.num_samples = property(lambda self: 10**12)
        factor = 1.0 if round_index % 2 else -1e6
        return {{name: shared[name] + factor * (leaf - shared[name]) for name, leaf in upload.items()}}, personal

    Node.train = train
"""


@pytest.fixture(autouse=True)
def _patience_with_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


class Deployment:
    """Two honest nodes, an odd one, and a run that is continued however often it is cut off."""

    def __init__(self, folder: Path, network: Loopback, rounds: int):
        self.clients = draw_clients(folder / "data", 2, seed=0)
        self.config, self.app = prepare(folder, rounds, schedule={"name": "constant"})
        self.network, self.folder = network, RunFolder(folder / "runs" / EXPERIMENT)
        self.nodes = start_nodes(network, self.clients)
        self.cut: Program | None = None

    def add_odd_node(self, folder: Path, held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (client,) = draw_clients(folder / "other", 1, seed=1)
        (folder / "odd").mkdir()
        (folder / "odd" / "sitecustomize.py").write_text(ODD.format(held=str(held)))
        with monkeypatch.context() as patch:
            others = filter(None, [self.network.environment.get("PYTHONPATH")])
            patch.setitem(self.network.environment, "PYTHONPATH", os.pathsep.join([str(folder / "odd"), *others]))
            key = self.network.register("mallory", "mallory")
            own = {"data": str(client.data), "client": "mallory", "state": str(folder / "mallory")}
            self.network.start_node("mallory", own, key).wait_for(CONNECTED)

    def go_on(self, **settings: Any) -> Program:
        """Submit the run, anew or continued."""
        if self.cut is not None:
            self.cut.kill()
            settings["continue"] = True
        own = {"experiment": EXPERIMENT, "folder": str(self.folder.path.parent), "strikes": STRIKES}
        self.cut = self.network.submit(self.app, own | settings)
        return self.cut

    def kept(self, number: int) -> Kept | None:
        path = kept_path(self.network.folder / "state" / f"node-{number}", EXPERIMENT, self.clients[number].name)
        return Kept.load(path) if path.exists() else None

    def kill_server_app(self) -> bool:
        """Kill the process in which the server's app runs; False where there is none."""
        for process in descendants(self.network.executor.process.pid):
            try:
                words = Path(f"/proc/{process}/cmdline").read_bytes()
            except OSError:
                continue
            if b"flwr-serverapp" in words:
                os.kill(process, signal.SIGKILL)
                return True
        return False

    def kill_superlink(self) -> bool:
        """Kill the SuperLink, and its SuperExec with it, as systemd does; then start it again."""
        self.network.superlink.kill()
        self.network.executor.kill()
        self.network.start_superlink()
        return True

    def restart(self, number: int) -> bool:
        """Start a node again; False while the SuperLink takes the one that was killed for alive."""
        client: Client = self.clients[number]
        state = str(self.network.folder / "state" / f"node-{number}")
        own = {"data": str(client.data), "client": client.name, "state": state}
        again = self.network.start_node(f"node-{number}", own, self.network.keys / f"node-{number}")
        try:
            again.wait_for(CONNECTED)
        except UserError:
            time.sleep(5)
            return False
        self.nodes[number] = again
        return True


def test_a_network_outlives_its_parts_and_a_node_that_is_slow_and_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, total = random.Random(9), one_in(100, least=1)
    kinds = [("ServerApp", "SuperLink", "SuperNode")[number % 3] for number in range(total)]
    of_server = [kind for kind in kinds if kind != "SuperNode"]
    rounds, held, done = 1 + STRIKES + len(of_server), tmp_path / "held", list[str]()
    held.touch()
    with Loopback(tmp_path / "network") as network:
        there = Deployment(tmp_path, network, rounds)
        there.add_odd_node(tmp_path, held, monkeypatch)
        expected = run(there.config, there.config.make_data()).state()
        going_on = there.go_on(timeout=patient(SLOW))
        until(lambda: checkpointed(there.folder) == 1, going_on)
        assert there.folder.metrics()[0]["clients"] == 2, "the round went on without the slow one"
        held.unlink()
        ways: dict[str, Callable[[], bool]] = {"ServerApp": there.kill_server_app, "SuperLink": there.kill_superlink}
        for number, kind in enumerate(of_server):
            until(lambda least=number + 1: checkpointed(there.folder) >= least, going_on)
            time.sleep(chance.uniform(0, patient(8)))
            before = checkpointed(there.folder)
            if there.folder.summary() is None and ways[kind]():
                done.append(kind)
            for client in range(2):
                kept = there.kept(client)
                assert kept is not None
                assert kept.round >= before, "it has kept every round that the server has closed"
            going_on = there.go_on(timeout=patient(LIMIT))
        until(lambda: there.folder.summary() is not None, going_on)
        going_on.finish(patient(LIMIT))
        _check_as_if_nothing_had_been(there, expected)
        if nodes := kinds.count("SuperNode"):
            done += _kill_nodes(there, chance, nodes)
    until(lambda: not left_over(network.folder))
    with capsys.disabled():
        print(f"\n{counted(len(done), 'kill')} ({', '.join(done)}), a slow node that lies: all went on as it should")


def _check_as_if_nothing_had_been(there: Deployment, expected: State) -> None:
    """The model and what clients keep are those of the honest ones; who lied is named and set aside."""
    found = there.folder.load()[0]["last"]
    assert found.round == expected.round
    torch.testing.assert_close(found.shared, expected.shared, rtol=0, atol=1e-5)
    for number in range(2):
        kept = there.kept(number)
        assert kept is not None
        torch.testing.assert_close(kept.personal, tree_index(expected.personal, number), rtol=0, atol=1e-5)
    lines = there.folder.metrics()
    assert [(line["round"], line["clients"]) for line in lines] == [(at + 1, 2) for at in range(expected.round)]
    uploads = [json.loads(line) for line in (there.folder.path / "uploads.jsonl").read_text().splitlines()]
    noticed = [[entry for entry in line["uploads"] if "left_out" in entry] for line in uploads]
    assert not noticed[0], "to be slow is no lie"
    told = [[(entry["left_out"], entry["strikes"]) for entry in entries] for entries in noticed[1:]]
    assert told[:STRIKES] == [[("samples", 1)], [("norm", 2)]]
    assert noticed[STRIKES][0]["set_aside"]
    assert not any(told[STRIKES:])
    log = (there.network.logs / "run.log").read_text()
    assert "Client 'mallory' is refused: its number of samples is 1,000,000,000,000" in log
    assert "Client 'mallory' is left out: its update has norm" in log
    assert f"is set aside: answers of {STRIKES} rounds in a row were left out" in log


def _kill_nodes(there: Deployment, chance: random.Random, count: int) -> list[str]:
    """Rounds go on without a node that is killed, and it takes part again with what it had kept."""
    going_on = there.go_on(rounds=1000, timeout=patient(60.0), **{"min-clients": 1})
    for _ in range(count):
        before = len(there.folder.metrics())
        until(lambda least=before: len(there.folder.metrics()) > least, going_on)
        time.sleep(chance.uniform(0, patient(8)))
        number = chance.randrange(2)
        there.nodes[number].kill()
        then = there.kept(number)
        assert then is not None
        until(lambda: there.folder.metrics()[-1]["clients"] == 1, going_on)
        alone = len(there.folder.metrics())
        until(lambda number=number: there.restart(number), going_on)
        until(lambda least=alone: any(line["clients"] == 2 for line in there.folder.metrics()[least:]), going_on)
        now = there.kept(number)
        assert now is not None
        assert now.round > then.round
    assert [line["round"] for line in there.folder.metrics()] == list(range(1, len(there.folder.metrics()) + 1))
    return ["SuperNode"] * count
