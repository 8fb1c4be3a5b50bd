"""A deployment tried on one machine: the same app, programs, certificates and keys as between real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import STDOUT, TimeoutExpired
from typing import Any, NamedTuple

import numpy as np
import torch

from fedem.core.errors import UserError, counted
from fedem.data.synthetic import Synthetic
from fedem.deploy.flower.database import companions, make_private
from fedem.deploy.flower.guard import Guard
from fedem.deploy.flower.project import write_app
from fedem.deploy.plan import Plan
from fedem.runs.config import Config, Layer, RunSettings, Values, to_toml
from fedem.runs.folder import RunFolder
from fedem.runs.trainer import Listener

EXPERIMENT = "trial"
FEWEST, MOST = 2, 50  # nodes of a trial: a process or two each, and a federation is of several
SHORT: Layer = {
    "run": {"rounds": 5, "evaluate_every": 5, "patience": 0}
}  # by default: every message to a node takes seconds
DIMENSION = 20  # features of the clients that are drawn
_APP_STARTING, _BETWEEN = 120.0, 30.0  # seconds that a run may take to start, and the server between two messages
HOST = "127.0.0.1"
SECRET = "superlink.secret"  # in the folder of certificates
CONNECTION = "loopback"  # what ``flwr`` calls our SuperLink
CONNECTED = "SuperNode ID:"  # what a SuperNode says when the SuperLink has let it in
QUIET_FLOWER = {  # nothing is reported, looked up or installed over the network
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
_PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec", "flwr", "flwr-serverapp", "flwr-clientapp")
_STARTING, _COMMAND, _ENDING = 60.0, 60.0, 10.0  # seconds to start, for a command to answer, to end before being killed
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Client(NamedTuple):
    """A node's client: its name, and where its samples are."""

    name: str
    data: Path


def draw_clients(folder: Path, nodes: int, seed: int) -> list[Client]:
    """Draw a small synthetic mixture, a file for each client, by which it is named."""
    source = Synthetic(nodes, dimension=DIMENSION, size_mean=6.0, size_sigma=0.5, num_validation=0, num_test=0)
    federation = source.make(seed).federation
    folder.mkdir(parents=True, exist_ok=True)
    clients = [Client(f"client-{number}", folder / f"client-{number}.npz") for number in range(nodes)]
    for number, client in enumerate(clients):
        samples = federation.take(torch.tensor([number])).train
        np.savez(client.data, x=samples.inputs.numpy(), y=samples.targets.numpy())
    return clients


def choose_clients(names: Sequence[str], path: Path, nodes: int) -> list[Client]:
    """Return the first clients of a file, one for each node."""
    if len(names) < nodes:
        there = f"{path} has {counted(len(names), 'client')}"
        raise UserError(f"{there}; allowed for a trial of {nodes} nodes: at least as many.")
    return [Client(name, path) for name in names[:nodes]]


def run_trial(folder: Path, config: Config, clients: Sequence[Client], listener: Listener, timeout: float) -> RunFolder:
    """Carry out a deployed run on this machine; every process that it started has ended when it returns or raises.

    Everything goes into ``folder``: the app, certificates and keys, logs, what the clients keep, and the run. The plan
    is made from the data of ``config``; each node has one client. A round waits ``timeout`` seconds for the slowest.
    """
    folder = folder.absolute()
    write_app(folder / "app", Plan.make(config, config.make_data()))
    run = RunFolder(folder / "runs" / EXPERIMENT)
    settings: Values = {"experiment": EXPERIMENT, "folder": str(run.path.parent), "min-clients": len(clients)}
    with ended_as_interrupted(), Loopback(folder) as network:
        nodes = start_nodes(network, clients)
        program = network.submit(folder / "app", {**settings, "timeout": timeout})
        _follow(program, network, nodes, run, listener, _longest_time(config.run, timeout))
    return run


def _longest_time(run: RunSettings, timeout: float) -> float:
    """Return how many seconds a run takes in which every message waits as long as it may."""
    scored = sum(run.is_scored(done + 1) for done in range(run.rounds))
    messages = run.rounds + scored + 2  # to train, to score, to count samples and to keep the result
    return _APP_STARTING + messages * (timeout + _BETWEEN)


def start_nodes(network: Loopback, clients: Sequence[Client]) -> list[Program]:
    """Start a SuperNode for each client, with a key of its own; returns when the SuperLink has let all in."""
    keys = [network.register(f"node-{number}", client.name) for number, client in enumerate(clients)]
    nodes = []
    for client, key in zip(clients, keys, strict=True):
        state = str(network.folder / "state" / key.name)
        settings = {"data": str(client.data.absolute()), "client": client.name, "state": state}
        nodes.append(network.start_node(key.name, settings, key))
    for node in nodes:
        node.wait_for(CONNECTED)
    return nodes


