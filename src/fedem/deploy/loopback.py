"""A SuperLink and SuperNodes of Flower on this machine, with TLS and keys as between real ones; all on 127.0.0.1."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from fedem.deploy.certificates import Certificates, make_certificates, make_node_key
from fedem.errors import UserError

HOST = "127.0.0.1"
CONNECTION = "loopback"
"""What ``flwr`` calls our SuperLink."""

QUIET_FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Nothing is reported, looked up or installed over the network."""

_PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec", "flwr", "flwr-serverapp", "flwr-clientapp")
_STARTING, _COMMAND, _LEAVING = 60.0, 60.0, 10.0
"""Seconds that a program has to start, a command to answer, and a program to leave before it is killed."""
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Program:
    """A process that was started here, in a group of its own, and its log."""

    def __init__(self, name: str, command: list[str], log: Path, environment: Mapping[str, str]):
        self.name, self.log = name, log
        self._read_from = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=log.parent,
                start_new_session=True,
            )

    def said(self) -> str:
        """Return what it has written since it was started."""
        with self.log.open("rb") as file:
            file.seek(self._read_from)
            return _STYLE.sub("", file.read().decode(errors="replace"))

    def wait_for(self, text: str, seconds: float = _STARTING) -> None:
        """Wait until its log holds ``text``; an error with the log's tail when it ends before, or the time is over."""
        deadline = time.monotonic() + seconds
        while text not in self.said():
            if self.process.poll() is not None and text not in self.said():
                raise self.failure(f"ended with code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise self.failure(f"did not say {text!r} within {seconds:.0f} s")
            time.sleep(0.1)

    def wait_until_in(self, seconds: float = _STARTING) -> None:
        """Wait until the SuperLink has let this SuperNode in."""
        self.wait_for("SuperNode ID:", seconds)

    def finish(self, seconds: float) -> int:
        """Wait until it ends by itself; returns its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self.failure(f"has not ended within {seconds:.0f} s") from None

    def failure(self, why: str, lines: int = 15) -> UserError:
        """Return the error that says what went wrong, with the tail of the log."""
        tail = "\n".join(self.said().splitlines()[-lines:])
        return UserError(f"{self.name} {why}. Its log ends:\n{tail}")

    def kill(self) -> None:
        """End it and what it started in its group at once, as a crash would."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def ask_to_leave(self) -> None:
        """Ask it, and what it started, to end; :meth:`leave` waits for it."""
        self._signal(signal.SIGTERM)

    def leave(self) -> None:
        """End it: asked first, killed when it takes too long."""
        self.ask_to_leave()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_LEAVING)
        self.kill()

    def _signal(self, which: signal.Signals) -> None:
        # The group outlives its leader while the leader's children run; until then its number is not given anew.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, which)


