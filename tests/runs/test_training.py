"""The Python interface."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_federation
from small_runs import SMALL, small_run
from torch import nn

import fedem
from fedem.core.errors import UserError


@pytest.mark.slow
def test_last_and_best_are_told_apart(tmp_path: Path) -> None:
    result = small_run(tmp_path / "run", rounds=20)
    validations = {line["round"]: line["validation_accuracy"] for line in result.history if "test_loss" in line}
    best = max(validations, key=lambda k: (validations[k], -k))  # the first among equals
    assert result.summary["best"]["round"] == best
    assert result.state("best").round == best
    assert result.state("last").round == 20
    at_best = next(line for line in result.history if line["round"] == best)
    assert result.summary["best"]["test_accuracy"] == pytest.approx(at_best["test_accuracy"])
    assert result.summary["test_accuracy"] == pytest.approx(result.history[-1]["test_accuracy"])


def test_without_validation_there_is_no_best() -> None:
    federation = fedem.Federation.from_clients([(np.eye(4), [0, 1, 0, 1])] * 2, validation=0)
    result = fedem.train(federation, rounds=2)
    assert result.summary["best"] is None
    with pytest.raises(UserError, match="Unknown state 'best'"):
        result.state("best")


def test_save_and_load_give_the_same_predictions(tmp_path: Path) -> None:
    federation = make_federation()
    result = fedem.train(federation, num_components=2, rounds=3, dtype="float64")
    inputs = federation.test.inputs[:5]
    result.save(tmp_path / "saved")
    loaded = fedem.Result.load(tmp_path / "saved")
    assert torch.equal(result.predict("cem", inputs), loaded.predict("cem", inputs))
    assert loaded.names == result.names
    assert dict(loaded.summary) == json.loads(json.dumps(result.summary))
    weights = [r.personalize(*federation.test.client(0)).mixture_weights for r in (result, loaded)]
    assert torch.equal(*weights)


def test_a_model_of_the_users_own_must_be_given_again_to_load(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))

    federation = make_federation()
    result = fedem.train(federation, model=build, rounds=2, out=tmp_path / "run")
    with pytest.raises(UserError, match="pass model="):
        fedem.Result.load(tmp_path / "run")
    loaded = fedem.Result.load(tmp_path / "run", model=build)
    inputs = federation.test.inputs[:5]
    assert torch.equal(result.predict("ann", inputs), loaded.predict("ann", inputs))


def test_predictions_are_probabilities_and_personal() -> None:
    federation = make_federation("cross_entropy")
    result = fedem.train(federation, rounds=15, learning_rate=0.5)
    inputs = federation.test.inputs
    first, second = result.predict("ann", inputs), result.predict("dan", inputs)
    assert first.shape == (len(inputs), 3)
    torch.testing.assert_close(first.sum(1), torch.ones(len(inputs)))
    assert not torch.allclose(first, second, atol=1e-3)


@pytest.mark.slow
def test_regression_predicts_means() -> None:
    federation = make_federation("squared_error")
    result = fedem.train(federation, method="local", rounds=100, learning_rate=0.1, batch_size=0)
    assert result.summary["train_mean_squared_error"] < 0.2
    inputs, targets = federation.train.client(3)
    errors = (result.predict("dan", inputs)[:, 0] - targets).square().mean()
    assert float(errors) < 0.2
    assert "test_accuracy" not in result.summary


def test_unseen_clients_from_python() -> None:
    data = fedem.Synthetic(**SMALL).make(0)
    result = fedem.train(data.federation, rounds=10, learning_rate=0.5)
    for count in (0, 1, 5, 40):
        personal = result.personalize(*(part[:count] for part in data.federation.test.client(2)))
        assert float(personal.mixture_weights.sum()) == pytest.approx(1, abs=1e-6)
        assert personal.predict(data.federation.test.inputs[:3]).shape == (3, 2)
    nothing = result.personalize(np.zeros((0, 6)), [])
    torch.testing.assert_close(nothing.mixture_weights, torch.full((3,), 1 / 3))
    one_step = result.personalize(*data.federation.test.client(2), max_iterations=1)
    assert not torch.allclose(one_step.mixture_weights, personal.mixture_weights, atol=1e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: fedem.train(f, method="fedm"), "Unknown method 'fedm'.*Did you mean 'fedem'"),
        (lambda f: fedem.train(f, num_component=3), "Unknown option 'num_component'.*'num_components'"),
        (lambda f: fedem.train(f, method="fedavg", num_components=3), "Unknown option 'num_components'"),
        (lambda f: fedem.train(f, num_components=0), "num_components is 0; allowed: at least 1"),
        (lambda f: fedem.train(f, rounds=0), "rounds is 0"),
        (lambda f: fedem.train("clean.csv"), r"federation is 'clean.csv'; allowed: .*fedem.FromFile\(path=\.\.\.\)"),
        (lambda f: fedem.train([(1, 2)]), "federation is of type list"),
        (lambda f: fedem.train(f, model=lambda: 3), "returned 3; allowed: an nn.Module"),
        (lambda f: fedem.train(f, clients_per_round=9), "whole number of clients from 2 to 5"),
        (lambda f: fedem.train(f, clients_per_round=1.5), "clients_per_round is 1.5"),
        (lambda f: fedem.train(f, loss="hinge"), "Unknown loss 'hinge'"),
        (lambda f: fedem.train(f, loss="squared_error", engine="fast"), "engine"),
        (lambda f: fedem.train(f, device="tpu"), "Unknown device 'tpu'"),
        (lambda f: fedem.train(f, unseen=0.99), "leaves none to train on"),
        (lambda f: fedem.train(make_federation("squared_error"), learning_rate=1e30, rounds=3), "diverged in round"),
        (lambda f: fedem.train(f, rounds=1).predict("zoe", np.ones((1, 4))), "Unknown client 'zoe'"),
        (lambda f: fedem.train(f, rounds=1).predict("ann", np.ones((1, 3))), r"inputs of shape \[1, 3\]"),
        (lambda f: fedem.train(f, rounds=1).predict("ann", np.full((1, 4), np.nan)), "NaN"),
        (lambda f: fedem.train(f, rounds=1).personalize(np.ones((1, 4)), [7]), "allowed: 0 to 1"),
        (lambda f: fedem.train(f, method="local", rounds=1).personalize(np.ones((1, 4)), [1]), "another method"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(make_federation())


def test_client_sampling_counts_in_the_bytes() -> None:
    result = fedem.train(make_federation(), rounds=2, clients_per_round=2, num_components=2)
    assert result.summary["bytes_up_per_round"] == 2 * 2 * 5 * 4  # clients, components, parameters, bytes a float


@pytest.mark.slow
def test_the_truth_is_recovered_when_it_can_be() -> None:
    data = fedem.Synthetic(
        num_clients=40, num_components=2, dimension=60, clustered=True, min_samples=150, num_test=50
    ).make(1)
    result = fedem.train(
        data.federation, num_components=2, truth=data.truth, rounds=80, learning_rate=2.0, momentum=0.9, seed=1
    )
    recovery = result.summary["recovery"]
    assert recovery["cluster_accuracy"] == 1
    assert max(recovery["component_distances"]) < 0.02


def test_more_components_than_the_truth_has_are_still_compared() -> None:
    data = fedem.Synthetic(**SMALL).make(0)
    result = fedem.train(data.federation, num_components=5, truth=data.truth, rounds=2)
    assert len(result.summary["recovery"]["component_distances"]) == 3


def test_scores_that_are_not_finite_do_not_stop_a_run(tmp_path: Path) -> None:
    federation = make_federation("squared_error", dtype=np.float32)
    federation.test.inputs[0] = 1e25
    result = fedem.train(federation, rounds=2, learning_rate=0.01, out=tmp_path / "run")
    assert math.isinf(result.summary["test_mean_squared_error"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_mean_squared_error"] is None


def test_inputs_of_another_kind_are_refused() -> None:
    bytes_ = np.random.default_rng(0).integers(0, 255, (20, 4), dtype=np.uint8)
    targets = np.arange(20) % 2
    on_bytes = fedem.train(fedem.Federation.from_clients([(bytes_, targets)]), rounds=1)
    on_floats = fedem.train(fedem.Federation.from_clients([(bytes_.astype(np.float32), targets)]), rounds=1)
    for result, inputs in ((on_bytes, bytes_.astype(np.float32)), (on_floats, bytes_)):
        with pytest.raises(UserError, match="as in training"):
            result.predict("0", inputs)
        with pytest.raises(UserError, match="as in training"):
            result.personalize(inputs, targets)
    whole = bytes_.astype(np.int64)
    assert torch.equal(on_floats.predict("0", whole), on_floats.predict("0", whole.astype(np.float32)))


def test_another_solver_does_not_inherit_a_learning_rate() -> None:
    assert fedem.Config.build({"solver": {"name": "adam"}}).schedule.learning_rate == 0.001
    assert fedem.Config.build({"solver": {"name": "adam"}}).solver.weight_decay == 0
    explicit = fedem.Config.build({"solver": {"name": "adam"}, "schedule": {"learning_rate": 0.02}})
    assert explicit.schedule.learning_rate == 0.02


def test_data_are_an_argument_and_not_an_option() -> None:
    with pytest.raises(UserError, match="the federation is the first argument"):
        fedem.train(make_federation(), data="synthetic")


def test_clients_held_out_may_have_parts_that_the_others_lack(tmp_path: Path) -> None:
    pairs = [(np.eye(4)[:1], [1])] * 3 + [(np.eye(4), [0, 1, 0, 1])] * 3
    federation = fedem.Federation.from_clients(pairs, validation=0.25, test=0.25)
    seen, held = federation.take(torch.arange(3)), federation.take(torch.arange(3, 6))
    parted = fedem.Federation(seen.names, seen.train, seen.validation, seen.test, unseen=held)
    result = fedem.train(parted, rounds=1, num_components=2, out=tmp_path / "run")
    assert "unseen_test_accuracy" in result.summary
    assert "test_accuracy" not in result.summary
    rows = list(csv.DictReader((tmp_path / "run/clients.csv").read_text().splitlines()))
    assert [row["test_accuracy"] == "" for row in rows] == [True] * 3 + [False] * 3
