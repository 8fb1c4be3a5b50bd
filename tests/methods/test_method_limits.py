"""Every method in the limits where it must be FedAvg or Local."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import LOSSES, advance, make_federation, make_training, scores_of
from least_squares import WHOLE, assert_same

from fedem.core.random import COMPONENTS, derive
from fedem.core.tree import take_prefix, tree_map, tree_repeat
from fedem.data.federation import Federation
from fedem.engines import Batching
from fedem.runs.rounds import State
from fedem.solvers import SGD

every_loss = pytest.mark.parametrize("loss", LOSSES)


# FedAvg as a limit.


@cache
def _fedavgs(cohort_size: int) -> State:
    return advance(make_training("fedavg", cohort_size=cohort_size))


@pytest.mark.parametrize("cohort_size", [5, 2])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedprox", {"mu": 0.0}),
        ("qffl", {"q": 0.0}),
        ("clustered", {"mean_tolerance": 1e-300}),
        ("clustered", {"member_tolerance": 1e300}),
        ("clustered", {"min_members": 3}),
        ("apfl", {"alpha": 0.0, "adaptive": False}),
        ("apfl", {"alpha": 0.3}),
        ("ditto", {"pull": 2.0}),
        ("perfedavg", {"inner_rate": 0.0, "independent": False}),
        ("perfedavg", {"inner_rate": 0.0, "independent": False, "hessian_free": True}),
        ("fedavg+", {}),
    ],
    ids=str,
)
def test_methods_whose_shared_model_is_fedavgs(method: str, settings: dict[str, object], cohort_size: int) -> None:
    other = advance(make_training(method, cohort_size=cohort_size, **settings))
    assert_same(other.shared, _fedavgs(cohort_size).shared)


@every_loss
def test_ifca_with_one_cluster_is_fedavg(loss: str) -> None:
    ifca, fedavg = make_training("ifca", loss=loss, num_clusters=1), make_training("fedavg", loss=loss)
    # The same initial model: IFCA derives one seed a cluster.
    seed = int(derive(int(derive(fedavg.seed, COMPONENTS)), 0))
    start = State(0, tree_repeat(fedavg.algorithm.init_shared(seed), 1), {})
    first, second = advance(ifca), advance(fedavg, state=start)
    assert_same(tree_map(lambda leaf: leaf[:, 0], first.shared), second.shared)


def test_apfl_without_own_share_predicts_with_fedavgs_model() -> None:
    apfl, fedavg = make_training("apfl", alpha=0.0, adaptive=False), make_training("fedavg")
    first, second = (scores_of(training, advance(training)) for training in (apfl, fedavg))
    torch.testing.assert_close(first["test"].losses, second["test"].losses, rtol=0, atol=1e-12)


def test_scaffold_is_fedavg_in_its_first_round() -> None:
    for cohort_size in (5, 2):
        first, second = (advance(make_training(m, cohort_size=cohort_size), 1) for m in ("scaffold", "fedavg"))
        for name, leaf in second.shared.items():
            torch.testing.assert_close(first.shared[f"model/{name}"], leaf, rtol=0, atol=1e-12)


@every_loss
def test_scaffold_with_one_client_is_fedavg(loss: str) -> None:
    federation = make_federation(loss, sizes=(13,))
    solver = SGD(0.01)
    first, second = (advance(make_training(m, federation, loss=loss, solver=solver), 5) for m in ("scaffold", "fedavg"))
    for name, leaf in second.shared.items():
        torch.testing.assert_close(first.shared[f"model/{name}"], leaf, rtol=0, atol=1e-12)
    assert all(float(leaf.abs().max()) > 1e-3 for leaf in first.personal.values())  # the controls are there


def test_afl_that_does_not_climb_is_fedavg_with_clients_of_one_size() -> None:
    federation = make_federation(sizes=(8, 8, 8))
    for cohort_size in (3, 2):
        first, second = (
            advance(make_training(method, federation, cohort_size=cohort_size, **settings))
            for method, settings in (("afl", {"climb_rate": 0.0}), ("fedavg", {}))
        )
        assert_same(first.shared, second.shared)


@pytest.mark.parametrize("cohort_size", [3, 2])
def test_pfedhn_whose_network_says_nothing_is_fedavg(cohort_size: int) -> None:
    """The base is a model, and a step of 1 along the mean change is the mean; zero layers pass no gradient on."""
    federation = make_federation(sizes=(8, 3, 12))
    training = make_training("pfedhn", federation, server_rate=1.0, cohort_size=cohort_size)
    start = training.init()
    silent = State(0, start.shared, start.personal, tree_map(torch.zeros_like, start.memory))
    first = advance(training, state=silent)
    second = advance(make_training("fedavg", federation, cohort_size=cohort_size))
    assert_same(first.shared, second.shared)


def test_fedu_that_pulls_all_the_way_is_fedavg_with_clients_of_one_size() -> None:
    federation = make_federation(sizes=(8, 8, 8))
    first = advance(make_training("fedu", federation, penalty=1e9))
    second = advance(make_training("fedavg", federation))
    for name, leaf in second.shared.items():
        torch.testing.assert_close(first.shared[name], leaf.expand_as(first.shared[name]), rtol=0, atol=1e-12)


# Local as a limit.


@every_loss
def test_apfl_with_its_own_share_alone_is_local(loss: str) -> None:
    apfl = advance(make_training("apfl", loss=loss, alpha=1.0, adaptive=False))
    local = advance(make_training("local", loss=loss))
    for name, leaf in local.shared.items():
        torch.testing.assert_close(apfl.personal[f"own/{name}"], leaf, rtol=0, atol=1e-12)


@every_loss
def test_dittos_own_models_without_a_pull_are_locals(loss: str) -> None:
    ditto, local = advance(make_training("ditto", loss=loss, pull=0.0)), advance(make_training("local", loss=loss))
    assert_same(take_prefix("own", ditto.personal), local.shared)


@pytest.mark.parametrize("cohort_size", [5, 2])
def test_fedu_without_a_penalty_is_local(cohort_size: int) -> None:
    fedu, local = (
        advance(make_training(method, cohort_size=cohort_size, **settings))
        for method, settings in (("fedu", {"penalty": 0.0}), ("local", {}))
    )
    assert_same(fedu.shared, local.shared)


@pytest.mark.parametrize("cohort_size", [5, 2])
def test_l2sgd_without_a_penalty_is_local_with_as_many_steps(cohort_size: int) -> None:
    l2sgd = make_training("l2sgd", penalty=0.0, cohort_size=cohort_size)
    local = make_training("local", cohort_size=cohort_size)
    state = local.init()
    lengths = []
    for index in range(4):
        steps = l2sgd.mixer.plan({}, {}, l2sgd.round(index, torch.arange(5))).num_steps
        assert steps is not None
        lengths.append(steps)
        state, _ = replace(local, batching=Batching(4, local_steps=steps)).step(state)
    assert len(set(lengths)) > 1
    assert_same(advance(l2sgd, 4).shared, state.shared)


def test_fedfomo_alone_is_local_without_the_held_out_samples() -> None:
    """One client has no candidates; the whole batch without the held-out samples is the batch of the others."""
    federation = make_federation(sizes=(30,))
    fomo = make_training("fedfomo", federation, batching=WHOLE)
    state = fomo.init()
    inputs, targets = federation.train.client(0)
    _, samples = fomo.algorithm.begin(
        state.shared,
        tree_map(lambda leaf: leaf[0], state.personal),
        fomo.algorithm.score(state.shared, inputs, targets),
        torch.ones(30, dtype=torch.bool),
    )
    used = samples["used"] > 0
    assert 0 < int((~used).sum()) < 15
    fewer = Federation.from_parts([(inputs[used], targets[used])], names=federation.names)
    assert_same(advance(fomo).shared, advance(make_training("local", fewer, batching=WHOLE)).shared)
