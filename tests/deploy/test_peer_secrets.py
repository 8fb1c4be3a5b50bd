"""What strangers at the meeting place can't do, and two processes with one state."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import patient
from peering import Deployment
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from typer.testing import CliRunner

from fedem.cli import app
from fedem.core.errors import UserError
from fedem.core.files import locked
from fedem.deploy.peers.group import PeersChangedError, ProcessGroup
from fedem.deploy.peers.meeting import KEY, Meeting, SealedBackend, host_meeting, make_key, read_key
from fedem.deploy.peers.work import Task, join
from fedem.deploy.plan import Plan


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Shelf:
    """A backend of one state, which anybody may replace."""

    name = "shelf"

    def __init__(self) -> None:
        self.state: bytes | None = None

    def get_state(self) -> tuple[bytes, Any] | None:
        return None if self.state is None else (self.state, self.state)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if token == self.state:
            self.state = state
        assert self.state is not None
        return self.state, self.state, self.state == state


def task(deployment: Deployment) -> Task:
    return Task(deployment.plan, deployment.data, ("ann",), deployment.state, print)


@pytest.mark.parametrize("seal", [b"", bytes(32)], ids=["without a seal", "with a wrong seal"])
def test_what_a_stranger_wrote_is_not_unpickled(tmp_path: Path, seal: bytes) -> None:
    deployment, store, exploded = Deployment(tmp_path, 1), host_meeting(0), tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    stranger = TCPStore("127.0.0.1", store.port, is_master=False)
    stranger.set("torch.rendezvous.fedem", b64encode(seal + bomb).decode())
    with pytest.raises(UserError, match=f"127.0.0.1:{store.port} is not sealed with the {KEY}"):
        join(Meeting(port=store.port, min_peers=1, join_timeout=5), task(deployment))
    assert not exploded.exists()
    # Torch's own backend would have run it.
    stranger.set("torch.rendezvous.fedem", b64encode(bomb).decode())
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{store.port}", "fedem", 1, 1, is_host=False)
    backend, found = create_backend(parameters)
    with pytest.raises(AttributeError):
        create_handler(found, backend, parameters).is_closed()
    assert exploded.exists()


@given(st.binary(max_size=50), st.integers(0), st.binary(min_size=32, max_size=32))
def test_states_come_back_unless_somebody_changed_them(state: bytes, place: int, other: bytes) -> None:
    shelf: Any = Shelf()  # a backend by its methods, not by its class
    key = b"k" * 32
    sealed = SealedBackend(shelf, key)
    assert sealed.get_state() is None
    content, token, is_set = sealed.set_state(state) or (b"", None, False)
    assert (content, is_set) == (state, True)
    assert sealed.get_state() == (state, token)
    # Somebody who had not seen this state does not replace it.
    assert sealed.set_state(b"late" + state, None) == (state, token, False)
    kept = shelf.state or b""
    with pytest.raises(RendezvousStateError):
        SealedBackend(shelf, other).get_state()
    changed = bytearray(kept)
    changed[place % len(kept)] ^= 1 + place % 255
    for forged in (bytes(changed), kept[:-1], kept + b"x", state, b""):
        shelf.state = forged
        with pytest.raises(RendezvousStateError):
            sealed.get_state()


def test_plans_bring_a_key_that_is_no_part_of_them(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, 1)
    made = tmp_path / "made"
    words = ["peer", "plan", str(made), "--data", str(deployment.data), "--graph", "ring"]
    assert CliRunner().invoke(app, words).exit_code == 0
    key, fingerprint = read_key(made), Plan.load(made).fingerprint
    assert stat.S_IMODE((made / KEY).stat().st_mode) == 0o600
    (made / KEY).unlink()
    make_key(made)
    assert read_key(made) != key
    assert Plan.load(made).fingerprint == fingerprint
    with pytest.raises(FileExistsError):
        make_key(made)
    for content in ("", "xyz", key.hex()[:-2]):
        (deployment.plan / KEY).write_text(content)
        with pytest.raises(UserError, match=f"{KEY} is not a key"):
            join(Meeting(port=1), task(deployment))
    (deployment.plan / KEY).unlink()
    with pytest.raises(UserError, match=f"holds no {KEY}"):
        join(Meeting(port=1), task(deployment))


def reached(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


several_loopback_addresses = pytest.mark.skipif(sys.platform != "linux", reason="there may be one such address only")


@several_loopback_addresses
def test_the_meeting_place_is_where_it_was_put() -> None:
    here, everywhere = host_meeting(0), host_meeting(0, "0.0.0.0")
    assert reached("127.0.0.1", here.port)
    assert not reached("127.0.0.2", here.port)
    assert reached("127.0.0.2", everywhere.port)
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):
        host_meeting(0, "192.0.2.1")


@several_loopback_addresses
def test_a_group_listens_at_the_address_of_the_meeting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in agent.items():
        monkeypatch.setenv(name, str(value))
    with ProcessGroup(10) as group:
        assert group.gather("alone") == [b'"alone"']
        assert reached("127.0.0.1", port)
        assert not reached("127.0.0.2", port)
        with pytest.raises(PeersChangedError):
            ProcessGroup(10)  # the port is taken: all must meet again


def test_one_process_at_a_time_has_a_clients_state(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, 1)
    (ann,) = task(deployment).open()
    with ann.locked(), pytest.raises(UserError, match=r"'ann' .*ann\.lock"):
        join(Meeting(port=1, join_timeout=1), task(deployment))
    with ann.locked():
        pass


def test_a_process_ends_with_the_one_that_holds_a_file(tmp_path: Path) -> None:
    path = tmp_path / "agent"
    watch = f"""
import pathlib, time
from fedem.deploy.peers.meeting import AgentFolder
AgentFolder(pathlib.Path({str(tmp_path)!r}), 0, 1).end_with_agent()
print("watching", flush=True)
time.sleep(600)
"""
    with locked(path):
        watcher = subprocess.Popen(
            [sys.executable, "-c", watch], stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert watcher.stdout is not None
        with watcher.stdout:
            assert watcher.stdout.readline() == b"watching\n"
        with pytest.raises(subprocess.TimeoutExpired):
            watcher.wait(0.5)
    assert watcher.wait(patient(10)) == 1
