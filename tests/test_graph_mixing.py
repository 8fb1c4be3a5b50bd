"""Clients that average with neighbours: D-FedEM and D-SGD at their limits, and what a graph does to a federation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np
import pytest
import torch
from helpers import NAMES, advance, distance, make_federation, make_personalizer, make_training, scores_of
from mixers import all_at_once, make_keys, make_round, random_tensor

import fedem
from fedem.engines import Batching, OneByOne, Stacked
from fedem.errors import UserError
from fedem.graphs import GRAPHS, Complete, Ring, Topology
from fedem.mixing.alone import Alone
from fedem.mixing.base import Mixed, Round, Uploads, weighted_means
from fedem.mixing.graph import Graph, among
from fedem.mixing.groups import OneGroup
from fedem.rounds import State, Training
from fedem.schedules import Constant
from fedem.solvers import SGD
from fedem.tree import Tree, tree_map

EQUAL = (10, 10, 10, 10, 10)
both = pytest.mark.parametrize(("with_server", "without"), [("fedem", "dfedem"), ("fedavg", "dsgd")])


@final
@dataclass(frozen=True)
class Equally(OneGroup):
    """A server that counts every client the same."""

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        count = len(this.clients)
        weights = torch.full((1, count), 1 / count, dtype=torch.float64)
        return Mixed(torch.zeros(1, dtype=torch.int64), weighted_means(weights, uploads), count), memory


def over(training: Training, graph: Graph) -> Training:
    return replace(training, mixer=graph)


def assert_everybody_has(state: State, reference: State, tolerance: float) -> None:
    for name, leaf in state.shared.items():
        expected = reference.shared[name].expand_as(leaf)
        torch.testing.assert_close(leaf, expected, rtol=0, atol=tolerance)
    for name, leaf in state.personal.items():
        torch.testing.assert_close(leaf, reference.personal[name], rtol=0, atol=tolerance)


@both
def test_a_complete_graph_is_a_server_for_clients_of_equal_size(with_server: str, without: str) -> None:
    federation = make_federation(sizes=EQUAL)
    served = advance(make_training(with_server, federation), 4)
    peers = advance(over(make_training(without, federation), Graph(Complete())), 4)
    assert_everybody_has(peers, served, 1e-12)


@both
def test_a_complete_graph_with_steps_of_one_length_is_a_server_that_counts_clients_the_same(
    with_server: str, without: str
) -> None:
    served = advance(replace(make_training(with_server), mixer=Equally()), 4)
    peers = advance(over(make_training(without), Graph(Complete(scale_steps=False))), 4)
    assert_everybody_has(peers, served, 1e-12)


def test_one_scaled_step_over_a_complete_graph_is_a_step_with_a_server() -> None:
    """T n_t / n in the step and 1/T in the mean are n_t / n in the mean, where everybody takes one step."""
    settings = {"batching": Batching(0, local_steps=1), "solver": SGD()}
    served = advance(make_training("fedem", **settings), 3)
    peers = advance(over(make_training("dfedem", **settings), Graph(Complete())), 3)
    assert_everybody_has(peers, served, 1e-12)


@pytest.mark.parametrize(("method", "alone"), [("dfedem", "fedem"), ("dsgd", "local")])
def test_clients_that_hear_nobody_train_alone(method: str, alone: str) -> None:
    graph = Graph(Ring(scale_steps=False))
    training = over(make_training(method), graph)
    start = training.init()
    identity = torch.eye(5, dtype=torch.float64)[None]
    state = advance(training, 3, replace(start, memory=start.memory | {"matrices": identity}))
    expected = advance(replace(make_training(alone), mixer=Alone()), 3)
    assert distance(replace(state, memory={}), expected) < 1e-12


def test_loop_equals_stacked_where_steps_are_scaled() -> None:
    states = [advance(make_training("dfedem", engine=engine)) for engine in (OneByOne(), Stacked(), Stacked(2))]
    assert max(distance(states[0], other) for other in states[1:]) < 1e-12


def test_larger_clients_take_larger_steps_and_the_average_step_is_one() -> None:
    sizes = torch.tensor([7, 1, 12, 30, 5])
    scales = Graph(Ring()).scales(sizes)
    assert scales is not None
    torch.testing.assert_close(scales, 5 * sizes / 55.0, check_dtype=False)
    assert Graph(Ring(scale_steps=False)).scales(sizes) is None


def _gossip(graph: Graph, rounds: int, count: int) -> list[float]:
    """Squared distances to consensus when nobody trains."""
    keys = make_keys(count)
    groups = {"w": random_tensor(count, 4)}
    _, memory = graph.init({"w": torch.zeros(4, dtype=torch.float64)}, frozenset("w"), keys, 3)
    found = []
    for index in range(rounds + 1):
        found.append(float((groups["w"] - groups["w"].mean(0)).square().sum()))
        this = make_round([1] * count, key=100 + index)
        mixed, memory = graph.mix(groups, memory, this, all_at_once(groups))
        groups = tree_map(lambda old, new, where=mixed.groups: old.index_copy(0, where, new), groups, mixed.means)
    return found


@pytest.mark.parametrize(
    "topology", [Ring(), Ring(laziness=0.3), Complete(weights="max_degree"), Ring(weights="metropolis")]
)
def test_pure_gossip_contracts_at_least_at_the_predicted_factor_and_in_the_end_at_it(topology: Topology) -> None:
    graph = Graph(topology)
    distances = _gossip(graph, 30, 6)
    _, memory = graph.init({"w": torch.zeros(4)}, frozenset("w"), make_keys(6), 3)
    p = graph.facts(memory)["consensus_p"]
    ratios = [after / before for before, after in pairwise(distances) if before > 1e-25]
    assert all(ratio <= 1 - p + 1e-9 for ratio in ratios)
    if p < 1 - 1e-9:
        assert ratios[-1] == pytest.approx(1 - p, rel=1e-3)


def test_matchings_in_turn_bring_everybody_together_over_their_period() -> None:
    graph = Graph(Ring(activity="matchings"))
    _, memory = graph.init({"w": torch.zeros(4)}, frozenset("w"), make_keys(6), 3)
    facts = graph.facts(memory)
    tau = int(facts["consensus_tau"])
    assert tau == 2
    distances = _gossip(graph, 20 * tau, 6)
    for before, after in zip(distances[::tau], distances[tau::tau], strict=False):
        assert after <= (1 - facts["consensus_p"]) * before + 1e-25
    assert distances[-1] < 1e-6 * distances[0]


def test_training_over_matchings_converges_to_what_a_server_finds() -> None:
    """Small steps leave little to disagree on, and the mean descends the same objective."""
    settings = {"batching": Batching(0, local_steps=1), "solver": SGD(), "schedule": Constant(0.05)}
    served = advance(make_training("fedavg", **settings), 300)
    peers = advance(over(make_training("dsgd", **settings), Graph(Ring(activity="matchings"))), 300)
    for name, leaf in peers.shared.items():
        torch.testing.assert_close(leaf.mean(0), served.shared[name][0], rtol=0, atol=0.05)
        assert float((leaf - leaf.mean(0)).abs().max()) < 0.3


def test_clients_that_are_away_neither_train_nor_talk() -> None:
    matrix = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.6, 0.1], [0.2, 0.1, 0.7]], dtype=torch.float64)
    found = among(matrix, torch.tensor([0, 2]))
    torch.testing.assert_close(found, torch.tensor([[0.8, 0.2], [0.2, 0.8]], dtype=torch.float64))
    training = over(make_training("dfedem", cohort_size=2), Graph(Ring()))
    state = training.init()
    after, log = training.step(state)
    rest = [t for t in range(5) if t not in log.cohort.tolist()]
    assert all(torch.equal(leaf[rest], state.shared[name][rest]) for name, leaf in after.shared.items())


def test_clients_may_start_apart_whatever_their_order() -> None:
    graph = Graph(Complete(start="apart"))
    training = over(make_training("dfedem"), graph)
    first = training.init().shared["weight"]
    assert len({tuple(row.flatten().tolist()) for row in first}) == 5
    order = torch.tensor([3, 0, 4, 2, 1])
    other = over(make_training("dfedem", make_federation().take(order)), graph).init().shared["weight"]
    assert torch.equal(first[order], other)
    # One exchange over a complete graph, and all have the same again.
    after = advance(training, 1)
    assert float((after.shared["weight"] - after.shared["weight"][:1]).abs().max()) < 1e-12


def test_newcomers_start_from_the_mean_or_from_a_peer() -> None:
    training = over(make_training("dfedem"), Graph(Ring()))
    state = advance(training, 2)
    newcomer = make_federation(sizes=(9,), seed=7)
    personalizer = make_personalizer(training)
    fits = [personalizer.personalize(state, newcomer.train, newcomer.keys, beside=beside) for beside in (None, 2)]
    for name, leaf in state.shared.items():
        torch.testing.assert_close(fits[0].shared[name][0], leaf.mean(0))
        assert torch.equal(fits[1].shared[name][0], leaf[2])
    assert not torch.equal(fits[0].personal["log_weights"], fits[1].personal["log_weights"])


def test_a_user_trains_and_predicts_without_a_server(tmp_path: Path) -> None:
    data = fedem.Synthetic(num_clients=6, dimension=3, num_test=5).make(0)
    result = fedem.train(
        data.federation, "dfedem", graph={"name": "ring", "link_failure": 0.2}, rounds=3, out=tmp_path / "run"
    )
    assert 0 < result.summary["consensus_p"] < 1
    loaded = fedem.Result.load(tmp_path / "run")
    inputs = np.zeros((2, 3))
    assert torch.equal(loaded.predict("0", inputs), result.predict("0", inputs))
    by_mean = loaded.personalize(np.ones((4, 3)), np.array([0, 1, 0, 1]))
    by_peer = loaded.personalize(np.ones((4, 3)), np.array([0, 1, 0, 1]), beside="3")
    assert not torch.equal(by_mean.predict(inputs + 1), by_peer.predict(inputs + 1))
    with pytest.raises(UserError, match="Unknown client 'nobody'"):
        loaded.personalize(np.ones((4, 3)), np.array([0, 1, 0, 1]), beside="nobody")


@pytest.mark.parametrize("method", ["fedem", "fedavg", "fedprox", "ditto", "apfl", "pfedme", "perfedavg", "fedavg+"])
def test_any_method_that_averages_models_goes_over_a_graph(method: str) -> None:
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=5).make(0)
    result = fedem.train(data.federation, method, graph="complete", rounds=2)
    assert result.summary["consensus_p"] == pytest.approx(1)


@pytest.mark.parametrize("method", ["mocha", "clustered", "scaffold", "ifca", "local", "qffl"])
def test_methods_that_need_a_server_say_so(method: str) -> None:
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=5).make(0)
    with pytest.raises(UserError, match=f"graph.name is 'ring', but method {method} needs a server; allowed"):
        fedem.train(data.federation, method, graph="ring", rounds=2)


def test_a_method_without_a_server_needs_a_graph() -> None:
    data = fedem.Synthetic(num_clients=5, dimension=3, num_test=5).make(0)
    with pytest.raises(UserError, match=r"Method dfedem needs a graph, and graph\.name is 'none'; allowed: "):
        fedem.train(data.federation, "dfedem", graph="none", rounds=2)
    with pytest.raises(UserError, match="rings"):
        fedem.train(data.federation, "dfedem", graph="rings", rounds=2)


def test_a_disconnected_graph_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data = fedem.Synthetic(num_clients=8, dimension=3, num_test=5).make(0)
    with pytest.raises(UserError, match="connected"):
        fedem.train(
            data.federation,
            "dfedem",
            graph={"name": "erdos_renyi", "probability": 0.01},
            rounds=2,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_every_graph_trains() -> None:
    data = fedem.Synthetic(num_clients=12, dimension=3, num_test=5).make(0)
    for name in GRAPHS.keys() - {"file"}:
        assert fedem.train(data.federation, "dfedem", graph=name, rounds=1).summary["consensus_p"] > 0


def test_scores_are_of_each_clients_own_components() -> None:
    training = over(make_training("dfedem"), Graph(Ring(weights="metropolis")))
    state = advance(training, 2)
    losses = scores_of(training, state)["test"].losses
    for position in range(len(NAMES)):
        moved = {name: leaf.clone() for name, leaf in state.shared.items()}
        moved["weight"][position] += 1
        changed = scores_of(training, replace(state, shared=moved))["test"].losses != losses
        assert changed.nonzero().flatten().tolist() == [position]
