"""Early stopping: training ends once the validation score does not improve, and the best state counts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import StopError, make_federation, same_states, stop_at

import fedem
from fedem.core.errors import UserError
from fedem.data.federation import Federation
from fedem.runs.config import read_toml
from fedem.runs.folder import RunFolder
from fedem.runs.trainer import reassess

BEST = 2  # the round whose validation score is the best on the clients that are misled
_SCORE = "validation_mean_squared_error"


def _misled(validation: int = 20) -> Federation:
    """Clients whose validation targets get the worse the better their training targets are learnt."""
    rng = np.random.default_rng(0)
    parts = []
    for sign, size in ((1.0, 30), (-1.0, validation), (1.0, 20)):
        inputs = [rng.normal(size=(size, 3)) for _ in range(4)]
        parts.append([(x, sign * x[:, 0]) for x in inputs])
    return Federation.from_parts(*parts, ["ann", "bob", "cem", "dan"])


def _train(federation: Federation | None = None, **options: Any) -> fedem.Result:
    usual: dict[str, Any] = {"rounds": 20, "evaluate_every": 2, "patience": 5, "checkpoint_every": 4}
    return fedem.train(_misled() if federation is None else federation, "fedavg", **usual | options)


def test_training_ends_when_the_validation_score_has_not_improved_and_keeps_the_best_state() -> None:
    result, whole = _train(), _train(patience=0)
    scores = {line["round"]: line[_SCORE] for line in whole.history if _SCORE in line}
    assert min(scores, key=scores.__getitem__) == BEST
    # The first scored round that is at least five later.
    assert [line["round"] for line in result.history] == list(range(1, BEST + 7))
    assert {name: result.summary[name] for name in ("rounds", "stopped_after", "max_rounds", "patience")} == {
        "rounds": BEST, "stopped_after": BEST + 6, "max_rounds": 20, "patience": 5,
    }  # fmt: skip
    best = whole.state("best")
    assert same_states(result.state(), best)
    assert same_states(result.state("best"), best)
    inputs = _misled().test.client(0)[0].numpy()
    assert result.predict("ann", inputs).equal(whole.predict("ann", inputs, "best"))
    assert not result.predict("ann", inputs).equal(whole.predict("ann", inputs))
    assert result.summary["test_loss"] == whole.summary["best"]["test_loss"]


def test_a_run_without_patience_says_nothing_of_it() -> None:
    whole = _train(patience=0)
    assert (whole.summary["rounds"], len(whole.history)) == (20, 20)
    assert "stopped_after" not in whole.summary


def test_the_best_state_counts_also_after_the_last_round() -> None:
    result = _train(rounds=8)
    assert (result.summary["rounds"], result.summary["stopped_after"]) == (BEST, 8)
    assert result.state().round == BEST


def test_as_long_as_the_score_improves_training_goes_on() -> None:
    result = _train(make_federation("squared_error"), rounds=12)
    rounds = [line["round"] for line in result.history if _SCORE in line]
    scores = [line[_SCORE] for line in result.history if _SCORE in line]
    best = rounds[int(np.argmin(scores))]
    assert result.state().round == best > 2
    assert result.summary["stopped_after"] == min(12, best + 6)


def test_rounds_that_are_not_scored_do_not_count_as_worse() -> None:
    assert _train(evaluate_every=4, patience=1).summary["stopped_after"] == 8


@pytest.mark.parametrize("how", [{"evaluate_every": 0}, {"federation": _misled(validation=0)}])
def test_without_validation_scores_all_rounds_are_trained(how: dict[str, Any]) -> None:
    result = _train(**how)
    assert (result.state().round, result.summary["rounds"], len(result.history)) == (20, 20, 20)
    assert "stopped_after" not in result.summary


@pytest.mark.parametrize("killed", [3, 6, BEST + 6])
def test_a_killed_run_ends_in_the_same_bits(tmp_path: Path, killed: int) -> None:
    with pytest.raises(StopError):
        _train(out=tmp_path / "cut", listener=stop_at(killed))
    cut, whole = _train(out=tmp_path / "cut", resume=True), _train(out=tmp_path / "whole")
    assert same_states(cut.state(), whole.state())
    assert cut.summary["stopped_after"] == BEST + 6
    lines = [[{**line, "seconds": 0} for line in RunFolder(tmp_path / name).metrics()] for name in ("cut", "whole")]
    assert lines[0] == lines[1]
    assert (tmp_path / "cut/clients.csv").read_bytes() == (tmp_path / "whole/clients.csv").read_bytes()


def test_a_run_that_is_over_is_not_gone_on_with(tmp_path: Path) -> None:
    first = _train(out=tmp_path / "run")
    again = _train(out=tmp_path / "run", resume=True, listener=stop_at(BEST + 7))
    assert same_states(first.state(), again.state())
    assert again.summary["stopped_after"] == BEST + 6
    assert [line["round"] for line in RunFolder(tmp_path / "run").metrics()] == list(range(1, BEST + 7))
    loaded = fedem.Result.load(tmp_path / "run")
    assert same_states(loaded.state(), first.state())
    assert loaded.summary["test_loss"] == first.summary["test_loss"]


def test_a_run_whose_last_state_is_gone_can_not_grow(tmp_path: Path) -> None:
    _train(out=tmp_path / "run", schedule="constant")
    with pytest.raises(UserError, match=r"ended after 8 rounds, of which the state of round 2 alone.*patience is 5"):
        _train(out=tmp_path / "run", resume=True, schedule="constant", rounds=30)
    assert RunFolder(tmp_path / "run").summary() is not None


def test_a_run_whose_best_state_is_the_last_grows(tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "constant", "evaluate_every": 3}
    _train(make_federation("squared_error"), out=tmp_path / "run", rounds=3, **options)
    longer = _train(make_federation("squared_error"), out=tmp_path / "run", resume=True, rounds=6, **options)
    assert longer.summary["stopped_after"] == 6
    assert same_states(longer.state(), _train(make_federation("squared_error"), rounds=6, **options).state())


def _write(path: Path) -> Path:
    """A table whose rows with the latest dates, for validation and testing, contradict those before."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "day", "x", "y"])
        for client in ("ann", "bob", "cem"):
            for day in range(30):
                x = rng.normal()
                writer.writerow([client, day, x, x if day < 18 else -x])
    return path


