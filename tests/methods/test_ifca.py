"""IFCA on clients whose clusters are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import DIMENSION, advance, make_model, make_training
from planted import THETAS, planted_federation
from torch.func import vmap

from fedem.data.federation import Federation
from fedem.engines import Batching
from fedem.methods.ifca import IFCA
from fedem.runs.rounds import State, Training
from fedem.solvers import SGD
from fedem.solvers.schedules import Constant


def _ifca(federation: Federation, count: int, **settings: object) -> Training:
    common = {"loss": "squared_error", "solver": SGD(), "batching": Batching(0, local_steps=3)}
    return make_training("ifca", federation, num_clusters=count, schedule=Constant(0.15), **(common | settings))


def _near(training: Training, thetas: np.ndarray) -> State:
    """A start whose models are these."""
    start = training.init()
    weight = torch.from_numpy(thetas).reshape(1, len(thetas), 1, DIMENSION)
    return State(0, start.shared | {"weight": weight.clone()}, start.personal, start.memory)


@pytest.mark.parametrize("cohort_size", [12, 5])
@pytest.mark.parametrize("num_groups", [2, 3, 4])
def test_ifca_finds_planted_clusters_from_a_good_start(num_groups: int, cohort_size: int) -> None:
    planted = [index % num_groups for index in range(12)]
    training = _ifca(planted_federation(planted), num_groups, cohort_size=cohort_size)
    noise = np.random.default_rng(1).normal(size=(num_groups, DIMENSION))
    state = advance(training, 12, _near(training, THETAS[:num_groups] + noise))
    weights = state.personal["log_weights"].exp()
    torch.testing.assert_close(weights.sum(1), torch.ones(12, dtype=torch.float64))
    seen = weights.max(1).values == 1
    assert int(seen.sum()) >= 10  # the others have not been sampled yet
    assert weights.argmax(1)[seen].tolist() == torch.tensor(planted)[seen].tolist()
    np.testing.assert_allclose(
        state.shared["weight"][0, :, 0].numpy(), THETAS[:num_groups], rtol=0, atol=0.1 if cohort_size == 12 else 0.3
    )


def test_a_cluster_that_nobody_chooses_stays_as_it_is() -> None:
    training = _ifca(planted_federation([0, 1, 0, 1]), 3)
    far = np.vstack([THETAS[0] + 0.5, [100.0] * 4, THETAS[1] - 0.5])
    start = _near(training, far)
    after = advance(training, 3, start)
    for name, leaf in after.shared.items():
        assert torch.equal(leaf[0, 1], start.shared[name][0, 1])
        assert not torch.equal(leaf[0, 0], start.shared[name][0, 0])
        assert not torch.equal(leaf[0, 2], start.shared[name][0, 2])
    assert after.personal["log_weights"].argmax(1).tolist() == [0, 2, 0, 2]


def test_ifca_is_fedavg_within_each_cluster() -> None:
    """Once nobody changes its mind, a cluster's model is what FedAvg makes of its clients alone."""
    planted = [0, 1, 1, 0, 1]
    federation = planted_federation(planted)
    training = _ifca(federation, 2)
    start = _near(training, THETAS[:2])
    after = advance(training, 4, start)
    for group in (0, 1):
        members = torch.tensor([position for position, mine in enumerate(planted) if mine == group])
        alone = make_training(
            "fedavg",
            federation.take(members),
            loss="squared_error",
            solver=SGD(),
            batching=training.batching,
            schedule=training.schedule,
        )
        own = {name: leaf[:, group] for name, leaf in start.shared.items()}
        expected = advance(alone, 4, State(0, own, {}))
        for name, leaf in expected.shared.items():
            torch.testing.assert_close(after.shared[name][:, group], leaf, rtol=0, atol=1e-12)


def test_ifcas_uploads_are_put_in_their_clusters_places() -> None:
    algorithm = IFCA(make_model(), SGD(), num_clusters=3)
    uploads = {
        "model/w": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]]),
        "model/steps": torch.tensor([4, 9, 2]),
        "indicator": torch.tensor([[0.0, 0, 1], [1, 0, 0], [0, 0, 1]]),
    }
    summands = vmap(algorithm.summand)(uploads)
    assert summands["model/w"].shape == (3, 3, 2)
    assert summands["model/w"][0].tolist() == [[0, 0], [0, 0], [1, 2]]
    assert torch.equal(summands["mass"], uploads["indicator"])
    shares = torch.tensor([0.5, 0.2, 0.3])
    mean = {
        "model/w": torch.tensordot(shares, summands["model/w"], 1),
        "model/steps": summands["model/steps"].amax(0),
        "mass": shares @ summands["mass"],
    }
    shared = {"w": torch.full((3, 2), 9.0), "steps": torch.zeros(3, dtype=torch.int64)}
    after = algorithm.update(shared, mean, 1.0)
    expected = [[3.0, 4.0], [9.0, 9.0], [(0.5 * 1 + 0.3 * 5) / 0.8, (0.5 * 2 + 0.3 * 7) / 0.8]]
    torch.testing.assert_close(after["w"], torch.tensor(expected))
    assert int(after["steps"][1]) == 0
    assert int(after["steps"][0]) > 0


def test_ifca_chooses_by_all_samples_and_not_by_the_padding() -> None:
    algorithm = IFCA(make_model(), SGD(), num_clusters=2)
    shared = algorithm.init_shared(0)
    losses = torch.tensor([[1.0, 1.0, 50.0], [2.0, 0.5, 0.0]], dtype=torch.float64)
    for mask, chosen in (([True, True, False], 0), ([True, True, True], 1)):
        # 2.0 against 2.5 of the two samples that are there.
        local, _ = algorithm.begin(shared, {}, {"losses": losses}, torch.tensor(mask))
        assert local.personal["log_weights"].exp().tolist() == [float(chosen == 0), float(chosen == 1)]
        for name, leaf in shared.items():
            assert torch.equal(local.shared[name], leaf[chosen])
