"""``scripts/work``: commands of a file, in one process."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
    queue.write_text("\n".join(lines))
    done = _work(queue)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert done.returncode == 2
    assert done.stdout.count("== exit code 0 ") == 2
    assert "error: Unknown method 'nothing'" in done.stderr
    assert "Failed: 2.\nmethods nothing\n" in done.stderr
    again = _work(queue)
    assert again.stdout.count("== exit code 0 ") == 2, "what is complete is left out"


def test_a_line_that_is_added_and_can_not_be_read_is_one_that_fails(tmp_path: Path) -> None:
    queue, data = tmp_path / "queue.txt", tmp_path / "data"
    queue.write_text(f"wait {data}\n")
    given = [sys.executable, str(ROOT / "scripts" / "work"), str(queue)]
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"== wait {data}\n"
        queue.write_text(f"wait {data}\nmethods 'fedem\nmethods fedavg\n")
        data.touch()
        out, err = process.communicate(timeout=patient(60))
    assert process.returncode == 2
    assert "== methods 'fedem: No closing quotation" in out
    assert out.count("== exit code 0 ") == 2
    assert err == "Failed: 1.\nmethods 'fedem\n"


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
        ("methods", ["queue.txt", "soon"], "could not convert string to float: 'soon'"),
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
