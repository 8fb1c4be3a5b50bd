"""The package's own side: a training with the stacked engine, and its state as the plain loops have it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.plain_loop import MOMENTUM, WEIGHT_DECAY, Server, start
from fedem.core.tree import tree_index
from fedem.data.federation import Federation
from fedem.engines import Batching, Stacked
from fedem.methods import find_method
from fedem.models import Linear, Model
from fedem.models.losses import Logistic
from fedem.runs.rounds import State, Training
from fedem.solvers import SGD
from fedem.solvers.schedules import Constant

NUM_COMPONENTS = {"fedem": 3, "fedavg": 1}
LEARNING_RATES = {"fedem": 1.0, "fedavg": 0.1}
"""As in the package's preset for the synthetic data."""
SEED = 0


def make_training(method: str, federation: Federation, batching: Batching, cohort_size: int | None = None) -> Training:
    """Prepare rounds of ``method`` with the stacked engine; all clients take part unless ``cohort_size`` is given."""
    row = find_method(method)
    model = Model(lambda: Linear().build(federation.input_shape, 1), Logistic())
    solver = SGD(weight_decay=WEIGHT_DECAY, momentum=MOMENTUM)
    hyper = {"num_components": NUM_COMPONENTS[method]} if method == "fedem" else {}
    return Training(
        row.algorithm(model, solver, **hyper),
        Stacked(),
        batching,
        SEED,
        row.mixer(),
        Constant(LEARNING_RATES[method]),
        federation,
        num_rounds=1000,
        cohort_size=federation.num_clients if cohort_size is None else cohort_size,
        device=torch.device("cpu"),
    )


def advancing(training: Training) -> Callable[[], None]:
    """Return what trains the next round, to its end on a GPU as well."""
    state = training.init()

    def advance() -> None:
        nonlocal state
        state, _ = training.step(state)
        if training.device.type == "cuda":
            torch.cuda.synchronize(training.device)

    return advance


def as_server(state: State, num_clients: int) -> Server:
    """Copy a state of the package to the plain loops' form; FedAvg's model counts as one component."""
    shared = tree_index(state.shared, 0)
    weight, bias = shared["weight"], shared["bias"]
    if not state.personal:
        return start(weight[None], bias[None], torch.ones(num_clients, 1))
    return start(weight, bias, state.personal["log_weights"].exp())
