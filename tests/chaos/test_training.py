"""Processes that train, killed at random moments, cut off by a full disk, or started twice into one folder.

Each is a fork of this process, which has loaded torch already, so that a kill falls into the work and not into imports.
``FEDEM_KILLS`` says how often they are killed in all; ``make chaos`` has many.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import same_states
from patience import patient

import fedem
from fedem.cli import main
from fedem.runs.folder import RunFolder

REFUSED = 2  # how a command ends that can't do what it is asked for
KILLS = int(os.environ.get("FEDEM_KILLS", "12"))
SMALL = [
    "--clients-per-round", "0.5", "--unseen", "0.2", "--quiet", "--set", "data.num_clients=12", "--set",
    "data.dimension=6", "--set", "data.num_test=10", "--set", "data.size_mean=4",
]  # fmt: skip
# What is written when: many checkpoints or few, a best state beside the last one, compressed messages, other methods.
RUNS = [
    ["--rounds", "30", "--set", "run.checkpoint_every=1", "--set", "run.evaluate_every=3"],
    ["--rounds", "40", "--set", "run.checkpoint_every=7", "--set", "compression.updates=int8"],
    ["--rounds", "30", "--set", "run.checkpoint_every=2", "--method", "clustered", "--set", "run.evaluate_every=1"],
    ["--rounds", "30", "--set", "run.checkpoint_every=3", "--method", "dfedem", "--set", "run.diagnose_every=5"],
]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch"),
]


class Child(NamedTuple):
    """A process that runs a command of fedem."""

    pid: int
    log: Path

    @classmethod
    def start(cls, log: Path, arguments: list[str], before: Callable[[], None] = lambda: None) -> Child:
        """Fork; ``before`` is called in the child, ahead of the command."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return cls(pid, log)
        code = 70
        try:
            sys.stdout = sys.stderr = log.open("a")
            before()
            sys.argv = ["fedem", *arguments]
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            sys.stdout.flush()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        """Return how it ended; None where it runs yet."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return None if pid == 0 else os.waitstatus_to_exitcode(status)

    def wait(self) -> int:
        deadline = time.monotonic() + patient(300)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"It hangs: {self.log.read_text()}")
            time.sleep(0.01)
        return code


def _train(way: list[str], out: Path, *more: str) -> list[str]:
    return ["train", *SMALL, *way, "--out", str(out), *more]


def _resume(out: Path) -> list[str]:
    return ["--resume"] if (out / "config.toml").exists() else []


def _check_same(whole: Path, cut: Path) -> None:
    """The same states, figures and lines, and nothing left behind."""
    first, second = (fedem.Result.load(path) for path in (whole, cut))
    for role in first.states:
        assert same_states(first.state(role), second.state(role))
    assert (whole / "clients.csv").read_bytes() == (cut / "clients.csv").read_bytes()
    lines = [[{**line, "seconds": 0} for line in RunFolder(path).metrics()] for path in (whole, cut)]
    assert lines[0] == lines[1]
    assert not list(cut.rglob("*.tmp"))


def test_runs_that_are_killed_end_in_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance, kills, runs = random.Random(0), 0, 0
    while kills < KILLS:
        way = [*RUNS[runs % len(RUNS)], "--seed", str(runs)]
        whole, cut, log = (tmp_path / f"{name}-{runs}" for name in ("whole", "cut", "log"))
        started = time.monotonic()
        assert Child.start(log, _train(way, whole)).wait() == 0, log.read_text()
        seconds, runs = time.monotonic() - started, runs + 1
        while True:
            child = Child.start(log, _train(way, cut, *_resume(cut)))
            # Anywhere in the run, from before its first file to after its last.
            deadline = time.monotonic() + chance.uniform(0, 1.2 * seconds)
            while (code := child.poll()) is None and time.monotonic() < deadline:
                time.sleep(0.001)
            if code is not None:
                assert code == 0, log.read_text()
                break
            os.kill(child.pid, signal.SIGKILL)
            kills += child.wait() == -signal.SIGKILL
        _check_same(whole, cut)
    with capsys.disabled():
        print(f"\n{kills} kills of {runs} runs: all ended in the same bits")


def test_a_full_disk_is_told_and_the_run_goes_on_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance, cuts, tries = random.Random(1), 0, max(4, KILLS // 10)
    for number in range(tries):
        way = [*RUNS[number % len(RUNS)], "--seed", "0"]
        whole, cut, log = (tmp_path / f"{name}-{number}" for name in ("whole", "cut", "log"))
        assert Child.start(log, _train(way, whole)).wait() == 0, log.read_text()
        largest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
        most = int(largest * chance.uniform(0.02, 1.0))

        def limited(most: int = most) -> None:
            # No file may get larger: what a write is told then is what it is told where a disk is full.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        stopped = Child.start(tmp_path / f"stopped-{number}", _train(way, cut), limited)
        code, said = stopped.wait(), stopped.log.read_text()
        if code:
            cuts += 1
            assert code == REFUSED, said
            assert "File too large" in said, said  # as the system has it
            assert Child.start(log, _train(way, cut, *_resume(cut))).wait() == 0, log.read_text()
        _check_same(whole, cut)
    assert cuts
    with capsys.disabled():
        print(f"\n{cuts} of {tries} runs met a full disk: all were told so, and went on to the same bits")


def test_of_two_that_start_into_one_folder_one_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = max(4, KILLS // 10)
    whole = tmp_path / "whole"
    assert Child.start(tmp_path / "log", _train(RUNS[0], whole)).wait() == 0
    for number in range(pairs):
        out, gate = tmp_path / f"run-{number}", tmp_path / f"gate-{number}"

        def together(gate: Path = gate) -> None:
            while not gate.exists():
                pass

        both = [
            Child.start(tmp_path / f"{which}-{number}", _train(RUNS[0], out), together) for which in ("one", "other")
        ]
        gate.touch()
        codes = [child.wait() for child in both]
        said = [child.log.read_text() for child in both]
        assert sorted(codes) == [0, REFUSED], said
        refused = said[codes.index(REFUSED)]
        assert "Another process is training into" in refused or "holds a run already" in refused, refused
        _check_same(whole, out)
    with capsys.disabled():
        print(f"\n{pairs} pairs of processes: each time one trained, and the other was told so")
