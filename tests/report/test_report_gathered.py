"""What a report reads from folders, and which folders it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import make_federation
from report_runs import METHODS, SEEDS, compared, gathered, regressed, trained

import fedem
from fedem.core.errors import UserError
from fedem.report.pictures.curves import recorded
from fedem.report.runs import Gathered, gather, read_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("runs") / "comparison")


@pytest.fixture(scope="module")
def data(folder: Path) -> Gathered:
    return gathered(folder)


def test_every_run_is_there_and_says_what_its_files_say(data: Gathered, folder: Path) -> None:
    assert set(data.runs) == set(METHODS)
    for method, runs in data.runs.items():
        assert [run.seed for run in runs] == list(SEEDS)
        for run in runs:
            place = folder / f"{method}-seed{run.seed}"
            assert run.summary == json.loads((place / "summary.json").read_text())
            assert len(run.clients.names) == run.summary["num_clients"]
            weighted = np.average(run.clients.scores, weights=run.clients.sizes)
            assert weighted == pytest.approx(run.summary["test_accuracy"])
            assert run.clients.weights.shape == (len(run.clients.names), 3 if method == "fedem" else 0)


def test_mixture_weights_sum_to_one(data: Gathered) -> None:
    for run in data.runs["fedem"]:
        assert run.clients.weights.sum(1) == pytest.approx(1)


def test_hostile_clients_have_no_scores(tmp_path: Path) -> None:
    for name, attack in (("honest", "none"), ("harmed", {"name": "label_flip", "share": 2})):
        fedem.train(make_federation(), "fedavg", rounds=2, attack=attack, out=tmp_path / name)
    harmed, honest = sorted(read_runs([tmp_path]), key=lambda run: run.folder.path)
    assert harmed.clients.names == honest.clients.names, "so that one report can have both"
    known = np.isfinite(harmed.clients.scores)
    assert [known.sum(), np.isfinite(honest.clients.scores).sum()] == [3, 5]
    weighted = np.average(harmed.clients.scores[known], weights=harmed.clients.sizes[known])
    assert weighted == pytest.approx(harmed.summary["test_accuracy"])


def test_methods_are_sorted_by_their_mean_over_seeds(data: Gathered) -> None:
    means = [np.mean([run.summary["test_accuracy"] for run in runs]) for runs in data.runs.values()]
    assert means == sorted(means, reverse=True)
    assert means == pytest.approx([row.figures["test_accuracy"].mean for row in data.comparison.rows])


def test_bytes_add_up_round_by_round(data: Gathered) -> None:
    for runs in data.runs.values():
        for run in runs:
            each = run.summary["bytes_up_per_round"] + run.summary["bytes_down_per_round"]
            assert run.sent.tolist() == [each * number for number in range(1, 5)]


def test_a_curve_has_the_rounds_that_were_scored(data: Gathered) -> None:
    rounds, values = recorded(data.runs["fedem"][0].history, "test_accuracy").T
    assert rounds.tolist() == [2, 4]
    assert values[-1] == data.runs["fedem"][0].summary["test_accuracy"]


def test_folders_of_runs_count_once_and_in_any_order(data: Gathered, folder: Path) -> None:
    places = [folder / f"{method}-seed{seed}" for seed in reversed(SEEDS) for method in METHODS]
    found = gathered(*places, places[0], folder)
    assert found.comparison == data.comparison
    assert set(found.commands) == {f"fedem train {place / 'config.toml'}" for place in places}


def test_a_run_comes_with_its_baselines(tmp_path: Path) -> None:
    found = gathered(regressed(tmp_path / "run"))
    assert set(found.runs) == {"fedem", "fedavg"}
    assert found.metric.name == "mean_squared_error"
    assert found.commands == []  # data passed from Python can't be made again by a command


def test_a_comparison_tells_its_command(tmp_path: Path, folder: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "told")
    (place / "comparison.json").write_text('{"command": "fedem compare --seeds 2"}')
    assert gathered(place).commands == ["fedem compare --seeds 2"]
    (place / "comparison.json").write_text("{")
    with pytest.raises(UserError, match=r"comparison\.json can't be read"):
        gather([place])


def test_scores_are_told_in_points_or_as_they_are(data: Gathered, tmp_path: Path) -> None:
    assert data.in_words(0.7512) == "75.1 %"
    assert data.apart(0.75, 0.70) == "5.0 points above"
    assert data.apart(0.70, 0.75) == "5.0 points below"
    errors = gathered(regressed(tmp_path / "run"))
    assert errors.in_words(0.12345) == "0.1235"
    assert errors.apart(0.5, 0.75) == "0.25 below"


def test_folders_that_are_not_there_or_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No folders are given"):
        gather([])
    with pytest.raises(UserError, match=r"There is no folder .*nowhere"):
        gather([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="holds no run"):
        gather([tmp_path])


def test_an_incomplete_run_is_named(tmp_path: Path, folder: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "killed")
    (place / "local-seed1/summary.json").unlink()
    with pytest.raises(UserError, match=r"killed/local-seed1 is not complete"):
        gather([place])


def test_other_samples_under_the_same_names_are_other_data(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    for method in ("fedem", "fedavg"):
        clients = [(generator.normal(size=(20, 2)), generator.integers(0, 2, size=20)) for _ in range(3)]
        fedem.train(fedem.Federation.from_clients(clients), method, out=tmp_path / method, rounds=1, learning_rate=0.1)
    with pytest.raises(UserError, match=r"fedem and .*fedavg have the same settings of data .* but other clients"):
        gather([tmp_path / "fedem", tmp_path / "fedavg"])


def test_a_run_that_is_there_twice_is_refused(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder / "local-seed0", tmp_path / "twice")
    with pytest.raises(UserError, match=r"both local with seed 0 and the same settings; allowed: each once"):
        gather([folder, tmp_path / "twice"])


def test_clients_fitted_after_training_are_no_run(tmp_path: Path) -> None:
    result = trained(tmp_path / "run", "fedem", 0)
    data = fedem.Synthetic(num_clients=3, dimension=5, num_test=5).make(1)
    result.with_unseen(data.federation).save(tmp_path / "new")
    with pytest.raises(UserError, match="holds clients fitted after training"):
        gather([tmp_path / "new"])
