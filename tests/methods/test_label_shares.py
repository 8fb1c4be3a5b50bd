"""Outputs shifted by each client's label shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deployments
import numpy as np
import pytest
import torch
from helpers import DIMENSION, StopError, make_federation, same_states, stop_at
from torch import Tensor, nn

import fedem
from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.data.federation import Federation
from fedem.deploy.node import Node
from fedem.export import export_client
from fedem.methods.wrappers.label_shares import SHIFT, LabelShares

CLASSES, CLIENTS = 3, 5
METHODS = ("fedem", "bfedem", "fedavg", "fedprox", "dfedem", "clustered", "local", "ensemble")
SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "learning_rate": 0.3,
    "batch_size": 8,
    "weight_decay": 0.1,
    "momentum": 0.5,
    "dtype": "float64",
}
Pairs = list[tuple[np.ndarray, np.ndarray]]


def _pairs(classes: int = CLASSES, seed: int = 0) -> Pairs:
    """Clients whose classes look alike and have other shares."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, DIMENSION))
    sizes, shares = (30, 9, 17, 24, 12), rng.dirichlet(np.full(classes, 0.6), CLIENTS)
    labels = [rng.choice(classes, size, p=share) for size, share in zip(sizes, shares, strict=True)]
    return [(rng.normal(centres[y]), y) for y in labels]


def _log_shares(labels: np.ndarray, classes: int = CLASSES) -> np.ndarray:
    counts = np.array([(labels == label).sum() + 0.5 for label in range(classes)])
    return np.log(counts / counts.sum())


def _federation(pairs: Pairs) -> Federation:
    return Federation.from_parts(pairs, pairs, pairs)


