"""Processes that start at once into one folder: exactly one trains, and the other is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedem.runs.checking import check_run
from fedem.runs.folder import RunFolder

# Each says that it is ready, and starts when it is told to; a run is over before the other may have looked.
_TRAIN = """
import pathlib, sys
import fedem
from fedem.core.errors import UserError
data = {"num_clients": 3, "dimension": 2, "num_test": 2, "num_validation": 2}
config = fedem.Config.build({"run": {"rounds": 1}, "data": data})
dataset = config.make_data()
for place in sys.argv[1:]:
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        fedem.run(config, dataset, out=place)
        print("trained", flush=True)
    except UserError as error:
        print("told", error, flush=True)
"""
_COMPARE = """
import pathlib, sys
import fedem.cli
print("ready", flush=True)
sys.stdin.readline()
sys.argv = ["fedem", "compare", "--methods", "fedavg", "--seeds", "1", "--rounds", "1", "--quiet", "--out", sys.argv[1],
    "--set", "data.num_clients=3", "--set", "data.dimension=2", "--set", "data.num_test=2"]
try:
    fedem.cli.main()
except SystemExit as stop:
    print("told" if stop.code == 2 else stop.code, flush=True)
"""
_EXPERIMENT = """
import contextlib, json, pathlib, sys
from fedem.studies.experiments import check, plan, read
from fedem.studies.sweep import SharedData, work_off
trained = []

@contextlib.contextmanager
def watch(entry):
    trained.append(entry.title)
    yield None

print("ready", flush=True)
sys.stdin.readline()
entries = plan(read(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), [0, 1])
check(entries, SharedData())
failed = work_off(entries, watch, SharedData())
print(json.dumps([trained, failed]), flush=True)
"""
# The second can't be trained: the model has one layer.
_DECLARED = """
title = "Two processes"
figures = ["test_accuracy"]
[settings]
"data.name" = "synthetic"
"data.num_clients" = 3
"data.dimension" = 2
"data.num_test" = 2
"run.rounds" = 1
"model.name" = "linear"
[axes.method]
FedAvg = { "method.name" = "fedavg" }
FedRep = { "method.name" = "fedrep" }
Local = { "method.name" = "local" }
"""


def _pair(script: str, *arguments: str) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes) for _ in range(2)]


def _start(pair: list[subprocess.Popen[str]]) -> list[str]:
    """Wait until both are ready, let them go, and return what they say."""
    for process in pair:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in pair:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return sorted(process.stdout.readline().strip() for process in pair if process.stdout is not None)


@pytest.mark.processes
def test_of_two_that_start_at_once_one_trains(tmp_path: Path) -> None:
    places = [tmp_path / f"{number}" for number in range(10)]
    pair = _pair(_TRAIN, *map(str, places))
    for place in places:
        told, trained = _start(pair)
        assert trained == "trained"
        assert told.startswith("told")
        assert "Another process is training into" in told or "holds a run already" in told
        assert RunFolder(place).summary() is not None
        assert check_run(RunFolder(place)) == []
    for process in pair:
        process.communicate()


@pytest.mark.processes
def test_of_two_comparisons_that_start_at_once_one_trains(tmp_path: Path) -> None:
    for number in range(3):
        pair = _pair(_COMPARE, str(tmp_path / f"{number}"))
        trained, told = _start(pair)
        for process in pair:
            process.communicate()
        assert (trained, told) == (f"Comparison: {tmp_path / str(number)}", "told")
        assert (tmp_path / f"{number}" / "comparison.json").is_file()


@pytest.mark.processes
def test_two_processes_that_start_one_experiment_train_each_run_once(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(_DECLARED)
    for number in range(3):
        pair = _pair(_EXPERIMENT, str(tmp_path), str(tmp_path / f"{number}"))
        said = [json.loads(text) for text in _start(pair)]
        for process in pair:
            process.communicate()
        assert [failed for _, failed in said] == [{}, {}]
        once = [f"{method}, seed {seed}" for method in ("FedAvg", "Local") for seed in (0, 1)]
        assert sorted(title for trained, _ in said for title in trained) == once
        for seed in (0, 1):
            assert RunFolder(tmp_path / f"{number}" / f"fedrep_seed{seed}").failure() is not None
