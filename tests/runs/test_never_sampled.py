"""Clients that no round has asked, and clients that choose: what they predict with is fitted when they predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import StopError, advance, make_federation, make_personalizer, make_training, stop_at
from newcomers import losses_of
from torch import Tensor

import fedem
from fedem.core.em import fit_log_weights
from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.graphs import Ring
from fedem.methods.decentralised import Graph
from fedem.runs.personalize import Personalizer, Predictors
from fedem.runs.rounds import State, Training, took_part


def _predictors(training: Training, state: State, **settings: int) -> tuple[Tensor, Predictors]:
    """Who took part, and everybody's predictor."""
    seen = took_part(training.federation.keys, training.cohort_size, training.seed, state.round)
    return seen, make_personalizer(training, **settings).predictors(state, training.federation, seen)


def _losses(training: Training, state: State, position: int) -> Tensor:
    """A client's losses under the components, or models, that it reads, ``[M, n]``."""
    read = training.mixer.read(state.shared, state.memory, torch.tensor([position]))
    models, data = tree_index(read.shared, int(read.reads[0])), training.federation.train.client(position)
    count = len(next(iter(models.values())))
    return torch.stack([training.algorithm.model.losses(tree_index(models, m), *data) for m in range(count)])


@pytest.mark.parametrize("rounds", [0, 1, 2, 40])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_who_took_part_is_who_was_sampled(rounds: int, size: int) -> None:
    training = make_training("fedavg", cohort_size=size, seed=7)
    asked = {position for index in range(rounds) for position in training.sample(index).tolist()}
    found = took_part(training.federation.keys, size, 7, rounds)
    assert set(found.nonzero().flatten().tolist()) == asked


@pytest.mark.parametrize("updates", [0, 1])
@pytest.mark.parametrize("method", ["fedem", "bfedem", "dfedem"])
def test_a_client_never_sampled_fits_its_weights(method: str, updates: int) -> None:
    training = make_training(method if method != "dfedem" else "fedem", cohort_size=2, unseen_updates=updates)
    if method == "dfedem":
        training = Training(
            training.algorithm, training.engine, training.batching, training.seed, Graph(Ring()), training.schedule,
            training.federation, training.num_rounds, training.cohort_size, training.device,
        )  # fmt: skip
    state = advance(training, 1)
    seen, found = _predictors(training, state)
    assert int(seen.sum()) == 2
    weights = found.log_weights(training.algorithm)
    for position in range(5):
        expected = state.personal["log_weights"][position]
        if not seen[position]:
            drawn, prior = expected, training.algorithm.unseen_prior
            expected = fit_log_weights(_losses(training, state, position), updates or None, prior)
            assert not torch.allclose(expected, drawn, atol=1e-2)
        torch.testing.assert_close(weights[position], expected, rtol=0, atol=1e-12)


def test_ifcas_clients_choose_anew_when_they_predict() -> None:
    training = make_training("ifca", num_clusters=3, cohort_size=2, seed=1)
    state = advance(training, 2)
    # The models have changed places since the clients chose.
    state = State(2, {name: leaf.flip(1) for name, leaf in state.shared.items()}, state.personal, state.memory)
    seen, found = _predictors(training, state)
    assert 0 < int(seen.sum()) < 5
    weights = found.log_weights(training.algorithm).exp()
    best = [int(_losses(training, state, position).sum(1).argmin()) for position in range(5)]
    assert weights.argmax(1).tolist() == best
    assert torch.equal(weights.max(1).values, torch.ones(5, dtype=torch.float64))
    assert state.personal["log_weights"][seen].argmax(1).tolist() != [best[at] for at in seen.nonzero().flatten()]


@pytest.mark.parametrize("fine_tune_epochs", [0, 1])
@pytest.mark.parametrize("method", ["fedem", "bfedem", "ditto", "pfedme", "apfl", "ifca", "scaffold", "fedavg"])
def test_a_client_never_sampled_is_as_one_unseen(method: str, fine_tune_epochs: int) -> None:
    """Behind a server it predicts with what a stranger with its name and samples would be given."""
    training = make_training(method, cohort_size=2)
    state, federation = advance(training, 1), training.federation
    seen, found = _predictors(training, state, fine_tune_epochs=fine_tune_epochs)
    maker = make_personalizer(training, fine_tune_epochs=fine_tune_epochs)
    strangers = maker.personalize(state, federation.train, federation.keys)
    losses = [losses_of(training, each, federation.train)[~seen] for each in (found, strangers)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["fedem", "ifca", "ditto"])
