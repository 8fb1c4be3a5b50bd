"""``scripts/keep``: what is kept of an experiment's runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED = """
title = "A few rounds"
figures = ["test_accuracy"]

[settings]
"run.rounds" = 2
"method.name" = "fedem"
"data.num_clients" = 4
"data.num_test" = 20

[axes.data]
"Synthetic" = { "data.name" = "synthetic" }
"""
AXES = {
    "mine": '[axes.method]\n"FedAvg" = { "method.name" = "fedavg" }\n"FedEM" = {}\n',
    "other": '[axes.components]\n"M = 2" = { "method.num_components" = 2 }\n"M = 3" = {}\n',
}
FEDAVG, FEDEM = "synthetic_fedavg_seed0", "synthetic_fedem_seed0"

Keep = Callable[..., str]
Made = Callable[..., Path]


@pytest.fixture
def keep(run: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Keep runs of two experiments in the folder at hand; returns what is printed, or what is refused."""
    for name, axes in AXES.items():
        Path("experiments", name).mkdir(parents=True)
        Path("experiments", name, "experiment.toml").write_text(SHARED + axes)
    script: Any = ModuleType("keep")
    SourceFileLoader("keep", str(ROOT / "scripts" / "keep")).exec_module(script)

    def call(*words: str) -> str:
        try:
            script.main(*words)
        except (script.UserError, OSError) as error:
            return f"error: {error}"
        return capsys.readouterr().out

    return call


@pytest.fixture
def make(keep: Keep, run: Callable[..., tuple[int, str, str]]) -> Made:
    """Train what is asked for, and return the folder."""

    def call(*options: str, out: str = "runs") -> Path:
        code, _, err = run("experiment", "run", "mine", "--out", out, "--device", "cpu", *options)
        assert code == 0, err
        return Path(out)

    return call


def _kept(name: str = "mine") -> list[str]:
    return sorted(path.name for path in Path("experiments", name, "results").glob("*"))


def test_a_finished_run_is_kept_with_figures_of_nine_digits(keep: Keep, make: Made) -> None:
    runs = make("--only", "method=FedAvg", "--seeds", "0,", "--set", "run.evaluate_every=0")
    clients = runs / FEDAVG / "clients.csv"
    rows = ["client,role,train_samples,test_loss", '"0123456789.75, b",train,1234567890123,0.12345678901234567']
    clients.write_text("\n".join([*rows, "x,unseen,3,"]) + "\n")
    assert keep("mine", "runs") == "Kept of mine: 1.\n"
    place = Path("experiments/mine/results", FEDAVG)
    assert sorted(path.name for path in place.iterdir()) == ["clients.csv", "config.toml", "summary.json"]
    assert (place / "summary.json").read_bytes() == (runs / FEDAVG / "summary.json").read_bytes()
    *_, first, second = (place / "clients.csv").read_text().splitlines()
    assert first == '"0123456789.75, b",train,1234567890123,0.123456789'
    assert second == "x,unseen,3,"
    assert not list(Path("experiments").glob(".*"))


def test_rounds_are_kept_where_their_scores_make_a_curve_and_go_with_their_run(keep: Keep, make: Made) -> None:
    runs = make("--only", "method=FedAvg", "--seeds", "0,", "--set", "run.evaluate_every=1")
    keep("mine", "runs")
    metrics = Path("experiments/mine/results", FEDAVG, "metrics.jsonl")
    made = [json.loads(line) for line in (runs / FEDAVG / "metrics.jsonl").read_text().splitlines()]
    for line, own in zip(metrics.read_text().splitlines(), made, strict=True):
        assert json.loads(line) == pytest.approx(own, rel=1e-8)
    make("--only", "method=FedAvg", "--seeds", "0,", "--set", "run.evaluate_every=0", out="again")
    keep("mine", "again")
    assert not metrics.exists(), "the curve was another run's"


