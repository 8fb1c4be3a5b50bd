"""Methods against each other in the limits where they must agree, and against centralised EM."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from centralised_em import CentralizedEM, EMState
from helpers import LOSSES, advance, make_federation, make_model, make_training, stacked

from fedem.core.random import COMPONENTS, derive
from fedem.core.tree import tree_index
from fedem.engines import Batching, Engine, OneByOne
from fedem.methods.fedem import FedEM
from fedem.runs.rounds import State
from fedem.solvers import Newton

every_loss = pytest.mark.parametrize("loss", LOSSES)


@pytest.mark.parametrize("engine", [OneByOne(), stacked()], ids=["one_by_one", "stacked"])
@pytest.mark.parametrize("method", ["fedem", "bfedem"])
@every_loss
def test_fedem_with_one_component_is_fedavg(loss: str, method: str, engine: Engine) -> None:
    fedem = make_training(method, loss=loss, num_components=1, engine=engine)
    fedavg = make_training("fedavg", loss=loss, engine=engine)
    # The same initial model: FedEM derives one seed a component.
    seed = int(derive(int(derive(fedavg.seed, COMPONENTS)), 0))
    start = State(0, {k: v[None] for k, v in fedavg.algorithm.init_shared(seed).items()}, {})
    first, second = advance(fedem), advance(fedavg, state=start)
    for name, leaf in second.shared.items():
        torch.testing.assert_close(first.shared[name][:, 0], leaf, rtol=0, atol=1e-14)
    assert torch.equal(first.personal["log_weights"], torch.zeros(5, 1, dtype=torch.float64))


def test_one_client_alone_is_one_client_with_a_server() -> None:
    federation = make_federation(sizes=(20,))
    local, fedavg = (advance(make_training(method, federation)) for method in ("local", "fedavg"))
    for name, leaf in local.shared.items():
        torch.testing.assert_close(leaf, fedavg.shared[name], rtol=0, atol=0)


def _em_start(training_state: State) -> EMState:
    return EMState(tree_index(training_state.shared, 0), training_state.personal["log_weights"])


@every_loss
def test_fedem_with_a_full_local_solve_and_one_client_is_centralised_em(loss: str) -> None:
    federation = make_federation(loss, sizes=(60,))
    training = make_training("fedem", federation, loss=loss, solver=Newton(0.05), batching=Batching(0, local_epochs=30))
    state = training.init()
    em = CentralizedEM(training.algorithm.model, weight_decay=0.05)
    reference = list(em.steps(_em_start(state), federation.train, 3))[1::2]
    for expected in reference:
        state, _ = training.step(state)
        for name, leaf in expected.components.items():
            torch.testing.assert_close(state.shared[name][0], leaf, rtol=0, atol=1e-7)
        torch.testing.assert_close(state.personal["log_weights"], expected.log_weights, rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@every_loss
def test_likelihood_never_falls_at_any_step_of_exact_em(loss: str, seed: int) -> None:
    federation = make_federation(loss, sizes=(15, 6, 10), seed=seed)
    algorithm = FedEM(make_model(loss), Newton(), num_components=3)
    components = algorithm.init_shared(seed)
    weights = [algorithm.init_personal(components, key)["log_weights"] for key in federation.keys]
    state = EMState(components, torch.stack(weights))
    em = CentralizedEM(algorithm.model, weight_decay=0.01)
    values = [em.objective(state, federation.train)]
    values += [em.objective(step, federation.train) for step in em.steps(state, federation.train, 6)]
    falls = [after <= before + 1e-12 for before, after in pairwise(values)]
    assert all(falls)
    assert values[-1] < values[0] - 0.01


def test_clients_keep_talking_only_through_the_average() -> None:
    """One FedEM round is the n_t-weighted mean of what each client would upload alone."""
    federation = make_federation()
    training = make_training("fedem", federation)
    start = training.init()
    expected = {name: torch.zeros_like(leaf[0]) for name, leaf in start.shared.items()}
    for position in range(federation.num_clients):
        alone = make_training("fedem", federation.take(torch.tensor([position])))
        personal = {name: leaf[position : position + 1] for name, leaf in start.personal.items()}
        after, _ = alone.step(State(0, start.shared, personal))
        share = int(federation.train.sizes[position]) / len(federation.train)
        expected = {name: total + share * after.shared[name][0] for name, total in expected.items()}
    together, _ = training.step(start)
    for name, leaf in expected.items():
        torch.testing.assert_close(together.shared[name][0], leaf, rtol=0, atol=1e-13)


def test_returning_clients_start_from_the_current_components() -> None:
    """With sampling, what a client uploads depends on the components it receives, not on those it had last time."""
    training = make_training("fedem", cohort_size=1, num_rounds=10)
    state = advance(training, 6)
    # Had clients kept old components, changing the current ones would not change the next state.
    moved = State(state.round, {name: leaf + 1 for name, leaf in state.shared.items()}, state.personal)
    first, _ = training.step(state)
    second, _ = training.step(moved)
    assert all(not torch.allclose(first.shared[name], second.shared[name]) for name in first.shared)


def test_momentum_starts_afresh_each_round() -> None:
    """A round depends on the state alone: stepping twice from the same state gives the same bits."""
    training = make_training("fedem")
    state = advance(training, 2)
    (first, _), (second, _) = training.step(state), training.step(state)
    assert all(torch.equal(first.shared[name], second.shared[name]) for name in first.shared)
