"""The mixers, each against its formula worked out anew in numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedem.errors import UserError
from fedem.methods import METHODS
from fedem.mixing.agnostic import Agnostic, project_to_simplex
from fedem.mixing.alone import Alone
from fedem.mixing.base import Mixer, Round, by_samples, gather, row_of, weighted_means
from fedem.mixing.candidates import Candidates
from fedem.mixing.clusters import Clusters
from fedem.mixing.groups import mean_of_groups
from fedem.mixing.hypernetwork import Hypernetwork
from fedem.mixing.pull import Laplacian, Loopless
from fedem.mixing.relations import Relations
from fedem.mixing.settled import Settled
from fedem.mixing.star import Star
from fedem.randomness import client_keys, derive
from fedem.tree import Tree, add_prefix, take_prefix

MIXERS: dict[str, Mixer] = {
    "star": Star(),
    "alone": Alone(),
    "agnostic": Agnostic(0.1),
    "clusters": Clusters(),
    "candidates": Candidates(2),
    "hypernetwork": Hypernetwork(3, 4),
    "loopless": Loopless(),
    "laplacian": Laplacian(),
    "relations": Relations(),
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _uploads(count: int) -> Tree:
    return {"w": _random(count, 2, 3), "steps": torch.arange(count)}


def _round(sizes: list[int], clients: list[int] | None = None, total: int | None = None, key: int = 7) -> Round:
    here = list(range(len(sizes))) if clients is None else clients
    return Round(torch.tensor(here), torch.tensor(sizes), len(sizes) if total is None else total, 0.2, key)


def _keys(count: int) -> Tensor:
    return client_keys([f"client {index}" for index in range(count)])


def _whole(uploads: Tree) -> list[tuple[Tensor, Tree]]:
    return [(torch.arange(len(next(iter(uploads.values())))), uploads)]


def _pieces(uploads: Tree, order: list[list[int]]) -> list[tuple[Tensor, Tree]]:
    return [(torch.tensor(index), {name: leaf[index] for name, leaf in uploads.items()}) for index in order]


def _start(mixer: Mixer, count: int) -> tuple[Tree, Tree]:
    """The first groups and memory of a mixer for a model with two leaves."""
    model = {"w": _random(2, 3, seed=1), "b": _random(3, seed=2)}
    if isinstance(mixer, Relations):
        model = add_prefix("task", model) | {"stiffness": torch.zeros((), dtype=torch.float64)}
    return mixer.init(model, frozenset("wb"), _keys(count), 5)


def _trained(mixer: Mixer, count: int, seed: int = 0) -> Tree:
    """Uploads of so many clients, as the mixer's method makes them."""
    model = {"w": _random(count, 2, 3, seed=seed + 3), "b": _random(count, 3, seed=seed + 4)}
    if isinstance(mixer, Agnostic):
        return add_prefix("model", model) | {"loss": _random(count, seed=5).abs()}
    if isinstance(mixer, Candidates):
        return add_prefix("model", model) | {"weights": _random(count, 2, seed=5).abs()}
    return model


# Every mixer.


def test_every_mixer_of_the_table_is_tested_here() -> None:
    assert {type(mixer) for mixer in MIXERS.values()} == {method.mixer for method in METHODS.values()}


@every_mixer
def test_everybody_is_served_a_tree_that_is_there(mixer: Mixer) -> None:
    shared, memory = _start(mixer, 5)
    clients = torch.tensor([4, 0, 2])
    served = mixer.serve(shared, memory, clients, 11)
    assert served.reads.shape == (3,)
    assert int(served.reads.min()) >= 0
    assert all(int(served.reads.max()) < len(leaf) for leaf in served.shared.values())


