"""Clients that train for themselves alone before they predict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import advance, make_federation, make_personalizer, make_training
from newcomers import NEWCOMERS, both_engines, losses_of, one_epoch_by_hand
from small_runs import SMALL, small_run

import fedem
from fedem.core.tree import tree_index
from fedem.engines import Batching, OneByOne, Stacked
from fedem.methods import METHODS
from fedem.report.console import remarks
from fedem.runs.personalize import Personalizer
from fedem.runs.rounds import Training
from fedem.runs.trainer import reassess
from fedem.solvers import SGD
from fedem.solvers.schedules import SCHEDULES

# Fine-tuning.


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_clients_train_for_themselves_at_the_rate_of_the_first_round(tmp_path: Path, schedule: str) -> None:
    """Fine-tuning, a newcomer's own training, and both after loading: at what the schedule gives for round 0 of K."""
    federation, rate = make_federation(), SCHEDULES[schedule](0.4).rate(0, 9)
    common = {"rounds": 9, "schedule": {"name": schedule, "learning_rate": 0.4}, "seed": 1, "dtype": "float64"}
    own = {"fine_tune_epochs": 2, **common}
    tuned, named = (fedem.train(federation, fine_tune_rate=given, **own) for given in (0.0, rate))
    assert tuned.summary["test_loss"] == named.summary["test_loss"]
    other = fedem.train(federation, fine_tune_rate=2 * rate, **own)
    assert tuned.summary["test_loss"] != other.summary["test_loss"]
    ditto = fedem.train(federation, "ditto", out=tmp_path / "run", **common)
    maker = replace(ditto.recipe.personalizer(OneByOne()), learning_rate=rate)
    with torch.no_grad():
        found = maker.personalize(ditto.state(), NEWCOMERS.train, NEWCOMERS.keys).personal
    for result in (ditto, fedem.Result.load(tmp_path / "run")):
        fitted = result.with_unseen(NEWCOMERS).state().personal
        for name, leaf in found.items():
            torch.testing.assert_close(fitted[name], leaf, rtol=0, atol=1e-12)


# pFedMe's own models come from other batches, and FedFOMO's clients keep some samples for other ends.
LOWERING = [method for method in METHODS if method not in ("pfedme", "fedfomo")]


def _tunable(method: str) -> Training:
    """Plain descent over whole batches."""
    settings = {"inner_rate": 0.02} if method == "perfedavg" else {}
    return make_training(method, solver=SGD(), batching=Batching(0, local_epochs=3), **settings)


def _gently(training: Training, learning_rate: float = 0.01) -> Personalizer:
    return replace(make_personalizer(training, fine_tune_epochs=1), learning_rate=learning_rate)


@pytest.mark.parametrize("method", LOWERING)
def test_fine_tuning_lowers_everybodys_training_loss(method: str) -> None:
    """A client that trains for itself alone descends its own loss, whatever its method does for the others."""
    training = _tunable(method)
    state = advance(training, 3)
    before = make_personalizer(training).predictors(state, training.federation)
    after = _gently(training).predictors(state, training.federation)
    samples = training.federation.train
    fall = losses_of(training, before, samples) - losses_of(training, after, samples)
    assert bool((fall > 0).all()), fall


@pytest.mark.parametrize("method", [method for method in LOWERING if method != "local"])
def test_fine_tuning_lowers_every_new_clients_training_loss(method: str) -> None:
    training = _tunable(method)
    state = advance(training, 3)
    personalizers = [_gently(training, rate) for rate in (1e-9, 0.01)]
    if method == "perfedavg":
        personalizers[0] = replace(personalizers[0], run=replace(personalizers[0].run, fine_tune_epochs=0))
    before, after = (
        losses_of(training, personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys), NEWCOMERS.train)
        for personalizer in personalizers
    )
    assert bool((before - after > 0).all()), before - after


