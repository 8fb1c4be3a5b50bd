"""How peers find each other: torch's elastic agents, which meet at a store that belongs to none of them.

Every peer's process runs an agent. The agents meet, and each starts a worker that knows how many they are and its rank.
When a worker fails because somebody is gone, or when somebody new is waiting, the agents stop their workers and meet
again. Importing this takes a while: commands import it late.
"""

from __future__ import annotations

import hmac
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, api
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from fedem.core.errors import UserError
from fedem.core.files import locked
from fedem.core.settings import Settings

KEY = "meeting.key"  # the file of a plan's folder with the secret that all who meet share
_KEY_BYTES = 32  # of a key, and of a seal
_RENDEZVOUS = "fedem"  # what torch calls the meeting of all who come to one store
_BACKLOG = 1024  # processes that may connect to a store at the same time
_RESTARTS = 10**9  # of a worker: it fails when its neighbours do, which is never its own fault
_HEARTBEATS = 3  # that an agent may miss
_RETRY = 0.5  # seconds between attempts to reach a store

Notify = Callable[[str], None]  # shows a note to the user; a function of a module where another process calls it


class MeetingOverError(UserError):
    """The others have finished without this process."""


@dataclass(frozen=True)
class Meeting(Settings):
    """Where and how peers meet: at a store on ``host``, whatever processes come there."""

    host: str = "127.0.0.1"
    port: int = field(default=29400, metadata={"min": 1, "max": 65535})
    min_peers: int = field(default=2, metadata={"min": 1})  # processes without which nobody begins
    max_peers: int = field(default=1000, metadata={"min": 1})  # when they are there, nobody waits for more
    # Seconds of silence after which a process counts as gone; machines' clocks must agree to within it.
    patience: int = field(default=15, metadata={"min": _HEARTBEATS})
    round_timeout: int = field(default=600, metadata={"min": 1})  # seconds for neighbours that are silent but not gone
    join_timeout: int = field(default=600, metadata={"min": 1})  # seconds to wait for the store, and for min_peers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_peers < self.min_peers:
            raise UserError(f"Meeting.max_peers is {self.max_peers}; allowed: at least min_peers, {self.min_peers}.")

    @classmethod
    def at(cls, place: str, **settings: int) -> Meeting:
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"The meeting place is {place!r}; allowed: HOST:PORT, such as 127.0.0.1:29400.")
        return cls(host.strip("[]"), int(port), **settings)

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    def reach(self) -> str:
        """Wait for the store to be there; returns the address of this machine that others of the meeting can reach."""
        deadline = time.monotonic() + self.join_timeout
        while True:
            try:
                with socket.create_connection((self.host, self.port), timeout=self.join_timeout) as connection:
                    return str(connection.getsockname()[0])
            except OSError as error:
                reason = f"Nobody answers at {self.place} ({error}); `fedem peer meet` must run there."
            if time.monotonic() > deadline:
                raise UserError(reason)
            time.sleep(_RETRY)


def host_meeting(port: int, host: str = "127.0.0.1") -> Any:
    """Open the store at which peers meet, on one address of this machine; it lives as long as what is returned."""
    try:
        return open_store(host, port)
    except OSError as error:
        raise UserError(f"Port {port} of {host} can't be opened ({error}).") from None


def open_store(host: str, port: int, seconds: float = 300.0) -> Any:
    """Open a store on one address of this machine (port 0: any); OSError when the system does not give them."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Left to itself, the store listens on all addresses, whichever it is given.
    listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    chosen, file, timeout = listener.getsockname()[1], listener.detach(), timedelta(seconds=seconds)
    return TCPStore(host, chosen, is_master=True, wait_for_workers=False, master_listen_fd=file, timeout=timeout)


def join_store(host: str, port: int, seconds: float) -> Any:
    """Join the store that another process opens; torch's error when it is not there in time."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))


def make_key(folder: Path) -> None:
    """Write a new key into the folder of a plan; only this user may read it."""
    descriptor = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(_KEY_BYTES) + "\n")


def read_key(folder: Path) -> bytes:
    """Return the key of the plan in a folder."""
    path, key = folder / KEY, b""
    if not path.exists():
        raise UserError(f"{folder} holds no {KEY}, the secret of all peers; `fedem peer plan` makes one for all.")
    with suppress(ValueError, OSError):
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    if len(key) != _KEY_BYTES:
        raise UserError(f"{path} is not a key; allowed: {2 * _KEY_BYTES} hexadecimal digits from `fedem peer plan`.")
    return key