class WithColumns(nn.Module):
    """What the shift does, written down by hand: columns beside the features are added to the outputs."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.map = nn.Linear(DIMENSION, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.map(inputs[:, :DIMENSION]) + inputs[:, DIMENSION:]


def _beside(pairs: Pairs, shifts: list[np.ndarray]) -> Pairs:
    return [(np.hstack([x, np.tile(shift, (len(x), 1))]), y) for (x, y), shift in zip(pairs, shifts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("classes", [CLASSES, 2])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_columns_beside_the_features(method: str, classes: int) -> None:
    pairs = _pairs(classes)
    shifts = [_log_shares(y, classes) for _, y in pairs]
    if classes == 2:
        shifts = [shift[1:] - shift[:1] for shift in shifts]
    outputs = 1 if classes == 2 else classes
    by_hand = fedem.train(_federation(_beside(pairs, shifts)), method, model=lambda: WithColumns(outputs), **SETTINGS)
    result = fedem.train(
        _federation(pairs), method, model=lambda: nn.Linear(DIMENSION, outputs), label_shares=True, **SETTINGS
    )
    for name in ("train_loss", "train_accuracy", "test_loss"):
        assert result.summary[name] == pytest.approx(by_hand.summary[name], rel=1e-8)
    plain = fedem.train(_federation(pairs), method, model=lambda: nn.Linear(DIMENSION, outputs), **SETTINGS)
    assert result.summary["train_loss"] != pytest.approx(plain.summary["train_loss"], rel=1e-4)


@pytest.mark.parametrize("method", ["fedem", "bfedem", "fedprox"])
def test_loop_equals_stacked(method: str) -> None:
    losses = [
        fedem.train(_federation(_pairs()), method, label_shares=True, engine=engine, **SETTINGS).summary["train_loss"]
        for engine in ("one_by_one", "stacked")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


def test_nobody_else_sees_the_shares() -> None:
    for method in ("fedem", "bfedem", "fedavg"):
        result = fedem.train(_federation(_pairs()), method, label_shares=True, **SETTINGS)
        assert isinstance(result.recipe.algorithm, LabelShares)
        state = result.state()
        assert (state.shared[SHIFT] == 0).all()
        for row, (_, labels) in enumerate(_pairs()):
            torch.testing.assert_close(state.personal[SHIFT][row], torch.from_numpy(_log_shares(labels)))


def test_uploads_hold_no_shift(tmp_path: Path) -> None:
    sample = deployments.write_sample(tmp_path)
    for method in ("fedem", "bfedem", "fedavg"):
        plan, trainer = deployments.make_plan(sample, method={"name": method}, run={"label_shares": True})
        node = Node.open(plan, sample, trainer.federation.names[0])
        shared = tree_index(trainer.training.init().shared, 0)
        upload, personal = node.train(shared, node.first_personal(shared), 0, plan.rate(0))
        (name,) = [name for name in upload if name.endswith(SHIFT)]
        assert (upload[name] == 0).all()
        assert (personal[SHIFT] != 0).all()


@pytest.mark.parametrize("method", ["fedem", "fedavg"])
def test_nodes_do_what_the_simulator_does(tmp_path: Path, method: str) -> None:
    sample = deployments.write_sample(tmp_path)
    plan, trainer = deployments.make_plan(
        sample, method={"name": method}, run={"label_shares": True, "dtype": "float64"}, solver={"name": "sgd"}
    )
    nodes = [Node.open(plan, sample, name) for name in trainer.federation.names]
    state = trainer.training.init()
    shared = tree_index(state.shared, 0)
    answers = [node.train(shared, node.first_personal(shared), 0, plan.rate(0)) for node in nodes]
    weights = trainer.federation.train.sizes.double() / len(trainer.federation.train)
    state, _ = trainer.training.step(state)
    for name, leaf in tree_index(state.shared, 0).items():
        mean = sum(weight * upload[name] for weight, (upload, _) in zip(weights, answers, strict=True))
        torch.testing.assert_close(leaf, mean, rtol=1e-10, atol=1e-10)
    for row, (_, personal) in enumerate(answers):
        torch.testing.assert_close(personal[SHIFT], state.personal[SHIFT][row])


@pytest.mark.parametrize("method", ["fedem", "fedavg"])
def test_unseen_clients_count_their_own(method: str) -> None:
    result = fedem.train(_federation(_pairs()), method, label_shares=True, **SETTINGS)
    inputs, labels = _pairs(seed=3)[0]
    newcomer = result.personalize(inputs, labels)
    for row in newcomer.mixture.components[SHIFT]:
        torch.testing.assert_close(row, torch.from_numpy(_log_shares(labels)))
    # Who has nothing to count takes all classes for equally frequent.
    unknown = result.personalize(inputs[:0], labels[:0]).mixture.components[SHIFT]
    torch.testing.assert_close(unknown, torch.full_like(unknown, -np.log(CLASSES)))


def test_a_mixture_is_fitted_to_the_shifted_components() -> None:
    result = fedem.train(_federation(_pairs()), "fedem", label_shares=True, unseen_prior=0.0, **SETTINGS)
    inputs, labels = _pairs(seed=3)[0]
    newcomer = result.personalize(inputs, labels)
    picked = torch.from_numpy(labels)

    def likelihood(log_weights: Tensor) -> float:
        model = result.recipe.model
        losses = model.component_losses(newcomer.mixture.components, torch.from_numpy(inputs), picked)
        return float(torch.logsumexp(log_weights[:, None] - losses, 0).mean())

    fitted = newcomer.mixture.log_weights
    for vertex in torch.eye(len(fitted), dtype=fitted.dtype):
        for step in (0.01, 0.3):
            other = ((1 - step) * fitted.exp() + step * vertex).log()
            assert likelihood(other) <= likelihood(fitted) + 1e-6


@pytest.mark.slow
def test_it_is_the_bayes_rule_where_only_shares_differ() -> None:
    rng = np.random.default_rng(1)
    centres = rng.normal(size=(CLASSES, DIMENSION)) / 2
    shares = rng.dirichlet(np.full(CLASSES, 0.4), 20)

    def draw(count: int) -> Pairs:
        labels = [rng.choice(CLASSES, count, p=share) for share in shares]
        return [(rng.normal(centres[y]), y) for y in labels]

    train, test = draw(400), draw(2000)
    settings = {"rounds": 60, "learning_rate": 0.3, "batch_size": 100}
    federation = Federation.from_parts(train, test=test)
    plain, shifted = (
        fedem.train(federation, "fedavg", label_shares=on, **settings).summary["test_accuracy"] for on in (False, True)
    )
    # Normal classes with one covariance: the posterior is linear in x, with the log shares in its constant.
    outputs = [x @ centres.T - (centres**2).sum(1) / 2 + np.log(p) for (x, _), p in zip(test, shares, strict=True)]
    best = np.mean([(found.argmax(1) == y).mean() for found, (_, y) in zip(outputs, test, strict=True)])
    assert best - 0.01 < shifted < best + 0.002
    assert plain < best - 0.05


def test_it_resumes_tunes_and_loads(tmp_path: Path) -> None:
    federation = _federation(_pairs())
    settings = SETTINGS | {"rounds": 4, "label_shares": True, "fine_tune_epochs": 1, "checkpoint_every": 1}
    whole = fedem.train(federation, "fedem", out=tmp_path / "whole", **settings)

    with pytest.raises(StopError):
        fedem.train(federation, "fedem", out=tmp_path / "cut", listener=stop_at(3), **settings)
    resumed = fedem.train(federation, "fedem", out=tmp_path / "cut", resume=True, **settings)
    assert same_states(whole.state(), resumed.state())
    loaded = fedem.Result.load(tmp_path / "cut")
    name, inputs = federation.names[0], federation.test.inputs
    assert torch.equal(loaded.predict(name, inputs), whole.predict(name, inputs))
    # A client that fine-tuned still has its shift, once.
    shift = torch.from_numpy(_log_shares(_pairs()[0][1]))
    for row in loaded.client(name).mixture.components[SHIFT]:
        torch.testing.assert_close(row, shift)


@pytest.mark.parametrize("model", [None, lambda: nn.Linear(DIMENSION, CLASSES)])
def test_an_exported_model_has_the_shift(model: Any, tmp_path: Path) -> None:
    federation = _federation(_pairs())
    result = fedem.train(federation, "fedem", label_shares=True, model=model, **SETTINGS)
    name, inputs = federation.names[1], federation.test.inputs
    # Each file is loaded again and compared when it is written.
    exported = export_client(result, name, tmp_path / "out", ("safetensors", "torchscript"))
    assert exported.differences.keys() == {"safetensors", "torchscript"}
    assert exported.differences["torchscript"] < 1e-12
    expected = result.predict(name, inputs)
    assert torch.equal(fedem.load_exported(tmp_path / "out", model).predict(inputs), expected)
    assert not torch.allclose(result.predict(federation.names[0], inputs), expected, atol=0.05)


def test_what_can_not_be_shifted_is_refused() -> None:
    classes, numbers = _federation(_pairs()), make_federation("squared_error")
    with pytest.raises(UserError, match=r"run\.label_shares is true, but targets of SquaredError are not labels"):
        fedem.train(numbers, "fedavg", rounds=1, label_shares=True)
    for method in ("ditto", "scaffold", "ifca", "pfedme"):
        with pytest.raises(UserError, match=r"run\.label_shares is true, but clients of \w+ have models or messages"):
            fedem.train(classes, method, rounds=1, label_shares=True)
    for method in ("pfedhn", "l2sgd", "fedu"):
        with pytest.raises(UserError, match=f"models of method {method} are not averages"):
            fedem.train(classes, method, rounds=1, label_shares=True)
    with pytest.raises(UserError, match=r"label_shares is true and \[compression\] is on; allowed: one"):
        fedem.train(classes, "fedem", rounds=1, label_shares=True, compression={"updates": "int8"})
    with pytest.raises(UserError, match=r"puts out 4 numbers for each sample; allowed with run\.label_shares: 3"):
        fedem.train(classes, "fedem", rounds=1, label_shares=True, model=nn.Linear(DIMENSION, 4))
    with pytest.raises(UserError, match="LabelShares can't be diagnosed"):
        fedem.train(classes, "fedem", rounds=1, label_shares=True, diagnose_every=1)


@pytest.mark.parametrize("method", ["fedem", "fedavg", "ensemble"])
def test_newcomers_have_their_own_shifts_and_weights_whoever_else_is_fitted(method: str) -> None:
    pairs, new = _pairs(), _federation(_pairs(seed=1))
    common: dict[str, Any] = SETTINGS | {"label_shares": True, "loss": "cross_entropy"}
    alone, together = (
        fedem.train(_federation(pairs), method, engine=engine, **common).with_unseen(new)
        for engine in ("one_by_one", "stacked")
    )
    inputs = new.train.inputs
    for name in new.names:
        torch.testing.assert_close(together.predict(name, inputs), alone.predict(name, inputs), rtol=0, atol=1e-9)