class Loopback:
    """A SuperLink with a database, which is started at once, and SuperNodes that it knows by their keys.

    Everything lies in one folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self._path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        for name in _PROGRAMS:
            if shutil.which(name, path=self._path) is None:
                raise UserError(
                    f"The program {name} is not installed; it comes with Flower: pip install 'fedem[flower]'."
                )
        self.keys, self.logs = self.folder / "keys", self.folder / "logs"
        for place in (self.folder, self.keys, self.logs, self.folder / "flwr"):
            place.mkdir(parents=True, exist_ok=True)
        self.certificates: Certificates = make_certificates(self.folder / "certificates")
        self.port = free_port()
        self.environment = {**os.environ, **QUIET_FLOWER, "PATH": self._path, "FLWR_HOME": str(self.folder / "flwr")}
        # Everybody shares this machine's cores: with a thread a core each, they would wait for one another.
        self.environment.setdefault("OMP_NUM_THREADS", "1")
        connection = {"address": f"{HOST}:{self.port}", "root-certificates": str(self.certificates.authority)}
        text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in connection.items())
        (self.folder / "flwr" / "config.toml").write_text(
            f"[superlink]\ndefault = {json.dumps(CONNECTION)}\n\n[superlink.{CONNECTION}]\n{text}\n", encoding="utf-8"
        )
        self.programs: list[Program] = []
        self.superlink = self.start_superlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start_superlink(self) -> Program:
        """Start the SuperLink, also after it was killed: its database is where it was."""
        superlink = self._start(
            "flower-superlink",
            "--host", HOST, "--port", str(self.port),
            "--ssl-ca-certfile", str(self.certificates.authority),
            "--ssl-certfile", str(self.certificates.certificate),
            "--ssl-keyfile", str(self.certificates.key),
            "--enable-supernode-auth",
            "--database", str(self.folder / "superlink.db"),
            "--isolation", "process",
        )  # fmt: skip
        try:
            superlink.wait_for("Uvicorn running on")
            # The SuperLink would start it in a session of its own, out of our reach; and what it starts, the server's
            # app, is not sure to end with it.
            self.executor = self._start(
                "flower-superexec",
                "--root-certificates", str(self.certificates.authority),
                "--runtime-api-address", f"{HOST}:{self.port}",
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        self.superlink = superlink
        return superlink

    def kill_superlink(self) -> None:
        """End the SuperLink and the server's app at once, as a crash of their machine would."""
        self.superlink.kill()
        self.executor.kill()

    def register(self, name: str) -> Path:
        """Make a key for a node and tell the SuperLink its public half; returns the key."""
        key = self.keys / name
        public = make_node_key(key)
        self.command("supernode", "register", str(public), CONNECTION)
        return key

    def start_node(
        self, name: str, settings: Mapping[str, str | int], key: Path | None, *, verify: bool = True, wait: bool = True
    ) -> Program:
        """Start a SuperNode, and wait until the SuperLink has let it in.

        Args:
            name: names its log.
            settings: its node configuration.
            key: its private key; None for a node without one.
            verify: whether it has the authority's certificate, by which it knows the SuperLink.
            wait: whether to wait.

        """
        node = self._start(
            "flower-supernode",
            "--superlink", f"{HOST}:{self.port}",
            "--host", HOST, "--port", str(free_port()),
            "--node-config", " ".join(f"{entry}={json.dumps(value)}" for entry, value in settings.items()),
            *(["--root-certificates", str(self.certificates.authority)] if verify else []),
            *(["--auth-supernode-private-key", str(key)] if key else []),
            log=name,
        )  # fmt: skip
        if wait:
            node.wait_until_in()
        return node

    def submit(self, app: Path, settings: Mapping[str, str | int | float | bool] | None = None) -> Program:
        """Hand an app to the SuperLink; the program returned shows the run's log and ends with the run."""
        chosen = " ".join(f"{key}={json.dumps(value)}" for key, value in (settings or {}).items())
        options = ["--run-config", chosen] if chosen else []
        run = self._start("flwr", "run", str(app), CONNECTION, "--stream", *options, log="run")
        run.wait_for("Successfully started run")
        return run

    def command(self, *words: str) -> str:
        """Run ``flwr`` with these words to its end; returns what it printed."""
        said = f"flwr {' '.join(words)}"
        try:
            done = subprocess.run(
                ["flwr", *words],
                env=self.environment,
                # Not where the user is: flwr takes a folder there for an app, if it is called like our connection.
                cwd=self.logs,
                capture_output=True,
                text=True,
                timeout=_COMMAND,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{said} has not ended within {_COMMAND:.0f} s.") from None
        if done.returncode:
            raise UserError(f"{said} failed:\n{_STYLE.sub('', done.stdout + done.stderr).strip()}")
        return done.stdout

    def close(self) -> None:
        """End everything that was started here, by its process group."""
        # Nodes first, so that they can say goodbye; all are asked before any is waited for.
        for program in reversed(self.programs):
            program.ask_to_leave()
        for program in reversed(self.programs):
            program.leave()
        self.programs.clear()

    def _start(self, command: str, *arguments: str, log: str = "") -> Program:
        path = shutil.which(command, path=self._path)
        assert path is not None, "looked for when this was made"
        program = Program(log or command, [path, *arguments], self.logs / f"{log or command}.log", self.environment)
        self.programs.append(program)
        return program


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    try:
        with socket.socket() as listener:
            listener.bind((HOST, 0))
            port: int = listener.getsockname()[1]
            return port
    except OSError as error:
        raise UserError(f"No port of {HOST} can be had: {error.strerror}.") from None
