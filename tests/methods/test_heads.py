"""Components that share layers: M heads on one network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    DIMENSION,
    StopError,
    advance,
    distance,
    make_federation,
    make_training,
    same_states,
    stacked,
    stop_at,
)
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fedem
from fedem.core.em import log_responsibilities
from fedem.core.errors import UserError
from fedem.core.tree import Tree, row_of, tree_bytes, tree_index
from fedem.data.federation import Federation
from fedem.engines import Batching, OneByOne
from fedem.export import export_client, load_exported
from fedem.methods.fedem import FedEM
from fedem.methods.wrappers.compression import Codec, Compression
from fedem.models import Model
from fedem.models.losses import Logistic
from fedem.runs import measures
from fedem.runs.rounds import Training
from fedem.solvers import SGD, Adam, Newton

SIZES = (7, 4, 12)
PLAIN = SGD(0.0, momentum=0.0)


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSION, 4), nn.Tanh(), nn.Linear(4, 1))


def _linear() -> nn.Module:
    return nn.Linear(DIMENSION, 1)


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSION, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def _training(method: str = "fedem-heads", build: Any = _build, sizes: tuple[int, ...] = SIZES, **how: Any) -> Training:
    how.setdefault("federation", make_federation(sizes=sizes))
    return make_training(method, model=Model(build, Logistic(), torch.float64), **how)


def _whole(federation: Federation) -> Batching:
    """A single step on all samples."""
    return Batching(batch_size=0, local_epochs=1)


def test_heads_are_many_and_the_body_is_one() -> None:
    state = _training(num_components=5).init()
    rows = {name: leaf.shape[1] for name, leaf in state.shared.items()}
    assert rows == {"0.weight": 1, "0.bias": 1, "2.weight": 5, "2.bias": 5}


def test_one_head_is_one_component() -> None:
    states = [advance(_training(method, _normalised, num_components=1)) for method in ("fedem-heads", "fedem")]
    assert distance(*states) < 1e-12


def _reference_step(shared: Tree, log_weights: Tensor, inputs: Tensor, targets: Tensor, rate: float) -> Tree:
    """A step on sum_m q_m loss(head_m of body), written out in plain torch."""
    body = [shared[name][0].clone().requires_grad_() for name in ("0.weight", "0.bias")]
    heads = [shared[name].clone().requires_grad_() for name in ("2.weight", "2.bias")]
    hidden = torch.tanh(inputs @ body[0].T + body[1])
    logits = torch.stack([hidden @ w.T + b for w, b in zip(*heads, strict=True)]).squeeze(-1)  # [M, n]
    losses = binary_cross_entropy_with_logits(logits, targets.double().expand_as(logits), reduction="none")
    responsibilities = torch.softmax(log_weights[:, None] - losses.detach(), 0)
    (responsibilities * losses).sum(0).mean().backward()
    steps = [leaf.detach() - rate * leaf.grad for leaf in (*body, *heads) if leaf.grad is not None]
    return {
        "0.weight": steps[0][None],
        "0.bias": steps[1][None],
        "2.weight": steps[2],
        "2.bias": steps[3],
    }


def test_a_round_is_a_step_on_the_sum_over_heads() -> None:
    federation = make_federation(sizes=(9,))
    training = _training(federation=federation, batching=_whole(federation), solver=PLAIN, num_components=3)
    before = training.init()
    after, _ = training.step(before)
    inputs, targets = federation.train.client(0)
    log_weights = before.personal["log_weights"][0]
    expected = _reference_step(tree_index(before.shared, 0), log_weights, inputs, targets, 0.2)
    for name, leaf in expected.items():
        torch.testing.assert_close(after.shared[name][0], leaf)


def test_equal_heads_leave_the_body_to_all_samples() -> None:
    # Responsibilities sum to one: whatever they are, the body steps as a single model's does.
    federation = make_federation(sizes=SIZES)
    heads = _training(federation=federation, batching=_whole(federation), solver=PLAIN)
    plain = _training("fedavg", federation=federation, batching=_whole(federation), solver=PLAIN)
    start = heads.init()
    equal = {name: leaf[:, :1].repeat_interleave(leaf.shape[1], 1) for name, leaf in start.shared.items()}
    one = replace(plain.init(), shared={name: leaf[:, 0] for name, leaf in equal.items()})
    moved, single = (run.step(state)[0] for run, state in ((heads, replace(start, shared=equal)), (plain, one)))
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(moved.shared[name][:, 0], single.shared[name])
    # And a head moves by its share of the way.
    way = single.shared["2.weight"] - one.shared["2.weight"]
    moves = moved.shared["2.weight"] - equal["2.weight"]
    torch.testing.assert_close(moves.sum(1), way)


def test_equal_heads_at_the_pace_of_their_number_are_fedavg() -> None:
    """Each has 1/M of all samples, and M times its gradient: so body and heads are a single model's, round by round."""
    heads = _training(num_components=3, own_speed=3.0, initial_weights="uniform")
    plain = _training("fedavg")
    start = heads.init()
    equal = {name: leaf[:, :1].repeat_interleave(leaf.shape[1], 1) for name, leaf in start.shared.items()}
    one = replace(plain.init(), shared={name: leaf[:, 0] for name, leaf in equal.items()})
    moved, single = advance(heads, 3, replace(start, shared=equal)), advance(plain, 3, one)
    for name, leaf in single.shared.items():
        torch.testing.assert_close(moved.shared[name], leaf[:, None].expand_as(moved.shared[name]))