@both_engines
@pytest.mark.parametrize("method", ["fedavg+", "fedprox", "qffl", "afl", "scaffold"])
def test_one_epoch_of_fine_tuning_is_one_epoch_of_sgd_from_the_shared_model(
    method: str, engine: OneByOne | Stacked
) -> None:
    """FedAvg+ (Jiang et al.), and the same for the other methods with one model."""
    training = make_training(method, engine=engine, **({"mu": 0.0} if method == "fedprox" else {}))
    state = advance(training)
    personalizer = make_personalizer(training, fine_tune_epochs=1)
    shared = {name.removeprefix("model/"): leaf[0] for name, leaf in state.shared.items() if "control" not in name}
    seen = personalizer.predictors(state, training.federation)
    unseen = personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    for found, federation in ((seen, training.federation), (unseen, NEWCOMERS)):
        for position in range(federation.num_clients):
            expected = one_epoch_by_hand(training, shared, federation.train, federation.keys, position, 0.2)
            components = found.of(training.algorithm, position).components
            for name, leaf in expected.items():
                torch.testing.assert_close(components[name][0], leaf, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "settings", "rate"),
    [
        ("perfedavg", {}, 0.03),
        ("perfedavg", {"fine_tune_rate": 0.07}, 0.07),
        ("fedavg+", {"fine_tune_rate": 0.07}, 0.07),
    ],
)
def test_fine_tuning_at_another_rate_than_the_schedules(method: str, settings: dict[str, float], rate: float) -> None:
    """Per-FedAvg's is that of its inner step; a rate that the user gives comes before all."""
    training = make_training(method, **({"inner_rate": 0.03} if method == "perfedavg" else {}))
    state = advance(training)
    personalizer = make_personalizer(training, fine_tune_epochs=1, **settings)
    found = personalizer.personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    start = tree_index(state.shared, 0)
    for position in range(3):
        expected = one_epoch_by_hand(training, start, NEWCOMERS.train, NEWCOMERS.keys, position, rate)
        components = found.of(training.algorithm, position).components
        for name, leaf in expected.items():
            torch.testing.assert_close(components[name][0], leaf, rtol=0, atol=1e-12)


def test_a_run_fine_tunes_at_the_rate_it_is_told() -> None:
    """So small a rate that nothing moves leaves FedAvg; the schedule's does not."""

    def loss(**settings: float) -> float:
        run = {"rounds": 3, "dtype": "float64", "fine_tune_epochs": 1} | settings
        config = fedem.Config.build({"method": {"name": "fedavg"}, "data": SMALL, "run": run})
        return fedem.run(config, config.data.make(0)).summary["train_loss"]

    plain = loss(fine_tune_epochs=0)
    assert loss(fine_tune_rate=1e-12) == pytest.approx(plain, rel=1e-9)
    assert loss() < plain - 1e-3


@pytest.mark.parametrize(
    ("method", "rate", "is_worse"), [("fedavg", 1e-9, False), ("fedavg", 1000.0, True), ("fedem", 1000.0, True)]
)
def test_a_run_says_what_fine_tuning_brought(method: str, rate: float, *, is_worse: bool) -> None:
    """What it was before is what the same training has without fine-tuning."""
    data = {**SMALL, "num_validation": 40}

    def scored(**settings: float) -> dict[str, Any]:
        run = {"rounds": 3, "dtype": "float64"} | settings
        config = fedem.Config.build({"method": {"name": method}, "data": data, "run": run})
        return dict(fedem.run(config, config.data.make(0)).summary)

    plain, tuned = scored(), scored(fine_tune_epochs=1, fine_tune_rate=rate)
    before, after = plain["validation_accuracy"], tuned["validation_accuracy"]
    assert tuned["fine_tuning"] == {"epochs": 1, "rate": rate, "validation_accuracy_before": before}
    (said,) = (line for line in remarks(tuned) if line.startswith("Fine-tuning at the rate"))
    assert f"{before:.4f} before, {after:.4f} after." in said
    assert ("By that it does harm" in said) == is_worse == (after < before)
    assert "fine_tuning" not in plain
    assert not any("Fine-tuning" in line for line in remarks(plain))


