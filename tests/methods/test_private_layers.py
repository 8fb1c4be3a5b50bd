"""Layers that methods keep with their clients or hold fixed: FedPer, FedRep, FedBABU, LG-FedAvg, FedBN."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from deployments import make_plan, write_sample
from helpers import (
    DIMENSION,
    LOSSES,
    StopError,
    advance,
    distance,
    make_federation,
    make_personalizer,
    make_training,
    same_states,
    stop_at,
)
from newcomers import NEWCOMERS, both_engines
from torch import nn

import fedem
from fedem.core.errors import UserError
from fedem.core.random import SHUFFLE, derive
from fedem.core.tree import Tree, tree_index
from fedem.deploy.flower.project import check_server
from fedem.engines import Batching, OneByOne, Stacked
from fedem.engines.base import BatchPlan
from fedem.methods import METHODS, Batch
from fedem.methods.steps import SingleModel
from fedem.models import Model
from fedem.runs.rounds import Training
from fedem.solvers import LBFGS, SGD, Adam, Newton, Solver

PRIVATE = ("fedper", "fedrep", "fedbabu", "lgfedavg", "fedbn")
HEAD, BODY = ("2.weight", "2.bias"), ("0.weight", "0.bias")


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSION, 3), nn.Tanh(), nn.Linear(3, 1))


def _normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSION, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


def _model() -> Model:
    return Model(_build, LOSSES["logistic"], torch.float64)


# FedAvg with other layers.


@pytest.mark.parametrize(
    ("method", "words", "model"),
    [("fedper", "head", _build), ("lgfedavg", "body", _build), ("fedbn", "batch_norm", _normalising)],
)
def test_it_is_fedavg_whose_clients_keep_these_layers(method: str, words: str, model: object) -> None:
    federation = make_federation(sizes=(9, 12, 8)).hold_out(0.34, 0)
    settings = {"model": model, "rounds": 3, "learning_rate": 0.1, "batch_size": 4}
    named = fedem.train(federation, method, **settings)
    plain = fedem.train(federation, "fedavg", local_layers=words, **settings)
    assert same_states(named.state(), plain.state())
    for figure in ("test_loss", "unseen_test_loss", "bytes_up_per_round"):
        assert named.summary[figure] == plain.summary[figure]


def test_what_a_run_asks_for_takes_the_place_of_the_methods_own_layers() -> None:
    settings = {"model": _build, "rounds": 2, "learning_rate": 0.1}
    asked = fedem.train(make_federation(), "fedper", local_layers="bias", **settings)
    plain = fedem.train(make_federation(), "fedavg", local_layers="bias", **settings)
    assert same_states(asked.state(), plain.state())


# Steps that hold some leaves.

SOLVERS: dict[str, Solver] = {
    "decay": SGD(0.1),
    "momentum": SGD(0.1, momentum=0.9, nesterov=True),
    "adam": Adam(0.1),
    "lbfgs": LBFGS(0.1, history=3),
    "newton": Newton(0.1, ridge=0.0),
    "newton without decay": Newton(),
}


@pytest.mark.parametrize("held", [HEAD, BODY], ids=["head", "body"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_held_leaf_is_a_constant_to_every_solver(solver: str, held: tuple[str, ...]) -> None:
    """The others move as those of a model in which the held ones are frozen, and the held ones not by a bit."""
    model = _model()
    frozen = Model(lambda: _frozen(held), LOSSES["logistic"], torch.float64)
    start = model.init(3)
    data, results = make_federation().train.client(3), []
    for each, keep in ((model, held), (frozen, ())):
        algorithm = METHODS["fedavg"].algorithm(each, SOLVERS[solver])
        assert isinstance(algorithm, SingleModel)
        local, _ = algorithm.begin(start, {}, {}, torch.ones(14, dtype=torch.bool))
        for step in range(4):
            rows = slice(3 * step, 3 * step + 5)
            weights = torch.full((len(data[1][rows]),), 1 / len(data[1][rows]), dtype=torch.float64)
            batch = Batch(data[0][rows], data[1][rows], weights, {}, torch.tensor(0))
            rate = torch.tensor(0.1, dtype=torch.float64)
            hold = frozenset(keep)
            local = algorithm.holding_step(local, batch, rate, hold) if hold else algorithm.step(local, batch, rate)
        results.append(local.shared)
    for name, leaf in start.items():
        if name in held:
            assert torch.equal(results[0][name], leaf)
        else:
            assert not torch.equal(results[0][name], leaf)
            torch.testing.assert_close(results[0][name], results[1][name], rtol=0, atol=1e-9)


def _frozen(names: tuple[str, ...]) -> nn.Module:
    module = _build()
    for name, leaf in module.named_parameters():
        leaf.requires_grad_(name not in names)
    return module


# FedRep.


def _by_hand(start: Tree, training: Training, position: int, head_steps: int) -> Tree:
    """A round of FedRep's client with torch's own SGD: the head for some steps, then the body."""
    federation = training.federation
    inputs, targets = federation.train.client(position)
    module = _build().double()
    module.load_state_dict(start)
    key = derive(federation.keys[position], SHUFFLE, 0, 0)[None]
    plan = BatchPlan(training.batching, federation.train.sizes[position : position + 1], key, torch.device("cpu"))
    head, body = (
        torch.optim.SGD(module[layer].parameters(), lr=0.2, momentum=0.9, weight_decay=0.01) for layer in (2, 0)
    )
    for step in range(int(plan.steps)):
        rows = plan.batch(step, slice(1)).positions[0]
        module.zero_grad()
        LOSSES["logistic"].negative_log_likelihood(module(inputs[rows]), targets[rows]).mean().backward()
        (head if step < head_steps else body).step()
    return {name: leaf.detach() for name, leaf in module.state_dict().items()}


@both_engines
def test_fedrep_trains_the_head_and_then_the_body(engine: OneByOne | Stacked) -> None:
    training = make_training("fedrep", model=_model(), engine=engine, batching=Batching(4, local_epochs=5))
    start = training.init()
    after, _ = training.step(start)
    served = training.mixer.read(start.shared, start.memory, torch.tensor([0]))
    first = tree_index(served.shared, 0)
    # Clients of 7, 1, 10, 14 and 5 samples take 2, 1, 3, 4 and 2 steps in a pass.
    own = [_by_hand(first, training, t, 4 * steps) for t, steps in enumerate((2, 1, 3, 4, 2))]
    shares = training.federation.train.sizes.double() / len(training.federation.train)
    for name in HEAD:
        expected = torch.stack([tree[name] for tree in own])
        torch.testing.assert_close(after.memory[f"local/{name}"], expected, rtol=0, atol=1e-12)
    for name in BODY:
        expected = torch.einsum("t,t...->...", shares, torch.stack([tree[name] for tree in own]))
        torch.testing.assert_close(after.shared[name][0], expected, rtol=0, atol=1e-12)


def test_the_parts_follow_each_other_in_a_network_whose_short_batches_wait() -> None:
    """Of convolutions, whose last steps are taken by clients of similar size."""

    def build() -> nn.Module:
        window = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten())
        return nn.Sequential(window, nn.Tanh(), nn.Linear(3, 1))

    model = Model(build, LOSSES["logistic"], torch.float64)
    assert model.is_large
    each = (
        make_training("fedrep", model=model, engine=engine, batching=Batching(4, local_epochs=5))
        for engine in (OneByOne(), Stacked())
    )
    assert distance(*(advance(training, 2) for training in each)) < 1e-12


@pytest.mark.parametrize(
    ("share", "steps", "still"),
    [(1.0, 1, HEAD), (0.0, 3, HEAD), (0.1, 4, HEAD)],
    ids=["the last step is of the body", "no share", "a share of less than half a step"],
)
def test_a_part_without_steps_stays(share: float, steps: int, still: tuple[str, ...]) -> None:
    batching = Batching(4, local_steps=steps)
    training = make_training("fedrep", model=_model(), batching=batching, head_share=share)
    start = training.init()
    after, _ = training.step(start)
    assert all(torch.equal(after.memory[f"local/{name}"], start.memory[f"local/{name}"]) for name in still)
    assert all(not torch.equal(after.shared[name], start.shared[name]) for name in BODY)


def test_the_bodys_statistics_stay_while_the_head_trains() -> None:
    model = Model(_normalising, LOSSES["logistic"], torch.float64)
    training = make_training("fedrep", model=model, batching=Batching(4, local_steps=5))
    after, _ = training.step(training.init())
    assert int(after.shared["1.num_batches_tracked"]) == 1  # of five


def test_a_client_of_fedrep_that_trains_alone_trains_its_head() -> None:
    training = make_training("fedrep", model=_model())
    state = advance(training)
    before = make_personalizer(training).predictors(state, training.federation)
    after = make_personalizer(training, fine_tune_epochs=2).predictors(state, training.federation)
    for name in HEAD:
        assert bool((before.own[name] != after.own[name]).flatten(1).any(1).all())
    assert all(torch.equal(before.own[name], after.own[name]) for name in BODY)


# FedBABU.


@both_engines
@pytest.mark.parametrize("solver", [SGD(0.1, momentum=0.9), Adam(0.1), LBFGS(0.1)], ids=["sgd", "adam", "lbfgs"])
def test_fedbabus_head_stays_as_it_was_drawn_until_clients_fine_tune(
    engine: OneByOne | Stacked, solver: Solver
) -> None:
    training = make_training("fedbabu", model=_model(), engine=engine, solver=solver)
    start = training.init()
    state = advance(training, 3, start)
    assert all(torch.equal(state.shared[name], start.shared[name]) for name in HEAD)
    assert all(not torch.equal(state.shared[name], start.shared[name]) for name in BODY)
    assert not state.memory  # all clients read the same
    tuned = make_personalizer(training, fine_tune_epochs=1).predictors(state, training.federation)
    for name in (*HEAD, *BODY):
        assert bool((tuned.own[name] != state.shared[name]).flatten(1).any(1).all())


def test_fedbabus_round_is_fedavgs_of_a_model_with_a_frozen_head() -> None:
    frozen = Model(lambda: _frozen(HEAD), LOSSES["logistic"], torch.float64)
    states = [advance(make_training(name, model=model)) for name, model in (("fedbabu", _model()), ("fedavg", frozen))]
    assert distance(*states) < 1e-12


def test_fedbabus_head_stays_over_a_graph_and_everybody_has_the_same() -> None:
    federation = make_federation()
    settings = {"model": _build, "graph": {"name": "ring", "scale": "updates"}, "fine_tune_epochs": 0}
    result = fedem.train(federation, "fedbabu", rounds=4, learning_rate=0.1, **settings)
    state = result.state()
    drawn = fedem.train(federation, "fedbabu", rounds=1, learning_rate=1e-30, **settings).state().shared
    for name in HEAD:
        assert all(torch.equal(row, drawn[name][0]) for row in state.shared[name])
    assert len(state.shared["0.weight"].unique(dim=0)) == 5


def test_runs_fine_tune_fedbabu_by_themselves() -> None:
    result = fedem.train(make_federation(), "fedbabu", model=_build, rounds=2, learning_rate=0.1)
    assert result.config.run.fine_tune_epochs == 5
    heads = torch.stack([result.client(name).mixture.components["2.weight"][0] for name in result.names])
    assert len(heads.unique(dim=0)) == len(heads)
    assert fedem.Config.build({"method": {"name": "fedrep"}}).batching.local_epochs == 5


# All of them.


@pytest.mark.parametrize("method", PRIVATE)
def test_a_model_of_one_layer_is_refused(method: str) -> None:
    refusal = "no batches" if method == "fedbn" else "has only one layer"
    with pytest.raises(UserError, match=f"Method {method} .*{refusal}.*; allowed"):
        fedem.train(make_federation(), method, rounds=1)


def test_a_body_that_is_frozen_leaves_one_layer() -> None:
    for method in ("fedper", "fedbabu"):
        with pytest.raises(UserError, match="only one layer that is trained"):
            fedem.train(make_federation(), method, model=lambda: _frozen(BODY), rounds=1)


def test_fedbn_needs_batch_normalisations_and_something_else() -> None:
    with pytest.raises(UserError, match=r"Method fedbn keeps batch_norm .* normalises no batches; allowed: another"):
        fedem.train(make_federation(), "fedbn", model=_build, rounds=1)


@pytest.mark.parametrize("method", PRIVATE)
def test_runs_resume_to_the_same_bits_and_welcome_newcomers(method: str, tmp_path: Path) -> None:
    federation = make_federation(sizes=(9, 12, 8)).hold_out(0.34, 0)
    settings = {"model": _normalising, "checkpoint_every": 2, "learning_rate": 0.1, "batch_size": 4}
    whole = fedem.train(federation, method, rounds=5, out=tmp_path / "whole", **settings)
    with pytest.raises(StopError):
        fedem.train(federation, method, rounds=5, out=tmp_path / "cut", listener=stop_at(3), **settings)
    resumed = fedem.train(federation, method, rounds=5, out=tmp_path / "cut", resume=True, **settings)
    assert same_states(whole.state(), resumed.state())
    loaded = fedem.Result.load(tmp_path / "cut", model=_normalising)
    assert loaded.summary["num_unseen_clients"] == 1
    inputs = federation.test.inputs
    ann, bob = (loaded.predict(name, inputs) for name in federation.names)
    assert torch.equal(ann, whole.predict(federation.names[0], inputs))
    assert not torch.equal(ann, bob)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lgfedavg"])
def test_newcomers_take_what_is_shared_and_the_mean_of_the_rest(method: str) -> None:
    training = make_training(method, model=_model())
    state = advance(training)
    found = make_personalizer(training).personalize(state, NEWCOMERS.train, NEWCOMERS.keys)
    shares = training.federation.train.sizes.double() / len(training.federation.train)
    for name, leaf in tree_index(found.own, 0).items():
        expected = state.shared[name][0] if name in state.shared else None
        if expected is None:
            expected = torch.einsum("t,t...->...", shares, state.memory[f"local/{name}"])
        torch.testing.assert_close(leaf, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "lgfedavg", "fedbn"])
def test_kept_layers_and_compressed_messages_do_not_go_together(method: str) -> None:
    with pytest.raises(UserError, match=rf"\[compression\] is on, but with method {method}, which keeps"):
        fedem.train(make_federation(), method, model=_normalising, rounds=1, compression={"updates": "int8"})
    row = METHODS[method]
    assert not row.is_compressible
    assert not row.is_diagnosable
    assert row.goes_over_graph
    graph = {"name": "ring", "start": "apart"}
    with pytest.raises(UserError, match=f"apart', but clients of {method} keep layers"):
        fedem.train(make_federation(), method, model=_normalising, rounds=1, graph=graph)


def test_they_go_over_a_graph_and_layers_still_stay() -> None:
    result = fedem.train(make_federation(), "fedper", model=_build, rounds=3, graph="ring", learning_rate=0.1)
    state = result.state()
    assert state.shared.keys() == set(BODY)
    assert len(state.memory["local/2.weight"].unique(dim=0)) == 5


def test_a_model_that_the_data_choose_has_two_layers() -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(20, 2)).astype(np.float32), rng.integers(0, 2, 20)) for _ in range(3)]
    federation = fedem.Federation.from_clients(pairs)
    assert fedem.train(federation, "fedper", model="auto", rounds=1).config.name("model") == "mlp"


def test_a_server_of_whole_models_refuses_kept_layers(tmp_path: Path) -> None:
    """FedBABU, whose clients send all, is held to the simulator behind Flower in tests/deploy."""
    sample, model = write_sample(tmp_path), {"name": "mlp", "hidden": 4}
    for method, is_refused in (("fedper", True), ("fedrep", True), ("fedbabu", False)):
        plan, _ = make_plan(sample, method={"name": method}, model=model)
        with pytest.raises(UserError, match=f"Method {method} needs LocalLayers") if is_refused else nullcontext():
            check_server(plan)