@pytest.mark.parametrize(
    ("method", "how", "message"),
    [
        ("fedem", {}, "method.own_speed is 3.0, but components share no layers; allowed: 1, or method.shared_layers"),
        ("fedem-heads", {"solver": Adam()}, "and Adam's steps are not as long as gradients are; allowed: solver sgd"),
        (
            "bfedem",
            {"solver": Newton(), "shared_layers": "body", "own_speed": 1.0},
            "and Newton takes its own; allowed",
        ),
    ],
)
def test_speeds_that_would_mean_nothing_are_refused(method: str, how: dict[str, Any], message: str) -> None:
    training = _training(method, **{"own_speed": 3.0} | how)
    with pytest.raises(UserError, match=message):
        training.algorithm.check(training.federation.train.inputs[:5])


@pytest.mark.parametrize("build", [_build, _normalised], ids=["plain", "normalised"])
@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("fedem-heads", {"own_speed": 2.5}),
        ("fedem", {"shared_layers": "0"}),
        ("bfedem", {"shared_layers": "body"}),
        ("dfedem", {"shared_layers": "body"}),
        ("ifca", {"shared_layers": "body"}),
    ],
)
def test_loop_equals_stacked(method: str, how: dict[str, Any], build: Any) -> None:
    if method == "fedem" and build is _normalised:
        how = {"shared_layers": "50%"}
    states = [advance(_training(method, build, engine=engine, **how)) for engine in (OneByOne(), stacked(2))]
    assert distance(*states) < 1e-11


def test_statistics_of_a_shared_body_are_those_of_one_model() -> None:
    # Steps of no length: normalisations see what FedAvg's would.
    federation = make_federation(sizes=SIZES)
    how = {"federation": federation, "schedule": fedem.solvers.schedules.Constant(1e-300)}
    heads, plain = _training(build=_normalised, **how), _training("fedavg", _normalised, **how)
    start = plain.init()
    body = {name: leaf[:, None] for name, leaf in start.shared.items() if not name.startswith("3")}
    state = heads.init()
    state = replace(state, shared=state.shared | body)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(heads.step(state)[0].shared[name][:, 0], plain.step(start)[0].shared[name])


def test_a_client_sends_one_body() -> None:
    training = _training(num_components=8)
    costs = training.step(training.init())[1]
    model = training.algorithm.model.init(0)
    head = {name: leaf for name, leaf in model.items() if name.startswith("2")}
    assert costs.bytes_up == len(SIZES) * (tree_bytes(model) + 7 * tree_bytes(head))


def test_balanced_heads_train_at_full_speed_and_the_body_on_all_samples() -> None:
    federation = make_federation(sizes=(9,))
    how = {"federation": federation, "batching": _whole(federation), "solver": PLAIN, "shared_layers": "body"}
    training = _training("bfedem", num_components=2, **how)
    before = training.init()
    after, _ = training.step(before)
    inputs, targets = federation.train.client(0)
    shared, log_weights = tree_index(before.shared, 0), before.personal["log_weights"][0]
    plain = _reference_step(shared, log_weights, inputs, targets, 0.2)
    losses = training.algorithm.model.component_losses(shared, inputs, targets)
    mean = log_responsibilities(losses, log_weights).exp().mean(1)
    for name, leaf in plain.items():
        scale = 1 if name.startswith("0") else mean.reshape(-1, *(1,) * (leaf.ndim - 1))
        torch.testing.assert_close(after.shared[name][0], shared[name] + (leaf - shared[name]) / scale)


