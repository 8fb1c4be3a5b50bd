"""A SuperLink and SuperNodes with TLS and keys on loopback: what is computed, who is refused, what a crash costs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import descendants, runs
from loopbacks import LIMIT, be_patient, checkpointed, left_over, prepare, until
from patience import patient

from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.deploy.kept import Kept, kept_path
from fedem.runs.folder import RunFolder
from fedem.runs.trainer import run

pytest.importorskip("flwr")

from fedem.deploy.flower import trial as loopback
from fedem.deploy.flower.certificates import make_node_key
from fedem.deploy.flower.trial import CONNECTED, CONNECTION, HOST, Loopback, draw_clients, start_nodes

SPOILT = """
import pathlib, sys, time

# Every Python program of this node starts here; the one that trains sends what is not a number, and it answers in the
# second round only after the test has removed a file.
if any(word.endswith("flwr-clientapp") for word in sys.orig_argv):
    from fedem.deploy.node import Node

    honest = Node.train

    def train(self, *arguments):
        upload, personal = honest(self, *arguments)
        shared, before, round_index, *rest = arguments
        while round_index == 1 and pathlib.Path({held!r}).exists():
            time.sleep(0.1)
        return {{name: leaf * float("nan") for name, leaf in upload.items()}}, personal

    Node.train = train
