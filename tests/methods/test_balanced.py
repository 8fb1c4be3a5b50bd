"""Balanced FedEM against FedEM, FedAvg, IFCA and centralised EM where they must agree; and where it leaves FedEM."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from centralised_em import CentralizedEM, EMState
from helpers import DIMENSION, advance, make_federation, make_training
from hypothesis import given
from hypothesis import strategies as st
from planted import THETAS, planted_federation

import fedem
from fedem.core.tree import tree_index
from fedem.engines import Batching
from fedem.methods.base import Batch, Local
from fedem.methods.fedem import BalancedFedEM
from fedem.runs.rounds import State, Training
from fedem.solvers import SGD, Newton
from fedem.solvers.schedules import Constant


def test_one_gradient_step_is_fedems_with_rates_divided_by_the_components_masses() -> None:
    whole = {"solver": SGD(), "batching": Batching(0), "schedule": Constant(0.1)}
    plain, balanced = (make_training(method, **whole) for method in ("fedem", "bfedem"))
    start = plain.init()
    first, second = (advance(training, 1, start) for training in (plain, balanced))
    weights = first.personal["log_weights"].exp()
    torch.testing.assert_close(second.personal["log_weights"].exp(), weights)
    sizes = plain.federation.train.sizes.double()
    masses = (sizes / sizes.sum()) @ weights
    for name, leaf in start.shared.items():
        rows = masses.reshape(-1, *(1,) * (leaf.ndim - 2))
        moved = first.shared[name] - leaf
        assert float(moved.abs().max()) > 1e-3
        torch.testing.assert_close((second.shared[name] - leaf) * rows, moved, rtol=0, atol=1e-14)


def test_with_a_full_local_solve_and_one_client_it_is_centralised_em() -> None:
    """A minimum does not change when its objective is divided by a number."""
    federation = make_federation("squared_error", sizes=(60,))
    training = make_training(
        "bfedem", federation, loss="squared_error", solver=Newton(), batching=Batching(0, local_epochs=30)
    )
    state = training.init()
    begun = EMState(tree_index(state.shared, 0), state.personal["log_weights"])
    for expected in list(CentralizedEM(training.algorithm.model, weight_decay=0).steps(begun, federation.train, 3))[
        1::2
    ]:
        state, _ = training.step(state)
        for name, leaf in expected.components.items():
            torch.testing.assert_close(state.shared[name][0], leaf, rtol=0, atol=1e-7)
        torch.testing.assert_close(state.personal["log_weights"], expected.log_weights, rtol=0, atol=1e-7)


def _near(training: Training, thetas: np.ndarray, weights: list[list[float]]) -> State:
    """A start whose components and mixture weights are these."""
    start = training.init()
    weight = torch.from_numpy(thetas).reshape(1, len(thetas), 1, DIMENSION)
    personal = {"log_weights": torch.tensor(weights, dtype=torch.float64).log()}
    return State(0, start.shared | {"weight": weight.clone()}, personal, start.memory)


_PLANTED = {
    "loss": "squared_error",
    "solver": SGD(),
    "batching": Batching(0, local_steps=3),
    "schedule": Constant(0.15),
}


def test_clients_that_are_sure_of_their_component_train_as_in_ifca() -> None:
    planted = [0, 1, 1, 0, 1]
    federation = planted_federation(planted)
    balanced = make_training("bfedem", federation, num_components=2, **_PLANTED)
    ifca = make_training("ifca", federation, num_clusters=2, **_PLANTED)
    sure = [[float(mine == 0), float(mine == 1)] for mine in planted]
    start = _near(balanced, THETAS[:2] + 0.3, sure)
    first = advance(balanced, 4, start)
    second = advance(ifca, 4, State(0, start.shared, ifca.init().personal, {}))
    assert second.personal["log_weights"].argmax(1).tolist() == planted
    for name, leaf in second.shared.items():
        torch.testing.assert_close(first.shared[name], leaf, rtol=0, atol=1e-9)


def test_a_component_of_few_clients_is_learnt_as_fast_as_one_of_many() -> None:
    planted = [0] * 9 + [1]
    federation = planted_federation(planted)
    left = {}
    for method in ("fedem", "bfedem"):
        training = make_training(method, federation, num_components=2, **_PLANTED)
        state = advance(training, 6, _near(training, THETAS[:2] / 2, [[0.5, 0.5]] * 10))
        left[method] = (state.shared["weight"][0, :, 0] - torch.from_numpy(THETAS[:2])).norm(dim=1)
    assert left["fedem"][1] > 5 * left["fedem"][0]
    assert left["bfedem"][1] < 2 * left["bfedem"][0]
    assert left["bfedem"][1] < left["fedem"][1] / 3


def _counts(logits: list[list[float]], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What samples count for each of two components, and the batch's weights."""
    log_responsibilities = torch.tensor(logits, dtype=torch.float64).T.log_softmax(0)
    log_weights = log_responsibilities.exp().mean(1).log()
    weights = torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)
    nothing = torch.zeros(len(rows))
    batch = Batch(
        nothing, nothing, weights, {"log_responsibilities": log_responsibilities[:, rows]}, torch.zeros(()).long()
    )
    algorithm = make_training("bfedem", num_components=2).algorithm
    assert isinstance(algorithm, BalancedFedEM)
    speeds = algorithm.speeds(Local({}, {"log_weights": log_weights}, {}, {}), batch)
    return speeds[:, None] * batch.samples["log_responsibilities"].exp(), weights


numbers = st.floats(-600, 600)
samples = st.lists(st.tuples(numbers, numbers).map(list), min_size=1, max_size=8)


@given(samples, st.data())
def test_no_batch_counts_for_more_than_a_mean(logits: list[list[float]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.sampled_from(range(len(logits))), min_size=1, unique=True))
    counts, weights = _counts(logits, rows)
    assert torch.isfinite(counts).all()
    assert float((counts * weights).sum(1).max()) <= 1 + 1e-12


@given(st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)).map(list), min_size=1, max_size=8))
def test_all_samples_together_count_for_a_mean_of_every_component(logits: list[list[float]]) -> None:
    counts, weights = _counts(logits, list(range(len(logits))))
    means = torch.tensor(logits, dtype=torch.float64).T.softmax(0).mean(1)
    torch.testing.assert_close((counts * weights).sum(1), (means / means.clamp(min=1e-12)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compression": {"updates": "int8"}}, "BalancedFedEM can't be compressed"),
        ({"graph": {"name": "ring"}}, "method bfedem needs a server"),
    ],
)
def test_what_needs_plain_uploads_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(fedem.UserError, match=said):
        fedem.train(make_federation(), "bfedem", rounds=1, **settings)