def test_every_client_of_ifca_trains_the_body_and_one_head() -> None:
    training = _training("ifca", shared_layers="body", num_clusters=2)
    before = training.init()
    after, _ = training.step(before)
    uploads: dict[int, Tree] = {}
    cohort = training.federation.train
    for t in range(len(SIZES)):
        alone = replace(training, federation=training.federation.take(torch.tensor([t])), cohort_size=1)
        one = replace(before, personal=tree_index(before.personal, torch.tensor([t])))
        uploads[t] = tree_index(alone.step(one)[0].shared, 0)
    shares = cohort.sizes.double() / cohort.sizes.sum()
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(after.shared[name][0], sum(shares[t] * uploads[t][name] for t in uploads))
    chosen = after.personal["log_weights"].argmax(1)
    for cluster in range(2):
        members = (chosen == cluster).nonzero().flatten().tolist()
        weight = sum(float(shares[t]) for t in members)
        mean = sum(shares[t] / weight * uploads[t]["2.weight"][cluster] for t in members)
        expected = mean if members else before.shared["2.weight"][0, cluster]
        torch.testing.assert_close(after.shared["2.weight"][0, cluster], expected)


def test_common_leaves_are_always_sent() -> None:
    training = _training(num_components=3)
    model, common = training.algorithm.model, training.algorithm.common
    codec = Codec(Compression(updates="int8", threshold=0.2), model, 1, common)
    received = tree_index(training.init().shared, 0)
    trained = {name: leaf + torch.randn(leaf.shape, dtype=leaf.dtype) for name, leaf in received.items()}
    personal = {"log_weights": torch.tensor([0.7, 0.05, 0.25], dtype=torch.float64).log()}
    message, residual = codec.encode(trained, received, personal, codec.first_residual(received))
    packed = codec.pack(message)
    assert (len(packed["0.weight"]), len(packed["2.weight"])) == (1, 2)
    assert codec.num_bytes({name: leaf[None] for name, leaf in message.items()}) == tree_bytes(packed)
    assert same_trees(codec.unpack(packed), message)
    said = codec.decode(message)
    for name, leaf in said.items():
        torch.testing.assert_close(
            leaf + residual[name], (trained[name] - received[name]) * _sent(name, message), atol=1e-12, rtol=1e-12
        )


def _sent(name: str, message: Tree) -> Tensor | float:
    sent = message["sent/components"].double()
    return 1.0 if name.startswith("0") else row_of(sent, message[name])


def same_trees(first: Tree, second: Tree) -> bool:
    return first.keys() == second.keys() and all(torch.equal(leaf, second[name]) for name, leaf in first.items())


def test_the_gradient_that_is_measured_is_that_of_all_components_together() -> None:
    federation = make_federation(sizes=SIZES)
    training = _training(federation=federation, solver=PLAIN)
    before = training.init()
    after, _ = training.step(before)
    found = measures.diagnose(training, before, after)
    shared = {name: leaf[0].clone().requires_grad_() for name, leaf in after.shared.items()}
    total = torch.zeros((), dtype=torch.float64)
    for t, weights in enumerate(after.personal["log_weights"]):
        inputs, targets = federation.train.client(t)
        losses = training.algorithm.model.component_losses(shared, inputs, targets)
        total = total - torch.logsumexp(weights[:, None] - losses, 0).sum() / len(federation.train)
    total.backward()
    total = total.detach()
    square = sum(float(leaf.grad.square().sum()) for leaf in shared.values() if leaf.grad is not None)
    assert found.objective == pytest.approx(float(total), abs=1e-12)
    assert found.gradient_norm2 == pytest.approx(square, rel=1e-9)


def test_alpha_is_of_one_problem_with_all_heads() -> None:
    # One slope and an intercept for each component are convex together.
    training = make_training(federation=make_federation(sizes=(40,)), num_components=2, shared_layers="weight")
    found = measures.measure_alpha(training, training.init())
    assert found.alphas.shape == (1, 1)
    assert 0 < float(found.alphas) < 1


