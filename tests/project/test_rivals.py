"""The rivals' benchmark runs without rivals installed, and refuses sides that did not learn the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals import plain
from benchmarks.rivals.environments import UnavailableError
from benchmarks.rivals.fedem import train as train_with_fedem
from benchmarks.rivals.jobs import Clock, Job
from rich.console import Console

pytestmark = pytest.mark.benchmark


def test_fedem_and_the_plain_loop_do_all_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    rivals.main(["--quick", "--rivals", "", "--threads", "1", "--out", str(out), "--picture", str(picture)])
    jobs = json.loads(out.read_text())["jobs"]
    assert set(jobs) == {"linear", "mlp", "cnn"}
    for name, sides in jobs.items():
        assert set(sides) == {"fedem", "plain"}
        for row in sides.values():
            assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("seconds", "loss", "peak_bytes"))
            assert row["loss"] < row["loss_before"], name
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) == 2 + 6
    assert f"| cnn | fedem | {jobs['cnn']['fedem']['seconds']:.3f} | 1.00 |" in printed[-2]


@pytest.mark.parametrize("name", ["linear", "mlp", "cnn"])
def test_sides_agree_to_rounding_where_a_client_has_one_batch(tmp_path: Path, name: str) -> None:
    job = rivals.make_jobs(rivals.QUICK)[name]._replace(batch_size=1_000)
    job.save(tmp_path / "job.npz")
    again = Job.load(tmp_path / "job.npz")
    assert again.cohorts == job.cohorts
    ours, plainly = (train(again, Clock("cpu")) for train in (train_with_fedem, plain.train))
    for leaf, value in plainly.items():
        torch.testing.assert_close(ours[leaf], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", [0.7, 0.55, math.nan])  # the first has learnt nothing
def test_sides_that_learnt_something_else_are_refused(loss: float) -> None:
    sides = {"fedem": {"loss": 0.5, "loss_before": 0.7}, "plain": {"loss": 0.51, "loss_before": 0.7}}
    rivals.check_agreement("linear", sides)
    with pytest.raises(rivals.DisagreementError, match="Flower has loss"):
        rivals.check_agreement("linear", sides | {"flwr": {"loss": loss, "loss_before": 0.7}})


def test_a_rival_that_cannot_be_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(rival: str) -> Path:
        raise UnavailableError("ERROR: No matching distribution found")

    monkeypatch.setattr(rivals, "python_of", fail)
    assert set(rivals.find_sides(["pfl"], "cpu", Console())) == {"fedem", "plain"}
    assert (
        "pfl is left out, it can't be installed here: ERROR: No matching distribution found" in capsys.readouterr().out
    )