def test_where_fine_tuning_diverged_its_rate_is_to_blame() -> None:
    record = {
        "train_accuracy": 0.1,
        "train_loss": 1e14,
        "validation_accuracy": 0.1,
        "fine_tuning": {"epochs": 1, "rate": 2.0},
    }
    for before, setting in ((0.8, "run.fine_tune_rate"), (0.05, "schedule.learning_rate")):
        record["fine_tuning"]["validation_accuracy_before"] = before
        (warning,) = (line for line in remarks(record) if line.startswith("warning"))
        assert f"A smaller {setting} is needed" in warning


def test_without_validation_samples_there_is_no_telling_what_fine_tuning_brought() -> None:
    run = {"rounds": 2, "fine_tune_epochs": 1}
    sections = {"method": {"name": "perfedavg", "inner_rate": 0.05}, "data": {**SMALL, "num_validation": 0}, "run": run}
    config = fedem.Config.build(sections)
    summary = fedem.run(config, config.data.make(0)).summary
    assert summary["fine_tuning"] == {"epochs": 1, "rate": 0.05}
    assert not any("Fine-tuning" in line for line in remarks(summary))


def test_local_clients_fine_tune_their_own_models() -> None:
    training = make_training("local")
    state = advance(training)
    found = make_personalizer(training, fine_tune_epochs=1).predictors(state, training.federation)
    federation = training.federation
    for position in range(5):
        start = tree_index(state.shared, position)
        expected = one_epoch_by_hand(training, start, federation.train, federation.keys, position, 0.2)
        components = found.of(training.algorithm, position).components
        for name, leaf in expected.items():
            torch.testing.assert_close(components[name][0], leaf, rtol=0, atol=1e-12)


# Another fine-tuning, once a run is trained.


def test_a_trained_run_is_scored_as_if_it_had_fine_tuned(tmp_path: Path) -> None:
    """Fine-tuning comes after training, so a run without it that is scored with it is the run with it."""
    tuned = small_run(None, unseen=0.25, fine_tune_epochs=2, fine_tune_rate=0.05)
    plain = small_run(tmp_path / "run", unseen=0.25)
    again = reassess(tmp_path / "run", fine_tune_epochs=2, fine_tune_rate=0.05)
    for key in ("test_loss", "validation_loss", "bottom_decile", "unseen_test_loss", "weights_mean"):
        assert again.summary[key] == tuned.summary[key]
    assert again.summary["train_loss"] < plain.summary["train_loss"]
    assert reassess(tmp_path / "run").summary["test_loss"] == plain.summary["test_loss"]  # the run is as it was


def test_another_fine_tuning_is_asked_for_on_the_command_line(run, tmp_path: Path) -> None:
    plain = small_run(tmp_path / "run")
    asked = ("evaluate", "run", "--fine-tune-epochs", "1", "--fine-tune-rate", "0.05", "--out", "scores.json")
    code, out, err = run(*asked)
    assert (code, err) == (0, "")
    assert "FedEM" in out
    assert json.loads((tmp_path / "scores.json").read_text())["train_loss"] < plain.summary["train_loss"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fine-tune-epochs", "-1"), "run.fine_tune_epochs is -1"),
        (("--fine-tune-epochs", "1", "--fine-tune-rate", "-0.1"), "run.fine_tune_rate is -0.1"),
        (("--fine-tune-rate", "0.1"), "fine_tune_rate is 0.1, but clients of run don't fine-tune"),
    ],
)
def test_a_fine_tuning_that_can_not_be_is_refused(run, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    small_run(tmp_path / "run")
    code, _, err = run("evaluate", "run", *options)
    assert (code, said in err) == (2, True), err
