"""Batch normalisations that stay with their clients (FedBN)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import DIMENSION, advance, distance, make_federation, make_training
from torch import nn

import fedem
from fedem.checkpoint import same_states
from fedem.engines import OneByOne, Stacked
from fedem.errors import UserError
from fedem.mixing.alone import Alone
from fedem.mixing.local_layers import LocalLayers
from fedem.mixing.star import Star
from fedem.models import Model
from fedem.models.losses import Logistic
from fedem.rounds import Training
from fedem.tree import tree_index

SIZES = (7, 4, 12)


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))


def _model() -> Model:
    return Model(_build, Logistic(), torch.float64)


def _training(method: str = "fedavg", sizes: tuple[int, ...] = SIZES, **settings: object) -> Training:
    training = make_training(method, make_federation(sizes=sizes), model=_model(), **settings)
    mixer = LocalLayers(training.mixer, training.algorithm.model.normalising)
    return replace(training, mixer=mixer)


def test_the_leaves_are_those_of_the_layer() -> None:
    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert _model().normalising == {f"1.{name}" for name in names}
    assert make_training().algorithm.model.normalising == frozenset()


def test_the_others_are_averaged_and_these_kept() -> None:
    training = _training()
    start = training.init()
    after, _ = training.step(start)
    # In the first round all start alike, so alone or together clients train the same.
    alone = make_training("local", training.federation, model=training.algorithm.model)
    assert isinstance(alone.mixer, Alone)
    apart, _ = alone.step(alone.init())
    weights = torch.tensor(SIZES).double() / sum(SIZES)
    for name, leaf in apart.shared.items():
        if name in training.mixer.leaves:
            torch.testing.assert_close(after.memory[f"local/{name}"], leaf)
        else:
            mean = torch.einsum("t,t...->...", weights, leaf)
            torch.testing.assert_close(after.shared[name][0], mean)


def test_everybody_reads_the_shared_leaves_and_their_own() -> None:
    training = _training("fedem")
    state = advance(training, 2)
    served = training.mixer.own(state.shared, state.memory, torch.tensor([2, 0]))
    for row, client in enumerate((2, 0)):
        tree = tree_index(served.shared, int(served.reads[row]))
        assert torch.equal(tree["0.weight"], state.shared["0.weight"][0])
        assert torch.equal(tree["1.running_mean"], state.memory["local/1.running_mean"][client])
    assert not torch.equal(served.shared["1.running_mean"][0], served.shared["1.running_mean"][1])


@pytest.mark.parametrize("method", ["fedavg", "fedem", "clustered", "ditto"])
def test_loop_equals_stacked(method: str) -> None:
    states = [advance(_training(method, engine=engine), 2) for engine in (OneByOne(), Stacked(), Stacked(2))]
    assert distance(states[0], states[1]) < 1e-10
    assert distance(states[0], states[2]) < 1e-10


def test_a_single_client_has_no_one_to_keep_apart_from() -> None:
    kept = advance(_training(sizes=(12,)), 3)
    plain = make_training("fedavg", make_federation(sizes=(12,)), model=_model())
    assert isinstance(plain.mixer, Star)
    shared = advance(plain, 3).shared
    for name, leaf in shared.items():
        torch.testing.assert_close(kept.shared[name], leaf)


def test_clients_that_are_not_sampled_keep_theirs() -> None:
    training = _training(cohort_size=1)
    state = training.init()
    after, log = training.step(state)
    idle = [client for client in range(3) if client not in log.cohort.tolist()]
    for name in training.mixer.leaves:
        assert torch.equal(after.memory[f"local/{name}"][idle], state.memory[f"local/{name}"][idle])


def test_a_run_resumes_and_predicts_with_each_clients_own(tmp_path: Path) -> None:
    federation = make_federation(sizes=(9, 12, 8)).hold_out(0.34, 0)
    settings = {"model": _build, "local_layers": "batch_norm", "checkpoint_every": 2, "learning_rate": 0.1}
    whole = fedem.train(federation, "fedavg", rounds=5, out=tmp_path / "whole", **settings)

    class StopError(Exception):
        pass

    def interrupt(record: dict[str, object]) -> None:
        if record["round"] == 3:
            raise StopError

    with pytest.raises(StopError):
        fedem.train(federation, "fedavg", rounds=5, out=tmp_path / "cut", listener=interrupt, **settings)
    resumed = fedem.train(federation, "fedavg", rounds=5, out=tmp_path / "cut", resume=True, **settings)
    assert same_states(whole.state(), resumed.state())
    loaded = fedem.Result.load(tmp_path / "cut", model=_build)
    inputs = federation.test.inputs
    ann, bob = (loaded.predict(name, inputs) for name in federation.names)
    assert torch.equal(ann, whole.predict(federation.names[0], inputs))
    assert not torch.equal(ann, bob)
    # Newcomers begin with the averages.
    newcomer = loaded.personalize(inputs[:0], [])
    assert torch.equal(newcomer.mixture.components["1.running_mean"], loaded.state().shared["1.running_mean"])


def test_what_can_not_keep_layers_is_refused() -> None:
    with pytest.raises(UserError, match="normalises no batches"):
        fedem.train(make_federation(), "fedavg", rounds=1, local_layers="batch_norm")
    for method in ("qffl", "scaffold", "ifca"):
        with pytest.raises(UserError, match=f"method {method} upload more or less"):
            fedem.train(make_federation(), method, model=_build, rounds=1, local_layers="batch_norm")
