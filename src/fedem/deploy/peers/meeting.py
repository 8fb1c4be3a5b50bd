"""How peers find each other: torch's elastic agents, which meet at a store that belongs to none of them.

Every peer's process runs an agent. The agents meet, and each starts a worker that knows how many they are and its rank.
When a worker fails because somebody is gone, or when somebody new is waiting, the agents stop their workers and meet
again.
"""

from __future__ import annotations

import hmac
import multiprocessing
import os
import secrets
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedem.core.errors import UserError
from fedem.core.settings import Settings
from fedem.deploy.node import end_with_holder, held

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token


# Where an agent and its workers, which come and go, leave notes for each other.


@dataclass(frozen=True)
class Desk:
    """What an agent and its workers, which come and go, tell each other: files of a folder that goes with the agent."""

    folder: Path
    agent: int
    """the agent's process"""
    round_timeout: int

    @classmethod
    @contextmanager
    def opened(cls, round_timeout: int) -> Iterator[Desk]:
        """Open a desk whose agent is this process."""
        with tempfile.TemporaryDirectory(prefix="fedem-") as folder:
            desk = cls(Path(folder), os.getpid(), round_timeout)
            with held(desk._held, "The agent's folder"):
                yield desk

    def end_with_agent(self) -> None:
        """Have this process, a worker, end when the agent is gone."""
        end_with_holder(self._held)

    @property
    def has_met(self) -> bool:
        """Whether a worker of this agent was accepted by others before."""
        return self._met.exists()

    def note_met(self, run: str) -> None:
        """Remember that the others accepted this process, and which run it is that they have in common."""
        self._met.write_text(run, encoding="utf-8")

    @property
    def run(self) -> str:
        """Which run a worker of this agent took part in; empty before."""
        return self._met.read_text(encoding="utf-8") if self.has_met else ""

    @property
    def _held(self) -> Path:
        return self.folder / "agent"

    @property
    def _met(self) -> Path:
        return self.folder / "met"

    @property
    def _reason(self) -> Path:
        return self.folder / "reason"

    def leave(self, reason: str) -> None:
        """Make the agent leave the meeting for good; nobody comes back from here."""
        self._reason.write_text(reason, encoding="utf-8")
        os.kill(self.agent, signal.SIGTERM)
        signal.pause()

    def reason(self) -> str | None:
        """Return why a worker had to leave, if one had."""
        return self._reason.read_text(encoding="utf-8") if self._reason.exists() else None


# Torch's store of keys and values, by which processes find each other.

_BACKLOG = 1024
"""processes that may knock at the same time"""