def _follow(
    program: Program, network: Loopback, nodes: Sequence[Program], run: RunFolder, listener: Listener, limit: float
) -> None:
    """Hand each round's record to the listener until the run is over, which must be within ``limit`` seconds."""
    num_rounds, is_over, deadline = 0, False, time.monotonic() + limit
    while not is_over:
        is_over = program.process.poll() is not None
        for record in run.metrics()[num_rounds:]:
            num_rounds += 1
            listener(record)
        for other in (network.superlink, network.executor, *nodes):
            if other.process.poll() is not None:
                raise other.failure(f"ended with code {other.process.returncode} amid the run")
        if not is_over and time.monotonic() > deadline:
            done = counted(num_rounds, "round is", "rounds are")
            raise program.failure(f"has not ended within {limit:.0f} s, and {done} done")
        time.sleep(0.2)
    errors = [f"{node.name}: {line}" for node in nodes for line in node.output().splitlines() if "ERROR" in line]
    if run.summary() is None:
        raise UserError("\n".join([str(program.failure("did not come to its end")), *errors]))
    # In a deployment that is all right; in a trial everybody is there, so something is wrong.
    if lacking := [str(record["round"]) for record in run.metrics() if record["clients"] < len(nodes)]:
        warnings = [line for line in program.output().splitlines() if "WARNING" in line]
        message = f"Not all of {len(nodes)} nodes answered in rounds {', '.join(lacking)}:"
        raise UserError("\n".join([message, *warnings, *errors]))


def ended_as_interrupted() -> AbstractContextManager[None]:
    """Treat a request to end this process like Ctrl-C, so that what it started is ended first."""
    return _handled_by(signal.default_int_handler, signal.SIGTERM)


