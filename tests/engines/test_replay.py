"""Recordings are the function itself: the same bits, for every method, solver and shape."""

from __future__ import annotations

import pytest
import torch
from helpers import NEVER, advance, make_federation, make_training, same_states
from torch.func import vmap

from fedem.engines import Batching, Stacked
from fedem.engines.replay import Traced
from fedem.methods import METHODS
from fedem.solvers import LBFGS, SOLVERS, Various

SIZES = (5, 1, 7)
# A loss is the same operations in whichever method.
CASES = [*((method, "logistic") for method in METHODS), ("fedem", "cross_entropy"), ("fedem", "squared_error")]
# These differ most in what they hand to an engine; a method takes a second to record.
QUICK_METHODS = ("fedem", "scaffold", "apfl", "ifca", "local", "fedfomo", "qffl")


@pytest.mark.parametrize(
    ("method", "loss"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in QUICK_METHODS)) for case in CASES],
)
def test_replayed_rounds_give_the_same_bits(method: str, loss: str) -> None:
    federation = make_federation(loss, SIZES)
    states = [
        advance(make_training(method, federation, loss=loss, engine=Stacked(record_after=after)), 2)
        for after in (NEVER, 0)
    ]
    assert same_states(*states)


# What a solver tries is unrolled in a recording, so few trials and iterations are as good as many.
QUICK = {"lbfgs": LBFGS(0.1, history=1, num_trials=4), "various": Various(0.1, iterations=1)}


@pytest.mark.parametrize("solver", SOLVERS)
def test_replayed_solvers_give_the_same_bits(solver: str) -> None:
    settings = {"solver": QUICK.get(solver, SOLVERS[solver](weight_decay=0.1)), "batching": Batching(0, local_epochs=2)}
    federation = make_federation(sizes=SIZES)
    states = [
        advance(make_training("fedem", federation, engine=Stacked(record_after=after), **settings), 2)
        for after in (NEVER, 0)
    ]
    assert same_states(*states)


# Which clients and how many are the engine's affair, and these differ most in what they hand it.
@pytest.mark.parametrize("method", ["fedem", "scaffold", "apfl", "ifca", "local", "fedfomo"])
def test_sampled_cohorts_and_chunks_give_the_same_bits(method: str) -> None:
    states = [
        advance(make_training(method, engine=Stacked(2, record_after=after), cohort_size=3), 4) for after in (NEVER, 1)
    ]
    assert same_states(*states)


def test_the_learning_rate_is_not_frozen_into_a_recording() -> None:
    from fedem.solvers.schedules import Cosine

    states = [
        advance(make_training("fedem", engine=Stacked(record_after=a), schedule=Cosine(0.3), num_rounds=6), 6)
        for a in (NEVER, 0)
    ]
    assert same_states(*states)


def test_a_function_is_recorded_once_a_shape_and_only_when_it_comes_back() -> None:
    calls = []

    def double(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        calls.append(a.shape)
        return 2 * a + b * c

    replay = Traced(vmap(double, in_dims=(0, 0, None)), after=2)
    small, large = (torch.arange(float(n * 3)).reshape(n, 3) for n in (2, 4))
    for _ in range(6):
        assert torch.equal(replay(small, small, torch.tensor(3.0)), 5 * small)
    assert len(calls) == 3  # two plain calls and the recording
    assert torch.equal(replay(large, large, torch.tensor(3.0)), 5 * large)
    assert len(calls) == 4
    # Another layout is another recording: a view that fits one need not fit the other.
    assert torch.equal(replay(small, small.T.contiguous().T, torch.tensor(3.0)), 5 * small)
    assert len(calls) == 5
