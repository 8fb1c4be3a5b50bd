"""``fedem train`` killed at random moments, cut off by a full disk, or started twice into one folder."""

from __future__ import annotations

import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from killing import KILLED, KILLS, REFUSED, Child, check_same_run, command, one_in

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


def _train(way: list[str], out: Path, *more: str) -> Callable[[], None]:
    return command("train", *SMALL, *way, "--out", out, *more)


def _resume(out: Path) -> list[str]:
    return ["--resume"] if (out / "config.toml").exists() else []


def test_runs_that_are_killed_end_in_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance, kills, runs = random.Random(0), 0, 0
    wholes: dict[int, tuple[Path, float]] = {}  # each way's run that nobody disturbs, and its seconds
    while kills < KILLS:
        number = runs % len(RUNS)
        way, cut, log = RUNS[number], tmp_path / f"cut-{runs}", tmp_path / f"log-{runs}"
        if number not in wholes:
            started = time.monotonic()
            assert Child.start(log, _train(way, tmp_path / f"whole-{number}")).wait() == 0, log.read_text()
            wholes[number] = tmp_path / f"whole-{number}", time.monotonic() - started
        (whole, seconds), runs = wholes[number], runs + 1
        while True:
            # Anywhere in the run, from before its first file to after its last; every other one soon after its start.
            moment = chance.uniform(0, chance.choice((0.3, 1.2)) * seconds)
            code = Child.start(log, _train(way, cut, *_resume(cut))).kill_after(moment)
            if code != KILLED:
                assert code == 0, log.read_text()
                break
            kills += 1
        check_same_run(whole, cut)
        shutil.rmtree(cut)
    with capsys.disabled():
        print(f"\n{kills} kills of {runs} runs: all ended in the same bits")


def test_a_full_disk_is_told_and_the_run_goes_on_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance, cuts, tries = random.Random(1), 0, one_in(10, least=2)
    for number in range(tries):
        way = [*RUNS[number % len(RUNS)], "--seed", "0"]
        whole, cut, log = (tmp_path / f"{name}-{number}" for name in ("whole", "cut", "log"))
        assert Child.start(log, _train(way, whole)).wait() == 0, log.read_text()
        largest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
        most = int(largest * chance.uniform(0.02, 1.0))

        train = _train(way, cut)

        def limited(most: int = most, train: Callable[[], None] = train) -> None:
            # No file may get larger: what a write is told then is what it is told where a disk is full.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            train()

        stopped = Child.start(tmp_path / f"stopped-{number}", limited)
        code, said = stopped.wait(), stopped.log.read_text()
        if code:
            cuts += 1
            assert code == REFUSED, said
            assert "File too large" in said, said  # as the system has it
            assert Child.start(log, _train(way, cut, *_resume(cut))).wait() == 0, log.read_text()
        check_same_run(whole, cut)
    assert cuts
    with capsys.disabled():
        print(f"\n{cuts} of {tries} runs met a full disk: all were told so, and went on to the same bits")


def test_of_two_that_start_into_one_folder_one_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = one_in(10, least=2)
    whole = tmp_path / "whole"
    assert Child.start(tmp_path / "log", _train(RUNS[0], whole)).wait() == 0
    for number in range(pairs):
        out, gate = tmp_path / f"run-{number}", tmp_path / f"gate-{number}"
        train = _train(RUNS[0], out)

        def together(gate: Path = gate, train: Callable[[], None] = train) -> None:
            while not gate.exists():
                pass
            train()

        both = [Child.start(tmp_path / f"{which}-{number}", together) for which in ("one", "other")]
        gate.touch()
        codes = [child.wait() for child in both]
        said = [child.log.read_text() for child in both]
        assert sorted(codes) == [0, REFUSED], said
        refused = said[codes.index(REFUSED)]
        assert "Another process is training into" in refused or "holds a run already" in refused, refused
        check_same_run(whole, out)
    with capsys.disabled():
        print(f"\n{pairs} pairs of processes: each time one trained, and the other was told so")
