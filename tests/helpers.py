"""Small federations and models that every test file uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedem.data.federation import Federation
from fedem.engines import Batching, Engine, Stacked
from fedem.graphs import Ring
from fedem.methods import METHODS
from fedem.methods.assembly import Around, assemble
from fedem.models import Linear, Model
from fedem.models.losses import CrossEntropy, Logistic, Loss, SquaredError
from fedem.runs.config import RunSettings
from fedem.runs.evaluate import Scores, evaluate
from fedem.runs.personalize import Personalizer
from fedem.runs.rounds import State, Training
from fedem.solvers import SGD, Solver
from fedem.solvers.schedules import Constant, Schedule

LOSSES: dict[str, Loss] = {"logistic": Logistic(), "cross_entropy": CrossEntropy(), "squared_error": SquaredError()}
SIZES = (7, 1, 10, 14, 5)
NAMES = ("ann", "bob", "cem", "dan", "eve")
DIMENSION = 4
NEVER = 10**9
# Two of its inner steps are enough to tell them from one; each costs as much as a whole step of another method.
QUICK: dict[str, dict[str, object]] = {"pfedme": {"inner_steps": 2}}


class StopError(Exception):
    """What :func:`stop_at` raises."""


def stop_at(round_: int) -> Callable[[Any], None]:
    """Return a listener that stops its run in this round, as if it were killed."""

    def listener(record: Any) -> None:
        if record["round"] == round_:
            raise StopError

    return listener


def make_federation(
    loss: str = "logistic",
    sizes: tuple[int, ...] = SIZES,
    names: tuple[str, ...] | None = None,
    seed: int = 0,
    dtype: type = np.float64,
) -> Federation:
    """Clients that differ: each has its own direction."""
    rng = np.random.default_rng(seed)
    names = NAMES[: len(sizes)] if names is None else names
    pairs = []
    for size in sizes:
        x = rng.normal(size=(size, DIMENSION)).astype(dtype)
        direction = rng.normal(size=DIMENSION)
        signal = x @ direction + 0.3 * rng.normal(size=size)
        y = {
            "logistic": (signal > 0).astype(np.int64),
            "cross_entropy": np.digitize(signal, [-1, 1]),
            "squared_error": signal.astype(dtype),
        }[loss]
        pairs.append((x, y))
    tests = [(x[: (len(x) + 1) // 2], y[: (len(y) + 1) // 2]) for x, y in pairs]
    return Federation.from_parts(pairs, tests, tests, names)


def make_model(loss: str = "logistic", dtype: torch.dtype = torch.float64) -> Model:
    outputs = 3 if loss == "cross_entropy" else 1
    return Model(lambda: Linear().build((DIMENSION,), outputs), LOSSES[loss], dtype)


def make_model_for(method: str, loss: str = "logistic", dtype: torch.dtype = torch.float64) -> Model:
    """The smallest model that a method takes: of one layer unless it tells layers apart."""
    row, outputs = METHODS[method], 3 if loss == "cross_entropy" else 1
    if not row.needs_layers:
        return make_model(loss, dtype)
    between = [nn.BatchNorm1d(3)] if row.local_layers == "batch_norm" else []
    layers = [nn.Linear(DIMENSION, 3), *between, nn.Tanh(), nn.Linear(3, outputs)]
    return Model(nn.Sequential(*layers), LOSSES[loss], dtype)


def stacked(chunk_size: int = 0, max_bytes: int = 0) -> Stacked:
    """The stacked engine without recordings: they give the same bits (test_replay) and are slower in short runs."""
    return Stacked(chunk_size, max_bytes, record_after=NEVER)


def make_training(
    method: str = "fedem",
    federation: Federation | None = None,
    *,
    loss: str = "logistic",
    model: Model | None = None,
    engine: Engine | None = None,
    batching: Batching | None = None,
    solver: Solver | None = None,
    schedule: Schedule | None = None,
    num_rounds: int = 4,
    cohort_size: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    **hyper: object,
) -> Training:
    federation = make_federation(loss) if federation is None else federation
    settings = QUICK.get(method, {}) | hyper
    row = METHODS[method]
    model = model or make_model_for(method, loss)
    around = Around(topology=Ring() if row.mixer.over_graph else None)
    algorithm, mixer, _ = assemble(method, model, solver or SGD(0.01, momentum=0.9), settings, around)
    return Training(
        algorithm,
        engine or stacked(),
        batching or Batching(batch_size=4, local_epochs=2),
        seed,
        mixer,
        schedule or Constant(0.2),
        federation,
        num_rounds,
        federation.num_clients if cohort_size is None else cohort_size,
        torch.device(device),
    )


def advance(training: Training, rounds: int = 3, state: State | None = None) -> State:
    state = training.init() if state is None else state
    for _ in range(rounds):
        state, _ = training.step(state)
    return state


def make_personalizer(training: Training, engine: Engine | None = None, **settings: Any) -> Personalizer:
    run = RunSettings(**{"unseen_epochs": 2} | settings)
    return Personalizer(training.algorithm, training.mixer, engine or training.engine, training.batching, 0.2, run)


def scores_of(training: Training, state: State, engine: Engine | None = None) -> dict[str, Scores]:
    found = make_personalizer(training, engine).predictors(state, training.federation)
    return evaluate(training.algorithm, engine or training.engine, found, training.federation)


def distance(first: State, second: State) -> float:
    """Largest difference between two states; minus infinity equals itself."""
    pairs = []
    for trees in ((first.shared, second.shared), (first.personal, second.personal), (first.memory, second.memory)):
        assert trees[0].keys() == trees[1].keys()
        pairs += [(trees[0][name].double().cpu(), trees[1][name].double().cpu()) for name in trees[0]]
    return max(float(torch.where(a == b, 0.0, a - b).abs().max()) for a, b in pairs if a.numel())


def same_states(first: State, second: State) -> bool:
    """Whether two states are equal to the last bit."""
    pairs = [(getattr(first, name), getattr(second, name)) for name in ("shared", "personal", "memory")]
    return first.round == second.round and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )
