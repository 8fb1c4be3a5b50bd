"""Processes that share one training: one is killed at a random moment, all end, and they resume to the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from killing import KILLED, REFUSED, Child, check_same_run, command, descendants, one_in, runs
from patience import patient
from peering import free_port

from fedem.core.errors import counted
from fedem.runs.folder import RunFolder

SIZE, ROUNDS = 2, 12
TRAIN = [
    "train", "--quiet", "--unseen", "0.25", "--clients-per-round", "4", "--rounds", str(ROUNDS),
    "--set", "run.engine=one_by_one", "--set", "run.checkpoint_every=2", "--set", "run.evaluate_every=3",
    "--set", "data.num_clients=8", "--set", "data.dimension=4", "--set", "data.num_test=10",
    "--set", "data.size_mean=3",
]  # fmt: skip
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has loaded torch"),
]


def _arguments(out: Path) -> list[str]:
    return [*TRAIN, "--out", str(out), *(["--resume"] if (out / "config.toml").exists() else [])]


def _start(log: Path, out: Path) -> list[Child]:
    """Start what torchrun starts: processes that know their number and where to meet."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(SIZE)}
    work = command(*_arguments(out))
    return [Child.start(log, work, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(SIZE)]


def _finish(log: Path, out: Path) -> None:
    assert [child.wait() for child in _start(log, out)] == [0] * SIZE, log.read_text()


def _seen(out: Path) -> set[tuple[int, float]]:
    """Return the rounds that were written down, and how long each took, by which no two are the same."""
    return {(line["round"], line["seconds"]) for line in RunFolder(out).metrics()}


def test_when_one_of_several_is_killed_all_end_and_resume_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, whole, log = random.Random(2), tmp_path / "whole", tmp_path / "log"
    started = time.monotonic()
    _finish(log, whole)
    seconds, kills, trainings, wanted = time.monotonic() - started, 0, 0, one_in(10, least=1)
    while kills < wanted:
        cut, trainings = tmp_path / f"cut-{trainings}", trainings + 1
        while True:
            before, told, started = _seen(cut), log.stat().st_size, time.monotonic()
            team = _start(log, cut)
            victim = chance.randrange(SIZE)
            code = team[victim].kill_after(chance.uniform(0, 1.2 * seconds))
            if code != KILLED:
                assert [code, *(child.wait() for child in team if child is not team[victim])] == [0] * SIZE
                seconds = min(seconds, time.monotonic() - started)
                break
            kills += 1
            # One that has not met the others yet may wait for them for long: there torchrun ends it.
            met = bool(_seen(cut) - before)
            for other in (child for child in team if child is not team[victim]):
                ended = other.wait() if met else other.kill_after(0)
                # Perhaps it was about to end, and missed nobody.
                assert ended in ((0, 1, REFUSED) if met else (KILLED, 0, 1, REFUSED)), log.read_text()
                if ended == REFUSED:
                    assert "Another process of this run ended" in log.read_text()[told:]
        check_same_run(whole, cut)
    with capsys.disabled():
        of = f"{counted(kills, 'kill')} of one of {SIZE} processes, in {counted(trainings, 'training')}"
        print(f"\n{of}: all ended in the same bits")


def _wait_for(condition: Callable[[], object], torchrun: subprocess.Popen[bytes], said: Path) -> None:
    deadline = time.monotonic() + patient(120)
    while not condition() and torchrun.poll() is None:
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.005)


def test_torchrun_whose_worker_is_killed_ends_with_an_error_and_resumes_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, whole, log = random.Random(3), tmp_path / "whole", tmp_path / "log"
    _finish(log, whole)
    kills, tries, wanted = 0, 0, one_in(100, least=1)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}", "-m", "fedem"]
    while kills < wanted:
        cut, said, tries = tmp_path / f"cut-{tries}", tmp_path / f"torchrun-{tries}", tries + 1
        with said.open("wb") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            torchrun = subprocess.Popen(
                [*launch, *_arguments(cut)], stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        try:
            # Each time in another round: in the first ones the workers may not have met.
            rounds = chance.choice(range(ROUNDS - 2))
            _wait_for(lambda pid=torchrun.pid: len(descendants(pid)) >= SIZE, torchrun, said)
            _wait_for(lambda cut=cut, least=rounds: len(RunFolder(cut).metrics()) >= least, torchrun, said)
            workers = sorted(descendants(torchrun.pid))
            time.sleep(chance.uniform(0, 0.1))
            if torchrun.poll() is None and workers:
                os.kill(chance.choice(workers), signal.SIGKILL)
            ended = torchrun.wait(patient(120))
        finally:
            torchrun.kill()
        if ended == 0:
            continue  # it was done before
        kills += 1
        assert "SIGKILL" in said.read_text() or "Signal 9" in said.read_text(), said.read_text()
        _wait_for(lambda workers=workers: not any(map(runs, workers)), torchrun, said)
        assert not any(map(runs, workers)), "some are left behind"
        _finish(log, cut)
        check_same_run(whole, cut)
    with capsys.disabled():
        print(
            f"\n{counted(kills, 'kill')} of a worker of torchrun: all ended with an error, and resumed to the same bits"
        )