@every_mixer
def test_a_client_is_served_the_same_whoever_else_is_there(mixer: Mixer) -> None:
    shared, memory = _start(mixer, 5)
    if isinstance(mixer, Alone | Loopless | Laplacian | Candidates):
        shared = {name: _random(*leaf.shape, seed=8) for name, leaf in shared.items()}
    together = mixer.serve(shared, memory, torch.tensor([4, 0, 2]), 11)
    alone = mixer.serve(shared, memory, torch.tensor([2]), 11)
    for name, leaf in together.shared.items():
        torch.testing.assert_close(leaf[together.reads[2]], alone.shared[name][alone.reads[0]], rtol=0, atol=1e-15)


@every_mixer
def test_uploads_may_come_in_pieces_and_in_any_order_for_every_mixer(mixer: Mixer) -> None:
    shared, memory = _start(mixer, 6)
    uploads = _trained(mixer, 5)
    this = _round([4, 1, 7, 2, 2], [0, 1, 3, 4, 5], total=6)
    whole, after = mixer.mix(shared, memory, this, _whole(uploads))
    cut, cut_after = mixer.mix(shared, memory, this, _pieces(uploads, [[3, 1], [4], [0, 2]]))
    assert torch.equal(whole.groups, cut.groups)
    for first, second in ((whole.means, cut.means), (after, cut_after)):
        assert first.keys() == second.keys()
        for name, leaf in first.items():
            torch.testing.assert_close(leaf, second[name], rtol=0, atol=1e-14)


@every_mixer
def test_mixing_leaves_the_old_groups_and_memory_alone(mixer: Mixer) -> None:
    shared, memory = _start(mixer, 4)
    before = [{name: leaf.clone() for name, leaf in tree.items()} for tree in (shared, memory)]
    mixer.mix(shared, memory, _round([3, 1, 2, 9]), _whole(_trained(mixer, 4)))
    for old, tree in zip(before, (shared, memory), strict=True):
        assert all(torch.equal(leaf, tree[name]) for name, leaf in old.items())


@every_mixer
def test_messages_are_counted_but_for_clients_that_are_alone(mixer: Mixer) -> None:
    shared, memory = _start(mixer, 6)
    mixed, _ = mixer.mix(shared, memory, _round([4, 1, 7], [5, 1, 3], total=6), _whole(_trained(mixer, 3)))
    assert mixed.num_messages == (0 if isinstance(mixer, Alone) else 3)


@every_mixer
def test_newcomers_are_welcome_unless_clients_are_alone(mixer: Mixer) -> None:
    shared, memory = _start(mixer, 4)
    welcome = mixer.welcome(shared, memory)
    assert (welcome is None) == isinstance(mixer, Alone)
    if welcome is not None:
        tuned = isinstance(mixer, Candidates | Loopless | Laplacian | Relations)
        assert welcome.fine_tune == tuned
        assert (welcome.learn is not None) == (welcome.kept is not None) == isinstance(mixer, Hypernetwork)
        assert len({len(leaf) for leaf in welcome.shared.values()}) == 1


def test_clients_that_are_settled_read_what_their_memory_says_and_do_nothing_else() -> None:
    shared, memory = {"w": _random(3, 2)}, {"reads": torch.tensor([2, 0, 0, 1])}
    served = Settled().serve(shared, memory, torch.tensor([3, 0]), 0)
    assert served.reads.tolist() == [1, 2]
    assert torch.equal(served.shared["w"], shared["w"])
    assert Settled().welcome(shared, memory) is None
    with pytest.raises(AssertionError, match="not trained again"):
        Settled().mix(shared, memory, _round([1]), [])
    with pytest.raises(AssertionError, match="personalisation alone"):
        Settled().init(shared, frozenset(shared), _keys(1), 0)


# The matrix.


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_a_star_averages_by_samples(sizes: list[int]) -> None:
    uploads, counts = _uploads(len(sizes)), torch.tensor(sizes)
    mixed, memory = Star().mix({}, {}, _round(sizes), _whole(uploads))
    expected = (uploads["w"] * counts[:, None, None]).sum(0) / counts.sum()
    torch.testing.assert_close(mixed.means["w"][0], expected)
    assert mixed.groups.tolist() == [0]
    assert mixed.means["steps"].tolist() == [len(sizes) - 1]  # a counter is not averaged
    assert memory == {}


