"""The ensemble against FedAvg, which it is several times, and against FedEM, whose limit it is."""

from __future__ import annotations

import pytest
import torch
from helpers import LOSSES, advance, make_personalizer, make_training, same_states, stacked
from newcomers import INPUTS, NEWCOMERS, predict_all

import fedem
from fedem.core.tree import tree_index
from fedem.engines import Engine, OneByOne
from fedem.methods import METHODS
from fedem.methods.base import Mixture
from fedem.runs.evaluate import predict
from fedem.runs.rounds import State
from fedem.solvers import SGD
from fedem.solvers.schedules import Constant


@pytest.mark.parametrize("engine", [OneByOne(), stacked()], ids=["one_by_one", "stacked"])
@pytest.mark.parametrize("loss", LOSSES)
def test_one_model_is_fedavg_to_the_bit(loss: str, engine: Engine) -> None:
    common = {"loss": loss, "engine": engine, "cohort_size": 3}
    ensemble, fedavg = make_training("ensemble", num_components=1, **common), make_training("fedavg", **common)
    first, second = advance(ensemble, 4), advance(fedavg, 4)
    assert same_states(State(4, tree_index(first.shared, 0), first.personal), State(4, second.shared, {}))


@pytest.mark.parametrize("loss", LOSSES)
def test_it_predicts_as_the_average_of_fedavg_runs_from_its_starts(loss: str) -> None:
    training = make_training("ensemble", num_components=4, loss=loss)
    start = training.init()
    models = []
    for component in range(4):
        alone = State(0, {name: leaf[:, component] for name, leaf in start.shared.items()}, {})
        models.append(tree_index(advance(make_training("fedavg", loss=loss), 3, alone).shared, 0))
    state = advance(training, 3, start)
    for component, model in enumerate(models):
        for name, leaf in model.items():
            torch.testing.assert_close(state.shared[name][0, component], leaf, rtol=0, atol=1e-13)
    inputs = training.federation.test.inputs
    network = training.algorithm.model
    expected = sum(network.loss.probabilities(network.outputs(model, inputs)) for model in models) / 4
    mixture = training.algorithm.predictor(tree_index(state.shared, 0), {})
    torch.testing.assert_close(predict(network, mixture, inputs), expected, rtol=0, atol=1e-13)


def test_it_is_fedem_as_the_sharpness_goes_to_zero_and_weights_are_uniform() -> None:
    """FedEM's steps are those on a third of a loss, so its rate is three times as large, and weight decay a third.

    The first models are equal.
    """
    ensemble = make_training("ensemble", solver=SGD(momentum=0.9, weight_decay=0.06), schedule=Constant(0.1))
    solver = SGD(momentum=0.9, weight_decay=0.02)
    other = {"solver": solver, "schedule": Constant(0.3), "initial_weights": "uniform"}
    gaps = []
    for sharpness in (1e-3, 1e-6, 1e-9):
        training = make_training("fedem", sharpness=sharpness, **other)
        limit = make_training("fedem", sharpness=sharpness, **other).init()
        for name, leaf in ensemble.init().shared.items():
            assert torch.equal(leaf, limit.shared[name])
        states = advance(ensemble), advance(training)
        found = [
            predict(ensemble.algorithm.model, kind.algorithm.predictor(tree_index(state.shared, 0), personal), INPUTS)
            for kind, state, personal in zip(
                (ensemble, training), states, ({}, tree_index(states[1].personal, 3)), strict=True
            )
        ]
        gaps.append(float((found[0] - found[1]).abs().max()))
    assert gaps[0] > 10 * gaps[1] > 100 * gaps[2]
    assert gaps[2] < 1e-8


def test_an_unseen_client_takes_the_ensemble_as_it_is() -> None:
    training = make_training("ensemble")
    state = advance(training)
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    weights = torch.full((3,), 1 / 3, dtype=torch.float64).log()
    expected = predict(training.algorithm.model, Mixture(tree_index(state.shared, 0), weights), INPUTS)
    for prediction in predict_all(training, found):
        torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-14)


def test_its_models_are_sent_small_go_over_a_graph_and_know_label_shares() -> None:
    row = METHODS["ensemble"]
    assert row.is_compressible
    assert row.goes_over_graph
    assert row.takes_label_shares
    assert not row.is_diagnosable
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=20).make(0)
    result = fedem.train(data.federation, "ensemble", rounds=2, compression={"updates": "int8"})
    assert result.summary["num_components"] == 3
