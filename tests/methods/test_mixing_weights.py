"""AFL's, FedU's and L2SGD's mixers against their formulas worked out anew in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixers import all_at_once, make_round, random_tensor

from fedem.core.random import derive
from fedem.methods.afl import Agnostic, project_to_simplex
from fedem.methods.mixer import Round
from fedem.methods.pulls import Laplacian, Loopless

# AFL.


def _nearest_distribution(point: np.ndarray) -> np.ndarray:
    """The projection on the simplex by trying every support."""
    best, least = np.zeros_like(point), math.inf
    for code in range(1, 2 ** len(point)):
        support = np.array([bool(code >> index & 1) for index in range(len(point))])
        candidate = np.where(support, point - (point[support].sum() - 1) / support.sum(), 0)
        distance = float(((candidate - point) ** 2).sum())
        if (candidate >= 0).all() and distance < least:
            best, least = candidate, distance
    return best


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=7))
def test_the_projection_on_the_simplex_is_the_nearest_distribution(point: list[float]) -> None:
    found = project_to_simplex(torch.tensor(point, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(found, _nearest_distribution(np.array(point)), rtol=0, atol=1e-12)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert (found >= 0).all()


def test_afls_weights_climb_by_the_losses_of_those_who_took_part() -> None:
    mixer = Agnostic(0.1)
    uploads = {"model/w": random_tensor(2, 3), "loss": torch.tensor([4.0, 1.0], dtype=torch.float64)}
    before = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    mixed, memory = mixer.mix({}, {"weights": before}, make_round([50, 1], [3, 1], total=4), all_at_once(uploads))
    # The mean is by the weights as they were, 0.1 and 0.3; the numbers of samples don't matter.
    torch.testing.assert_close(mixed.means["model/w"][0], 0.25 * uploads["model/w"][0] + 0.75 * uploads["model/w"][1])
    climbed = np.array([0.4, 0.3 + 0.1, 0.2, 0.1 + 0.4])
    np.testing.assert_allclose(memory["weights"].numpy(), _nearest_distribution(climbed), rtol=0, atol=1e-12)


def test_afl_averages_equally_those_who_all_weigh_nothing() -> None:
    uploads = {"model/w": random_tensor(2, 3), "loss": torch.ones(2, dtype=torch.float64)}
    weights = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    mixed, _ = Agnostic().mix({}, {"weights": weights}, make_round([5, 1], total=3), all_at_once(uploads))
    torch.testing.assert_close(mixed.means["model/w"][0], uploads["model/w"].mean(0))


# FedU and L2SGD.


def _laplacian_step(models: np.ndarray, strength: float) -> np.ndarray:
    """(I - strength L) W, with L the Laplacian of the complete graph whose edges weigh 1/T."""
    count = len(models)
    adjacency = (np.ones((count, count)) - np.eye(count)) / count
    laplacian = np.diag(adjacency.sum(1)) - adjacency
    return (np.eye(count) - strength * laplacian) @ models


@pytest.mark.parametrize("penalty", [0.0, 0.7, 3.0])
def test_fedus_step_is_the_laplacians(penalty: float) -> None:
    mixer = Laplacian(penalty)
    shared, memory = {"w": random_tensor(5, 3), "steps": torch.arange(5)}, {}
    uploads = {"w": random_tensor(5, 3, seed=1), "steps": torch.arange(5) + 7}
    mixed, _ = mixer.mix(shared, memory, make_round([3, 9, 1, 4, 2]), all_at_once(uploads))
    expected = _laplacian_step(uploads["w"].numpy(), 0.2 * penalty)
    np.testing.assert_allclose(mixed.means["w"].numpy(), expected, rtol=0, atol=1e-14)
    assert torch.equal(mixed.means["steps"], uploads["steps"])


def test_fedus_step_on_a_cohort_sees_the_others_as_they_were() -> None:
    shared, uploads = {"w": random_tensor(5, 3)}, {"w": random_tensor(2, 3, seed=1)}
    mixed, _ = Laplacian(2.0).mix(shared, {}, make_round([3, 9], [4, 1], total=5), all_at_once(uploads))
    models = shared["w"].numpy().copy()
    models[[4, 1]] = uploads["w"].numpy()
    expected = _laplacian_step(models, 0.4)
    assert mixed.groups.tolist() == [4, 1]
    np.testing.assert_allclose(mixed.means["w"].numpy(), expected[[4, 1]], rtol=0, atol=1e-14)


def test_pulls_never_pass_the_mean() -> None:
    uploads = {"w": random_tensor(4, 3)}
    shared = {"w": torch.zeros(4, 3, dtype=torch.float64)}
    for mixer in (Laplacian(1e6), Loopless(1e6)):
        mixed, _ = mixer.mix(shared, {}, make_round([3, 9, 1, 4]), all_at_once(uploads))
        torch.testing.assert_close(mixed.means["w"], uploads["w"].mean(0).expand(4, 3), rtol=0, atol=1e-14)


@pytest.mark.parametrize("key", range(6))
def test_l2sgds_pull_is_a_run_of_steps_towards_the_mean(key: int) -> None:
    penalty, probability = 0.9, 0.6
    uploads = {"w": random_tensor(5, 3, seed=1)}
    shared = {"w": random_tensor(5, 3)}
    mixed, _ = Loopless(penalty, probability).mix(
        shared, {}, make_round([3, 9, 1, 4, 2], key=key), all_at_once(uploads)
    )
    # The length of the run is random, but it is a whole number.
    strength = 0.2 * penalty * (1 - probability) / probability
    models, candidates = uploads["w"].numpy(), []
    for _ in range(30):
        models = _laplacian_step(models, strength)
        candidates.append(float(np.abs(mixed.means["w"].numpy() - models).max()))
    assert min(candidates) < 1e-14
    assert sorted(candidates)[1] > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.8])
def test_l2sgds_runs_have_geometric_lengths(probability: float) -> None:
    mixer, count = Loopless(1.0, probability), 1000
    keys = [int(derive(3, index)) for index in range(count)]
    local = np.array([mixer.plan({}, {}, make_round([1], key=key)).num_steps for key in keys])
    uploads, shared = {"w": torch.tensor([[1.0], [-1.0]]).double()}, {"w": torch.zeros(2, 1).double()}
    once = 0.01 * (1 - probability) / probability
    means = []
    for key in keys:
        this = Round(torch.arange(2), torch.ones(2, dtype=torch.int64), 2, 0.01, key)
        mixed, _ = mixer.mix(shared, {}, this, all_at_once(uploads))
        means.append(round(math.log(float(mixed.means["w"][0])) / math.log1p(-once)))
    for lengths, ends in ((local, probability), (np.array(means), 1 - probability)):
        deviation = math.sqrt(1 - ends) / ends
        assert lengths.mean() == pytest.approx(1 / ends, abs=4 * deviation / math.sqrt(count))
        assert lengths.min() == 1
        for length in (1, 2, 3):
            chance = ends * (1 - ends) ** (length - 1)
            error = 4 * math.sqrt(chance * (1 - chance) / count)
            assert (lengths == length).mean() == pytest.approx(chance, abs=error)
    assert abs(np.corrcoef(local, means)[0, 1]) < 4 / math.sqrt(count)
