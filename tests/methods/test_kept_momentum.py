"""Local solvers that go on from round to round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import StopError, distance, make_federation, same_states, stop_at
from torch import nn

import fedem
from fedem.core.errors import UserError
from fedem.methods import METHODS
from fedem.methods.wrappers.kept_momentum import KeptMomentum
from fedem.models import Model
from fedem.models.losses import CrossEntropy
from fedem.solvers import SOLVERS

KEEPING = [name for name, row in METHODS.items() if row.may_keep_momentum and not row.needs_layers]
WAY = {
    "rounds": 5,
    "learning_rate": 0.2,
    "schedule": "constant",
    "momentum": 0.9,
    "model": "linear",
    "dtype": "float64",
}


def _alone(seed: int = 0) -> fedem.Federation:
    """One client, whose rounds are then steps of one solver if it keeps its state."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    return fedem.Federation.from_arrays(
        inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0), ["one"] * 40, validation=0.0, test=0.0
    )


def test_rounds_of_a_single_client_are_steps_of_one_optimiser() -> None:
    federation = _alone()
    start = fedem.train(federation, "fedavg", **WAY | {"rounds": 1, "learning_rate": 1e-300}).state().shared
    plain = nn.Linear(3, 3).double()
    plain.load_state_dict({name: leaf[0] for name, leaf in start.items()})
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for _ in range(5):
        optimiser.zero_grad()
        nn.functional.cross_entropy(plain(federation.train.inputs), federation.train.targets).backward()
        optimiser.step()
    kept = fedem.train(federation, "fedavg", batch_size=40, keep_momentum=True, **WAY).state().shared
    afresh = fedem.train(federation, "fedavg", batch_size=40, **WAY).state().shared
    for name, leaf in plain.named_parameters():
        torch.testing.assert_close(kept[name][0], leaf.detach())
        assert (afresh[name][0] - leaf.detach()).abs().max() > 0.01


@pytest.mark.parametrize("name", KEEPING)
def test_clients_keep_what_their_solvers_start_with(name: str) -> None:
    model = Model(lambda: nn.Linear(3, 2), CrossEntropy())
    algorithm, _ = METHODS[name].build(model, SOLVERS["sgd"](momentum=0.9), {})
    kept = KeptMomentum.of(algorithm)
    shared = algorithm.init_shared(0)
    personal = kept.init_personal(shared, torch.tensor(1))
    fresh = {f"solver/{key}": leaf.shape for key, leaf in algorithm.start(shared).items()}
    assert fresh
    assert {key: leaf.shape for key, leaf in personal.items() if key.startswith("solver/")} == fresh


@pytest.mark.parametrize("method", ["fedem", "fedprox", "dfedem"])
def test_loop_equals_stacked(method: str) -> None:
    settings = WAY | {"rounds": 3, "keep_momentum": True, "clients_per_round": 0.6}
    engines = ("one_by_one", "stacked")
    one, other = (fedem.train(make_federation(), method, engine=engine, **settings).state() for engine in engines)
    assert distance(one, other) < 1e-11


def test_without_momentum_there_is_nothing_to_keep() -> None:
    settings = WAY | {"momentum": 0.0}
    states = [fedem.train(make_federation(), keep_momentum=keep, **settings).state() for keep in (False, True)]
    assert same_states(*states)


def test_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    settings = WAY | {"keep_momentum": True, "checkpoint_every": 1, "fine_tune_epochs": 1, "unseen": 0.3}
    whole = fedem.train(make_federation(), out=tmp_path / "whole", **settings)
    with pytest.raises(StopError):
        fedem.train(make_federation(), out=tmp_path / "cut", listener=stop_at(3), **settings)
    resumed = fedem.train(make_federation(), out=tmp_path / "cut", resume=True, **settings)
    assert same_states(whole.state(), resumed.state())
    assert whole.summary["unseen_test_accuracy"] == resumed.summary["unseen_test_accuracy"]


@pytest.mark.parametrize("method", ["ditto", "bfedem", "scaffold", "fedrep"])
def test_methods_whose_clients_train_more_or_start_afresh_are_refused(method: str) -> None:
    with pytest.raises(UserError, match=rf"keep_momentum is true, but clients of method {method} .*allowed.*: fedem"):
        fedem.train(make_federation(), method, rounds=1, keep_momentum=True)