def test_components_that_share_layers_have_a_surrogate_all_the_same() -> None:
    intercepts, heads = (
        fedem.surrogates.check(FedEM(Model(build, Logistic(), torch.float64), SGD(), shared_layers=words), samples)
        for build, words, samples in ((_linear, "weight", make_federation()), (_build, "body", make_federation()))
    )
    assert intercepts.holds
    # Far out the slopes of any network of two layers grow with its numbers, whole or shared.
    assert all("smoothness" in failure.name for failure in heads.failures)


@pytest.mark.parametrize(
    ("method", "how", "said"),
    [
        ("fedem", {"shared_layers": "tail"}, "no layers called 'tail'; allowed: head, body"),
        ("fedem-heads", {"model": "linear"}, "has only one layer that is trained"),
        ("fedem", {"shared_layers": "0, 2"}, "names all that the model trains"),
        ("ifca", {"shared_layers": "*"}, "names all that the model trains"),
        ("bfedem", {"shared_layers": "body", "solver": "newton"}, "allowed: solvers sgd and adam"),
    ],
)
def test_what_can_not_be_shared_is_refused(method: str, how: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        fedem.train(make_federation(), method, rounds=1, **{"model": _build} | how)


def test_statistics_above_a_layer_of_one_s_own_are_refused() -> None:
    with pytest.raises(UserError, match="comes after one that is not shared"):
        fedem.train(make_federation(), "fedem", rounds=1, model=_normalised, shared_layers="1, 3.weight")


def test_a_run_of_heads(tmp_path: Path) -> None:
    federation = make_federation(sizes=(12, 9, 30, 8, 15)).hold_out(0.3, 0)
    settings = {"model": _build, "rounds": 6, "checkpoint_every": 2, "num_components": 4, "fine_tune_epochs": 1}
    whole = fedem.train(federation, "fedem-heads", out=tmp_path / "whole", **settings)
    with pytest.raises(StopError):
        fedem.train(federation, "fedem-heads", out=tmp_path / "cut", listener=stop_at(3), **settings)
    resumed = fedem.train(federation, "fedem-heads", out=tmp_path / "cut", resume=True, **settings)
    assert same_states(whole.state(), resumed.state())
    assert whole.summary["num_components"] == 4
    assert 0 <= whole.summary["unseen_test_accuracy"] <= 1


def test_heads_leave_as_files(tmp_path: Path) -> None:
    federation = make_federation(sizes=(12, 9, 30))
    result = fedem.train(federation, "fedem-heads", model={"name": "mlp", "hidden": 4}, rounds=2)
    inputs = federation.test.inputs[:5]
    written = export_client(result, "ann", tmp_path / "model", ["safetensors", "torchscript"])
    assert written.differences["torchscript"] < 1e-6
    again = load_exported(tmp_path / "model", device="cpu")
    assert sorted({len(leaf) for leaf in again.mixture.components.values()}) == [1, 3]
    assert torch.equal(again.predict(inputs), result.client("ann").predict(inputs))


def test_label_shares_and_compressed_messages_take_heads() -> None:
    federation = make_federation(sizes=(12, 9, 30))
    how = {"model": {"name": "mlp", "hidden": 4}, "rounds": 2}
    shares = fedem.train(federation, "fedem-heads", label_shares=True, **how)
    compression = {"updates": "int8", "threshold": 0.2, "downloads": "bfloat16"}
    small = fedem.train(federation, "fedem-heads", compression=compression, **how)
    plain = fedem.train(federation, "fedem-heads", **how)
    assert shares.summary["num_components"] == 3
    assert small.history[-1]["bytes_up"] < plain.history[-1]["bytes_up"] / 2


@pytest.mark.slow
def test_heads_on_a_network_find_the_clusters() -> None:
    source = fedem.Synthetic(num_clients=100, dimension=20, clustered=True, num_test=20, noise_scale=0, min_samples=100)
    how = {"model": {"name": "mlp", "hidden": 64}, "learning_rate": 0.5, "rounds": 150, "evaluate_every": 0}
    recovery = fedem.train(source.make(seed=1), "fedem-heads", **how).summary["recovery"]
    assert recovery["component_distances"] == []  # networks are of another kind than the true components
    assert recovery["cluster_accuracy"] >= 0.9