def test_a_star_serves_everybody_its_one_tree() -> None:
    shared, memory = Star().init({"w": _random(2)}, frozenset("w"), _keys(9), 0)
    served = Star().serve(shared, memory, torch.tensor([8, 3]), 0)
    assert served.reads.tolist() == [0, 0]
    assert served.shared["w"].shape == (1, 2)


def test_alone_replaces_the_own_tree_and_nothing_else() -> None:
    uploads, this = _uploads(2), _round([5, 6], [3, 1], total=4)
    mixed, _ = Alone().mix({}, {}, this, _whole(uploads))
    assert mixed.groups.tolist() == [3, 1]
    assert all(torch.equal(leaf, uploads[name]) for name, leaf in mixed.means.items())
    assert Alone().serve({}, {}, this.clients, 0).reads.tolist() == [3, 1]


def test_alone_keeps_a_diverged_client_to_itself() -> None:
    uploads = {"w": torch.tensor([[1.0], [float("inf")]])}
    mixed, _ = Alone().mix({}, {}, _round([1, 1]), _pieces(uploads, [[1], [0]]))
    assert mixed.means["w"].flatten().tolist() == [1.0, float("inf")]


def test_any_matrix_mixes() -> None:
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]], dtype=torch.float64)
    uploads = {"w": _random(3, 4)}
    torch.testing.assert_close(weighted_means(weights, _whole(uploads))["w"], weights @ uploads["w"])


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
    assert weighted_means(weights, _pieces(uploads, [[0], [1], [2]]))["steps"].tolist() == [4, -7]


def test_gathered_uploads_stand_in_the_cohorts_order() -> None:
    uploads = _uploads(5)
    gathered = gather(_pieces(uploads, [[3, 1], [4], [0, 2]]))
    assert all(torch.equal(leaf, uploads[name]) for name, leaf in gathered.items())


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_weights_by_samples_are_a_distribution(sizes: list[int]) -> None:
    weights = by_samples(_round(sizes))
    assert weights.shape == (1, len(sizes))
    np.testing.assert_allclose(weights[0].numpy(), np.array(sizes) / sum(sizes), rtol=1e-15)


def test_the_mean_of_groups_takes_the_largest_counter() -> None:
    mean = mean_of_groups({"w": torch.tensor([[1.0, 2.0], [3.0, 6.0]]), "steps": torch.tensor([4, 9])})
    assert mean["w"].tolist() == [[2.0, 4.0]]
    assert mean["steps"].tolist() == [9]


def test_rows_broadcast() -> None:
    assert row_of(torch.arange(3), torch.zeros(3, 4, 5)).shape == (3, 1, 1)
    assert row_of(torch.arange(3), torch.zeros(3)).shape == (3,)


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
    uploads = {"model/w": _random(2, 3), "loss": torch.tensor([4.0, 1.0], dtype=torch.float64)}
    before = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    mixed, memory = mixer.mix({}, {"weights": before}, _round([50, 1], [3, 1], total=4), _whole(uploads))
    # The mean is by the weights as they were, 0.1 and 0.3; the numbers of samples don't matter.
    torch.testing.assert_close(mixed.means["model/w"][0], 0.25 * uploads["model/w"][0] + 0.75 * uploads["model/w"][1])
    climbed = np.array([0.4, 0.3 + 0.1, 0.2, 0.1 + 0.4])
    np.testing.assert_allclose(memory["weights"].numpy(), _nearest_distribution(climbed), rtol=0, atol=1e-12)


