"""What every mixer must obey, and the matrix that uploads are mixed by."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixers import (
    MIXERS,
    all_at_once,
    downloads,
    every_mixer,
    first_state,
    in_pieces,
    make_keys,
    make_round,
    make_trained,
    make_uploads,
    random_tensor,
)
from torch import Tensor

from fedem.core.tree import Tree, row_of
from fedem.methods import METHODS, mixer
from fedem.methods.decentralised import Graph
from fedem.methods.fedfomo import Candidates
from fedem.methods.mixer import (
    Alone,
    Mixer,
    Settled,
    Star,
    Start,
    by_samples,
    gather,
    mean_of_groups,
    weighted_means,
)
from fedem.methods.mocha import Relations
from fedem.methods.pfedhn import Hypernetwork
from fedem.methods.pulls import Laplacian, Loopless
from fedem.methods.wrappers.local_layers import LocalLayers

# Every mixer.


def test_every_mixer_of_the_table_is_tested_here() -> None:
    assert {type(mixer) for mixer in MIXERS.values()} == {method.mixer for method in METHODS.values()}


@every_mixer
def test_everybody_is_served_a_tree_that_is_there(mixer: Mixer) -> None:
    shared, memory = first_state(mixer, 5)
    served = downloads(mixer, shared, memory, [4, 0, 2], 11)
    assert served.reads.shape == (3,)
    assert int(served.reads.min()) >= 0
    assert all(int(served.reads.max()) < len(leaf) for leaf in served.shared.values())


@every_mixer
def test_a_client_is_served_the_same_whoever_else_is_there(mixer: Mixer) -> None:
    shared, memory = first_state(mixer, 5)
    if isinstance(mixer, Alone | Loopless | Laplacian | Candidates):
        shared = {name: random_tensor(*leaf.shape, seed=8) for name, leaf in shared.items()}
    together = downloads(mixer, shared, memory, [4, 0, 2], 11)
    alone = downloads(mixer, shared, memory, [2], 11)
    for name, leaf in together.shared.items():
        torch.testing.assert_close(leaf[together.reads[2]], alone.shared[name][alone.reads[0]], rtol=0, atol=1e-15)


@every_mixer
def test_uploads_may_come_in_pieces_and_in_any_order_for_every_mixer(mixer: Mixer) -> None:
    shared, memory = first_state(mixer, 6)
    uploads = make_trained(mixer, 5)
    this = make_round([4, 1, 7, 2, 2], [0, 1, 3, 4, 5], total=6)
    whole, after = mixer.mix(shared, memory, this, all_at_once(uploads))
    cut, cut_after = mixer.mix(shared, memory, this, in_pieces(uploads, [[3, 1], [4], [0, 2]]))
    assert torch.equal(whole.groups, cut.groups)
    for first, second in ((whole.means, cut.means), (after, cut_after)):
        assert first.keys() == second.keys()
        for name, leaf in first.items():
            torch.testing.assert_close(leaf, second[name], rtol=0, atol=1e-14)


@every_mixer
def test_mixing_leaves_the_old_groups_and_memory_alone(mixer: Mixer) -> None:
    shared, memory = first_state(mixer, 4)
    before = [{name: leaf.clone() for name, leaf in tree.items()} for tree in (shared, memory)]
    mixer.mix(shared, memory, make_round([3, 1, 2, 9]), all_at_once(make_trained(mixer, 4)))
    for old, tree in zip(before, (shared, memory), strict=True):
        assert all(torch.equal(leaf, tree[name]) for name, leaf in old.items())


@every_mixer
def test_messages_are_counted_but_for_clients_that_are_alone(mixer: Mixer) -> None:
    shared, memory = first_state(mixer, 6)
    mixed, _ = mixer.mix(shared, memory, make_round([4, 1, 7], [5, 1, 3], total=6), all_at_once(make_trained(mixer, 3)))
    # Over a graph messages go along links, which tests of their own count.
    assert isinstance(mixer, Graph) or mixed.num_messages == (0 if isinstance(mixer, Alone) else 3)


@every_mixer
def test_newcomers_are_welcome_unless_clients_are_alone(mixer: Mixer) -> None:
    shared, memory = first_state(mixer, 4)
    welcome = mixer.welcome(shared, memory)
    assert bool(welcome.refusal) == isinstance(mixer, Alone)
    if not welcome.refusal:
        tuned = isinstance(mixer, Candidates | Loopless | Laplacian | Relations)
        assert welcome.fine_tune == tuned
        assert (welcome.learn is not None) == (welcome.kept is not None) == isinstance(mixer, Hypernetwork)
        assert len({len(leaf) for leaf in welcome.shared.values()}) == 1


def test_clients_that_are_settled_read_what_their_memory_says_and_do_nothing_else() -> None:
    shared, memory = {"w": random_tensor(3, 2)}, {"reads": torch.tensor([2, 0, 0, 1])}
    served = Settled().read(shared, memory, torch.tensor([3, 0]))
    assert served.reads.tolist() == [1, 2]
    assert torch.equal(served.shared["w"], shared["w"])
    assert Settled().welcome(shared, memory).refusal
    with pytest.raises(AssertionError, match="not trained again"):
        Settled().mix(shared, memory, make_round([1]), [])
    with pytest.raises(AssertionError, match="personalisation alone"):
        Settled().init(Start(shared, frozenset(shared), make_keys(1), 0))


# The matrix.


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_a_star_averages_by_samples(sizes: list[int]) -> None:
    uploads, counts = make_uploads(len(sizes)), torch.tensor(sizes)
    mixed, memory = Star().mix({}, {}, make_round(sizes), all_at_once(uploads))
    expected = (uploads["w"] * counts[:, None, None]).sum(0) / counts.sum()
    torch.testing.assert_close(mixed.means["w"][0], expected)
    assert mixed.groups.tolist() == [0]
    assert mixed.means["steps"].tolist() == [len(sizes) - 1]  # a counter is not averaged
    assert memory == {}


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_a_star_may_count_clients_alike(sizes: list[int]) -> None:
    uploads = make_uploads(len(sizes))
    mixed, _ = Star("equal").mix({}, {}, make_round(sizes), all_at_once(uploads))
    torch.testing.assert_close(mixed.means["w"][0], uploads["w"].mean(0))
    this = make_round(sizes, total=8)
    assert Star("equal").share(this, 0.9) == len(sizes) / 8
    assert Star().share(this, 0.9) == 0.9
    assert LocalLayers(Star("equal"), frozenset()).share(this, 0.9) == len(sizes) / 8


def test_a_star_serves_everybody_its_one_tree() -> None:
    shared, memory = Star().init(Start({"w": random_tensor(2)}, frozenset("w"), make_keys(9), 0))
    served = Star().read(shared, memory, torch.tensor([8, 3]))
    assert served.reads.tolist() == [0, 0]
    assert served.shared["w"].shape == (1, 2)


def test_alone_replaces_the_own_tree_and_nothing_else() -> None:
    uploads, this = make_uploads(2), make_round([5, 6], [3, 1], total=4)
    mixed, _ = Alone().mix({}, {}, this, all_at_once(uploads))
    assert mixed.groups.tolist() == [3, 1]
    assert all(torch.equal(leaf, uploads[name]) for name, leaf in mixed.means.items())
    assert Alone().read({}, {}, this.clients).reads.tolist() == [3, 1]


def test_alone_keeps_a_diverged_client_to_itself() -> None:
    uploads = {"w": torch.tensor([[1.0], [float("inf")]])}
    mixed, _ = Alone().mix({}, {}, make_round([1, 1]), in_pieces(uploads, [[1], [0]]))
    assert mixed.means["w"].flatten().tolist() == [1.0, float("inf")]


@given(st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.floats(0, 1), st.integers(0, 99))
def test_any_matrix_mixes_uploads_in_any_pieces(groups: int, pieces: list[int], links: float, seed: int) -> None:
    """Dense or, as a graph's is, with few links: some groups may hear of nobody."""
    rng, count = np.random.default_rng(seed), sum(pieces)
    weights = torch.from_numpy(rng.normal(size=(groups, count)) * (rng.random((groups, count)) < links))
    uploads, order = {"w": random_tensor(count, 4, 2)}, rng.permutation(count)
    parts = [part.tolist() for part in np.split(order, np.cumsum(pieces)[:-1])]
    mixed = weighted_means(weights, in_pieces(uploads, parts))["w"]
    expected = np.einsum("gc,cij->gij", weights.numpy(), uploads["w"].double().numpy())
    np.testing.assert_allclose(mixed.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_uploads_mix_as_they_come() -> None:
    """Each is used up before the next is asked for: a million models need not fit into memory."""
    place = torch.empty(1, 2)

    def slowly() -> Iterator[tuple[Tensor, Tree]]:
        for position in range(4):
            yield torch.tensor([position]), {"w": place.fill_(position)}

    assert torch.equal(weighted_means(torch.full((1, 4), 0.25), slowly())["w"], torch.full((1, 2), 1.5))


def test_counters_of_several_groups_whose_members_come_one_by_one() -> None:
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    uploads = {"steps": torch.tensor([-3, 4, -7])}
    assert weighted_means(weights, in_pieces(uploads, [[0], [1], [2]]))["steps"].tolist() == [4, -7]


@pytest.mark.parametrize("most", [1, 10, 1 << 24])
def test_counters_are_compared_in_blocks_of_groups(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixer, "_MOST_COMPARED", most)
    weights, counters = torch.eye(6) + (random_tensor(6, 6) > 0), torch.arange(24).reshape(6, 2, 2) % 11 - 5
    mixed = weighted_means(weights, in_pieces({"steps": counters}, [[3, 0], [1, 2, 4, 5]]))["steps"]
    for group, row in enumerate(weights.numpy()):
        np.testing.assert_array_equal(mixed[group], counters.numpy()[row > 0].max(0))


def test_gathered_uploads_stand_in_the_cohorts_order() -> None:
    uploads = make_uploads(5)
    gathered = gather(in_pieces(uploads, [[3, 1], [4], [0, 2]]))
    assert all(torch.equal(leaf, uploads[name]) for name, leaf in gathered.items())


def test_counters_of_any_kind_are_compared_together_and_leaves_keep_their_order() -> None:
    kinds = {"a": torch.int64, "b": torch.uint8, "c": torch.int64, "w": torch.float32, "d": torch.int32}
    uploads = {
        name: (50 * random_tensor(4, place + 1).abs()).to(kind) for place, (name, kind) in enumerate(kinds.items())
    }
    uploads["none"] = torch.zeros(4, 0, dtype=torch.int64)
    weights = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.0, 0.2, 0.2, 0.6]])
    mixed = weighted_means(weights, in_pieces(uploads, [[2, 0], [1, 3]]))
    assert list(mixed) == list(uploads)
    for name, kind in (kinds | {"none": torch.int64}).items():
        assert mixed[name].dtype == kind
        assert mixed[name].shape == (2, *uploads[name].shape[1:])
        if kind != torch.float32 and name != "none":
            for group, row in enumerate(weights.numpy()):
                np.testing.assert_array_equal(mixed[name][group], uploads[name].numpy()[row > 0].max(0))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_weights_by_samples_are_a_distribution(sizes: list[int]) -> None:
    weights = by_samples(make_round(sizes))
    assert weights.shape == (1, len(sizes))
    np.testing.assert_allclose(weights[0].numpy(), np.array(sizes) / sum(sizes), rtol=1e-15)


def test_the_mean_of_groups_takes_the_largest_counter() -> None:
    mean = mean_of_groups({"w": torch.tensor([[1.0, 2.0], [3.0, 6.0]]), "steps": torch.tensor([4, 9])})
    assert mean["w"].tolist() == [[2.0, 4.0]]
    assert mean["steps"].tolist() == [9]


def test_rows_broadcast() -> None:
    assert row_of(torch.arange(3), torch.zeros(3, 4, 5)).shape == (3, 1, 1)
    assert row_of(torch.arange(3), torch.zeros(3)).shape == (3,)
