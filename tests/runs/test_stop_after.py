"""A run that stops in time, at a checkpoint, and goes on from there to the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import same_states
from small_runs import small_config

import fedem
from fedem.core import deadline
from fedem.core.deadline import StoppedError, Watch, stopping_after
from fedem.core.errors import UserError
from fedem.runs.folder import RunFolder
from fedem.runs.trainer import run


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(deadline, "time", made)
    return made


def test_a_run_that_stops_goes_on_to_the_same_bits(tmp_path: Path, clock: Clock) -> None:
    config = small_config(checkpoint_every=100)
    dataset = config.make_data()
    whole = run(config, dataset, out=tmp_path / "whole")

    def tick(_: Any) -> None:
        clock.now += 10  # as long as a round takes

    # After two rounds a third one would end at 30.
    with pytest.raises(StoppedError, match="after round 2 of 6"), stopping_after(29):
        run(config, dataset, out=tmp_path / "cut", listener=tick)
    assert RunFolder(tmp_path / "cut").load()[0]["last"].round == 2
    with pytest.raises(StoppedError, match="after round 3 of 6"), stopping_after(11):
        run(config, dataset, out=tmp_path / "cut", resume=True, listener=tick)
    again = run(config, dataset, out=tmp_path / "cut", resume=True)
    assert same_states(whole.state("last"), again.state("last"))
    assert (tmp_path / "whole/clients.csv").read_bytes() == (tmp_path / "cut/clients.csv").read_bytes()


def test_a_run_that_is_over_in_time_is_not_stopped(tmp_path: Path) -> None:
    config = small_config()
    with stopping_after(1e6):
        assert run(config, config.make_data(), out=tmp_path / "run").summary["rounds"] == 6


class TestWatch:
    def test_checkpoints_come_by_time(self, clock: Clock) -> None:
        watch = Watch(60)
        due = []
        for _ in range(10):
            clock.now += 25
            watch.after_round()
            due.append(watch.is_due())
            if due[-1]:
                clock.now += 1
                watch.after_checkpoint()
        assert due == [False, False, True] * 3 + [False]

    def test_they_take_a_fiftieth_of_the_time_at_most(self, clock: Clock) -> None:
        watch, writing, start = Watch(1), 0.0, clock.now
        for _ in range(1000):
            clock.now += 2
            watch.after_round()
            if watch.is_due():
                clock.now += 5
                writing += 5
                watch.after_checkpoint()
        assert 0.015 < writing / (clock.now - start) < 0.02 + 5 / 2000

    def test_writing_counts_towards_the_end(self, clock: Clock) -> None:
        with stopping_after(100):
            watch = Watch(0)
        clock.now += 40
        watch.after_round()
        assert not watch.is_over()
        clock.now += 21  # 61 so far, another round 101
        watch.after_checkpoint()
        clock.now += 1
        watch.after_round()
        assert watch.is_over()


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(UserError, match=r"stop_after is .*; allowed: seconds above 0"), stopping_after(seconds):
        pass


@pytest.mark.processes
def test_by_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ["--set", "data.num_clients=5", "--set", "data.dimension=5", "--set", "data.num_test=5", "--quiet"]
    words = [sys.executable, "-m", "fedem", "train", "--rounds", "3", *small, "--out", str(out)]
    # Less than any round takes: one is made all the same.
    stopped = subprocess.run([*words, "--stop-after", "0.000001"], capture_output=True, text=True)
    assert stopped.returncode == 3, stopped.stderr
    assert "Stopped after round 1 of 3, as asked." in stopped.stderr
    assert not (out / "summary.json").exists()
    finished = subprocess.run([*words, "--resume"], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert fedem.Result.load(out).summary["rounds"] == 3
    refused = subprocess.run([*words, "--stop-after", "0"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "stop_after is 0; allowed: seconds above 0." in refused.stderr