"""


@pytest.fixture(autouse=True)
def _patience_with_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.mark.network
def test_nodes_compute_what_the_simulator_does_whoever_else_comes_and_though_the_superlink_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = draw_clients(tmp_path / "data", 3, seed=0)
    config, app = prepare(tmp_path, rounds=3)
    expected = run(config, config.make_data()).state()
    (tmp_path / "spoilt").mkdir()
    held = tmp_path / "held"
    held.touch()
    (tmp_path / "spoilt" / "sitecustomize.py").write_text(SPOILT.format(held=str(held)))
    (spoilt,) = draw_clients(tmp_path / "other", 1, seed=1)
    folder = RunFolder(tmp_path / "runs" / "first")
    settings: dict[str, Any] = {
        "experiment": "first",
        "folder": str(folder.path.parent),
        "min-clients": 3,
        "timeout": patient(LIMIT),
    }
    with Loopback(tmp_path / "network") as network:
        start_nodes(network, clients)
        key = network.register("mallory", "mallory")
        with monkeypatch.context() as patch:
            others = filter(None, [network.environment.get("PYTHONPATH")])
            patch.setitem(network.environment, "PYTHONPATH", os.pathsep.join([str(tmp_path / "spoilt"), *others]))
            own = {"data": str(spoilt.data), "client": "mallory", "state": str(tmp_path / "mallory")}
            network.start_node("mallory", own, key).wait_for(CONNECTED)

        make_node_key(network.keys / "stranger")
        refused = {
            "must be registered": network.start_node("without-a-key", {}, None),
            "Failed to activate": network.start_node("stranger", {}, network.keys / "stranger"),
            "CERTIFICATE_VERIFY_FAILED": network.start_node("no-authority", {}, key, verify=False),
        }
        for why, node in refused.items():
            assert node.finish(patient(LIMIT)) != 0
            assert why in node.output()
            assert CONNECTED not in node.output()

        cut = network.submit(app, settings)
        files = [
            kept_path(network.folder / "state" / f"node-{number}", "first", client.name)
            for number, client in enumerate(clients)
        ]
        until(lambda: checkpointed(folder) == 1, cut)
        # Somebody has trained the second round, and the server has not got everybody's answers: one is held back.
        until(lambda: any(Kept.load(path).round == 2 for path in files), cut)
        network.superlink.kill()
        network.executor.kill()
        assert checkpointed(folder) == 1
        held.unlink()
        network.start_superlink()
        going_on = network.submit(app, settings | {"continue": True})
        going_on.finish(patient(LIMIT))
        assert folder.summary() is not None, going_on.output()
    found = folder.load()[0]["last"]

    assert [(line["round"], line["clients"]) for line in folder.metrics()] == [(1, 3), (2, 3), (3, 3)]
    assert "Rounds done: 1 of 3" in going_on.output()
    assert "Client 'mallory' is refused: leaf" in going_on.output()
    assert found.round == expected.round == 3
    torch.testing.assert_close(found.shared, expected.shared, rtol=0, atol=1e-5)
    for number, path in enumerate(files):
        kept = Kept.load(path)
        torch.testing.assert_close(kept.personal, tree_index(expected.personal, number), rtol=0, atol=1e-5)
        assert kept.shared is not None
        torch.testing.assert_close(kept.shared, tree_index(found.shared, 0), rtol=0, atol=0)
    # No client's name, weights or scores stay with the server.
    assert not found.personal
    assert not any(b"client-" in path.read_bytes() for path in folder.path.rglob("*") if path.is_file())
    until(lambda: not left_over(network.folder))


@pytest.mark.network
def test_a_node_killed_in_mid_round_comes_back_with_its_weights(tmp_path: Path) -> None:
    clients = draw_clients(tmp_path / "data", 3, seed=0)
    _, app = prepare(tmp_path, rounds=50)
    folder = RunFolder(tmp_path / "runs" / "second")
    # The SuperLink takes the node for alive until 60 seconds have passed, and lets nobody else in with its key.
    settings: dict[str, Any] = {
        "experiment": "second",
        "folder": str(folder.path.parent),
        "min-clients": 2,
        "timeout": patient(60.0),
    }
    with Loopback(tmp_path / "network") as network:
        node = start_nodes(network, clients)[2]
        state = network.folder / "state" / "node-2"
        kept = kept_path(state, "second", clients[2].name)
        going_on = network.submit(app, settings)
        until(lambda: node.output().count("Receiving: train message") == 2, going_on)
        node.kill()
        then, content = Kept.load(kept), kept.read_bytes()

        until(lambda: len(folder.metrics()) >= 2, going_on)
        assert [line["clients"] for line in folder.metrics()[:2]] == [3, 2]
        # At the latest; earlier when the SuperLink notices that the node does not breathe any more.
        assert folder.metrics()[1]["seconds"] < settings["timeout"] + patient(15)

        def back() -> bool:
            own = {"data": str(clients[2].data), "client": clients[2].name, "state": str(state)}
            again = network.start_node("node-2", own, network.keys / "node-2")
            try:
                again.wait_for(CONNECTED)
            except UserError:
                time.sleep(5)
                return False
            return True

        until(back, going_on)
        until(lambda: kept.read_bytes() != content, going_on)
        now = Kept.load(kept)
        assert now.round > then.round
        assert now.before is not None
        torch.testing.assert_close(now.before, then.personal, rtol=0, atol=0)
        until(lambda: folder.metrics()[-1]["clients"] == 3, going_on)
    until(lambda: not left_over(network.folder))


TRIAL = [sys.executable, "-m", "fedem", "deploy", "trial", "--nodes", "2", "--rounds", "3", "--keep"]


@pytest.mark.network
@pytest.mark.skipif(sys.platform != "linux", reason="/proc shows who started whom")
def test_a_trial_that_is_killed_leaves_no_process_and_no_database(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*TRIAL, str(tmp_path / "it")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as trial:
        # The app of a client is a child of a child of a child.
        until(lambda: any("clientapp" in name for name in left_over(tmp_path / "it")) or trial.poll() is not None)
        started = descendants(trial.pid)
        assert len(started) >= 8, "a guard, a SuperLink, a SuperExec, two SuperNodes and what they start"
        database = tmp_path / "it" / "superlink.db"
        assert stat.S_IMODE(database.stat().st_mode) == 0o600
        trial.kill()
    until(lambda: not any(map(runs, started)))
    until(lambda: not left_over(tmp_path / "it"))
    until(lambda: not list((tmp_path / "it").glob("superlink.db*")))


@pytest.mark.network
def test_a_superlink_takes_commands_and_gives_work_by_its_secret_alone(tmp_path: Path) -> None:
    with Loopback(tmp_path / "network") as network:
        other = tmp_path / "another account"
        other.mkdir()
        home = network.folder / "flwr"
        shutil.copy(home / "config.toml", other)
        public = make_node_key(tmp_path / "mine")
        commands = (["supernode", "register", str(public), CONNECTION], ["supernode", "list", CONNECTION])
        for words in (*commands, ["list", CONNECTION]):
            said = subprocess.run(
                ["flwr", *words],
                env=network.environment | {"FLWR_HOME": str(other)},
                capture_output=True,
                text=True,
                timeout=patient(LIMIT),
                check=False,
                cwd=other,
            )
            assert said.returncode != 0
            assert "authenticat" in (said.stdout + said.stderr).lower()
        assert "Created node_id" not in network.superlink.output()
        network.register("node", "north")  # with the secret
        assert network.superlink.output().count("Created node_id") == 1
        words = ["--root-certificates", str(network.certificates.authority)]
        words += ["--runtime-api-address", f"{HOST}:{network.port}"]
        thief = network._start("flower-superexec", *words, log="thief")
        until(lambda: '"POST /v1/runtime/acquire-task HTTP/1.1" 401' in network.superlink.output(), thief)


@pytest.mark.network
def test_a_trial_that_is_stopped_ends_all_it_started(tmp_path: Path) -> None:
    place = tmp_path / "my trial"
    command = [*TRIAL, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as trial:
        until(lambda: (place / "logs" / "node-1.log").exists() or trial.poll() is not None)
        assert len(left_over(place)) >= 3
        trial.send_signal(signal.SIGTERM)  # as Ctrl-C does
        said, _ = trial.communicate(timeout=patient(LIMIT))
    assert trial.returncode == 130, said
    assert "Traceback" not in said
    assert "It can't be continued: a new trial needs another folder" in " ".join(said.split())
    assert "--resume" not in said
    until(lambda: not left_over(place))


def test_a_program_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"program flower-superlink is not installed.*pip install 'fedem\[flower\]'"):
        Loopback(tmp_path / "network")


@pytest.mark.network
def test_a_port_that_is_taken_is_told_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        monkeypatch.setattr(loopback, "free_port", lambda: taken.getsockname()[1])
        with pytest.raises(UserError, match=r"(?s)flower-superlink ended with code .*address already in use"):
            Loopback(tmp_path)
    until(lambda: not left_over(tmp_path))
