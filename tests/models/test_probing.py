"""What a trial before training tells of a model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import DIMENSION, make_federation
from small_runs import small_config
from torch import nn

import fedem
from fedem.core.errors import UserError
from fedem.engines import OneByOne, Stacked, choose_engine
from fedem.models import Model
from fedem.models.losses import Logistic
from fedem.runs import recipe


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.memory(inputs.reshape(-1, 2, 2))[0][:, -1])


def test_a_recurrence_without_a_rule_trains_one_by_one() -> None:
    result = fedem.train(make_federation(sizes=(12, 8), dtype=np.float32), model=_Recurrent, rounds=1)
    assert "one by one" in result.summary["note"]


class _Bounded(nn.Module):
    """Changes its weights in a pass, which torch can't do for stacked inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(inputs).mean(1))


# torch warns, before it fails, that it has no fast rule for this.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_can_not_take_stacked_inputs_trains_one_by_one() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.integers(0, 9, (20, 5)), rng.integers(0, 3, 20)) for _ in range(2)]
    result = fedem.train(fedem.Federation.from_clients(clients), model=_Bounded, rounds=1)
    assert "one by one" in result.summary["note"]


class _Among(nn.Module):
    """Lets samples see each other: in training alone, or always."""

    def __init__(self, always: bool, look: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.always, self.look = nn.Linear(DIMENSION, 1), always, look

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs - self.look(inputs)) if self.always or self.training else self.layer(inputs)


@pytest.mark.parametrize("look", [lambda x: x.mean(0), lambda x: x[-1:], lambda x: x.cumsum(0).sum(0)])
def test_samples_that_see_each_other_are_found_out(look: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inputs = make_federation(dtype=np.float32).train.inputs[:5]
    model = Model(lambda: _Among(False, look), Logistic())
    model.probe(inputs)
    assert "padding" in model.not_stackable
    with pytest.raises(UserError, match="depends on the samples beside it"):
        Model(lambda: _Among(True, look), Logistic()).probe(inputs)
    with pytest.raises(UserError, match="depends on the samples beside it"):
        Model(lambda: _Among(True, lambda x: x.amax(0)), Logistic()).probe(inputs)


def test_what_can_not_be_trained_at_all_is_refused_in_a_sentence() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * 1

    class Wrapped(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return Broken.apply(super().forward(inputs))

    federation = make_federation(dtype=np.float32)
    with pytest.raises(UserError, match="The model can't be trained"):
        fedem.train(federation, model=lambda: Wrapped(DIMENSION, 1), rounds=1)
    with pytest.raises(UserError, match="has no shape before its first input"):
        fedem.train(federation, model=lambda: nn.LazyLinear(1), rounds=1)


@pytest.mark.parametrize("solver", ["newton", "various"])
def test_second_derivatives_through_statistics_are_refused(solver: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(DIMENSION, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    with pytest.raises(UserError, match="needs second derivatives"):
        fedem.train(make_federation(), model=build, rounds=1, solver=solver)


def test_large_models_are_stacked_where_that_is_faster() -> None:
    model = Model(lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 1, 2), nn.Flatten()), Logistic())
    model.probe(make_federation(dtype=np.float32).train.inputs[:5])
    engines = [choose_engine("auto", 0, model, torch.device(name)) for name in ("cpu", "cuda")]
    assert isinstance(engines[0], OneByOne)
    assert "faster" in engines[0].note
    assert isinstance(engines[1], Stacked)
    assert isinstance(choose_engine("stacked", 0, model, torch.device("cpu")), Stacked)


def test_layers_within_layers_count_once() -> None:
    layers = nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1)
    inputs = torch.rand(4, 5)
    for build in (nn.Sequential(*layers), nn.Sequential(nn.Sequential(nn.Sequential(*layers[:2]), layers[2]))):
        model = Model(build, Logistic())
        model.probe(inputs)
        assert model.bytes_per_sample == 4 * (7 + 7 + 1 + 2 * 7)


def test_models_of_one_kind_are_tried_once_and_a_users_own_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Model] = []
    probe = Model.probe
    monkeypatch.setattr(recipe, "_found_of_models", {})
    monkeypatch.setattr(Model, "probe", lambda model, inputs: (tried.append(model), probe(model, inputs))[1])

    def trials(model: type[nn.Module] | None = None, **run: object) -> int:
        config = small_config(**run)
        data = config.data.make(0)
        before = len(tried)
        first, second = (recipe.resolve(config, data, model).model for _ in range(2))
        assert first.bytes_per_sample == second.bytes_per_sample > 0
        return len(tried) - before

    assert trials() == 1
    assert trials(seed=1) == 0
    assert trials(dtype="float64") == 1

    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 1)

    assert trials(model=Own) == 2
