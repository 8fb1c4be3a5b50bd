"""``scripts/keep``: what is kept of an experiment's runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with one experiment, one finished run of it and one that has not ended."""
    for folder in ("scripts", "experiments/mine", "runs/first_seed0", "runs/second_seed0"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "keep", tmp_path / "scripts")
    (tmp_path / "experiments" / "mine" / "experiment.toml").touch()
    finished = tmp_path / "runs" / "first_seed0"
    for name in ("summary.json", "config.toml"):
        (finished / name).write_text(name)
    (finished / "metrics.jsonl").write_text('{"round": 1, "seconds": 1}\n{"round": 2, "test_loss": 1}\n')
    (tmp_path / "runs" / "second_seed0" / "config.toml").touch()
    rows = [
        "client,role,train_samples,test_loss",
        '"0123456789.75, b",train,1234567890123,0.12345678901234567',
        "x,unseen,3,",
    ]
    (finished / "clients.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def _keep(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "scripts/keep", *words], cwd=project, capture_output=True, text=True)


def test_a_finished_run_is_kept_with_figures_of_nine_digits(project: Path) -> None:
    assert _keep(project, "mine", "runs").stdout == "Kept of mine: 1.\n"
    kept = project / "experiments" / "mine" / "results"
    assert [path.name for path in kept.iterdir()] == ["first_seed0"]
    assert {path.name for path in (kept / "first_seed0").iterdir()} == {"summary.json", "config.toml", "clients.csv"}
    assert (kept / "first_seed0" / "summary.json").read_text() == "summary.json"
    *_, first, second = (kept / "first_seed0" / "clients.csv").read_text().splitlines()
    assert first == '"0123456789.75, b",train,1234567890123,0.123456789'
    assert second == "x,unseen,3,"


def test_a_selection_of_anothers_runs_is_kept_there(project: Path) -> None:
    (project / "experiments" / "part").mkdir()
    (project / "experiments" / "part" / "experiment.toml").write_text('runs = "mine"\n')
    assert _keep(project, "part", "runs").stdout == "Kept of mine: 1.\n"
    assert [path.parent.name for path in (project / "experiments").glob("*/results")] == ["mine"]


def test_rounds_are_kept_where_their_scores_make_a_curve(project: Path) -> None:
    metrics = project / "runs" / "first_seed0" / "metrics.jsonl"
    lines = ['{"round": 1, "train_loss": 2}', '{"round": 2, "seconds": 1}', '{"round": 3, "train_loss": 1}']
    metrics.write_text("\n".join(lines) + "\n")
    assert _keep(project, "mine", "runs").returncode == 0
    kept = project / "experiments" / "mine" / "results" / "first_seed0" / "metrics.jsonl"
    assert kept.read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["other", "runs"], "no experiment 'other'; allowed: mine"), (["mine", "scripts"], "scripts has no finished run")],
)
def test_what_can_not_be_kept_is_said(project: Path, words: list[str], problem: str) -> None:
    ended = _keep(project, *words)
    assert ended.returncode == 1
    assert problem in ended.stderr
    assert not (project / "experiments" / "mine" / "results").exists()
