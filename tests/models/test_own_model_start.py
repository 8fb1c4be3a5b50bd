"""Clients with a model of their own that do not all take part at once."""

from __future__ import annotations

import pytest
import torch
from helpers import advance, make_personalizer, make_training
from newcomers import both_engines

from fedem.core.tree import take_prefix, tree_index
from fedem.engines import OneByOne, Stacked


@both_engines
@pytest.mark.parametrize("method", ["ditto", "pfedme", "apfl"])
def test_who_has_not_taken_part_predicts_with_the_shared_model(method: str, engine: OneByOne | Stacked) -> None:
    training = make_training(method, cohort_size=2, engine=engine)
    state = advance(training, 2)
    trained = state.personal["trained"].tolist()
    assert any(trained)
    assert not all(trained)
    found = make_personalizer(training).predictors(state, training.federation)
    for position, has in enumerate(trained):
        components = found.of(training.algorithm, position).components
        same = all(torch.equal(components[name][0], leaf[0]) for name, leaf in state.shared.items())
        assert same != has


def test_dittos_own_models_start_from_what_their_client_first_receives() -> None:
    """Alone in its round and without a pull, a client trains its own model just as the shared one."""
    training = make_training("ditto", cohort_size=1, pull=0.0)
    state = training.init()
    first_rounds = []
    for number in range(12):
        before = state.personal["trained"]
        state, _ = training.step(state)
        for position in (state.personal["trained"] & ~before).nonzero().flatten().tolist():
            first_rounds.append(number)
            own = take_prefix("own", tree_index(state.personal, position))
            for name, leaf in own.items():
                torch.testing.assert_close(leaf, state.shared[name][0], rtol=0, atol=1e-12)
    assert len(first_rounds) > 2
    assert max(first_rounds) > 1