def test_afl_averages_equally_those_who_all_weigh_nothing() -> None:
    uploads = {"model/w": _random(2, 3), "loss": torch.ones(2, dtype=torch.float64)}
    weights = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    mixed, _ = Agnostic().mix({}, {"weights": weights}, _round([5, 1], total=3), _whole(uploads))
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
    shared, memory = {"w": _random(5, 3), "steps": torch.arange(5)}, {}
    uploads = {"w": _random(5, 3, seed=1), "steps": torch.arange(5) + 7}
    mixed, _ = mixer.mix(shared, memory, _round([3, 9, 1, 4, 2]), _whole(uploads))
    expected = _laplacian_step(uploads["w"].numpy(), 0.2 * penalty)
    np.testing.assert_allclose(mixed.means["w"].numpy(), expected, rtol=0, atol=1e-14)
    assert torch.equal(mixed.means["steps"], uploads["steps"])


def test_fedus_step_on_a_cohort_sees_the_others_as_they_were() -> None:
    shared, uploads = {"w": _random(5, 3)}, {"w": _random(2, 3, seed=1)}
    mixed, _ = Laplacian(2.0).mix(shared, {}, _round([3, 9], [4, 1], total=5), _whole(uploads))
    models = shared["w"].numpy().copy()
    models[[4, 1]] = uploads["w"].numpy()
    expected = _laplacian_step(models, 0.4)
    assert mixed.groups.tolist() == [4, 1]
    np.testing.assert_allclose(mixed.means["w"].numpy(), expected[[4, 1]], rtol=0, atol=1e-14)


def test_pulls_never_pass_the_mean() -> None:
    uploads = {"w": _random(4, 3)}
    shared = {"w": torch.zeros(4, 3, dtype=torch.float64)}
    for mixer in (Laplacian(1e6), Loopless(1e6)):
        mixed, _ = mixer.mix(shared, {}, _round([3, 9, 1, 4]), _whole(uploads))
        torch.testing.assert_close(mixed.means["w"], uploads["w"].mean(0).expand(4, 3), rtol=0, atol=1e-14)


@pytest.mark.parametrize("key", range(6))
def test_l2sgds_pull_is_a_run_of_steps_towards_the_mean(key: int) -> None:
    penalty, probability = 0.9, 0.6
    uploads = {"w": _random(5, 3, seed=1)}
    shared = {"w": _random(5, 3)}
    mixed, _ = Loopless(penalty, probability).mix(shared, {}, _round([3, 9, 1, 4, 2], key=key), _whole(uploads))
    # The length of the run is random, but it is a whole number.
    strength = 0.2 * penalty * (1 - probability) / probability
    models, candidates = uploads["w"].numpy(), []
    for _ in range(30):
        models = _laplacian_step(models, strength)
        candidates.append(float(np.abs(mixed.means["w"].numpy() - models).max()))
    assert min(candidates) < 1e-14
    assert sorted(candidates)[1] > 1e-6


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.8])
def test_l2sgds_runs_have_geometric_lengths(probability: float) -> None:
    mixer, count = Loopless(1.0, probability), 2000
    keys = [int(derive(3, index)) for index in range(count)]
    local = np.array([mixer.num_steps(key) for key in keys])
    uploads, shared = {"w": torch.tensor([[1.0], [-1.0]]).double()}, {"w": torch.zeros(2, 1).double()}
    once = 0.01 * (1 - probability) / probability
    means = []
    for key in keys:
        this = Round(torch.arange(2), torch.ones(2, dtype=torch.int64), 2, 0.01, key)
        mixed, _ = mixer.mix(shared, {}, this, _whole(uploads))
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


# pFedHN.


def _hypernetwork(base: Tree, network: Tree, embeddings: Tensor) -> Tree:
    """Models made by the network, leaf by leaf."""
    hidden = torch.tanh(torch.einsum("ce,he->ch", embeddings, network["first"]) + network["bias"])
    return {
        name: base[name]
        + torch.einsum("ch,ph->cp", hidden, network[f"last/{name}"]).reshape(-1, *base[name].shape[1:])
        / math.sqrt(hidden.shape[1])
        for name in ("b", "w")
    }


