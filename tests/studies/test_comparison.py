"""Methods side by side: the same data for all, and a comparison can be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import TINY
from comparisons import TWO, table_of

import fedem
from fedem.runs.folder import RunFolder
from fedem.runs.trainer import Trainer
from fedem.studies.comparison import plan
from fedem.studies.sweep import SharedData, check


def test_one_seed_has_no_deviation(run, tmp_path: Path) -> None:
    code, out, _ = run("compare", "--methods", "fedavg", "--seeds", "5,", *TINY, "--out", "c")
    assert code == 0
    assert "seed 5" in out
    assert "±" not in out
    assert (tmp_path / "c/fedavg-seed5/summary.json").exists()


def test_a_comparison_prints_and_saves_one_table(run, tmp_path: Path) -> None:
    code, out, err = run(*TWO, "--unseen", "0.3", "--out", "c")
    assert code == 0, err
    assert all(word in out for word in ("FedAvg", "Local", "oracle", "unseen", "Comparison: c"))
    assert "Without a model for clients held out: Local." in out
    assert "FedAvg seed 1" in err
    lines = table_of(tmp_path / "c")
    assert {(line["method"], line["seed"]) for line in lines} == {(m, s) for m in ("local", "fedavg") for s in "01"}
    for line in lines:
        summary = fedem.Result.load(tmp_path / "c" / f"{line['method']}-seed{line['seed']}").summary
        assert float(line["test_accuracy"]) == summary["test_accuracy"]
        assert line["unseen_test_accuracy"] == str(summary.get("unseen_test_accuracy", ""))
    markdown = (tmp_path / "c/comparison.md").read_text()
    assert "    fedem compare --methods local,fedavg --seeds 2" in markdown
    # Or there would be no curve.
    assert fedem.Result.load(tmp_path / "c/local-seed0").config.run.evaluate_every == 1


def test_all_methods_of_a_seed_have_the_same_data_and_splits(run, tmp_path: Path) -> None:
    arguments = ["--methods", "local,fedavg,fedem,fedavg+", "--seeds", "2", *TINY, "--unseen", "0.3", "--quiet"]
    assert run("compare", *arguments, "--out", "c") == (0, "Comparison: c\n", "")
    prints = {path.name: RunFolder(path).load()[1]["data"] for path in (tmp_path / "c").glob("*-seed*")}
    assert len(prints) == 8
    for seed in "01":
        assert len({value for name, value in prints.items() if name.endswith(seed)}) == 1
    assert len(set(prints.values())) == 2


def test_the_data_are_made_once_a_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []
    original = fedem.Synthetic.make

    def make(self: fedem.Synthetic, seed: int, *more: Any) -> fedem.Dataset:
        made.append(seed)
        return original(self, seed, *more)

    monkeypatch.setattr(fedem.Synthetic, "make", make)
    shared = {"data": {"num_clients": 6, "dimension": 4, "num_test": 20}}
    entries, data = plan(tmp_path / "c", ["local", "fedavg", "fedem"], [0, 4], [shared], {}), SharedData(most=2)
    assert check(entries, data) == []
    assert made == [0, 4]
    assert [(entry.labels["method"], entry.seed) for entry in entries][2:4] == [("fedem", 0), ("local", 4)]
    assert data.of(entries[0].config) is data.of(entries[2].config)
    assert made == [0, 4]
    # Nothing may be fitted on the clients that a method holds out, so these are other data.
    others = plan(tmp_path / "c", ["local", "fedavg"], [0], [shared], {"fedavg": [{"run": {"unseen": 0.5}}]})
    check(others, SharedData(most=2))
    assert made == [0, 4, 0, 0]
    assert not (tmp_path / "c").exists()


def test_complete_cells_are_not_run_again(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*TWO, "--out", "c", "-q")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*-seed*/**/*") if path.is_file()}
    table = table_of(tmp_path / "c")

    def advance(*_: object) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", advance)
        code, _, err = run(*TWO, "--out", "c", "--resume")
    assert code == 0
    assert "4 of 4 runs are complete already." in err
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert table == table_of(tmp_path / "c")
    assert "--resume" not in (tmp_path / "c/comparison.md").read_text()
    more = ["compare", "--methods", "fedavg,local,fedprox", *TWO[3:]]
    assert run(*more, "--out", "c", "--resume", "-q")[0] == 0
    assert len(table_of(tmp_path / "c")) == 6


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 3])
def test_a_killed_comparison_goes_on_to_the_same_table(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    assert run(*TWO, "--out", "whole", "-q")[0] == 0
    advance, calls = Trainer.advance, []

    def killed(self: Trainer, progress):
        calls.append(progress.state.round)
        if len(calls) > stop:
            raise KeyboardInterrupt
        return advance(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", killed)
        code, _, err = run(*TWO, "--out", "cut", "-q")
    assert code == 130
    assert "--resume" in err
    assert not (tmp_path / "cut/comparison.csv").exists()
    calls.clear()
    done, stop = stop, 100
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", killed)
        assert run(*TWO, "--out", "cut", "-q", "--resume")[0] == 0
    assert len(calls) == 8 - done  # what was done before is not done again
    assert table_of(tmp_path / "cut") == table_of(tmp_path / "whole")


def test_a_method_that_diverges_does_not_stop_the_others(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(60, 3)), y=rng.normal(size=60), client=np.arange(60) % 4)
    arguments = ["compare", "--data", "d.npz", "--methods", "local,fedavg", "--seeds", "2", "--rounds", "40"]
    code, out, err = run(*arguments, "--set", "local:schedule.learning_rate=1e6", "--out", "c")
    assert code == 0
    assert "failed: diverged" in " ".join(out.split())
    assert "Local failed with seeds 0, 1: Training diverged in round" in " ".join(out.split())
    assert "1 of 2 methods failed; the table in c says why." in err
    lines = table_of(tmp_path / "c")
    assert [line["method"] for line in lines] == ["fedavg", "fedavg", "local", "local"]
    assert ["diverged" in line["failed"] for line in lines] == [False, False, True, True]
    assert "diverged in round" in run("show", "c/local-seed0")[1]

    # Resumed, what failed is not tried again, and with other settings only where that is asked for.
    def advance(*_: object) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", advance)
        code, _, err = run(*arguments, "--set", "local:schedule.learning_rate=1e6", "--out", "c", "--resume", "-q")
        assert (code, table_of(tmp_path / "c")) == (0, lines)
        code, _, err = run(*arguments, "--out", "c", "--resume")
    assert code == 2
    assert "other settings (schedule.learning_rate)" in err
    assert "--retry-failed trains it with the settings asked for" in err
    code, out, err = run(*arguments, "--out", "c", "--resume", "--retry-failed")
    assert (code, "failed" in out) == (0, False), err
    assert "Local" in out
    assert not list((tmp_path / "c").glob("*/failed.json"))
    assert "without --resume" in run(*arguments, "--out", "new", "--retry-failed")[2]


def test_where_every_method_fails_the_reasons_are_the_error(run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(60, 3)), y=rng.normal(size=60), client=np.arange(60) % 4)
    arguments = ["compare", "--data", "d.npz", "--methods", "local", "--seeds", "1", "--rounds", "40", "--out", "c"]
    code, out, err = run(*arguments, "--set", "local:schedule.learning_rate=1e6", "-q")
    assert (code, out) == (2, "")
    assert err.startswith("error: No method came to an end. local failed with seed 0: Training diverged in round")
    assert run("report", "c")[2].startswith("error: No run came to an end. local on d.npz failed with seed 0: Training")


def test_without_test_samples_there_is_a_table_but_no_picture(run, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.eye(40, 3), y=np.arange(40) % 2, client=np.arange(40) % 4)
    assert run("compare", "--data", "d.npz", "--rounds", "1", "--set", "data.test=0", "--out", "c")[0] == 0
    assert not list((tmp_path / "c").glob("*.png"))
    assert [line["test_accuracy"] for line in table_of(tmp_path / "c")] == [""] * 9