class SealedBackend(RendezvousBackend):
    """A backend of torch's rendezvous that refuses states that somebody without the key of the plan wrote.

    Torch's agents unpickle what lies at the store, which runs whatever code its writer chose. A seal (HMAC-SHA256) is
    checked before.
    """

    def __init__(self, backend: RendezvousBackend, key: bytes):
        self._backend, self._key = backend, key

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return None if found is None else (self._check(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._backend.set_state(self._seal(state) + state, token)
        return None if found is None else (self._check(found[0]), *found[1:])

    def _seal(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _check(self, sealed: bytes) -> bytes:
        seal, state = sealed[:_KEY_BYTES], sealed[_KEY_BYTES:]
        if not hmac.compare_digest(seal, self._seal(state)):
            raise api.RendezvousStateError("The seal is wrong.")
        return state


@dataclass(frozen=True)
class AgentFolder:
    """What an agent and its workers must know of each other, in files of a temporary folder."""

    path: Path
    agent: int  # the agent's process
    round_timeout: int

    @classmethod
    @contextmanager
    def opened(cls, round_timeout: int) -> Iterator[AgentFolder]:
        with tempfile.TemporaryDirectory(prefix="fedem-") as folder, locked(Path(folder) / "agent"):
            yield cls(Path(folder), os.getpid(), round_timeout)

    def end_with_agent(self) -> None:
        """Have this process, a worker, end at once when the agent is gone."""

        def wait() -> None:
            try:
                with locked(self.path / "agent", wait=True):  # which the agent holds while it lives
                    pass
            finally:
                os._exit(1)

        threading.Thread(target=wait, daemon=True).start()

    def stop_agent(self, reason: str) -> None:
        """Make the agent leave the meeting for good; this does not return."""
        self.write("reason", reason)
        os.kill(self.agent, signal.SIGTERM)
        signal.pause()

    def write(self, name: str, text: str) -> None:
        """Leave word: the "run" that others accepted a worker of this agent in, or the "reason" to stop."""
        (self.path / name).write_text(text, encoding="utf-8")

    def read(self, name: str) -> str:
        """Return what :meth:`write` left; nothing where there is none."""
        path = self.path / name
        return path.read_text(encoding="utf-8") if path.exists() else ""


Worker = Callable[[AgentFolder, Any], None]  # takes part until the run is over: a module's function, in a process


def take_part(meeting: Meeting, key: bytes, worker: Worker, task: Any, notify: Notify) -> None:
    """Meet and work until the worker returns, however often the peers change; ``key`` is the secret that all share."""
    place = meeting.place
    with AgentFolder.opened(meeting.round_timeout) as folder, _torch_settings():
        while True:
            try:
                return _run_agent(meeting, key, worker, folder, task)
            except SignalException:
                if reason := folder.read("reason"):
                    raise UserError(reason) from None
                raise KeyboardInterrupt from None  # this process was told to stop
            except api.RendezvousClosedError:
                advice = "What this process has learnt is kept; to go on with others, a new meeting place is needed."
                raise MeetingOverError(f"Those who met at {place} have finished. {advice}") from None
            except api.RendezvousTimeoutError:
                few = f"Fewer than {meeting.min_peers} peers came to {place} within {meeting.join_timeout} seconds."
                raise UserError(few) from None
            except api.RendezvousStateError:
                unread = f"What lies at the meeting place {place} is not sealed with the {KEY} of this plan"
                why = "so it is not read: somebody with another plan, or a stranger, has written there"
                mend = "All peers need the same plan folder, and a new meeting place that nobody else can reach"
                raise UserError(f"{unread}, {why}. {mend}.") from None
            except api.RendezvousConnectionError:
                # Whoever opens the store again finds all of them waiting.
                notify(f"warning: The meeting place {place} is gone; waiting for it.")
                time.sleep(_RETRY)


def _run_agent(meeting: Meeting, key: bytes, worker: Worker, folder: AgentFolder, task: Any) -> None:
    address = meeting.reach()
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    sizes, heartbeat = (meeting.min_peers, meeting.max_peers), meeting.patience // _HEARTBEATS
    # All learn of a change within a heartbeat; those who come later make everybody meet once more.
    times = {"join_timeout": meeting.join_timeout, "last_call_timeout": heartbeat, "keep_alive_interval": heartbeat}
    times["keep_alive_max_attempt"] = _HEARTBEATS
    parameters = RendezvousParameters("c10d", meeting.place, _RENDEZVOUS, *sizes, address, is_host=False, **times)
    backend, store = create_backend(parameters)
    handler = create_handler(store, SealedBackend(backend, key), parameters)
    spec = WorkerSpec("peer", 1, handler, entrypoint=worker, args=(folder, task), max_restarts=_RESTARTS)
    spec.local_addr = address
    # A server that has imported what a worker needs makes one in no time, again and again.
    multiprocessing.set_forkserver_preload([worker.__module__])
    logs, patience = DefaultLogsSpecs(os.devnull), meeting.patience
    LocalElasticAgent(spec, logs, "forkserver", exit_barrier_timeout=patience, shutdown_timeout=patience).run()
    # Torch's own launcher closes a meeting for everybody when one of them fails; here it ends when the run does.
    handler.shutdown()


@contextmanager
def _torch_settings() -> Iterator[None]:
    """Have torch form each group anew, and say nothing of workers that meet again; then as it was."""
    settings = {
        # Shared with the agents, the store of a group would be that of a process that may be gone by the next meeting.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # When an agent is killed, Python's tracker of resources frees its semaphores, and need not complain of it.
        "PYTHONWARNINGS": ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"))),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, settings))
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.getsignal(number))
        stack.callback(logging.disable, logging.NOTSET)
        logging.disable(logging.ERROR)
        yield


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None where the system does not say."""
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                # SIOCGIFADDR of Linux: a name of 16 bytes in, the address in bytes 20 to 24 out.
                found = fcntl.ioctl(probe.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