def test_a_saved_run_predicts_as_it_was_scored(tmp_path: Path, method: str) -> None:
    """Without the data: every client's test loss by its loaded model is that of clients.csv."""
    federation = make_federation()
    out = tmp_path / "run"
    result = fedem.train(federation, method, out=out, rounds=1, clients_per_round=2, learning_rate=0.3, seed=3)
    for found in (result, fedem.Result.load(out)):
        for position, row in enumerate(found.clients):
            inputs, targets = federation.test.client(position)
            predictions = found.predict(str(row["client"]), inputs)
            loss = -predictions[torch.arange(len(targets)), targets].double().log().mean()
            assert float(loss) == pytest.approx(float(row["test_loss"]), rel=1e-5, abs=1e-6)


def test_a_last_state_that_is_the_best_is_fitted_and_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[int] = []
    plain = Personalizer.predictors

    def counted(self: Personalizer, state: State, *others: Any) -> Predictors:
        fitted.append(state.round)
        return plain(self, state, *others)

    monkeypatch.setattr(Personalizer, "predictors", counted)
    result = fedem.train(make_federation(), rounds=1, clients_per_round=2, seed=3)
    assert fitted == [1, 1]  # when the round is scored, and at the end
    best = result.summary["best"]
    assert best["round"] == 1
    assert all(result.summary[key] == value for key, value in best.items() if key != "round")


def test_weights_of_a_client_never_sampled_are_refused_until_they_are_fitted(tmp_path: Path) -> None:
    federation, place = make_federation(), tmp_path / "run"
    own = {"rounds": 2, "clients_per_round": 2, "seed": 3, "checkpoint_every": 1}
    with pytest.raises(StopError):
        fedem.train(federation, out=place, listener=stop_at(2), **own)
    killed = fedem.Result.load(place)
    seen = took_part(federation.keys, 2, 3, 1).tolist()
    for name, took in zip(federation.names, seen, strict=True):
        if took:
            killed.predict(name, np.zeros((1, 4)))
        else:
            with pytest.raises(UserError, match=f"'{name}' has taken part in no round.*--resume"):
                killed.predict(name, np.zeros((1, 4)))
    resumed = fedem.train(federation, out=place, resume=True, **own)
    weights = [resumed.client(name).mixture_weights for name in federation.names]
    loaded = fedem.Result.load(place)
    for name, fitted in zip(federation.names, weights, strict=True):
        assert torch.equal(loaded.client(name).mixture_weights, fitted)
    # A run of before, which has no fitted weights: resumed, it gets them.
    manifest = place / "checkpoints" / "checkpoint.json"
    content = json.loads(manifest.read_text())
    content["states"] = {role: entry for role, entry in content["states"].items() if not role.startswith("tuned")}
    del content["blake2b"]  # nor hashes of manifests
    manifest.write_text(json.dumps(content))
    never = federation.names[took_part(federation.keys, 2, 3, 2).tolist().index(False)]
    with pytest.raises(UserError, match="no round"):
        fedem.Result.load(place).client(never)
    fedem.train(federation, out=place, resume=True, **own)
    assert torch.equal(fedem.Result.load(place).client(never).mixture_weights, weights[federation.names.index(never)])


def test_a_resumed_run_goes_on_from_the_weights_as_drawn(tmp_path: Path) -> None:
    """Fitted weights are what clients predict with, and not what they train from."""
    federation, own = make_federation(), {"clients_per_round": 2, "seed": 3, "rounds": 3}
    whole = fedem.train(federation, **own)
    with pytest.raises(StopError):
        fedem.train(federation, out=tmp_path / "run", listener=stop_at(3), checkpoint_every=1, **own)
    again = fedem.train(federation, out=tmp_path / "run", resume=True, checkpoint_every=1, **own)
    for one, other in zip(whole.states["last"].personal.values(), again.states["last"].personal.values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", [0, 1])
def test_the_rule_for_unseen_clients_is_a_runs_setting(rule: int) -> None:
    federation = make_federation(sizes=(20, 15, 12, 30, 25))
    result = fedem.train(federation, rounds=2, unseen=0.4, seed=1, unseen_updates=rule, unseen_prior=0.0)
    rows = [row for row in result.clients if row["role"] == "unseen"]
    assert len(rows) == 2
    for row in rows:
        data = federation.train.client(federation.position(row["client"]))
        weights = [row[f"weight_{m}"] for m in range(3)]
        for updates, same in ((1, rule == 1), (0, rule == 0)):
            expected = result.personalize(*data, max_iterations=updates).mixture_weights
            assert (weights == pytest.approx(expected.tolist(), abs=1e-4)) == same