def test_another_experiments_run_with_the_same_settings_is_kept_there_unless_it_has_one(keep: Keep, make: Made) -> None:
    make("--seeds", "0,1", "--set", "run.evaluate_every=0")
    own = Path("experiments/other/results/synthetic_m-3_seed1")
    own.mkdir(parents=True)
    (own / "config.toml").write_text(Path("runs/synthetic_fedem_seed1/config.toml").read_text())
    assert keep("mine", "runs") == "Kept of mine: 4.\nKept of other: 1.\n"
    assert _kept("other") == ["synthetic_m-3_seed0", "synthetic_m-3_seed1"]
    summaries = [Path("experiments", name, "results") for name in ("mine", "other")]
    first, second = (
        (place / name / "summary.json").read_bytes()
        for place, name in zip(summaries, (FEDEM, "synthetic_m-3_seed0"), strict=True)
    )
    assert first == second
    assert [path.name for path in own.iterdir()] == ["config.toml"]
    # Another run in place of the first one is another one there, too.
    make("--only", "method=FedEM", "--seeds", "0,1", "--set", "run.evaluate_every=0", out="again")
    assert keep("mine", "again") == "Kept of mine: 2.\nKept of other: 1.\n"
    again = Path("experiments/other/results/synthetic_m-3_seed0/summary.json").read_bytes()
    assert again == Path("again", FEDEM, "summary.json").read_bytes() != first


def test_a_selection_of_anothers_runs_is_kept_there(keep: Keep, make: Made) -> None:
    Path("experiments/part").mkdir()
    only = AXES["mine"].replace('"FedEM" = {}\n', "")
    Path("experiments/part/experiment.toml").write_text(
        SHARED.replace("\n[settings]", 'runs = "mine"\n[settings]') + only
    )
    make("--only", "method=FedAvg", "--seeds", "0,")
    assert keep("part", "runs") == "Kept of mine: 1.\n"
    assert (_kept("mine"), _kept("part")) == ([FEDAVG], [])


def test_why_a_run_failed_is_kept(keep: Keep, make: Made, run: Callable[..., tuple[int, str, str]]) -> None:
    make("--seeds", "0,", "--set", "FedAvg:schedule.learning_rate=1e30")
    keep("mine", "runs")
    place = Path("experiments/mine/results", FEDAVG)
    assert "failed.json" in {path.name for path in place.iterdir()}
    _, out, _ = run("experiment", "board", "mine")
    assert "2 of 2 cells run" in out
    assert "failed: diverged" in out


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        (("third", "runs"), "Unknown experiment 'third'; allowed: mine, other"),
        (("mine", "experiments"), "experiments has no run that is over; allowed: the --out folder of"),
        (("other", "runs"), f"runs has {FEDAVG}, {FEDEM}; allowed: runs of other alone"),
        (("mine", "short"), f"short/{FEDAVG} has 1 round; allowed: 2"),
        (("mine", "harder"), "made with different settings (schedule.learning_rate)"),
        (("mine", "damaged"), "clients.csv"),
    ],
)
def test_what_can_not_be_kept_is_said_and_nothing_changes(
    keep: Keep, make: Made, what: tuple[str, str], problem: str
) -> None:
    make("--seeds", "0,")
    keep("mine", "runs")
    before = {path: path.read_bytes() for path in Path("experiments").rglob("*.*") if path.is_file()}
    if what[1] in ("short", "damaged"):
        make("--seeds", "0,", *(["--rounds", "1"] if what[1] == "short" else []), out=what[1])
    if what[1] == "harder":
        make("--seeds", "1,", "--set", "schedule.learning_rate=0.01", out="harder")
    if what[1] == "damaged":
        (Path("damaged") / FEDEM / "clients.csv").unlink()
    said = keep(*what)
    assert said.startswith("error: ")
    assert problem in said
    assert {path: path.read_bytes() for path in Path("experiments").rglob("*.*") if path.is_file()} == before


def test_what_does_not_fit_another_experiment_is_kept_nowhere(keep: Keep, make: Made) -> None:
    harder = make("--only", "method=FedEM", "--seeds", "1,", "--set", "schedule.learning_rate=0.01", out="harder")
    place = Path("experiments/other/results")
    place.mkdir(parents=True)
    (harder / "synthetic_fedem_seed1").rename(place / "synthetic_m-3_seed1")
    make("--only", "method=FedEM", "--seeds", "0,")
    assert "made with different settings (schedule.learning_rate)" in keep("mine", "runs")
    assert (_kept("mine"), _kept("other")) == ([], ["synthetic_m-3_seed1"])


def test_the_command_says_how_it_is_used(capfd: pytest.CaptureFixture[str]) -> None:
    script = str(ROOT / "scripts" / "keep")
    assert subprocess.run([sys.executable, script], check=False).returncode == 1
    assert subprocess.run([sys.executable, script, "none", "runs"], cwd=ROOT, check=False).returncode == 1
    err = capfd.readouterr().err
    assert "usage: scripts/keep EXPERIMENT FOLDER" in err
    assert "error: Unknown experiment 'none'; allowed: " in err
