"""Uploads that are guarded before they are averaged: the rules against numpy and scipy, and what they bear."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DIMENSION, advance, distance, make_federation, make_training, same_states, stacked
from hypothesis import given
from hypothesis import strategies as st
from mixers import all_at_once, in_pieces, make_round, random_tensor
from scipy.optimize import minimize
from scipy.stats import trim_mean
from torch import Tensor, nn

from fedem.core.tree import Tree, tree_index, tree_map
from fedem.engines import OneByOne
from fedem.graphs import Ring
from fedem.methods import METHODS
from fedem.methods.decentralised import Graph
from fedem.methods.mixer import Mixer, Round, Star
from fedem.methods.wrappers.compression import Codec, Compression
from fedem.methods.wrappers.defences import (
    DEFENCES,
    Blocks,
    Clip,
    Defence,
    DefendedGraph,
    DefendedServer,
    GeometricMedian,
    Median,
    MultiKrum,
    PlainMean,
    TrimmedMean,
    capped,
)
from fedem.methods.wrappers.local_layers import LocalLayers
from fedem.methods.wrappers.server_steps import FedAvgM, ServerSteps
from fedem.models import Model
from fedem.models.losses import Logistic
from fedem.runs.rounds import Training

ONE = Blocks(frozenset({"w"}))
SEVERAL = Blocks(frozenset({"w", "v"}), True, frozenset({"v"}))
EVEN = Star(weighting="equal")
every_rule = pytest.mark.parametrize("name", DEFENCES)
centres = pytest.mark.parametrize("name", ["median", "trimmed_mean", "geometric_median", "multi_krum"])


def mixed_by(rule: Defence, uploads: Tree, this: Round, blocks: Blocks = ONE, base: Mixer = EVEN, **more: Any) -> Tree:
    """The mean, without the dimension of groups, of a server whose u is zero."""
    shared = tree_map(lambda leaf: torch.zeros_like(leaf[:1]), uploads)
    mixer = DefendedServer(base, rule, blocks)
    mixed, memory = mixer.mix(more.get("shared", shared), {}, this, more.get("pieces", all_at_once(uploads)))
    assert (mixed.groups.tolist(), mixed.num_messages, memory) == ([0], len(this.clients), {})
    return tree_index(mixed.means, 0)


def defended(training: Training, rule: Defence) -> Training:
    blocks, of_updates = Blocks.of_method(training.algorithm), training.codec is not None
    if isinstance(training.mixer, Graph):
        return replace(training, mixer=DefendedGraph(training.mixer, rule, blocks))
    return replace(training, mixer=DefendedServer(training.mixer, rule, blocks, of_updates))


def normalising() -> Model:
    layers = (nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    return Model(lambda: nn.Sequential(*layers), Logistic(), torch.float64)


# The largest weight.


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_no_weight_is_above_the_largest_allowed(sizes: list[int], most: float) -> None:
    weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    found = capped(weights, most)
    assert float(found.sum()) == pytest.approx(1)
    assert float(found.max()) <= max(most, 1 / len(sizes)) * (1 + 1e-9)
    order = weights.argsort()
    assert bool((found[order].diff() >= -1e-12).all())
    # min(most, level * weight): whoever is below the most has its weight times one level.
    below = found < min(most, float(found.max())) * (1 - 1e-9)
    levels = found[below] / weights[below]
    assert not len(levels) or float(levels.max() / levels.min()) == pytest.approx(1)


def test_weights_that_are_small_enough_stay_and_those_of_too_few_are_alike() -> None:
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    torch.testing.assert_close(capped(weights, 0.6), weights)
    assert capped(weights, 0.2).tolist() == [1 / 3] * 3


def test_the_largest_weight_holds_in_the_mean() -> None:
    uploads, this = {"w": random_tensor(3, 4)}, make_round([80, 10, 10])
    found = mixed_by(PlainMean(max_weight=0.5), uploads, this, base=Star())["w"]
    torch.testing.assert_close(found, torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64) @ uploads["w"])
    # With a weight above a half, a client is the weighted median itself.
    assert torch.equal(mixed_by(Median(), uploads, this, base=Star())["w"], uploads["w"][0])
    alike = mixed_by(Median(max_weight=0.4), uploads, this, base=Star())["w"]
    torch.testing.assert_close(alike, uploads["w"].median(0).values)


# The rules.


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_a_median_is_numpys(count: int) -> None:
    uploads = {"w": random_tensor(count, 2, 3)}
    found = mixed_by(Median(), uploads, make_round([1] * count))["w"]
    np.testing.assert_allclose(found.numpy(), np.median(uploads["w"].numpy(), axis=0), rtol=1e-14)


@pytest.mark.parametrize(("count", "share"), [(4, 0.25), (5, 0.2), (10, 0.3), (8, 0.0)])
def test_a_trimmed_mean_is_scipys(count: int, share: float) -> None:
    uploads = {"w": random_tensor(count, 2, 3)}
    found = mixed_by(TrimmedMean(share=share), uploads, make_round([1] * count))["w"]
    np.testing.assert_allclose(found.numpy(), trim_mean(uploads["w"].numpy(), share, axis=0), rtol=1e-12)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(share=0.2)], ids=["median", "trimmed_mean"])
def test_a_client_counts_as_many_times_as_its_weight_says(rule: Defence) -> None:
    sizes, uploads = [3, 1, 2, 4], {"w": random_tensor(4, 5)}
    repeated = tree_map(lambda leaf: leaf.repeat_interleave(torch.tensor(sizes), 0), uploads)
    found = mixed_by(rule, uploads, make_round(sizes), base=Star())
    torch.testing.assert_close(found, mixed_by(rule, repeated, make_round([1] * 10)))


@pytest.mark.parametrize("sizes", [[1] * 6, [5, 1, 2, 8, 3, 3]])
def test_a_geometric_median_has_the_least_sum_of_distances(sizes: list[int]) -> None:
    uploads = {"w": random_tensor(6, 2, 3), "b": random_tensor(6, seed=1)}
    rule, blocks = GeometricMedian(tolerance=1e-9, iterations=2000), Blocks(frozenset({"w", "b"}))
    found = mixed_by(rule, uploads, make_round(sizes), blocks, base=Star())
    points = np.concatenate([uploads["w"].reshape(6, -1).numpy(), uploads["b"].reshape(6, 1).numpy()], axis=1)
    weights = np.array(sizes) / sum(sizes)
    best = minimize(lambda z: weights @ np.linalg.norm(points - z, axis=1), points.mean(0), tol=1e-14)
    np.testing.assert_allclose(found["w"].flatten().numpy(), best.x[:6], atol=1e-5)
    np.testing.assert_allclose(float(found["b"]), best.x[6], atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_krum_averages_those_with_others_close_by(count: int) -> None:
    points = np.random.default_rng(count).normal(size=(count, 4))
    hostile = max(0, min(ceil(0.3 * count), (count - 3) // 2))
    squares = np.sort(((points[:, None] - points) ** 2).sum(-1), axis=1)
    scores = squares[:, 1 : max(1, count - hostile - 1)].sum(1)
    kept = np.argsort(scores, kind="stable")[: count - hostile]
    found = mixed_by(MultiKrum(share=0.3), {"w": torch.from_numpy(points)}, make_round([1] * count))["w"]
    np.testing.assert_allclose(found.numpy(), points[kept].mean(0), rtol=1e-12)


@pytest.mark.parametrize("count", [6, 12])
def test_clipping_by_hand(count: int) -> None:
    lengths = np.array([1.0, 1.5, 0.9, 1.6, 50.0, 1.0, 1.0, 1.1, 1.1, 1.2, 0.8, 1.1][:count])
    directions = random_tensor(count, 6)
    directions = (directions / directions.norm(dim=1, keepdim=True)).reshape(count, 2, 3)
    start = random_tensor(1, 2, 3, seed=5)
    uploads = {"w": start + torch.from_numpy(lengths)[:, None, None] * directions}
    found = mixed_by(Clip(), uploads, make_round([1] * count), shared={"w": start})["w"]
    ordered = np.sort(lengths)
    upper, median = ordered[count - ceil(count / 4) - 1], ordered[(count - 1) // 2]
    limit = upper * (max(3.0, (upper / median) ** 5) if count == 12 else 15.0)
    clipped = np.minimum(lengths, limit)
    assert clipped[4] == limit < 50
    expected = start[0].numpy() + (clipped[:, None, None] * directions.numpy()).mean(0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_the_limit_widens_where_clients_differ_and_no_further() -> None:
    alike, spread, far = (torch.tensor([1.0] * 8 + [upper] * 4 + [99.0] * 4) for upper in (1.0, 1.5, 9.0))
    assert [float(Clip().limit(lengths)) for lengths in (alike, spread, far)] == [3.0, 1.5 * 1.5**5, 135.0]
    assert float(Clip(tightest=2.0, loosest=2.0).limit(spread)) == 3.0
    assert float(Clip(tightest=20.0).limit(far)) == 180.0
    # Few clients do not show how much they differ.
    assert float(Clip().limit(alike[:11])) == 15.0
    # Nobody moves: nobody may. One alone, or most without a length: all may.
    assert float(Clip().limit(torch.tensor([0.0, 0.0, 0.0, 1.0]))) == 0.0
    assert float(Clip().limit(torch.tensor([7.0]))) >= 7.0
    assert float(Clip().limit(torch.tensor([1.0, torch.nan, torch.inf]))) == torch.inf


@pytest.mark.parametrize("order", [[[0, 1, 2, 3, 4]], [[3, 1], [0], [2, 4]]])
def test_each_model_has_a_length_of_its_own_and_one_limit(order: list[list[int]]) -> None:
    """Clients move the model that suits them; one also moves another, much further, and only that is clipped."""
    own, common = 1e-6 * random_tensor(5, 3, 4), random_tensor(5, 1, 2, seed=1)
    for client, model in enumerate((0, 1, 2, 0, 1)):
        own[client, model] = 1.0
    own[4, 2] = 100.0
    uploads = {"w": own, "v": common}
    found = mixed_by(Clip(), uploads, make_round([1] * 5), SEVERAL, pieces=in_pieces(uploads, order))
    expected = own.clone()
    expected[4, 2] *= 15 * 2.0 / 200.0  # the limit is fifteen times the usual length, of four ones
    torch.testing.assert_close(found["w"], expected.mean(0))
    torch.testing.assert_close(found["v"], common.mean(0))
    # What was not clipped is what it was, also of that client.
    rule, clipped = Clip(), torch.zeros(1, 3, 4, dtype=torch.float64)
    _, pieces = rule.defend({"w": clipped}, make_round([1] * 5), torch.ones(5), all_at_once({"w": own}), SEVERAL)
    ((_, trees),) = pieces
    assert torch.equal(
        trees["w"] == own,
        torch.ones(5, 3, 4, dtype=torch.bool).index_put((torch.tensor(4), torch.tensor(2)), torch.tensor(False)),
    )


def test_krum_and_the_geometric_median_judge_each_model_by_itself() -> None:
    models = random_tensor(7, 3, 4)
    models[0, 0] += 1e6
    models[1, 2] += 1e6
    blocks, this = Blocks(frozenset({"w"}), True), make_round([1] * 7)
    for rule in (MultiKrum(), GeometricMedian()):
        found = mixed_by(rule, {"w": models}, this, blocks)["w"]
        for model in range(3):
            alone = mixed_by(rule, {"w": models[:, model]}, this)["w"]
            torch.testing.assert_close(found[model], alone, rtol=1e-4, atol=1e-4)
        assert float(found.abs().max()) < 10


# What all rules have in common.


@every_rule
def test_one_client_is_taken_as_it_is(name: str) -> None:
    uploads = {"w": random_tensor(1, 2, 3), "steps": torch.tensor([4])}
    found = mixed_by(DEFENCES[name](), uploads, make_round([9]))
    assert all(torch.equal(found[leaf], rows[0]) for leaf, rows in uploads.items())


@every_rule
def test_clients_that_agree_are_their_mean(name: str) -> None:
    uploads = tree_map(lambda leaf: leaf.repeat(5, 1, 1), {"w": random_tensor(1, 2, 3)})
    found = mixed_by(DEFENCES[name](), uploads, make_round([3, 1, 4, 1, 5]), base=Star())
    torch.testing.assert_close(found["w"], uploads["w"][0])


@every_rule
def test_the_order_of_clients_and_of_their_coming_does_not_matter(name: str) -> None:
    uploads, sizes, order = {"w": random_tensor(6, 2, 3)}, [5, 1, 2, 8, 3, 4], [4, 2, 0, 5, 1, 3]
    uploads["w"][2] *= 40
    rule = DEFENCES[name](max_weight=0.3)
    whole = mixed_by(rule, uploads, make_round(sizes), base=Star())
    turned = mixed_by(
        rule, tree_index(uploads, torch.tensor(order)), make_round([sizes[at] for at in order]), base=Star()
    )
    torch.testing.assert_close(whole, turned)
    pieces = in_pieces(uploads, [[5, 0], [3], [1, 2, 4]])
    torch.testing.assert_close(whole, mixed_by(rule, uploads, make_round(sizes), base=Star(), pieces=pieces))


@given(
    st.sampled_from(["clip", "median", "trimmed_mean", "geometric_median", "multi_krum"]),
    st.integers(0, 10**6),
    st.sampled_from([10.0, 1e6, 1e15]),
)
def test_a_quarter_of_the_clients_can_do_little(name: str, seed: int, far: float) -> None:
    """Two of nine send whatever they like, together or not: the result stays by the others."""
    honest = random_tensor(7, 5, seed=seed)
    hostile = far * random_tensor(1 if seed % 2 else 2, 5, seed=seed + 1).expand(2, 5)
    found = mixed_by(DEFENCES[name](), {"w": torch.cat([honest, hostile])}, make_round([1] * 9))["w"]
    if name in ("median", "trimmed_mean"):
        slack = 1e-12
        assert bool((found >= honest.amin(0) - slack).all() and (found <= honest.amax(0) + slack).all())
    elif name == "clip":
        # sum_t |d_t| / C, with none longer than fifteen times the longest honest change.
        longest = float(honest.norm(dim=1).max())
        assert float((found - honest.sum(0) / 9).norm()) <= 15 * longest * 2 / 9 * (1 + 1e-9)
    else:
        # Both are within a few radii of the honest ones: of the geometric median 2 (1 - a) / (1 - 2 a), a = 2 / 9.
        radius = float((honest - honest.mean(0)).norm(dim=1).max())
        assert float((found - honest.mean(0)).norm()) <= 2 * (7 / 9) / (5 / 9) * radius + 1e-6


@pytest.mark.parametrize("name", sorted(set(DEFENCES) - {"mean"}))
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_whoever_sends_what_is_not_finite_did_not_answer(name: str, broken: float) -> None:
    uploads, sizes = {"w": random_tensor(5, 2, 3), "steps": torch.arange(5)}, [5, 1, 2, 8, 3]
    spoilt = uploads | {"w": uploads["w"].clone()}
    spoilt["w"][3, 1, 2] = broken
    others, rule = torch.tensor([0, 1, 2, 4]), DEFENCES[name]()
    expected = mixed_by(rule, tree_index(uploads, others), make_round([5, 1, 2, 3]), base=Star())
    for pieces in ([[0, 1, 2, 3, 4]], [[3], [4, 0], [1, 2]]):
        found = mixed_by(rule, spoilt, make_round(sizes), base=Star(), pieces=in_pieces(spoilt, pieces))
        torch.testing.assert_close(found, expected)
    # Where it is most of them, training diverges, and that must be noticed.
    spoilt["w"][:4] = torch.nan
    assert not bool(mixed_by(rule, spoilt, make_round(sizes), base=Star())["w"].isfinite().all())


@centres
def test_counters_have_their_median(name: str) -> None:
    uploads = {"w": random_tensor(5, 2), "steps": torch.tensor([3, 5, 4, 2**60, 4])}
    assert int(mixed_by(DEFENCES[name](), uploads, make_round([1] * 5))["steps"]) == 4


def test_clipping_holds_counters_buffers_and_what_is_frozen() -> None:
    """A counter far ahead, buffers far off and a frozen leaf that moved, each by another client than the others."""
    uploads = {"w": random_tensor(6, 2), "steps": torch.tensor([13, 15, 14, 10**9, 14, 12])}
    uploads |= {"mean": 1e-3 * random_tensor(6, 2, seed=1).sign(), "frozen": torch.zeros(6, 1, dtype=torch.float64)}
    uploads["mean"][5] *= 1e6
    shared = {name: torch.zeros_like(leaf[:1]) for name, leaf in uploads.items()} | {"steps": torch.tensor([10])}
    found = mixed_by(Clip(), uploads, make_round([1] * 6), shared=shared)
    # Without the longest two of 2, 3, 4, 4, 5 and another the longest is 4: at most fifteen times that.
    assert int(found["steps"]) == 10 + 15 * 4
    assert float(found["mean"].abs().max()) <= (5 + 15) * 1e-3 / 6 + 1e-12
    torch.testing.assert_close(found["w"], uploads["w"].mean(0))
    uploads = {"w": random_tensor(6, 2), "frozen": torch.zeros(6, 1, dtype=torch.float64)}
    uploads["frozen"][2] = 7.0
    assert float(mixed_by(Clip(), uploads, make_round([1] * 6))["frozen"]) == 0.0


# Rounds.


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.takes_defence])
def test_honest_rounds_with_clipping_are_those_without_to_the_bit(method: str) -> None:
    plain = make_training(method, make_federation(sizes=(7, 6, 10, 14, 5)), engine=stacked(2), cohort_size=4)
    if isinstance(plain.mixer, LocalLayers):
        blocks = Blocks.of_method(plain.algorithm)
        guarded = replace(plain, mixer=LocalLayers(DefendedServer(Star(), Clip(), blocks), plain.mixer.leaves))
    else:
        guarded = defended(plain, Clip())
    assert same_states(advance(plain, 2), advance(guarded, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_honest_rounds_of_compressed_messages_as_well(dtype: torch.dtype) -> None:
    model = Model(lambda: nn.Linear(DIMENSION, 1), Logistic(), dtype)
    federation = make_federation(sizes=(7, 6, 10, 14, 5), dtype=np.float32 if dtype == torch.float32 else np.float64)
    plain = make_training("fedem", federation, model=model, cohort_size=4)
    plain = replace(plain, codec=Codec(Compression("int8", "int8"), plain.algorithm.model, 1))
    assert same_states(advance(plain, 3), advance(defended(plain, Clip()), 3))


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "multi_krum", "clip"])
def test_messages_of_changes_lead_where_models_do(name: str) -> None:
    plain = make_training("fedem")
    rule = DEFENCES[name](**({"tightest": 1.0, "loosest": 1.0} if name == "clip" else {}))
    changes = replace(plain, codec=Codec(Compression("none", "none", 1e-9), plain.algorithm.model, 1))
    whole, sent = advance(defended(plain, rule), 2), advance(defended(changes, rule), 2)
    for leaf, known in whole.shared.items():
        torch.testing.assert_close(sent.shared[leaf], known, rtol=1e-8, atol=1e-8)
    assert distance(whole, advance(plain, 2)) > 1e-3


@every_rule
@pytest.mark.parametrize("method", ["fedavg", "fedem"])
def test_loop_equals_stacked(name: str, method: str) -> None:
    rule = DEFENCES[name](max_weight=0.3)
    states = [advance(defended(make_training(method, engine=engine), rule), 3) for engine in (OneByOne(), stacked(2))]
    assert distance(*states) < 1e-4 if name == "geometric_median" else distance(*states) < 1e-9


@every_rule
def test_a_mixture_of_one_is_fedavg(name: str) -> None:
    mixture = defended(make_training("fedem", num_components=1), DEFENCES[name]())
    fedavg = defended(make_training("fedavg"), DEFENCES[name]())
    start = fedavg.init()
    alike = replace(mixture.init(), shared=tree_map(lambda leaf: leaf[:, None], start.shared))
    one, single = advance(mixture, 2, alike).shared, advance(fedavg, 2, start).shared
    for leaf, model in single.items():
        torch.testing.assert_close(one[leaf][:, 0], model, rtol=1e-5, atol=1e-6)


@every_rule
def test_statistics_of_batches_stay_possible(name: str) -> None:
    training = make_training("fedavg", make_federation(sizes=(7, 4, 12, 9)), model=normalising())
    state = advance(defended(training, DEFENCES[name]()), 3)
    assert bool((state.shared["1.running_var"] > 0).all())
    assert int(state.shared["1.num_batches_tracked"]) > 0


def test_a_server_steps_along_what_the_rule_makes() -> None:
    plain = make_training("fedem", cohort_size=4)
    guarded = defended(plain, Median())
    stepping = replace(plain, mixer=ServerSteps(guarded.mixer, FedAvgM(0.5, 0.0)))
    start = plain.init()
    half, whole = stepping.step(stepping.init())[0].shared, guarded.step(start)[0].shared
    for name, leaf in whole.items():
        torch.testing.assert_close(half[name], (leaf + start.shared[name]) / 2)


def test_means_add_up_only_where_uploads_are_not_gathered() -> None:
    for name, kind in DEFENCES.items():
        mixer = DefendedServer(Star(), kind(), ONE)
        assert mixer.adds_up == ServerSteps(mixer, FedAvgM()).adds_up == (name == "mean")
    assert not DefendedGraph(Graph(Ring()), Clip(), ONE).adds_up


# Graphs.


def gossip(rule: Defence, matrix: Tensor, uploads: Tree, blocks: Blocks = ONE) -> Tree:
    return rule.gossip(matrix, torch.arange(len(matrix)), all_at_once(uploads), blocks)


def lazy_ring(count: int) -> Tensor:
    eye = torch.eye(count, dtype=torch.float64)
    return eye / 2 + (eye.roll(1, 0) + eye.roll(-1, 0)) / 4


def test_clipped_gossip_by_hand() -> None:
    matrix, models = lazy_ring(6), random_tensor(6, 3)
    models[2] += 1e4
    found = gossip(Clip(), matrix, {"w": models})["w"].numpy()
    for client in range(6):
        near = [(client - 1) % 6, (client + 1) % 6]
        apart = models[near].numpy() - models[client].numpy()
        lengths = np.linalg.norm(apart, axis=1)
        limit = 15 * lengths.min()  # of two neighbours one is asked
        clipped = apart * np.minimum(1, limit / lengths)[:, None]
        np.testing.assert_allclose(found[client], models[client].numpy() + clipped.sum(0) / 4, rtol=1e-10, atol=1e-10)


def test_gossip_within_the_limits_is_the_mean_to_the_bit() -> None:
    matrix, uploads = lazy_ring(5), {"w": random_tensor(5, 3), "steps": torch.arange(5)}
    generous = gossip(Clip(tightest=1e3, loosest=1e3), matrix, uploads)
    assert torch.equal(generous["w"], (matrix @ uploads["w"]))
    assert generous["steps"].tolist() == [4, 2, 3, 4, 4]


def test_hostile_neighbours_move_nobody_far() -> None:
    matrix = torch.full((8, 8), 1 / 8, dtype=torch.float64)
    for far in (1e3, 1e9):
        models = random_tensor(8, 3)
        models[6:] = far
        for rule in (Clip(), TrimmedMean()):
            found = gossip(rule, matrix, {"w": models})["w"][:6]
            radius = float(torch.cdist(models[:6], models[:6]).max())
            assert float(torch.cdist(found, models[:6]).max()) <= 10 * radius


def test_trimmed_means_among_neighbours_are_scipys() -> None:
    matrix, models = torch.full((8, 8), 1 / 8, dtype=torch.float64), random_tensor(8, 3)
    found = gossip(TrimmedMean(), matrix, {"w": models})["w"]
    np.testing.assert_allclose(found.numpy(), np.tile(trim_mean(models.numpy(), 0.25, axis=0), (8, 1)), rtol=1e-12)


@pytest.mark.parametrize("rule", [Clip(), TrimmedMean()], ids=["clip", "trimmed_mean"])
def test_graphs_loop_equals_stacked(rule: Defence) -> None:
    trainings = [make_training("dfedem", engine=engine) for engine in (OneByOne(), stacked(2))]
    states = [advance(defended(training, rule), 3) for training in trainings]
    assert distance(*states) < 1e-9
    generous = defended(trainings[0], Clip(tightest=1e6, loosest=1e6))
    assert same_states(advance(generous, 3), advance(trainings[0], 3))
