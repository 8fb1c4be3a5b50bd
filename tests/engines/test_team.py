"""Several processes that share a run come to what one comes to."""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY
from helpers import distance
from hypothesis import given
from hypothesis import strategies as st
from mixers import MIXERS, all_at_once, first_state, make_round, make_trained
from patience import patient
from teamwork import CASES, QUICK, ROUNDS, StoppedError, train, watch

from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.engines.processes import ALONE, Team, joined, placed
from fedem.methods.mixer import Mixer
from fedem.runs.folder import RunFolder

PROCESSES = 2
TESTS = Path(__file__).parents[1]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=40), st.integers(1, 6))
def test_shares_are_everybody_once_and_nearly_even(sizes: list[int], processes: int) -> None:
    counts = torch.tensor(sizes)
    shares = [Team(rank, processes).share(counts) for rank in range(processes)]
    assert torch.cat(shares).sort().values.tolist() == list(range(len(sizes)))
    loads = [int(counts[share].sum()) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)
    numbers = [len(share) for share in shares]
    assert max(numbers) - min(numbers) <= 1
    assert all(share.tolist() == sorted(share.tolist()) for share in shares)


@pytest.mark.parametrize("mixer", [pytest.param(mixer, id=name) for name, mixer in MIXERS.items() if mixer.adds_up])
def test_means_of_parts_add_up(mixer: Mixer) -> None:
    count, this = 5, make_round([4, 1, 7, 2, 2])
    shared, memory = first_state(mixer, count)
    uploads = make_trained(mixer, count) | {"steps": torch.tensor([3, 9, -4, 1, 0])}
    whole, remembered = mixer.mix(shared, memory, this, all_at_once(uploads))
    parts = [
        mixer.mix(shared, memory, this, [(torch.tensor(some), tree_index(uploads, torch.tensor(some)))])
        for some in ([1, 3], [0, 2, 4])
    ]
    for name, mean in whole.means.items():
        first, second = (part.means[name] for part, _ in parts)
        both = first + second if mean.is_floating_point() else torch.maximum(first, second)
        torch.testing.assert_close(both, mean)
    for part, kept in parts:
        assert (part.num_messages, part.groups.tolist()) == (whole.num_messages, whole.groups.tolist())
        assert all(torch.equal(kept[name], leaf) for name, leaf in remembered.items())


def test_those_that_add_up() -> None:
    assert {name for name, mixer in MIXERS.items() if mixer.adds_up} == {"star", "graph"}


def test_alone_nothing_is_exchanged() -> None:
    tree = {"w": torch.ones(3)}
    assert ALONE.total(tree)[0] is tree
    assert ALONE.tell("a word") == "a word"
    ALONE.agree("anything", "at all")
    with joined() as team:
        assert team == ALONE


def test_pieces_are_placed() -> None:
    pieces = [(torch.tensor([3, 0]), {"w": torch.tensor([[1.0], [-math.inf]])})]
    assert placed(pieces, 4)["w"].flatten().tolist() == [-math.inf, 0, 0, 1]
    assert placed([], 4) == {}


@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
def test_processes_without_a_gpu_of_their_own_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"cuda:0|3 processes .* 2 GPUs"):
        Team(0, 3).check(10, torch.device(device))
    Team(0, 3).check(10, torch.device("cpu"))


def test_processes_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR"), joined():
        pass


@pytest.mark.parametrize("command", [["compare"], ["tune"], ["experiment", "list"]])
def test_only_training_is_shared(
    command: list[str], monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert f"fedem {command[0]} was started as 2 processes" in err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes saw of all cases."""
    folder = tmp_path_factory.mktemp("team")
    with suppress(StoppedError):
        train("fedem", listener=watch, **QUICK, out=folder / "begun")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(PROCESSES)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(TESTS / "teamwork.py"), str(folder)],
            env=os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        printed = [process.communicate(timeout=patient(240))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * PROCESSES, printed
    return [pickle.loads((folder / f"seen-{rank}.pickle").read_bytes()) for rank in range(PROCESSES)]


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_two_processes_come_to_what_one_comes_to(case: str, seen: list[dict[str, Any]]) -> None:
    result = train(case)
    tolerance = 1e-5 if CASES[case].get("dtype") == "float32" else 1e-10
    for states, summary, clients, history in (process["results"][case] for process in seen):
        for role, state in result.states.items():
            assert distance(state, states[role]) < tolerance, role
        assert numbers(summary) == pytest.approx(numbers(result.summary), abs=10 * tolerance)
        for mine, theirs in zip(result.clients + result.history, clients + history, strict=True):
            assert numbers(theirs) == pytest.approx(numbers(mine), abs=10 * tolerance)
    first, second = (process["results"][case][0]["last"] for process in seen)
    assert distance(first, second) == 0


def numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a record that do not measure the machine."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and not name.startswith(("seconds", "peak", "clients_together"))
    }


@pytest.mark.processes
def test_rows_of_all_kinds_of_numbers_are_exchanged(seen: list[dict[str, Any]]) -> None:
    for found in (process["exchanged"] for process in seen):
        assert found["log_weights"].flatten().tolist() == [-math.inf, -1, -2, -math.inf, 0]
        assert found["doubles"].tolist() == [0, 1 / 3, 2 / 3, 1, 4 / 3]
        assert found["counts"].tolist() == [-5, 4, -3, 2, -1]
        assert found["bytes"].tolist() == [0, 255, 1, 2, 3]
        assert found["flags"].tolist() == [True, False, False, True, True]


@pytest.mark.processes
def test_a_process_that_fails_ends_all_and_alone_says_why(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["stopped"][0] == "StoppedError: a listener's own error"
    for name, words in {"cohort": "1 client (", "seeds": "settings or data", "taken": "holds a run already"}.items():
        words_of = sorted(process[name][0] for process in seen)
        assert words_of[0] == "SystemExit: 1", name
        assert words_of[1].startswith("UserError: "), name
        assert words in words_of[1]
    assert max(process[name][1] for process in seen for name in ("stopped", "cohort", "seeds", "taken")) < patient(60)


@pytest.mark.processes
def test_a_run_is_taken_up_by_all(seen: list[dict[str, Any]]) -> None:
    whole = train("fedem", clients_per_round=5)
    for name in ("resumed", "taken up"):  # begun by two processes, and by one
        assert all(distance(whole.states["last"], process[name]["last"]) < 1e-10 for process in seen)
    # One round was saved before the listener broke off the run; one process alone tells it.
    assert seen[0]["told"] == list(range(2, ROUNDS + 1))
    assert seen[1]["told"] == []


@pytest.mark.processes
def test_torchrun_trains_and_one_process_writes_and_prints(tmp_path: Path) -> None:
    command = ["-m", "fedem", "train", "--out", str(tmp_path / "run")]
    several = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    limits: dict[str, Any] = {"capture_output": True, "text": True, "timeout": patient(120), "env": environment}
    done = subprocess.run([*several, *TINY, "--quiet"], check=False, **limits)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Run folder:") == 1
    run = RunFolder(tmp_path / "run")
    assert [line["round"] for line in run.metrics()] == [1, 2]
    assert json.loads((run.path / "summary.json").read_text())["rounds"] == 2
    refused = subprocess.run([*several, *TINY], check=False, **limits)
    assert refused.returncode != 0
    assert refused.stderr.count("holds a run already") == 1