def open_store(host: str, port: int, seconds: float = 300.0) -> Any:
    """Open a store on one address of this machine (port 0: any); it lives as long as what is returned.

    Raises:
        OSError: the system does not give the address or the port.

    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # Left to itself, the store listens on all addresses, whichever it is given.
    listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    given = listener.getsockname()[1]
    return _store(host, given, seconds, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def reach_store(host: str, port: int, seconds: float) -> Any:
    """Connect to a store, which may be opened meanwhile."""
    return _store(host, port, seconds, is_master=False)


def _store(host: str, port: int, seconds: float, **options: Any) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not in its list

    return TCPStore(host, port, timeout=timedelta(seconds=seconds), **options)


# The secret of a meeting: what peers read at the meeting place counts only if one of them wrote it.
#
# Torch's agents unpickle what lies there, which runs whatever code its writer chose. A seal (HMAC-SHA256), checked
# first, leaves that to those who have the key of the plan.

KEY = "meeting.key"
_BYTES = 32
"""of a key, and of a seal"""


def make_key(folder: Path) -> None:
    """Write a new key into the folder of a plan; only this user may read it."""
    descriptor = os.open(folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(_BYTES) + "\n")


def read_key(folder: Path) -> bytes:
    """Return the key of the plan in a folder."""
    path = folder / KEY
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no {KEY}, the secret by which peers know each other; `fedem peer plan` makes one for all."
        ) from None
    except ValueError:
        key = b""
    if len(key) != _BYTES:
        raise UserError(f"{path} is no key; allowed: the {2 * _BYTES} hexadecimal digits that `fedem peer plan` wrote.")
    return key


class Sealed:
    """A backend of torch's rendezvous whose states are sealed: it hands out none that somebody without the key wrote.

    Raises:
        RendezvousStateError: a seal is wrong.

    """

    def __init__(self, backend: RendezvousBackend, key: bytes):
        self._backend, self._key = backend, key

    @property
    def name(self) -> str:
        """What torch calls the backend."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; None while there is no state."""
        found = self._backend.get_state()
        return None if found is None else (self._opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that ``token`` is of; returns the state that is there now, and whether it is this one."""
        found = self._backend.set_state(self._seal(state) + state, token)
        return None if found is None else (self._opened(found[0]), *found[1:])

    def _seal(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _opened(self, sealed: bytes) -> bytes:
        from torch.distributed.elastic.rendezvous.api import RendezvousStateError

        seal, state = sealed[:_BYTES], sealed[_BYTES:]
        if not hmac.compare_digest(seal, self._seal(state)):
            raise RendezvousStateError("The seal is wrong.")
        return state


_FEDERATION = "fedem"
"""what all who meet at one store are looking for"""
_RESTARTS = 10**9
"""of a worker whose neighbours fail: it is never its own fault"""
_BEATS = 3
"""heartbeats that an agent may miss"""
_RETRY = 0.5

Worker = Callable[[Desk, Any], None]
"""Takes part until the run is over. It must be a function of a module, since it runs in a process of its own."""


class MeetingOverError(UserError):
    """The others have finished without this process."""


@dataclass(frozen=True)
class Meeting(Settings):
    """Where and how peers meet.

    Attributes:
        host: where the store is.
        port: of the store.
        min_peers: processes without which nobody begins.
        max_peers: processes at most. When they are there, nobody waits for more.
        patience: seconds of silence after which a process counts as gone. Machines' clocks must agree to within it.
        round_timeout: seconds that a process waits for its neighbours in a round, if they are silent but not gone.
        join_timeout: seconds that a process waits for the store, and for ``min_peers``.

    """

    host: str = "127.0.0.1"
    port: int = field(default=29400, metadata={"min": 1, "max": 65535})
    min_peers: int = field(default=2, metadata={"min": 1})
    max_peers: int = field(default=1000, metadata={"min": 1})
    patience: int = field(default=15, metadata={"min": _BEATS})
    round_timeout: int = field(default=600, metadata={"min": 1})
    join_timeout: int = field(default=600, metadata={"min": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_peers < self.min_peers:
            raise UserError(
                f"Meeting.max_peers is {self.max_peers}; allowed: at least min_peers, which is {self.min_peers}."
            )

    @classmethod
    def at(cls, place: str, **settings: int) -> Meeting:
        """Read ``HOST:PORT``."""
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"The meeting place is {place!r}; allowed: HOST:PORT, such as 127.0.0.1:29400.")
        return cls(host.strip("[]"), int(port), **settings)

    def reach(self) -> str:
        """Wait for the store to be there; returns the address of this machine that others of the meeting can reach."""
        deadline = time.monotonic() + self.join_timeout
        while True:
            try:
                with socket.create_connection((self.host, self.port), timeout=self.join_timeout) as connection:
                    return str(connection.getsockname()[0])
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"Nobody answers at {self.host}:{self.port} ({error}); `fedem peer meet` must run there."
                    ) from None
                time.sleep(_RETRY)


def host_meeting(port: int, host: str = "127.0.0.1") -> Any:
    """Open the store at which peers meet, on one address of this machine; it lives as long as what is returned."""
    try:
        return open_store(host, port)
    except OSError as error:
        raise UserError(f"Port {port} of {host} can't be opened ({error}).") from None


def attend(meeting: Meeting, key: bytes, worker: Worker, task: Any, tell: Callable[[str], None]) -> None:
    """Take part until the worker returns, however often the peers change; ``tell`` gets notes for the user.

    ``key`` is the secret that all who meet share.

    Raises:
        UserError: the others refuse this process, or have finished without it, or too few are there.
        KeyboardInterrupt: this process was told to stop.

    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousStateError,
        RendezvousTimeoutError,
    )

    where = f"{meeting.host}:{meeting.port}"
    with Desk.opened(meeting.round_timeout) as desk, _torch_settings():
        while True:
            try:
                return _run_agent(meeting, key, worker, desk, task)
            except SignalException:
                if (reason := desk.reason()) is not None:
                    raise UserError(reason) from None
                raise KeyboardInterrupt from None
            except RendezvousClosedError:
                raise MeetingOverError(
                    f"Those who met at {where} have finished. What this process has learnt is kept; to go on with "
                    "others, a new meeting place is needed."
                ) from None
            except RendezvousTimeoutError:
                raise UserError(
                    f"Fewer than {meeting.min_peers} peers came to {where} within {meeting.join_timeout} seconds."
                ) from None
            except RendezvousStateError:
                raise UserError(
                    f"What lies at the meeting place {where} is not sealed with the {KEY} of this plan, so it is not "
                    "read: somebody with another plan, or a stranger, has written there. All peers need the same plan "
                    "folder, and a new meeting place that nobody else can reach."
                ) from None
            except RendezvousConnectionError:
                # Whoever opens the store again finds all of them waiting.
                tell(f"warning: The meeting place {where} is gone; waiting for it.")
                time.sleep(_RETRY)


