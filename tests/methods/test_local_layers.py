"""Batch normalisations that stay with their clients (FedBN)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    DIMENSION,
    StopError,
    advance,
    distance,
    make_federation,
    make_personalizer,
    make_training,
    same_states,
    stacked,
    stop_at,
)
from torch import nn

import fedem
from fedem.core.errors import UserError
from fedem.core.tree import tree_index, tree_map
from fedem.engines import OneByOne
from fedem.methods.mixer import Alone, Star
from fedem.methods.wrappers.local_layers import LocalLayers
from fedem.models import Model
from fedem.models.losses import Logistic
from fedem.runs.rounds import Training
from fedem.solvers.schedules import Constant

SIZES = (7, 4, 12)
STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))


def _model() -> Model:
    return Model(_build, Logistic(), torch.float64)


def _training(method: str = "fedavg", sizes: tuple[int, ...] = SIZES, **settings: object) -> Training:
    training = make_training(method, make_federation(sizes=sizes), model=_model(), **settings)
    mixer = LocalLayers(training.mixer, training.algorithm.model.normalising)
    return replace(training, mixer=mixer)


def test_the_leaves_are_those_of_the_layer() -> None:
    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert _model().normalising == {f"1.{name}" for name in names}
    assert make_training().algorithm.model.normalising == frozenset()


def test_the_others_are_averaged_and_these_kept() -> None:
    training = _training()
    start = training.init()
    after, _ = training.step(start)
    # In the first round all start alike, so alone or together clients train the same.
    alone = make_training("local", training.federation, model=training.algorithm.model)
    assert isinstance(alone.mixer, Alone)
    apart, _ = alone.step(alone.init())
    weights = torch.tensor(SIZES).double() / sum(SIZES)
    for name, leaf in apart.shared.items():
        if name in training.mixer.leaves:
            torch.testing.assert_close(after.memory[f"local/{name}"], leaf)
        else:
            mean = torch.einsum("t,t...->...", weights, leaf)
            torch.testing.assert_close(after.shared[name][0], mean)


def test_everybody_reads_the_shared_leaves_and_their_own() -> None:
    training = _training("fedem")
    state = advance(training, 2)
    served = training.mixer.read(state.shared, state.memory, torch.tensor([2, 0]))
    for row, client in enumerate((2, 0)):
        tree = tree_index(served.shared, int(served.reads[row]))
        assert torch.equal(tree["0.weight"], state.shared["0.weight"][0])
        assert torch.equal(tree["1.running_mean"], state.memory["local/1.running_mean"][client])
    assert not torch.equal(served.shared["1.running_mean"][0], served.shared["1.running_mean"][1])


@pytest.mark.parametrize("method", ["fedavg", "fedem", "clustered", "ditto"])
def test_loop_equals_stacked(method: str) -> None:
    states = [advance(_training(method, engine=engine), 2) for engine in (OneByOne(), stacked(), stacked(2))]
    assert distance(states[0], states[1]) < 1e-10
    assert distance(states[0], states[2]) < 1e-10


def test_a_single_client_has_no_one_to_keep_apart_from() -> None:
    training = _training(sizes=(12,))
    kept = advance(training, 3)
    plain = make_training("fedavg", make_federation(sizes=(12,)), model=_model())
    assert isinstance(plain.mixer, Star)
    shared = advance(plain, 3).shared
    assert kept.shared.keys() | training.mixer.leaves == shared.keys()
    for name, leaf in shared.items():
        where = kept.memory[f"local/{name}"] if name in training.mixer.leaves else kept.shared[name]
        torch.testing.assert_close(where, leaf)


def test_clients_that_are_not_sampled_keep_theirs() -> None:
    training = _training(cohort_size=1)
    state = training.init()
    after, _ = training.step(state)
    idle = [client for client in range(3) if client not in training.sample(state.round).tolist()]
    for name in training.mixer.leaves:
        assert torch.equal(after.memory[f"local/{name}"][idle], state.memory[f"local/{name}"][idle])


def test_a_run_resumes_and_predicts_with_each_clients_own(tmp_path: Path) -> None:
    federation = make_federation(sizes=(9, 12, 8)).hold_out(0.34, 0)
    settings = {"model": _build, "local_layers": "batch_norm", "checkpoint_every": 2, "learning_rate": 0.1}
    whole = fedem.train(federation, "fedavg", rounds=5, out=tmp_path / "whole", **settings)

    with pytest.raises(StopError):
        fedem.train(federation, "fedavg", rounds=5, out=tmp_path / "cut", listener=stop_at(3), **settings)
    resumed = fedem.train(federation, "fedavg", rounds=5, out=tmp_path / "cut", resume=True, **settings)
    assert same_states(whole.state(), resumed.state())
    loaded = fedem.Result.load(tmp_path / "cut", model=_build)
    inputs = federation.test.inputs
    ann, bob = (loaded.predict(name, inputs) for name in federation.names)
    assert torch.equal(ann, whole.predict(federation.names[0], inputs))
    assert not torch.equal(ann, bob)
    # Newcomers begin with the averages.
    newcomer = loaded.personalize(inputs[:0], [])
    state, sizes = loaded.state(), federation.train.sizes
    mean = torch.einsum("t,td->d", sizes / sizes.sum(), state.memory["local/1.running_mean"])
    torch.testing.assert_close(newcomer.mixture.components["1.running_mean"][0], mean)


MIXED = ["fedavg", "clustered", "pfedhn", "l2sgd"]


@pytest.mark.parametrize("method", MIXED)
def test_a_server_that_learns_nothing_moves_nothing(method: str) -> None:
    training = _training(method, schedule=Constant(1e-12))
    start = training.init()
    after = advance(training, 3, start)
    assert start.shared.keys().isdisjoint(training.mixer.leaves)
    assert after.memory["local/1.running_mean"].unique(dim=0).shape == (3, 5)  # while clients see their own samples
    for tree in ("shared", "memory"):
        for name, leaf in getattr(start, tree).items():
            counted = ("base/sizes", "base/fresh") if tree == "memory" else ()
            if not name.startswith(("local/", "average/")) and name not in counted:
                torch.testing.assert_close(getattr(after, tree)[name], leaf, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", MIXED)
def test_newcomers_begin_with_the_average_by_samples(method: str) -> None:
    training = _training(method)
    state = advance(training, 2)
    start = training.mixer.welcome(state.shared, state.memory)
    assert start is not None
    weights = torch.tensor(SIZES).double() / sum(SIZES)
    for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var"):
        mean = torch.einsum("t,td->d", weights, state.memory[f"local/{name}"])
        for row in start.shared[name]:
            torch.testing.assert_close(row, mean)
    assert start.shared["1.num_batches_tracked"].tolist() == [int(state.memory["local/1.num_batches_tracked"].max())]
    served = training.mixer.read(state.shared, state.memory, torch.arange(3)).shared
    assert {name: leaf[0].shape for name, leaf in start.shared.items()} == tree_map(lambda leaf: leaf[0].shape, served)


def test_newcomers_keep_what_they_train_of_these_leaves() -> None:
    training = _training("pfedhn")
    state = advance(training, 2)
    newcomers = make_federation(sizes=(10, 6), names=("new", "newer"), seed=3)
    found = make_personalizer(training).personalize(state, newcomers.train, newcomers.keys)
    own = found.shared["1.running_mean"]
    assert not torch.allclose(own[0], own[1])
    # They train the average further, by as many passes as they make.
    passes = found.shared["1.num_batches_tracked"] - state.memory["average/1.num_batches_tracked"]
    assert passes.tolist() == [2 * 3, 2 * 2]


def test_what_stays_with_clients_is_not_sent() -> None:
    model = _model()
    common = sum(leaf.numel() * leaf.element_size() for name, leaf in model.init(0).items() if name[0] != "1")
    for method in ("fedavg", "clustered", "pfedhn", "ditto"):
        training = _training(method)
        _, log = training.step(training.init())
        assert (log.bytes_up, log.bytes_down) == (3 * common, 3 * common)
    plain = make_training("fedavg", make_federation(sizes=SIZES), model=model)
    _, log = plain.step(plain.init())
    assert log.bytes_up == log.bytes_down == 3 * (common + 4 * 5 * 8 + 8)


def test_clients_that_train_alone_still_say_why_newcomers_find_nothing() -> None:
    federation = make_federation(sizes=(9, 12))
    result = fedem.train(federation, "local", model=_build, rounds=1, local_layers="batch_norm", learning_rate=0.1)
    with pytest.raises(UserError, match="leave nothing to share"):
        result.personalize(federation.test.inputs, federation.test.targets)


@pytest.mark.parametrize(
    ("words", "leaves"),
    [
        ("bias", {"0.bias", "1.bias", "3.bias"}),
        ("head", {"3.weight", "3.bias"}),
        ("0", {"0.weight", "0.bias"}),
        ("*.weight, 3", {"0.weight", "1.weight", "3.weight", "3.bias"}),
        ("body", {f"{layer}.{leaf}" for layer in "01" for leaf in ("weight", "bias")} | STATISTICS),
        ("33%", {"0.weight", "0.bias"}),
        ("1.running_*", {"1.running_mean", "1.running_var"}),
    ],
)
def test_layers_are_found_by_name(words: str, leaves: set[str]) -> None:
    assert _model().leaves_called(words.replace(" ", "")) == leaves


def test_own_intercepts_on_shared_slopes_are_the_fixed_effects_estimator() -> None:
    generator = np.random.default_rng(0)
    owners = np.repeat([0, 1, 2], [8, 12, 20])
    inputs = generator.normal(size=(40, 2))
    targets = inputs @ [1.0, -2.0] + np.array([-3.0, 0.0, 4.0])[owners] + generator.normal(size=40)
    clients = [(inputs[owners == t], targets[owners == t]) for t in range(3)]
    federation = fedem.Federation.from_clients(clients, validation=0.0, test=0.0)
    # A step of gradient descent per round, on all samples: alternating averages are one descent of the joint problem.
    how = {
        "batch_size": 0,
        "local_epochs": 1,
        "solver": {"name": "sgd", "momentum": 0.0},
        "schedule": "constant",
        "dtype": "float64",
    }
    result = fedem.train(
        federation, "fedavg", rounds=400, learning_rate=0.3, local_layers=["bias"], evaluate_every=0, **how
    )
    exact = np.linalg.lstsq(np.hstack([inputs, np.eye(3)[owners]]), targets, rcond=None)[0]
    found = [result.predict(str(t), np.vstack([np.zeros(2), np.eye(2)])).squeeze().numpy() for t in range(3)]
    for t in range(3):
        np.testing.assert_allclose(found[t], exact[2 + t] + np.array([0.0, *exact[:2]]), atol=1e-6)


def test_what_can_not_keep_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"no layers called 'tail'; allowed: head, body, .*, weight, bias"):
        fedem.train(make_federation(), "fedavg", rounds=1, local_layers="tail")
    for word in ("body", "10%"):  # of one layer
        with pytest.raises(UserError, match=f"no layers called '{word}'"):
            fedem.train(make_federation(), "fedavg", rounds=1, local_layers=word)
    with pytest.raises(UserError, match="trains nothing else"):
        fedem.train(make_federation(), "fedavg", rounds=1, local_layers="bias,weight")
    with pytest.raises(UserError, match="normalises no batches"):
        fedem.train(make_federation(), "fedavg", rounds=1, local_layers="batch_norm")
    with pytest.raises(UserError, match="trains nothing else"):
        fedem.train(make_federation(), "fedavg", model=nn.BatchNorm1d(DIMENSION), rounds=1, local_layers="batch_norm")
    for method in ("qffl", "scaffold", "ifca"):
        with pytest.raises(UserError, match=f"method {method} upload more or less"):
            fedem.train(make_federation(), method, model=_build, rounds=1, local_layers="batch_norm")
