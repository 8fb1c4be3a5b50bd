"""pFedHN's, FedFOMO's and MOCHA's servers against their formulas worked out anew."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from mixers import all_at_once, downloads, first_state, make_keys, make_round, make_trained, random_tensor
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.tree import Tree, take_prefix
from fedem.methods.fedfomo import Candidates
from fedem.methods.mixer import Mixer, Star, Start
from fedem.methods.mocha import Relations
from fedem.methods.pfedhn import Hypernetwork

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
    shared, memory = first_state(mixer, 5)
    clients = torch.tensor([4, 0])
    served = mixer.read(shared, memory, clients)
    made = _hypernetwork(shared, take_prefix("network", memory), memory["embeddings"][clients])
    for name, leaf in made.items():
        torch.testing.assert_close(served.shared[name][served.reads], leaf, rtol=0, atol=1e-14)
    assert not torch.allclose(made["w"][0], made["w"][1])


def test_a_hypernetworks_step_is_the_gradient_of_the_clients_changes() -> None:
    mixer = Hypernetwork(3, 4, server_rate=0.7, embedding_rate=0.3)
    shared, memory = first_state(mixer, 5)
    sizes, clients = [6, 2], [3, 1]
    uploads = make_trained(mixer, 2)
    mixed, after = mixer.mix(shared, memory, make_round(sizes, clients, total=5), all_at_once(uploads))

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
    shared, memory = first_state(mixer, 3)
    uploads = make_trained(mixer, 3)
    mixed, after = mixer.mix(shared, memory, make_round([1, 2, 5]), all_at_once(uploads))
    served = mixer.read(shared, memory, torch.arange(3)).shared
    again = mixer.read(mixed.means, after, torch.arange(3)).shared
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
    model = {"w": random_tensor(3), "scale": random_tensor(2, seed=1), "steps": torch.tensor(4)}
    shared, memory = mixer.init(Start(model, frozenset("w"), make_keys(3), 0))
    served = mixer.read(shared, memory, torch.arange(3)).shared
    assert torch.equal(served["scale"], model["scale"].expand(3, 2))
    assert not torch.equal(served["w"], model["w"].expand(3, 3))
    uploads = {"w": random_tensor(3, 3, seed=2), "scale": random_tensor(3, 2, seed=3), "steps": torch.tensor([5, 9, 7])}
    mixed, _ = mixer.mix(shared, memory, make_round([1, 2, 5]), all_at_once(uploads))
    shares = torch.tensor([1, 2, 5], dtype=torch.float64) / 8
    torch.testing.assert_close(mixed.means["scale"][0], shares @ uploads["scale"])
    assert mixed.means["steps"].tolist() == [9]


@pytest.mark.parametrize("mixer", [Relations(), Candidates()], ids=["mocha", "fedfomo"])
def test_mixers_that_keep_pairs_of_clients_refuse_very_many(mixer: Mixer) -> None:
    mixer.check(torch.zeros(10_000), 0)
    with pytest.raises(UserError, match="there are 10,001; allowed: at most 10,000 clients"):
        mixer.check(torch.zeros(10_001), 0)


def test_a_hypernetworks_base_alone_is_a_server_that_averages() -> None:
    """With embeddings that say nothing and the other layers held still, a rate of 1 takes the mean of the uploads."""
    mixer = Hypernetwork(2, 3, server_rate=1.0)
    shared, memory = first_state(mixer, 3)
    memory = {name: torch.zeros_like(leaf) for name, leaf in memory.items()}
    uploads = make_trained(mixer, 3)
    mixed, _ = mixer.mix(shared, memory, make_round([1, 2, 5]), all_at_once(uploads))
    star, _ = Star().mix({}, {}, make_round([1, 2, 5]), all_at_once(uploads))
    for name, leaf in star.means.items():
        torch.testing.assert_close(mixed.means[name], leaf, rtol=0, atol=1e-14)


def test_an_embedding_depends_on_the_clients_name_alone() -> None:
    mixer, model = Hypernetwork(3, 4), {"w": random_tensor(2)}
    _, memory = mixer.init(Start(model, frozenset(model), make_keys(5), 1))
    _, fewer = mixer.init(Start(model, frozenset(model), make_keys(5)[[3, 1]], 1))
    assert torch.equal(memory["embeddings"][[3, 1]], fewer["embeddings"])
    assert len({tuple(row) for row in memory["embeddings"].tolist()}) == 5


# FedFOMO's server.


def test_a_client_is_sent_its_own_model_first_and_never_as_a_candidate() -> None:
    mixer = Candidates(3)
    shared = {"w": torch.arange(6.0)[:, None]}
    _, memory = mixer.init(Start({"w": torch.zeros(1)}, frozenset("w"), make_keys(6), 0))
    clients = torch.tensor([5, 2, 0])
    for key in range(20):
        sent = downloads(mixer, shared, memory, [5, 2, 0], key).shared["w"].squeeze(-1).long()
        assert sent.shape == (3, 4)
        assert torch.equal(sent[:, 0], clients)
        assert all(len(set(row)) == 4 for row in sent.tolist())


def test_candidates_are_those_who_helped_most_unless_chance_decides() -> None:
    _, memory = Candidates().init(Start({"w": torch.zeros(1)}, frozenset("w"), make_keys(6), 0))
    memory["gains"][2] = torch.tensor([0.5, 0.0, 9.0, 2.0, 0.1, 0.7], dtype=torch.float64)
    shared = {"w": torch.arange(6.0)[:, None]}

    def sent(exploration: float, key: int) -> set[int]:
        row = downloads(Candidates(2, exploration), shared, memory, [2], key).shared["w"].flatten().long()
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
    _, memory = mixer.init(Start({"w": torch.zeros(1)}, frozenset("w"), make_keys(6), 0))
    this = make_round([1, 1], [4, 1], total=6)
    sent = mixer.plan(shared, memory, this).downloads.shared["w"].squeeze(-1).long()[:, 1:]
    weights = torch.tensor([[0.25, 0.75], [0.0, 1.0]], dtype=torch.float64)
    mixed, after = mixer.mix(shared, memory, this, all_at_once({"model/w": random_tensor(2, 1), "weights": weights}))
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for client, others, helped in zip(this.clients, sent, weights, strict=True):
        expected[client, others] = helped
    assert torch.equal(after["gains"], expected)
    assert mixed.groups.tolist() == [4, 1]
    _, twice = mixer.mix(
        shared, memory | {"gains": expected}, this, all_at_once({"model/w": random_tensor(2, 1), "weights": weights})
    )
    assert float(twice["gains"].sum()) == pytest.approx(4)


def test_newcomers_are_sent_the_mean_and_those_who_helped_most() -> None:
    mixer = Candidates(2)
    shared = {"w": torch.tensor([0.0, 1.0, 5.0, 10.0])[:, None]}
    _, memory = mixer.init(Start({"w": torch.zeros(1)}, frozenset("w"), make_keys(4), 0))
    memory["gains"][:, 3], memory["gains"][0, 1] = 1.0, 2.0
    welcome = mixer.welcome(shared, memory)
    assert not welcome.refusal
    assert welcome.shared["w"].flatten().tolist() == [4.0, 10.0, 1.0]


# MOCHA's server.


def test_mochas_tasks_are_combinations_of_the_dual_vectors() -> None:
    mixer = Relations(0.8, relations_every=0)
    shared, memory = first_state(mixer, 4)
    sigma = torch.tensor(np.cov(np.random.default_rng(0).normal(size=(4, 9))))
    memory = memory | {"relations": sigma / sigma.trace()}
    shared = shared | {"dual/b": random_tensor(4, 3), "dual/w": random_tensor(4, 2, 3)}
    duals = make_trained(mixer, 2)
    mixed, after = mixer.mix(shared, memory, make_round([1, 1], [3, 0], total=4), all_at_once(duals))
    for name in ("b", "w"):
        everyone = shared[f"dual/{name}"].clone()
        everyone[[3, 0]] = duals[name]
        assert torch.equal(mixed.means[f"dual/{name}"], everyone)
        expected = np.einsum("ts,s...->t...", memory["relations"].numpy() / 1.6, everyone.numpy())
        np.testing.assert_allclose(mixed.means[f"task/{name}"].numpy(), expected, rtol=0, atol=1e-14)
    assert torch.equal(after["relations"], memory["relations"])
    assert mixed.groups.tolist() == [0, 1, 2, 3]


def test_new_relations_leave_mochas_tasks_where_they_are() -> None:
    kept, learnt = Relations(0.8, relations_every=0), Relations(0.8, relations_every=1)
    shared, memory = first_state(kept, 4)
    duals, this = make_trained(kept, 4), make_round([1, 1, 1, 1])
    before, _ = kept.mix(shared, memory, this, all_at_once(duals))
    after, related = learnt.mix(shared, memory, this, all_at_once(duals))
    sigma = related["relations"]
    assert not torch.allclose(sigma, memory["relations"], atol=0.01)
    for name in ("b", "w"):
        tasks = after.means[f"task/{name}"]
        assert torch.equal(tasks, before.means[f"task/{name}"])
        expected = np.einsum("ts,s...->t...", sigma.numpy() / 1.6, after.means[f"dual/{name}"].numpy())
        np.testing.assert_allclose(tasks.numpy(), expected, rtol=0, atol=1e-12)


def test_mochas_relations_are_updated_when_they_are_due() -> None:
    mixer = Relations(relations_every=3)
    shared, memory = first_state(mixer, 4)
    seen = [memory["relations"]]
    for index in range(7):
        _, memory = mixer.mix(
            shared, memory, make_round([1, 1, 1, 1]), all_at_once(make_trained(mixer, 4, seed=10 * index))
        )
        seen.append(memory["relations"])
    changed = [not torch.equal(first, second) for first, second in pairwise(seen)]
    assert changed == [False, False, True, False, False, True, False]
