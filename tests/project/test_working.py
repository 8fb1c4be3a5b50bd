"""``scripts/work``: commands of a file, in one process."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from patience import patient

ROOT = Path(__file__).parents[2]
SMALL = (
    "--data synthetic --set data.num_clients=3 --set data.num_test=5 --set run.evaluate_every=0 --quiet --device cpu"
)


def _work(*words: object, python: Sequence[str] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    given = [*python, str(ROOT / "scripts" / "work"), *map(str, words)]
    return subprocess.run(given, capture_output=True, text=True)


def test_all_commands_are_carried_out_and_those_that_fail_are_named(tmp_path: Path) -> None:
    queue, added = tmp_path / "queue.txt", tmp_path / "added.txt"
    lines = ["# first", "", f"train {SMALL} --rounds 1 --out {tmp_path / 'run'}  # trained", "methods nothing"]
    lines += [f"wait {tmp_path / 'run' / 'summary.json'}", f"methods --out {added}"]
    lines += [f"evaluate {tmp_path / 'run'} --device cpu --quiet --out={tmp_path / 'scores.json'}"]
    queue.write_text("\n".join(lines))
    done = _work(queue)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert done.returncode == 2
    assert done.stdout.count("== exit code 0 ") == 3
    assert "error: Unknown method 'nothing'" in done.stderr
    assert "Failed: 2.\nmethods nothing\n" in done.stderr
    written = (tmp_path / "scores.json").stat().st_mtime_ns
    again = _work(queue)
    assert again.stdout.count("== exit code 0 ") == 3, "what is complete is left out"
    assert (tmp_path / "scores.json").stat().st_mtime_ns == written


def test_a_line_that_is_added_and_can_not_be_read_is_one_that_fails(tmp_path: Path) -> None:
    queue, data = tmp_path / "queue.txt", tmp_path / "data"
    queue.write_text(f"wait {data}\n")
    with _begun(queue, f"== wait {data}") as process:
        queue.write_text(f"wait {data}\nmethods 'fedem\nmethods fedavg\n")
        data.touch()
        out, err = process.communicate(timeout=patient(60))
    assert process.returncode == 2
    assert "== methods 'fedem: No closing quotation" in out
    assert out.count("== exit code 0 ") == 2
    assert err == "Failed: 1.\nmethods 'fedem\n"


def _begun(queue: Path, *first: str) -> subprocess.Popen[str]:
    """Return a queue at work that has printed these lines."""
    given = [sys.executable, str(ROOT / "scripts" / "work"), str(queue)]
    process = subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in first] == [f"{line}\n" for line in first]
    return process


@pytest.mark.parametrize("content", ["methods fedavg\nmethods fedem\n", None])
def test_lines_may_be_removed_and_the_file_be_away(content: str | None, tmp_path: Path) -> None:
    queue, data = tmp_path / "queue.txt", tmp_path / "data"
    queue.write_text(f"wait {data}\nmethods fedem\n")
    with _begun(queue, f"== wait {data}") as process:
        queue.unlink()
        if content:
            queue.write_text(content)
        data.touch()
        out, err = process.communicate(timeout=patient(60))
    assert (process.returncode, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("== methods")] == [
        f"== {line}" for line in (content or "methods fedem\n").splitlines()
    ]


@pytest.mark.parametrize("line", ["wait never", f"train {SMALL} --rounds 1000000 --out run"])
def test_an_interrupt_ends_it_all(line: str, tmp_path: Path) -> None:
    queue, never = tmp_path / "queue.txt", tmp_path / "never"
    line = line.replace("--out run", f"--out {tmp_path / 'run'}").replace("wait never", f"wait {never}")
    queue.write_text(f"{line}\nmethods fedem\n")
    with _begun(queue, f"== {line}") as process:
        if "train" in line:
            while not (tmp_path / "run" / "metrics.jsonl").exists():
                assert process.poll() is None
                time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=patient(60))
    assert process.returncode == 130
    assert "methods fedem" not in out


def test_what_nobody_expected_is_shown_and_the_others_are_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = ModuleType("work")
    SourceFileLoader("work", str(ROOT / "scripts" / "work")).exec_module(module)
    monkeypatch.setattr(sys, "argv", [])

    def main() -> None:
        if sys.argv[1] == "data":
            raise MemoryError("nothing is left")

    monkeypatch.setattr(module, "main", main)
    (tmp_path / "queue.txt").write_text("data\nmethods\n")
    assert module.work(tmp_path / "queue.txt", 60.0) == 2
    out, err = capsys.readouterr()
    assert "MemoryError: nothing is left" in err
    assert err.endswith("Failed: 1.\ndata\n")
    assert [line.partition(" after")[0] for line in out.splitlines()] == [
        "== data",
        "== exit code 1",
        "== methods",
        "== exit code 0",
    ]


def test_waiting_ends_in_time(tmp_path: Path) -> None:
    (tmp_path / "queue.txt").write_text(f"wait {tmp_path / 'never'}\nmethods fedem\n")
    done = _work(tmp_path / "queue.txt", 2)
    assert done.returncode == 3
    assert "methods fedem" not in done.stdout


def test_training_ends_in_time_and_goes_on(tmp_path: Path) -> None:
    queue = tmp_path / "queue.txt"
    queue.write_text(f"train {SMALL} --rounds 1000000 --out {tmp_path / 'run'}\ntrain --out {tmp_path / 'never'}\n")
    rounds = []
    for _ in range(2):  # the second goes on with the first
        done = _work(queue, 8)
        assert done.returncode == 3, done.stderr
        manifest = json.loads((tmp_path / "run" / "checkpoints" / "checkpoint.json").read_text())
        rounds.append(manifest["states"]["last"]["round"])
    assert 0 < rounds[0] < rounds[1]
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("line", "words", "said"),
    [
        ("methods", ["none.txt"], "can't be worked through"),
        ("methods 'fedem", ["queue.txt"], "No closing quotation"),
        ("wait", ["queue.txt"], "must name one path"),
        ("evaluate run --quiet", ["queue.txt"], "must name an --out"),
        ("methods", ["queue.txt", "soon"], "could not convert string to float: 'soon'"),
        ("methods", ["queue.txt", "nan"], "there are nan seconds for it"),
        ("methods", [], "usage: "),
    ],
)
def test_what_it_can_not_work_through_is_refused(line: str, words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "queue.txt").write_text(line)
    done = _work(*(tmp_path / word if "." in word else word for word in words))
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


def test_a_python_without_fedem_is_refused() -> None:
    done = _work("queue.txt", python=[sys.executable, "-S"])
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no fedem; allowed: a Python that has" in done.stderr


def _queued(*commands: str) -> list[str]:
    lines = (ROOT / "experiments" / "queue.txt").read_text().splitlines()
    return [line for line in lines if line.startswith(commands)]


@pytest.mark.parametrize("line", _queued("experiment run "))
def test_what_is_queued_can_be_run(line: str, run: Callable[..., tuple[int, str, str]]) -> None:
    _, _, name, *options = (word for word in shlex.split(line) if word != "--quiet")
    place = ROOT / "experiments"
    code, out, err = run("experiment", "status", name, *options, "--experiments", place)
    assert (code, err) == (0, "")
    assert "to do" in out


@pytest.mark.parametrize("line", _queued("train ", "tune "))
def test_what_is_queued_lacks_nothing_but_data(
    line: str, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDEM_DATA", str(tmp_path))
    code, out, err = run(*shlex.split(line.replace("--device cuda", "--device cpu")))
    assert (code, out) == (2, "")
    assert "is not prepared in" in err  # settings are checked before data are read