def test_a_hypernetwork_serves_the_models_it_makes() -> None:
    mixer = Hypernetwork(3, 4)
    shared, memory = _start(mixer, 5)
    clients = torch.tensor([4, 0])
    served = mixer.serve(shared, memory, clients, 0)
    made = _hypernetwork(shared, take_prefix("network", memory), memory["embeddings"][clients])
    for name, leaf in made.items():
        torch.testing.assert_close(served.shared[name][served.reads], leaf, rtol=0, atol=1e-14)
    assert not torch.allclose(made["w"][0], made["w"][1])


def test_a_hypernetworks_step_is_the_gradient_of_the_clients_changes() -> None:
    mixer = Hypernetwork(3, 4, server_rate=0.7, embedding_rate=0.3)
    shared, memory = _start(mixer, 5)
    sizes, clients = [6, 2], [3, 1]
    uploads = _trained(mixer, 2)
    mixed, after = mixer.mix(shared, memory, _round(sizes, clients, total=5), _whole(uploads))

    network = take_prefix("network", memory)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in (shared | network).items()}
    embeddings = memory["embeddings"].clone().requires_grad_()
    made = _hypernetwork(leaves, leaves, embeddings[clients])
    change = {name: (leaf - uploads[name]).detach() for name, leaf in made.items()}
    products = sum((change[name] * leaf).flatten(1).sum(1) for name, leaf in made.items())
    assert isinstance(products, Tensor)
    slopes = torch.autograd.grad(
        (torch.tensor([0.75, 0.25]) * products).sum(), list(leaves.values()), retain_graph=True
    )
    (own,) = torch.autograd.grad(products.sum(), embeddings)
    for (name, leaf), slope in zip(leaves.items(), slopes, strict=True):
        found = mixed.means[name] if name in shared else after[f"network/{name}"]
        torch.testing.assert_close(found, leaf.detach() - 0.7 * slope, rtol=0, atol=1e-13)
        assert float(slope.abs().max()) > 1e-3
    torch.testing.assert_close(after["embeddings"], memory["embeddings"] - 0.3 * own, rtol=0, atol=1e-13)
    assert torch.equal(after["embeddings"][[0, 2, 4]], memory["embeddings"][[0, 2, 4]])


def test_a_hypernetworks_step_lowers_what_it_descends_by_finite_differences() -> None:
    """d/dh of sum_c p_c <change_c, h_c> along the step is minus the step's squared length over its rate."""
    mixer = Hypernetwork(2, 3, server_rate=1e-6, embedding_rate=0.0)
    shared, memory = _start(mixer, 3)
    uploads = _trained(mixer, 3)
    mixed, after = mixer.mix(shared, memory, _round([1, 2, 5]), _whole(uploads))
    served = mixer.serve(shared, memory, torch.arange(3), 0).shared
    again = mixer.serve(mixed.means, after, torch.arange(3), 0).shared
    shares = torch.tensor([1, 2, 5], dtype=torch.float64) / 8
    fall = sum(
        float((shares * ((served[name] - uploads[name]) * (again[name] - served[name])).flatten(1).sum(1)).sum())
        for name in served
    )
    steps = [(mixed.means[name] - shared[name]).square().sum() for name in shared]
    steps += [(after[name] - memory[name]).square().sum() for name in memory if name.startswith("network/")]
    assert fall == pytest.approx(-float(sum(steps)) / 1e-6, rel=1e-4)


