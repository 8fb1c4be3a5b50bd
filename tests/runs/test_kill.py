"""A run killed with -9 at random points, and resumed each time, ends in the same bits as one that never stopped."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import same_states
from patience import patient

import fedem
from fedem.runs.folder import RunFolder

ARGUMENTS = [
    "--rounds", "40", "--clients-per-round", "0.5", "--unseen", "0.2", "--quiet",
    "--set", "data.num_clients=30", "--set", "data.dimension=10", "--set", "data.num_test=20",
    "--set", "run.checkpoint_every=3", "--set", "run.evaluate_every=2",
]  # fmt: skip


def _command(out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "fedem", "train", *ARGUMENTS, "--out", str(out), *more]


@pytest.mark.processes
def test_kill_and_resume(tmp_path: Path) -> None:
    subprocess.run(_command(tmp_path / "whole"), check=True, capture_output=True)
    whole = RunFolder(tmp_path / "whole")
    cut, folder = tmp_path / "cut", RunFolder(tmp_path / "cut")
    chance = random.Random(0)
    kills = 0
    for _ in range(4):
        more = ("--resume",) if (cut / "config.toml").exists() else ()
        process = subprocess.Popen(_command(cut, *more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        # Wait until it trains, then a little longer: the kill falls between, or amid, writes.
        before, deadline = len(folder.metrics()), time.monotonic() + patient(120)
        while process.poll() is None and len(folder.metrics()) <= before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        _, error = process.communicate()
        if process.returncode == 0:
            break
        kills += 1
        assert process.returncode == -signal.SIGKILL, error.decode()
        fedem.Config.build(folder.config().sections, preset=False)  # the folder stays readable
        assert all("round" in line for line in folder.metrics())
    assert kills >= 2
    subprocess.run(_command(cut, "--resume"), check=True, capture_output=True)
    first, second = (fedem.Result.load(path.path) for path in (whole, folder))
    for role in ("last", "best"):
        assert same_states(first.state(role), second.state(role))
    assert (whole.path / "clients.csv").read_bytes() == (folder.path / "clients.csv").read_bytes()
    lines = [[{**line, "seconds": 0} for line in run.metrics()] for run in (whole, folder)]
    assert lines[0] == lines[1]
    assert not list(folder.path.rglob("*.tmp"))
