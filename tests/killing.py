"""Processes that are killed at random moments: how often, and how one is started, killed and waited for.

Each is a fork of this process, which has loaded torch already, so that a kill falls into the work and not into imports.
``FEDEM_KILLS`` says how often ``fedem train`` is killed; what takes longer to come back is killed a share as often.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from helpers import same_states
from patience import patient

import fedem
from fedem.cli import main
from fedem.runs.folder import RunFolder

REFUSED = 2  # how a command ends that can't do what it is asked for
KILLED = -signal.SIGKILL
KILLS = int(os.environ.get("FEDEM_KILLS", "6"))


def one_in(share: int, least: int) -> int:
    """Return how often to kill what is killed once in ``share`` kills of a training, and ``least`` times at least."""
    return max(least, KILLS // share)


def command(*arguments: str | Path) -> Callable[[], None]:
    """Return what runs ``fedem ...`` in a process."""

    def work() -> None:
        sys.argv = ["fedem", *map(str, arguments)]
        main()

    return work


class Child(NamedTuple):
    """A fork of this process, and what it writes."""

    pid: int
    log: Path

    @classmethod
    def start(cls, log: Path, work: Callable[[], object], environment: Mapping[str, str] | None = None) -> Child:
        """Fork; the child ends when ``work`` does, with the code of a program that does it."""
        sys.stdout.flush()
        with warnings.catch_warnings():
            # Newer Pythons warn of locks that other threads may hold: those here sleep in libraries that are not used.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return cls(pid, log)
        code = 70
        try:
            sys.stdout = sys.stderr = log.open("a")
            os.environ.update(environment or {})
            try:
                work()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except Exception:
                traceback.print_exc()
            sys.stdout.flush()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """Return how it ended; None where it runs yet."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return None if pid == 0 else os.waitstatus_to_exitcode(status)

    def wait(self) -> int:
        """Wait for its end; returns how it ended."""
        code = self.kill_after(patient(300))
        assert code != KILLED, f"It hangs: {self.log.read_text()}"
        return code

    def kill_after(self, seconds: float) -> int:
        """Kill it after some time unless it has ended by then; returns how it ended."""
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if code is not None:
            return code
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def check_same_run(whole: Path, cut: Path) -> None:
    """The same states, figures and lines, and nothing left behind."""
    first, second = (fedem.Result.load(path) for path in (whole, cut))
    for role in first.states:
        assert same_states(first.state(role), second.state(role))
    assert (whole / "clients.csv").read_bytes() == (cut / "clients.csv").read_bytes()
    lines = [[{**line, "seconds": 0} for line in RunFolder(path).metrics()] for path in (whole, cut)]
    assert lines[0] == lines[1]
    assert not list(cut.rglob("*.tmp"))


def descendants(process: int) -> set[int]:
    """Return the processes that a process has started, and those that they have."""
    found: set[int] = set()
    for path in Path("/proc").glob(f"{process}/task/*/children"):
        with suppress(OSError):  # it has ended meanwhile
            for child in map(int, path.read_text().split()):
                found |= {child} | descendants(child)
    return found


def runs(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
