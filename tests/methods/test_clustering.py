"""Clustered FL on clients whose clusters are known."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from helpers import DIMENSION, advance, make_federation, make_training, scores_of
from hypothesis import example, given
from hypothesis import strategies as st
from planted import THETAS, planted_federation
from torch import Tensor, nn

import fedem
from fedem.core.tree import Tree
from fedem.data.federation import Federation
from fedem.engines import Batching
from fedem.methods.clustered import Clusters, bipartition
from fedem.methods.mixer import Mixed, Round, Start
from fedem.models import Model
from fedem.models.losses import Logistic
from fedem.runs.rounds import Training
from fedem.solvers import SGD
from fedem.solvers.schedules import Constant


def _clustered(federation: Federation, loss: str = "squared_error", rate: float = 0.15, **settings: object) -> Training:
    common = {"loss": loss, "solver": SGD(), "batching": Batching(0, local_steps=3), "schedule": Constant(rate)}
    return make_training("clustered", federation, **(common | settings))


def _same_partition(found: Tensor, planted: list[int]) -> bool:
    pairs = set(zip(found.tolist(), planted, strict=True))
    return len(pairs) == len(set(planted)) == len(set(found.tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
@pytest.mark.parametrize("num_groups", [2, 3, 4])
def test_planted_clusters_are_found_exactly(num_groups: int, linkage: str) -> None:
    planted = [index % num_groups for index in range(12)]
    training = _clustered(planted_federation(planted), mean_tolerance=0.2, member_tolerance=0.5, linkage=linkage)
    state = training.init()
    counts = []
    for _ in range(25):
        state, _ = training.step(state)
        counts.append(len(state.shared["bias"]))
    assert counts[0] == 1
    assert counts[-1] == num_groups
    assert _same_partition(state.memory["cluster"], planted)
    # Once found they stay, and their models become the planted ones.
    for position, group in enumerate(planted):
        model = state.shared["weight"][state.memory["cluster"][position]].flatten()
        np.testing.assert_allclose(model.numpy(), THETAS[group], rtol=0, atol=0.2)


def test_planted_clusters_are_found_in_classification() -> None:
    planted = [0, 2, 1, 0, 1, 2, 2, 1, 0, 0, 1, 2]
    federation = planted_federation(planted, "logistic", size=60)
    training = _clustered(federation, "logistic", rate=0.5, mean_tolerance=0.2, member_tolerance=0.4)
    state = advance(training, 15)
    assert _same_partition(state.memory["cluster"], planted)
    fedavg = make_training("fedavg", federation, solver=SGD(), batching=training.batching, schedule=Constant(0.5))
    assert scores_of(training, state)["test"].average > scores_of(fedavg, advance(fedavg, 15))["test"].average + 0.1


def test_a_run_says_how_many_clusters_there_are_in_the_end() -> None:
    federation = planted_federation([0, 1, 0, 1, 1, 0])
    how = {"method": "clustered", "rounds": 25, "learning_rate": 0.1}
    found = fedem.train(federation, **how, mean_tolerance=0.2, member_tolerance=0.5)
    assert found.summary["num_clusters"] == len(found.state().shared["bias"]) == 2
    assert fedem.train(federation, **how, min_members=4).summary["num_clusters"] == 1


def test_clients_who_are_alike_stay_together() -> None:
    training = _clustered(planted_federation([1] * 8), mean_tolerance=0.2, member_tolerance=0.5)
    state = advance(training, 20)
    assert len(state.shared["bias"]) == 1
    assert state.memory["cluster"].tolist() == [0] * 8


@pytest.mark.parametrize("cohort_size", [1, 3, 5])
def test_sampled_clients_split_in_the_end_and_nobody_is_without_a_cluster(cohort_size: int) -> None:
    planted = [0, 1, 0, 1, 1, 0]
    training = _clustered(
        planted_federation(planted), rate=0.02, cohort_size=cohort_size, mean_tolerance=0.25, member_tolerance=0.2
    )
    state = training.init()
    for _ in range(40):
        state, _ = training.step(state)
        count = len(state.shared["bias"])
        cluster = state.memory["cluster"]
        assert cluster.shape == (6,)
        assert int(cluster.min()) >= 0
        assert cluster.unique().tolist() == list(range(count))  # no cluster is empty
        assert all(bool(torch.isfinite(leaf).all()) for leaf in state.shared.values())
    assert count >= 2
    pure = {(int(cluster[t]), planted[t]) for t in range(6)}
    assert len(pure) == count  # nobody shares a cluster with one of the other kind


def test_one_client_never_splits() -> None:
    federation = make_federation(sizes=(12,))
    training = make_training("clustered", federation, mean_tolerance=1e9, member_tolerance=0.0)
    state = advance(training, 4)
    local = advance(make_training("local", federation), 4)
    assert state.memory["cluster"].tolist() == [0]
    for name, leaf in local.shared.items():
        torch.testing.assert_close(state.shared[name], leaf, rtol=0, atol=1e-14)


def test_tolerances_that_are_always_met_split_down_to_single_clients() -> None:
    training = _clustered(planted_federation([0, 1, 2, 3, 0]), mean_tolerance=1e9, member_tolerance=0.0)
    state = advance(training, 6)
    assert sorted(state.memory["cluster"].tolist()) == [0, 1, 2, 3, 4]
    training = _clustered(planted_federation([0, 1, 2, 3, 0]), mean_tolerance=1e9, member_tolerance=0.0, min_members=2)
    sizes = advance(training, 6).memory["cluster"].bincount()
    assert int(sizes.min()) >= 2


# The mixer by hand.


def _mix(
    mixer: Clusters, shared: Tree, memory: Tree, clients: list[int], uploads: list[list[float]], sizes: list[int]
) -> tuple[Mixed, Tree]:
    this = Round(torch.tensor(clients), torch.tensor(sizes), len(memory["cluster"]), 0.1, 0)
    trees = {"w": torch.tensor(uploads, dtype=torch.float64)}
    return mixer.mix(shared, memory, this, [(torch.arange(len(clients)), trees)])


def _fresh(mixer: Clusters, count: int) -> tuple[Tree, Tree]:
    keys = torch.arange(count)
    return mixer.init(Start({"w": torch.zeros(2, dtype=torch.float64)}, frozenset("w"), keys, 0))


def test_both_halves_start_from_what_their_members_uploaded() -> None:
    mixer = Clusters(mean_tolerance=0.5, member_tolerance=1.0)
    shared, memory = _fresh(mixer, 4)
    uploads = [[2.0, 0.0], [-1.5, 0.2], [2.2, 0.1], [-1.5, -0.2]]
    mixed, after = _mix(mixer, shared, memory, [0, 1, 2, 3], uploads, [1, 2, 3, 2])
    cluster = after["cluster"]
    assert _same_partition(cluster, [0, 1, 0, 1])
    expected = {int(cluster[0]): [(2.0 + 3 * 2.2) / 4, 0.3 / 4], int(cluster[1]): [-1.5, 0.0]}
    for group, row in zip(mixed.groups.tolist(), mixed.means["w"].tolist(), strict=True):
        assert row == pytest.approx(expected[group])
    assert sorted(mixed.groups.tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("mean_tolerance", "member_tolerance"), [(0.001, 0.1), (0.5, 3.0)], ids=["still moving", "all content"]
)
def test_a_cluster_stays_whole_while_it_moves_or_all_are_content(
    mean_tolerance: float, member_tolerance: float
) -> None:
    mixer = Clusters(mean_tolerance=mean_tolerance, member_tolerance=member_tolerance)
    shared, memory = _fresh(mixer, 2)
    mixed, after = _mix(mixer, shared, memory, [0, 1], [[2.0, 0.0], [-1.9, 0.0]], [5, 5])
    assert after["cluster"].tolist() == [0, 0]
    assert mixed.means["w"].tolist() == [pytest.approx([0.05, 0.0])]


def test_a_clusters_mean_update_counts_clients_by_their_samples() -> None:
    mixer = Clusters(mean_tolerance=0.2, member_tolerance=0.5)
    for sizes, count in (([9, 1], 2), ([1, 1], 1)):
        shared, memory = _fresh(mixer, 2)
        _, after = _mix(mixer, shared, memory, [0, 1], [[0.1, 0.0], [-0.9, 0.0]], sizes)
        assert len(after["cluster"].unique()) == count


def test_a_cluster_waits_for_everybodys_word() -> None:
    mixer = Clusters(mean_tolerance=1.0, member_tolerance=1.0)
    shared, memory = _fresh(mixer, 3)
    mixed, memory = _mix(mixer, shared, memory, [0, 1], [[2.0, 0.0], [-2.0, 0.0]], [5, 5])
    assert memory["cluster"].tolist() == [0, 0, 0]
    shared = {"w": mixed.means["w"]}
    mixed, memory = _mix(mixer, shared, memory, [2], [[-2.1, 0.0]], [5])
    assert memory["cluster"].unique().tolist() == [0, 1]
    assert _same_partition(memory["cluster"], [0, 1, 1])
    # Client 0's side has nobody in this round's cohort: it keeps what the cluster had.
    trees = dict(zip(mixed.groups.tolist(), mixed.means["w"].tolist(), strict=True))
    here, away = int(memory["cluster"][2]), int(memory["cluster"][0])
    assert trees[here] == pytest.approx([-2.1, 0.0])
    assert trees.get(away, shared["w"][0].tolist()) == pytest.approx(shared["w"][0].tolist())


def test_words_spoken_before_a_split_do_not_count_after_it() -> None:
    mixer = Clusters(mean_tolerance=9.0, member_tolerance=0.1)
    shared, memory = _fresh(mixer, 4)
    uploads = [[2.0, 0.1], [-2.0, 0.0], [2.0, -0.1], [-2.0, 0.1]]
    mixed, memory = _mix(mixer, shared, memory, [0, 1, 2, 3], uploads, [1, 1, 1, 1])
    assert not bool(memory["fresh"].any())
    shared = {"w": mixed.means["w"][mixed.groups.argsort()]}
    _, memory = _mix(mixer, shared, memory, [0, 1], [[3.0, 0.0], [-3.0, 0.0]], [1, 1])
    assert len(memory["cluster"].unique()) == 2


def test_batch_statistics_decide_nothing() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))

    # Nobody learns, while everybody's statistics move.
    model, federation = Model(build, Logistic(), torch.float64), make_federation(sizes=(7, 4, 12))
    training = make_training(
        "clustered", federation, model=model, schedule=Constant(1e-12), mean_tolerance=1e9, member_tolerance=1e-6
    )
    state = advance(training, 2)
    assert state.memory["cluster"].tolist() == [0, 0, 0]
    assert {f"updates/{name}" for name in model.trainable} == {n for n in state.memory if n.startswith("updates/")}
    assert all(float(state.memory[f"updates/{name}"].abs().max()) < 1e-9 for name in model.trainable)
    assert float(state.shared["1.running_mean"].abs().max()) > 1e-3


# The cut.


def _similarities(updates: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(updates, axis=1, keepdims=True)
    directions = np.divide(updates, lengths, out=np.zeros_like(updates), where=lengths > 0)
    return directions @ directions.T


def _across(similarities: np.ndarray, side: np.ndarray) -> float:
    return float(similarities[np.ix_(side, ~side)].max())


@given(st.integers(2, 7), st.integers(2, 4), st.integers(0, 10_000))
def test_single_linkage_minimises_the_largest_similarity_across_the_cut(count: int, width: int, seed: int) -> None:
    updates = np.random.default_rng(seed).normal(size=(count, width))
    _check_the_cut(updates)


@example([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])  # disjoint features: all similarities are equal
@given(
    st.integers(2, 6).flatmap(
        lambda count: st.lists(
            st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=3, max_size=3).filter(any),
            min_size=count,
            max_size=count,
        )
    )
)
def test_single_linkage_cuts_where_similarities_are_tied(updates: list[list[float]]) -> None:
    _check_the_cut(np.array(updates))


def _check_the_cut(updates: np.ndarray) -> None:
    similarities = _similarities(updates)
    side = bipartition(torch.from_numpy(updates), "single").numpy()
    assert 0 < side.sum() < len(side)
    sides = [np.array(code, dtype=bool) for code in product([False, True], repeat=len(updates))]
    least = min(_across(similarities, other) for other in sides if 0 < other.sum() < len(other))
    assert _across(similarities, side) == pytest.approx(least, abs=1e-9)


@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
def test_a_clear_cut_is_found_by_either_linkage(linkage: str) -> None:
    updates = torch.tensor([[1.0, 0.1], [-1.0, 0.2], [5.0, -0.2], [-0.1, 0.0], [0.2, 0.0]])
    assert _same_partition(bipartition(updates, linkage).long(), [0, 1, 0, 1, 0])


@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
def test_three_clients_with_nothing_in_common_are_cut_too(linkage: str) -> None:
    side = bipartition(torch.eye(3), linkage)
    assert 0 < int(side.sum()) < 3


# The separation that a split needs: sqrt((1 - largest similarity across the cut) / 2) > gamma_max.


def _splits(updates: np.ndarray, separation: float) -> bool:
    """Whether a cluster that may always split does, its members having sent these updates."""
    mixer = Clusters(mean_tolerance=1e9, member_tolerance=0.0, linkage="single", separation=separation)
    trees = {"w": torch.from_numpy(updates)}
    start = {"w": torch.zeros(updates.shape[1], dtype=torch.float64)}
    shared, memory = mixer.init(Start(start, frozenset("w"), torch.arange(len(updates)), 0))
    this = Round(torch.arange(len(updates)), torch.ones(len(updates), dtype=torch.int64), len(updates), 0.1, 0)
    _, after = mixer.mix(shared, memory, this, [(torch.arange(len(updates)), trees)])
    return len(after["cluster"].unique()) == 2


@pytest.mark.parametrize("degrees", [5.0, 30.0, 60.0])
def test_a_cut_is_made_where_it_separates_more_than_the_setting(degrees: float) -> None:
    """Opposite pairs, spread by an angle a: across the cut, through the wider gap, it is cos a or sin a."""
    a = np.radians(degrees)
    right = np.array([[np.cos(a), np.sin(a)], [np.cos(a), -np.sin(a)]])
    updates, separation = np.concatenate([right, -right]), max(np.cos(a), np.sin(a))
    assert _splits(updates, 0.0)
    assert _splits(updates, separation - 1e-9)
    assert not _splits(updates, separation + 1e-9)


def _around(rng: np.random.Generator, count: int, width: int, most: float) -> np.ndarray:
    """A direction and ``count`` vectors around it, each away from it by at most ``most`` of its length."""
    centre = rng.normal(size=width)
    noise = rng.normal(size=(count, width))
    noise *= rng.uniform(0, most, (count, 1)) * np.linalg.norm(centre) / np.linalg.norm(noise, axis=1, keepdims=True)
    return centre + noise


@given(st.integers(2, 9), st.integers(2, 5), st.floats(0.01, 0.95), st.integers(0, 10_000))
def test_members_of_one_kind_are_never_parted(count: int, width: int, most: float, seed: int) -> None:
    """Two vectors within gamma of a third have a cosine of at least 1 - 2 gamma^2; nothing else is used."""
    updates = _around(np.random.default_rng(seed), count, width, most)
    assert _splits(updates, 0.0)
    assert not _splits(updates, most)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(2, 5), st.floats(0.01, 0.95), st.integers(0, 10_000))
def test_a_cut_that_is_made_never_goes_through_a_kind(
    first: int, second: int, width: int, most: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    updates = np.concatenate([_around(rng, first, width, most), _around(rng, second, width, most)])
    if _splits(updates, most):
        side = bipartition(torch.from_numpy(updates), "single").numpy()
        assert (side[:first] == side[0]).all()
        assert (side[first:] == side[-1]).all()