def test_the_command_line_says_when_training_stopped_and_what_is_kept(run, tmp_path: Path) -> None:
    table, out = _write(tmp_path / "table.csv"), tmp_path / "run"
    options = ["--method", "fedavg", "--target-column", "y", "--split-by", "day"]
    code, told, errors = run("train", "--data", table, *options, "--rounds", "120", "--out", out)
    assert code == 0
    said = (
        "Training stopped after 105 of 120 rounds: the validation score had not improved for 100; the state of round 5"
    )
    assert said in " ".join(told.split())
    assert "best (round 5)" in told
    assert "last (round" not in told
    assert "105/105" in errors
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rounds"], summary["stopped_after"]) == (5, 105)
    assert said in " ".join(run("show", out)[1].split())
    predicted = run("predict", out, "--data", table, "--out", tmp_path / "p.csv")
    assert predicted[0] == 0
    assert "not complete" not in predicted[2]
    code, told, _ = run("train", "--out", out, "--resume")
    assert (code, said in " ".join(told.split())) == (0, True)
    assert len(RunFolder(out).metrics()) == 105
    scored = reassess(out)
    assert scored.summary["stopped_after"] == 105
    assert scored.summary["test_loss"] == pytest.approx(summary["test_loss"])


def test_a_deployment_trains_all_rounds_and_says_so(run, tmp_path: Path) -> None:
    table = _write(tmp_path / "table.csv")
    code, _, errors = run("deploy", "init", tmp_path / "app", "--data", table, "--target-column", "y", "--rounds", "70")
    assert code == 0
    assert "run.patience is 100, but 0 over a network: all 70 rounds are trained" in errors
    assert [read_toml(path)["run"]["patience"] for path in (tmp_path / "app").rglob("config.toml")] == [0]


def test_a_sweep_reads_the_score_of_the_state_that_counts(run, tmp_path: Path) -> None:
    table, out = _write(tmp_path / "table.csv"), tmp_path / "compared"
    options = ["--data", table, "--target-column", "y", "--split-by", "day", "--rounds", "60", "--seeds", "1"]
    code, told, _ = run("compare", "--methods", "fedavg", *options, "--out", out)
    assert code == 0
    content = json.loads((out / "comparison.json").read_text())
    summary = RunFolder(out / "fedavg-seed0").summary()
    assert summary is not None
    assert summary["rounds"] < summary["stopped_after"]
    assert content["rounds"] == 60
    assert content["methods"][0]["figures"]["test_loss"]["mean"] == summary["test_loss"]
    assert "60 rounds" in told
