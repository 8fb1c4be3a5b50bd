"""What a process starts under a guard ends with it, grandchildren too, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import patient

from fedem.deploy.flower.guard import Guard

# A program that starts another, writes down both numbers, and stays.
PARENT = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
path = pathlib.Path(sys.argv[1])
path.with_suffix(".tmp").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".tmp").rename(path)
time.sleep(1000)
"""
STARTER = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it may have been started by nohup, as all tests may
from fedem.deploy.flower.guard import Guard
guard = Guard(Path(sys.argv[2]))
process = guard.start([sys.executable, "-c", sys.argv[3], sys.argv[1]])
time.sleep(1000)
"""


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + patient(60)
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    try:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError:
        return False
    return not state.stdout.strip().startswith("Z")


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_all_end_with_the_process_that_started_them(tmp_path: Path, how: signal.Signals) -> None:
    numbers, secret = tmp_path / "numbers", tmp_path / "secret"
    secret.touch()
    command = [sys.executable, "-c", STARTER, str(numbers), str(secret), PARENT]
    with subprocess.Popen(command, start_new_session=True) as starter:
        until(numbers.exists)
        started = list(map(int, numbers.read_text().split()))
        assert all(map(is_alive, started))
        os.kill(starter.pid, how)
        until(lambda: not any(map(is_alive, started)))
        until(lambda: not secret.exists())


@pytest.mark.processes
def test_who_closes_its_guard_has_all_ended_but_those_forgotten(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with Guard() as guard:
        ended, kept = guard.start(sleep), guard.start(sleep)
        guard.forget(kept)
    assert ended.wait(patient(60)) == -signal.SIGKILL
    assert kept.poll() is None
    kept.kill()
    kept.wait()


@pytest.mark.processes
def test_a_program_gets_its_words_as_they_are_and_no_input(tmp_path: Path) -> None:
    words = ["a b", "$HOME", "'\"", "*", "", "-c"]
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:], sys.stdin.read() == '')", *words]
    with Guard() as guard, (tmp_path / "said").open("wb") as said:
        assert guard.start(command, stdout=said).wait(patient(60)) == 0
    assert (tmp_path / "said").read_text() == f"{words} True\n"