def _work(worker: Worker, desk: Desk, task: Any) -> None:
    """Run a worker, which ends with its agent: alone it would count as present, and nobody could stop it."""
    desk.end_with_agent()
    worker(desk, task)


def _run_agent(meeting: Meeting, key: bytes, worker: Worker, desk: Desk, task: Any) -> None:
    """Meet and work until the worker returns."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

    address = meeting.reach()
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    beat = meeting.patience // _BEATS
    parameters = RendezvousParameters(
        "c10d",
        f"{meeting.host}:{meeting.port}",
        _FEDERATION,
        meeting.min_peers,
        meeting.max_peers,
        address,
        is_host=False,
        join_timeout=meeting.join_timeout,
        # All learn of a change within a heartbeat; those who come later make everybody meet once more.
        last_call_timeout=beat,
        keep_alive_interval=beat,
        keep_alive_max_attempt=_BEATS,
    )
    backend, store = create_backend(parameters)
    handler = create_handler(store, cast(RendezvousBackend, Sealed(backend, key)), parameters)
    spec = WorkerSpec("peer", 1, handler, entrypoint=_work, args=(worker, desk, task), max_restarts=_RESTARTS)
    spec.local_addr = address
    # A server that has imported what a worker needs makes one in no time, again and again.
    multiprocessing.set_forkserver_preload([worker.__module__])
    LocalElasticAgent(
        spec,
        DefaultLogsSpecs(os.devnull),
        start_method="forkserver",
        exit_barrier_timeout=meeting.patience,
        shutdown_timeout=meeting.patience,
    ).run()
    # Torch's own launcher closes a meeting for everybody when one of them fails; here it ends when the run does.
    handler.shutdown()


@contextmanager
def _torch_settings() -> Iterator[None]:
    """Have torch form each group anew, and say nothing of workers that meet again; then as it was."""
    import logging

    # Shared with the agents, the store of a group would be that of a process that may be gone by the next meeting.
    names = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    # When an agent is killed, Python's tracker of resources frees its semaphores, and need not complain of it.
    names["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker")))
    before = {name: os.environ.get(name) for name in names}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    os.environ |= names
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None where the system does not say."""
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                # SIOCGIFADDR of Linux: a name of 16 bytes in, the address in bytes 20 to 24 out.
                found = fcntl.ioctl(probe.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
