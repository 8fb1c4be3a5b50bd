"""Clients that average with neighbours: D-FedEM and D-SGD at their limits, and what a graph does to a federation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import pytest
import torch
from helpers import NAMES, advance, distance, make_federation, make_personalizer, make_training, scores_of, stacked
from mixers import all_at_once, make_keys, make_round, random_tensor

from fedem.core.tree import Tree, tree_map
from fedem.engines import Batching, OneByOne
from fedem.graphs import Complete, Ring, Topology, among
from fedem.methods.decentralised import Graph, recall, remember, scaled
from fedem.methods.mixer import Alone, Mixed, OneGroup, Round, Start, Uploads, weighted_means
from fedem.runs.rounds import State, Training
from fedem.solvers import LBFGS, SGD, Newton, Solver
from fedem.solvers.schedules import Constant

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
    peers = advance(over(make_training(without), Graph(Complete(scale="none"))), 4)
    assert_everybody_has(peers, served, 1e-12)


def test_one_scaled_step_over_a_complete_graph_is_a_step_with_a_server() -> None:
    """T n_t / n in the step and 1/T in the mean are n_t / n in the mean, where everybody takes one step."""
    settings = {"batching": Batching(0, local_steps=1), "solver": SGD()}
    served = advance(make_training("fedem", **settings), 3)
    peers = advance(over(make_training("dfedem", **settings), Graph(Complete(scale="steps"))), 3)
    assert_everybody_has(peers, served, 1e-12)


_SOLVERS = (SGD(0.01, momentum=0.9), Newton(0.1), LBFGS(0.1, history=2, num_trials=4))
_ANY = ("fedavg", "fedprox", "ditto", "apfl", "pfedme", "perfedavg")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "solver"),
    [
        *(("fedem", solver) for solver in _SOLVERS),
        *((method, _SOLVERS[number % 3]) for number, method in enumerate(_ANY)),
    ],
    ids=lambda it: it if isinstance(it, str) else type(it).__name__,
)
def test_scaled_updates_over_a_complete_graph_are_a_server_for_any_method_solver_and_sizes(
    method: str, solver: Solver
) -> None:
    training = make_training(method, solver=solver)
    peers = advance(over(training, Graph(Complete(scale="updates"))), 3)
    assert_everybody_has(peers, advance(training, 3), 1e-10)


def test_clients_own_models_do_not_notice_the_scale() -> None:
    """Ditto without a pull trains its own models alone."""
    local = advance(make_training("local"), 3)
    ditto = advance(over(make_training("ditto", pull=0.0), Graph(Ring())), 3)
    for name, leaf in local.shared.items():
        torch.testing.assert_close(ditto.personal[f"own/{name}"], leaf, rtol=0, atol=1e-12)


def test_batch_statistics_are_not_stretched() -> None:
    shared = {"w": torch.zeros(2, 1), "running_var": torch.ones(2, 1), "count": torch.zeros(2, dtype=torch.int64)}
    uploads = {"w": torch.ones(2, 1), "running_var": torch.full((2, 1), 0.9), "count": torch.ones(2, dtype=torch.int64)}
    this = make_round([1, 39])._replace(average_size=20.0, trained=frozenset("w"))
    ((_, found),) = scaled(shared, this, all_at_once(uploads))
    torch.testing.assert_close(found["w"], torch.tensor([[0.05], [1.95]]))
    assert torch.equal(found["running_var"], uploads["running_var"])
    assert torch.equal(found["count"], uploads["count"])


@pytest.mark.parametrize(("method", "alone"), [("dfedem", "fedem"), ("dsgd", "local")])
def test_clients_that_hear_nobody_train_alone(method: str, alone: str) -> None:
    graph = Graph(Ring(scale="none"))
    training = over(make_training(method), graph)
    start = training.init()
    nobody = remember(torch.eye(5, dtype=torch.float64)[None], training.federation.keys)
    state = advance(training, 3, replace(start, memory=nobody))
    expected = advance(replace(make_training(alone), mixer=Alone()), 3)
    assert distance(replace(state, memory={}), expected) < 1e-12


def test_loop_equals_stacked_where_steps_are_scaled() -> None:
    states = [
        advance(over(make_training("dfedem", engine=engine), Graph(Ring(scale="steps"))))
        for engine in (OneByOne(), stacked(), stacked(2))
    ]
    assert max(distance(states[0], other) for other in states[1:]) < 1e-12


def test_larger_clients_take_larger_steps_and_the_average_step_is_one() -> None:
    sizes = torch.tensor([7, 1, 12, 30, 5])
    scales = Graph(Ring(scale="steps")).step_scales(sizes, 11.0)
    assert scales is not None
    torch.testing.assert_close(scales, 5 * sizes / 55.0, check_dtype=False)
    assert all(Graph(Ring(scale=scale)).step_scales(sizes, 11.0) is None for scale in ("none", "updates"))


def _gossip(graph: Graph, rounds: int, count: int) -> list[float]:
    """Squared distances to consensus when nobody trains."""
    keys = make_keys(count)
    groups = {"w": random_tensor(count, 4)}
    _, memory = graph.init(Start({"w": torch.zeros(4, dtype=torch.float64)}, frozenset("w"), keys, 3))
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
    _, memory = graph.init(Start({"w": torch.zeros(4)}, frozenset("w"), make_keys(6), 3))
    p = graph.summary(memory, 6)["consensus_p"]
    ratios = [after / before for before, after in pairwise(distances) if before > 1e-25]
    assert all(ratio <= 1 - p + 1e-9 for ratio in ratios)
    if p < 1 - 1e-9:
        assert ratios[-1] == pytest.approx(1 - p, rel=1e-3)


def test_matchings_in_turn_bring_everybody_together_over_their_period() -> None:
    graph = Graph(Ring(activity="matchings"))
    _, memory = graph.init(Start({"w": torch.zeros(4)}, frozenset("w"), make_keys(6), 3))
    facts = graph.summary(memory, 6)
    tau = int(facts["consensus_tau"])
    assert tau == 2
    distances = _gossip(graph, 20 * tau, 6)
    for before, after in zip(distances[::tau], distances[tau::tau], strict=False):
        assert after <= (1 - facts["consensus_p"]) * before + 1e-25
    assert distances[-1] < 1e-6 * distances[0]


@pytest.mark.slow
def test_training_over_matchings_converges_to_what_a_server_finds() -> None:
    """Small steps leave little to disagree on, and the mean descends the same objective."""
    settings = {"batching": Batching(0, local_steps=1), "solver": SGD(), "schedule": Constant(0.1)}
    served = advance(make_training("fedavg", **settings), 150)
    peers = advance(over(make_training("dsgd", **settings), Graph(Ring(activity="matchings"))), 150)
    for name, leaf in peers.shared.items():
        torch.testing.assert_close(leaf.mean(0), served.shared[name][0], rtol=0, atol=0.05)
        assert float((leaf - leaf.mean(0)).abs().max()) < 0.3


def test_clients_that_are_away_neither_train_nor_talk() -> None:
    matrix = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.6, 0.1], [0.2, 0.1, 0.7]], dtype=torch.float64)
    found = among(matrix, torch.tensor([0, 2]))
    torch.testing.assert_close(found, torch.tensor([[0.8, 0.2], [0.2, 0.8]], dtype=torch.float64))
    training = over(make_training("dfedem", cohort_size=2), Graph(Ring()))
    state = training.init()
    after, _ = training.step(state)
    rest = [t for t in range(5) if t not in training.sample(state.round).tolist()]
    assert all(torch.equal(leaf[rest], state.shared[name][rest]) for name, leaf in after.shared.items())


def test_sampling_slows_agreement_down_as_simulated() -> None:
    """E|x W - mean|^2 over cohorts of three among eight, beside what the constants say."""
    topology, keys, count = Ring(weights="metropolis"), make_keys(8), 3
    matrices = topology.matrices(keys, 0)
    found = topology.consensus(matrices, keys, count)
    assert found.is_estimate
    assert found.p < topology.consensus(matrices, keys).p / 2
    generator = torch.Generator().manual_seed(0)
    rest = torch.eye(8, dtype=torch.float64) - 1 / 8
    total = torch.zeros_like(rest)
    for _ in range(2000):
        present = torch.randperm(8, generator=generator)[:count].sort().values
        matrix = torch.eye(8, dtype=torch.float64)
        matrix[present[:, None], present] = among(matrices[0], present)
        total += matrix @ rest @ matrix
    left = float(torch.linalg.eigvalsh(total / 2000).max())
    assert 1 - found.p == pytest.approx(left, abs=0.02)


@pytest.mark.parametrize("topology", [Ring(), Ring(activity="matchings"), Complete(laziness=0.2)])
def test_what_is_remembered_are_the_matrices(topology: Topology) -> None:
    matrices = topology.matrices(make_keys(6), 0)
    memory = remember(matrices, make_keys(6))
    assert int(memory["tau"]) == len(matrices)
    for phase, matrix in enumerate(matrices):
        torch.testing.assert_close(recall(memory, phase), matrix, rtol=0, atol=1e-15)


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


def test_scores_are_of_each_clients_own_components() -> None:
    training = over(make_training("dfedem"), Graph(Ring(weights="metropolis")))
    state = advance(training, 2)
    losses = scores_of(training, state)["test"].losses
    for position in range(len(NAMES)):
        moved = {name: leaf.clone() for name, leaf in state.shared.items()}
        moved["weight"][position] += 1
        changed = scores_of(training, replace(state, shared=moved))["test"].losses != losses
        assert changed.nonzero().flatten().tolist() == [position]