def test_a_hypernetwork_makes_what_is_trained_and_averages_the_rest() -> None:
    mixer = Hypernetwork(2, 3)
    model = {"w": _random(3), "scale": _random(2, seed=1), "steps": torch.tensor(4)}
    shared, memory = mixer.init(model, frozenset("w"), _keys(3), 0)
    served = mixer.serve(shared, memory, torch.arange(3), 0).shared
    assert torch.equal(served["scale"], model["scale"].expand(3, 2))
    assert not torch.equal(served["w"], model["w"].expand(3, 3))
    uploads = {"w": _random(3, 3, seed=2), "scale": _random(3, 2, seed=3), "steps": torch.tensor([5, 9, 7])}
    mixed, _ = mixer.mix(shared, memory, _round([1, 2, 5]), _whole(uploads))
    shares = torch.tensor([1, 2, 5], dtype=torch.float64) / 8
    torch.testing.assert_close(mixed.means["scale"][0], shares @ uploads["scale"])
    assert mixed.means["steps"].tolist() == [9]


@pytest.mark.parametrize("mixer", [Relations(), Candidates()], ids=["mocha", "fedfomo"])
def test_mixers_that_keep_pairs_of_clients_refuse_very_many(mixer: Mixer) -> None:
    mixer.check(10_000)
    with pytest.raises(UserError, match="there are 10,001; allowed: at most 10,000 clients"):
        mixer.check(10_001)


def test_a_hypernetworks_base_alone_is_a_server_that_averages() -> None:
    """With embeddings that say nothing and the other layers held still, a rate of 1 takes the mean of the uploads."""
    mixer = Hypernetwork(2, 3, server_rate=1.0)
    shared, memory = _start(mixer, 3)
    memory = {name: torch.zeros_like(leaf) for name, leaf in memory.items()}
    uploads = _trained(mixer, 3)
    mixed, _ = mixer.mix(shared, memory, _round([1, 2, 5]), _whole(uploads))
    star, _ = Star().mix({}, {}, _round([1, 2, 5]), _whole(uploads))
    for name, leaf in star.means.items():
        torch.testing.assert_close(mixed.means[name], leaf, rtol=0, atol=1e-14)


def test_an_embedding_depends_on_the_clients_name_alone() -> None:
    mixer, model = Hypernetwork(3, 4), {"w": _random(2)}
    _, memory = mixer.init(model, frozenset(model), _keys(5), 1)
    _, fewer = mixer.init(model, frozenset(model), _keys(5)[[3, 1]], 1)
    assert torch.equal(memory["embeddings"][[3, 1]], fewer["embeddings"])
    assert len({tuple(row) for row in memory["embeddings"].tolist()}) == 5


# FedFOMO's server.


def test_a_client_is_sent_its_own_model_first_and_never_as_a_candidate() -> None:
    mixer = Candidates(3)
    shared = {"w": torch.arange(6.0)[:, None]}
    _, memory = mixer.init({"w": torch.zeros(1)}, frozenset("w"), _keys(6), 0)
    clients = torch.tensor([5, 2, 0])
    for key in range(20):
        sent = mixer.serve(shared, memory, clients, key).shared["w"].squeeze(-1).long()
        assert sent.shape == (3, 4)
        assert torch.equal(sent[:, 0], clients)
        assert all(len(set(row)) == 4 for row in sent.tolist())


def test_candidates_are_those_who_helped_most_unless_chance_decides() -> None:
    _, memory = Candidates().init({"w": torch.zeros(1)}, frozenset("w"), _keys(6), 0)
    memory["gains"][2] = torch.tensor([0.5, 0.0, 9.0, 2.0, 0.1, 0.7], dtype=torch.float64)
    shared, client = {"w": torch.arange(6.0)[:, None]}, torch.tensor([2])

    def sent(exploration: float, key: int) -> set[int]:
        row = Candidates(2, exploration).serve(shared, memory, client, key).shared["w"].flatten().long()
        return set(row[1:].tolist())

    assert all(sent(0.0, key) == {3, 5} for key in range(20))
    by_chance = [sent(1.0, key) for key in range(200)]
    times = [sum(other in row for row in by_chance) for other in (0, 1, 3, 4, 5)]
    assert min(times) > 200 * 2 / 5 - 4 * math.sqrt(200 * 0.4 * 0.6)
    assert max(times) < 200 * 2 / 5 + 4 * math.sqrt(200 * 0.4 * 0.6)
    sometimes = sum(sent(0.5, key) == {3, 5} for key in range(200)) / 200
    assert 0.4 < sometimes < 0.7