@contextmanager
def _handled_by(handler: Callable[[int, Any], Any], *signals: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = {which: signal.signal(which, handler) for which in signals}
    try:
        yield
    finally:
        for which, earlier in before.items():
            signal.signal(which, earlier)


class Program:
    """A process that was started here, in a group of its own, which ends with this one at the latest; and its log."""

    def __init__(self, name: str, command: list[str], log: Path, env: Mapping[str, str], guard: Guard):
        self.name, self.log, self._guard = name, log, guard
        self._read_from = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self.process = guard.start(command, stdout=out, stderr=STDOUT, env=env, cwd=log.parent)

    def output(self) -> str:
        """Return what it has written since it was started."""
        with self.log.open("rb") as file:
            file.seek(self._read_from)
            return _STYLE.sub("", file.read().decode(errors="replace"))

    def wait_for(self, text: str, seconds: float = _STARTING) -> None:
        """Wait until its log holds ``text``; an error with the log's tail when it ends before, or the time is over."""
        deadline = time.monotonic() + seconds
        while text not in self.output():
            if self.process.poll() is not None and text not in self.output():
                raise self.failure(f"ended with code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise self.failure(f"did not say {text!r} within {seconds:.0f} s")
            time.sleep(0.1)

    def finish(self, seconds: float) -> int:
        """Wait until it ends by itself; returns its exit code."""
        try:
            return self.process.wait(seconds)
        except TimeoutExpired:
            raise self.failure(f"has not ended within {seconds:.0f} s") from None

    def failure(self, why: str) -> UserError:
        tail = "\n".join(self.output().splitlines()[-15:])
        return UserError(f"{self.name} {why}. Its log ends:\n{tail}")

    def kill(self) -> None:
        """End it and what it started in its group at once, as a crash would."""
        self.send(signal.SIGKILL)
        self.process.wait()
        self._guard.forget(self.process)

    def end(self) -> None:
        self.send(signal.SIGTERM)
        with suppress(TimeoutExpired):
            self.process.wait(_ENDING)
        self.kill()

    def send(self, which: signal.Signals) -> None:
        # The group outlives its leader while the leader's children run; until then its number is not given anew.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, which)


class Loopback(AbstractContextManager["Loopback"]):
    """A SuperLink with a database, started at once, and SuperNodes that it knows by their keys.

    Everything lies in one folder, and all on 127.0.0.1, with TLS, keys and a secret as between real machines. The
    database goes in the end: it holds uploads and names, also those that Flower has deleted.
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self._path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        for name in _PROGRAMS:
            if shutil.which(name, path=self._path) is None:
                raise UserError(f"The program {name} is not installed; Flower has it: pip install 'fedem[flower]'.")
        from fedem.deploy.flower.certificates import make_certificates
        from fedem.deploy.flower.superlink import allow_commands, make_secret

        self.keys, self.logs, home = self.folder / "keys", self.folder / "logs", self.folder / "flwr"
        for path in (self.keys, self.logs, home):
            path.mkdir(parents=True, exist_ok=True)
        self.certificates = make_certificates(self.folder / "certificates")
        self.port = free_port()
        self.environment = {**os.environ, **QUIET_FLOWER, "PATH": self._path, "FLWR_HOME": str(home)}
        # Everybody shares this machine's cores: with one thread for each core, they would wait for one another.
        self.environment.setdefault("OMP_NUM_THREADS", "1")
        known = {"address": f"{HOST}:{self.port}", "root-certificates": str(self.certificates.authority)}
        content = to_toml({"superlink": {"default": CONNECTION}, f"superlink.{CONNECTION}": known})
        (home / "config.toml").write_text(content, encoding="utf-8")
        self.secret, self.database = make_secret(self.certificates.key.with_name(SECRET)), self.folder / "superlink.db"
        allow_commands(home, f"{HOST}:{self.port}", self.secret)
        make_private(self.database)
        self.programs: list[Program] = []
        self.guard = Guard(*companions(self.database))
        self.start_superlink()

    def __exit__(self, *_: object) -> None:
        # Nodes first, so that they can take their leave; all are asked before any is waited for.
        for program in reversed(self.programs):
            program.send(signal.SIGTERM)
        for program in reversed(self.programs):
            program.end()
        self.programs.clear()
        self.guard.__exit__()  # which removes the database

    def start_superlink(self) -> None:
        """Start the SuperLink, also after it was killed: its database is where it was."""
        from fedem.deploy.flower.superlink import superlink_options

        options = superlink_options(self.certificates, self.secret, HOST, self.port, self.database)
        words = ("-m", "fedem.deploy.flower.superlink", str(self.secret), *options)
        self.superlink = self._start(sys.executable, *words, log="flower-superlink")
        with ExitStack() as failing:
            failing.push(self)
            self.superlink.wait_for("Uvicorn running on")
            # The SuperLink would start it in a session of its own, out of our reach; and what it starts, the server's
            # app, is not sure to end with it.
            self.executor = self._start(
                "flower-superexec",
                "--root-certificates", str(self.certificates.authority),
                "--runtime-api-address", f"{HOST}:{self.port}",
                "--superexec-auth-secret-file", str(self.secret),
            )  # fmt: skip
            failing.pop_all()

    def register(self, name: str, client: str) -> Path:
        """Make a key for a node and register its public half with the SuperLink, for a client; returns the key."""
        from fedem.deploy.flower.certificates import make_node_key

        key = self.keys / name
        words = ("supernode", "register", str(make_node_key(key)), CONNECTION, "--name", client)
        command = self._start("flwr", *words, log="flwr-supernode-register")
        if command.finish(_COMMAND):
            raise command.failure("failed")
        return key

    def start_node(self, name: str, settings: Values, key: Path | None, *, verify: bool = True) -> Program:
        """Start a SuperNode; one that does not ``verify`` lacks the certificate by which it knows the SuperLink."""
        return self._start(
            "flower-supernode",
            "--superlink", f"{HOST}:{self.port}",
            "--host", HOST, "--port", str(free_port()),
            "--node-config", _flat(settings),
            *(["--root-certificates", str(self.certificates.authority)] if verify else []),
            *(["--auth-supernode-private-key", str(key)] if key else []),
            log=name,
        )  # fmt: skip

    def submit(self, app: Path, settings: Values) -> Program:
        """Hand an app to the SuperLink; the program returned shows the run's log and ends with the run."""
        words = ("run", str(app), CONNECTION, "--stream", "--run-config", _flat(settings))
        run = self._start("flwr", *words, log="run")
        run.wait_for("Successfully started run")
        return run

    def _start(self, command: str, *arguments: str, log: str = "") -> Program:
        # Programs run in the folder of logs: flwr takes a folder where it runs for an app, if it is called like it.
        path, name = str(shutil.which(command, path=self._path)), log or command
        held: list[int] = []
        # Interrupted, it would leave behind a program that has just been started.
        with _handled_by(lambda which, _: held.append(which), signal.SIGINT, signal.SIGTERM):
            program = Program(name, [path, *arguments], self.logs / f"{name}.log", self.environment, self.guard)
            self.programs.append(program)
        if held:
            signal.raise_signal(held[0])
        return program


def _flat(values: Values) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    try:
        with socket.create_server((HOST, 0)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise UserError(f"No port of {HOST} can be had: {error.strerror}.") from None
