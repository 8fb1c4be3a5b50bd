"""What every method must obey. A new method is tested by being listed."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    DIMENSION,
    LOSSES,
    NAMES,
    SIZES,
    advance,
    distance,
    make_federation,
    make_model,
    make_model_for,
    make_training,
    same_states,
    scores_of,
    stacked,
)
from torch import nn

from fedem.data.federation import Federation
from fedem.engines import Batching, OneByOne
from fedem.methods import METHODS, Algorithm
from fedem.methods.decentralised import Graph
from fedem.methods.mixer import Alone
from fedem.models import Model
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import State, Training
from fedem.solvers import LBFGS, SGD, SOLVERS, Newton, Various

every_method = pytest.mark.parametrize("method", METHODS)


@functools.cache
def _trained(method: str) -> tuple[Training, State]:
    """Return a training and its state after two rounds, which many properties are compared with."""
    training = make_training(method)
    return training, advance(training, 2)


def _network(method: str) -> Model:
    between = nn.BatchNorm1d(6) if method == "fedbn" else nn.Tanh()
    return Model(nn.Sequential(nn.Linear(DIMENSION, 6), between, nn.Linear(6, 1)), LOSSES["logistic"], torch.float64)


# As few trials and iterations as show what a solver does: under vmap it makes them all.
_SOLVERS = {
    **{name: kind(weight_decay=0.1) for name, kind in SOLVERS.items()},
    "sgd": SGD(0.1, momentum=0.9),
    "lbfgs": LBFGS(0.1, history=2, num_trials=4),
    "various": Various(0.1, iterations=2),
}
_BATCHINGS = (
    Batching(0, local_epochs=2),
    Batching(1, local_steps=7),
    Batching(3, local_steps=5, drop_short=True),
    Batching(4, local_epochs=2),
    Batching(100, local_epochs=3),
)


# A batch normalisation has no second derivatives.
_IN_PLACE = {("fedbn", "newton"): "lbfgs", ("fedbn", "various"): "adam"}


def _pairs() -> Iterator[Any]:
    """All pairs of a method, a solver, a batching and a loss, in one row per method and solver.

    Each method meets every solver, every batching and every loss. From one method to the next the batchings move on by
    one against the solvers, and after five methods the losses do, so that these three meet each other as well.
    """
    for position, method in enumerate(METHODS):
        for number, usual in enumerate(_SOLVERS):
            solver = _IN_PLACE.get((method, usual), usual)
            batching = _BATCHINGS[(number + position) % len(_BATCHINGS)]
            loss = list(LOSSES)[(number + position // len(_BATCHINGS)) % len(LOSSES)]
            yield pytest.param(method, solver, batching, loss, id=f"{method}-{solver}-{batching}-{loss}")


@pytest.mark.parametrize(("method", "solver", "batching", "loss"), list(_pairs()))
def test_loop_equals_stacked(method: str, solver: str, batching: Batching, loss: str) -> None:
    settings: dict[str, Any] = {"solver": _SOLVERS[solver], "batching": batching, "loss": loss}
    rounds = 2 if solver == "sgd" else 1  # the others take five times as long for a step
    states = [advance(make_training(method, engine=engine, **settings), rounds) for engine in (OneByOne(), stacked())]
    assert distance(*states) < (1e-12 if solver == "sgd" else 1e-9)


def test_all_pairs_are_met() -> None:
    rows = [row.values for row in _pairs()]
    factors = (METHODS, _SOLVERS, _BATCHINGS, LOSSES)
    for first, second in itertools.combinations(range(4), 2):
        met = {(row[first], row[second]) for row in rows}
        assert met == set(itertools.product(factors[first], factors[second])) - _IN_PLACE.keys()


@pytest.mark.slow
@every_method
def test_loop_equals_stacked_in_single_precision(method: str) -> None:
    model = make_model_for(method, dtype=torch.float32)
    states = [advance(make_training(method, model=model, engine=engine), 2) for engine in (OneByOne(), stacked())]
    assert distance(*states) < 1e-5


@every_method
def test_chunk_size_and_memory_limit_are_irrelevant(method: str) -> None:
    _, reference = _trained(method)
    for engine in (stacked(2), stacked(max_bytes=1)):  # the last trains them one by one
        assert distance(advance(make_training(method, engine=engine), 2), reference) < 1e-12, engine


def _reordered(federation: Federation, order: list[int]) -> Federation:
    return federation.take(torch.tensor(order))


@pytest.mark.parametrize("cohort_size", [5, 2])
@every_method
def test_order_of_clients_is_irrelevant(method: str, cohort_size: int) -> None:
    order = [3, 0, 4, 2, 1]
    federation = make_federation()
    trainings = [
        make_training(method, data, cohort_size=cohort_size) for data in (federation, _reordered(federation, order))
    ]
    first, second = (advance(training, 2) for training in trainings)
    scores = [scores_of(t, state)["test"].losses for t, state in zip(trainings, (first, second), strict=True)]
    torch.testing.assert_close(scores[0][order], scores[1], rtol=0, atol=1e-12)
    for name, leaf in first.personal.items():
        torch.testing.assert_close(leaf[order], second.personal[name], rtol=0, atol=1e-12)


@every_method
def test_unsampled_clients_keep_their_personal_state(method: str) -> None:
    training = make_training(method, cohort_size=2)
    state = training.init()
    for _ in range(4):
        after, _ = training.step(state)
        rest = [t for t in range(len(SIZES)) if t not in training.sample(state.round).tolist()]
        for name, leaf in after.personal.items():
            assert torch.equal(leaf[rest], state.personal[name][rest])
        if isinstance(training.mixer, Alone):
            assert all(torch.equal(leaf[rest], state.shared[name][rest]) for name, leaf in after.shared.items())
        state = after


@every_method
def test_cohorts_have_their_size_and_reach_everybody(method: str) -> None:
    training = make_training(method, cohort_size=2)
    cohorts = [training.sample(k).tolist() for k in range(30)]
    assert all(len(set(cohort)) == 2 for cohort in cohorts)
    assert {client for cohort in cohorts for client in cohort} == set(range(len(SIZES)))


@every_method
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(method: str) -> None:
    _, first = _trained(method)
    again, other = (advance(make_training(method, seed=seed), 2) for seed in (0, 1))
    assert same_states(first, again)
    assert distance(first, other) > 1e-3


@every_method
def test_stepping_leaves_the_old_state_alone(method: str) -> None:
    training = make_training(method)
    state, twin = training.init(), training.init()
    training.step(state)
    assert same_states(state, twin)


@every_method
def test_a_checkpoint_resumes_to_the_same_bits(method: str, tmp_path: Path) -> None:
    training = make_training(method, cohort_size=3)
    middle = advance(training, 2)
    RunFolder(tmp_path / "c").save({"last": middle}, {"clients": list(NAMES)})
    states, facts = RunFolder(tmp_path / "c").load()
    assert facts == {"clients": list(NAMES)}
    assert same_states(states["last"], middle)
    assert same_states(advance(training, 2, states["last"]), advance(training, 4))


@pytest.mark.slow
@every_method
def test_a_checkpoint_of_many_leaves_resumes_to_the_same_bits(method: str, tmp_path: Path) -> None:
    """Leaves come back from a file in another order; nothing may be added up in another."""
    model = make_model() if method == "mocha" else _network(method)
    solver = SGD(0.01, momentum=0.9) if method in ("scaffold", "qffl") else LBFGS(0.01, history=2, num_trials=4)
    training = make_training(method, model=model, solver=solver, batching=Batching(0, 2), cohort_size=3)
    middle = advance(training, 1)
    RunFolder(tmp_path / "c").save({"last": middle}, {})
    states, _ = RunFolder(tmp_path / "c").load()
    assert same_states(advance(training, 1, states["last"]), advance(training, 2))


@every_method
def test_one_client(method: str) -> None:
    federation = make_federation(sizes=(9,))
    states = [advance(make_training(method, federation, engine=engine)) for engine in (OneByOne(), stacked())]
    assert distance(*states) < 1e-12


@every_method
def test_clients_with_one_sample(method: str) -> None:
    federation = make_federation(sizes=(1, 1, 1))
    states = [advance(make_training(method, federation, engine=engine)) for engine in (OneByOne(), stacked())]
    assert distance(*states) < 1e-12
    assert all(bool(torch.isfinite(leaf).all()) for leaf in states[0].shared.values())


@every_method
def test_a_client_with_one_class(method: str) -> None:
    federation = make_federation()
    federation.train.targets[:7] = 1
    state = advance(make_training(method, federation))
    assert all(bool(torch.isfinite(leaf).all()) for leaf in state.shared.values())
    assert not any(bool(leaf.isnan().any()) for leaf in state.personal.values())


@every_method
def test_training_lowers_the_training_loss(method: str) -> None:
    training = make_training(method, num_rounds=8, solver=SGD(0.01), batching=Batching(4))
    losses = [scores_of(training, state)["train"].loss for state in (training.init(), advance(training, 8))]
    assert losses[1] < losses[0] - 0.05  # one model for all can gain a tenth here


@every_method
def test_scores_agree_between_engines(method: str) -> None:
    training, state = _trained(method)
    scores = [scores_of(training, state, engine) for engine in (OneByOne(), stacked(), stacked(2))]
    for part in ("train", "test"):
        for other in scores[1:]:
            torch.testing.assert_close(scores[0][part].losses, other[part].losses, rtol=0, atol=1e-12)
            torch.testing.assert_close(scores[0][part].values, other[part].values, rtol=0, atol=1e-12)


# Models that go up and down with each client of a round, or either way along each link; what is counted besides is a
# few numbers.
MODELS_SENT = {
    "local": (0, 0),
    "fedem": (3, 3),
    "dfedem": (3, 3),
    "bfedem": (3, 3),
    "ensemble": (3, 3),
    "ifca": (1, 3),
    "scaffold": (2, 2),
    "fedfomo": (1, 5),  # its own and those of the four others
    "mocha": (1, 2),  # a dual vector; a task and its dual vector
}


@every_method
def test_bytes_are_those_of_the_messages(method: str) -> None:
    training = make_training(method)
    num_messages = 5  # and in a ring of five clients each hears two
    if isinstance(training.mixer, Graph):
        num_messages = 10
    _, log = training.step(training.init())
    sent_leaves = training.algorithm.model.trainable - training.mixer.local_leaves
    shapes, common = training.algorithm.model.leaf_shapes, training.algorithm.common
    model = 8 * sum(math.prod(shapes[name]) for name in sent_leaves)
    for sent, models in zip((log.bytes_up, log.bytes_down), MODELS_SENT.get(method, (1, 1)), strict=True):
        # Of leaves that all components have in common there is one.
        heads = 2 * sum(8 * math.prod(shapes[name]) for name in sent_leaves - common) if common else 0
        besides = sent - num_messages * (models * model + heads)
        assert 0 <= besides <= num_messages * 8 * 4
        assert besides == 0 or method in ("afl", "qffl", "ifca", "fedfomo", "mocha", "bfedem")


@every_method
def test_every_row_of_the_table_says_what_it_does(method: str) -> None:
    row = METHODS[method]
    assert all((row.title, row.summary, row.personal, row.sent, row.unseen))
    assert row.paper or method in ("local", "bfedem", "fedem-heads")


@every_method
def test_every_method_declares_what_its_client_uploads(method: str) -> None:
    kind = METHODS[method].algorithm
    plain = [hook for hook in ("finish", "summand", "update") if getattr(kind, hook) is getattr(Algorithm, hook)]
    assert kind.uploads_model == ({"finish", "summand"} <= set(plain))
    assert kind.compressible == (len(plain) == 3)


@every_method
def test_clients_learn_of_others_only_where_something_is_sent(method: str) -> None:
    """Spoiling one client's targets changes the others' predictors, unless clients are alone."""
    federation, spoilt = make_federation(), make_federation()
    spoilt.train.targets[sum(SIZES[:3]) : sum(SIZES[:4])] = 1  # the fourth of five clients
    losses = [
        scores_of(training, advance(training, 3))["train"].losses[[0, 1, 2, 4]]
        for training in (
            make_training(method, data, num_rounds=3, **_EAGER.get(method, {})) for data in (federation, spoilt)
        )
    ]
    assert torch.equal(*losses) == (method == "local")


# What lets a method's clients meet within three rounds.
_EAGER = {"mocha": {"relations_every": 2}, "fedfomo": {"held_out": 0.4}}


@every_method
def test_loop_equals_stacked_for_a_network(method: str) -> None:
    model = _network(method)
    settings = {"model": model, "batching": Batching(4)}
    states = [advance(make_training(method, engine=engine, **settings), 2) for engine in (OneByOne(), stacked(2))]
    assert distance(*states) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedem", "fedavg", "local"])
def test_newton_reaches_a_stationary_point_of_one_clients_problem(method: str) -> None:
    federation = make_federation(sizes=(40,))
    training = make_training(method, federation, solver=Newton(0.1), batching=Batching(0, local_epochs=3))
    before = advance(training, 60)
    after = advance(training, 2, before)
    for name, leaf in before.shared.items():
        torch.testing.assert_close(after.shared[name], leaf, rtol=0, atol=1e-4)