def test_gains_are_booked_for_the_clients_that_were_sent() -> None:
    mixer = Candidates(2)
    shared = {"w": torch.arange(6.0)[:, None]}
    _, memory = mixer.init({"w": torch.zeros(1)}, frozenset("w"), _keys(6), 0)
    this = _round([1, 1], [4, 1], total=6)
    sent = mixer.serve(shared, memory, this.clients, this.key).shared["w"].squeeze(-1).long()[:, 1:]
    weights = torch.tensor([[0.25, 0.75], [0.0, 1.0]], dtype=torch.float64)
    mixed, after = mixer.mix(shared, memory, this, _whole({"model/w": _random(2, 1), "weights": weights}))
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for client, others, helped in zip(this.clients, sent, weights, strict=True):
        expected[client, others] = helped
    assert torch.equal(after["gains"], expected)
    assert mixed.groups.tolist() == [4, 1]
    _, twice = mixer.mix(
        shared, memory | {"gains": expected}, this, _whole({"model/w": _random(2, 1), "weights": weights})
    )
    assert float(twice["gains"].sum()) == pytest.approx(4)


def test_newcomers_are_sent_the_mean_and_those_who_helped_most() -> None:
    mixer = Candidates(2)
    shared = {"w": torch.tensor([0.0, 1.0, 5.0, 10.0])[:, None]}
    _, memory = mixer.init({"w": torch.zeros(1)}, frozenset("w"), _keys(4), 0)
    memory["gains"][:, 3], memory["gains"][0, 1] = 1.0, 2.0
    welcome = mixer.welcome(shared, memory)
    assert welcome is not None
    assert welcome.shared["w"].flatten().tolist() == [4.0, 10.0, 1.0]


# MOCHA's server.


def test_mochas_tasks_are_combinations_of_the_dual_vectors() -> None:
    mixer = Relations(0.8, relations_every=0)
    shared, memory = _start(mixer, 4)
    sigma = torch.tensor(np.cov(np.random.default_rng(0).normal(size=(4, 9))))
    memory = memory | {"relations": sigma / sigma.trace()} | {"dual/b": _random(4, 3), "dual/w": _random(4, 2, 3)}
    duals = _trained(mixer, 2)
    mixed, after = mixer.mix(shared, memory, _round([1, 1], [3, 0], total=4), _whole(duals))
    for name in ("b", "w"):
        everyone = memory[f"dual/{name}"].clone()
        everyone[[3, 0]] = duals[name]
        assert torch.equal(after[f"dual/{name}"], everyone)
        expected = np.einsum("ts,s...->t...", memory["relations"].numpy() / 1.6, everyone.numpy())
        np.testing.assert_allclose(mixed.means[f"task/{name}"].numpy(), expected, rtol=0, atol=1e-14)
    assert torch.equal(after["relations"], memory["relations"])
    assert mixed.groups.tolist() == [0, 1, 2, 3]


def test_mochas_relations_are_updated_when_they_are_due() -> None:
    mixer = Relations(relations_every=3)
    shared, memory = _start(mixer, 4)
    seen = [memory["relations"]]
    for index in range(7):
        _, memory = mixer.mix(shared, memory, _round([1, 1, 1, 1]), _whole(_trained(mixer, 4, seed=10 * index)))
        seen.append(memory["relations"])
    changed = [not torch.equal(first, second) for first, second in pairwise(seen)]
    assert changed == [False, False, True, False, False, True, False]
