"""Different solvers across clients."""

from __future__ import annotations

import pytest
import torch
from helpers import advance, distance, make_federation, make_personalizer, make_training, stacked

from fedem.core.random import client_keys
from fedem.engines import OneByOne
from fedem.solvers import LBFGS, SGD, Newton, Solver, Various

ONE = torch.tensor(1.0)


def _solver_of(solver: Various, names: tuple[str, ...]) -> dict[str, Solver]:
    return {names[k]: member for member, positions in solver.among(client_keys(names)) for k in positions.tolist()}


def test_various_deals_clients_out_by_their_names_alone() -> None:
    names = tuple(f"client {k}" for k in range(300))
    solver = Various(0.1, members="sgd, lbfgs,newton", momentum=0.5, iterations=7)
    chosen = _solver_of(solver, names)
    assert set(chosen.values()) == {SGD(0.1, momentum=0.5), LBFGS(0.1, iterations=7), Newton(0.1, iterations=7)}
    assert all(80 <= list(chosen.values()).count(member) <= 120 for member in solver.solvers)
    for some in (names[::-1], names[3:50:7]):
        assert _solver_of(solver, some) == {name: chosen[name] for name in some}
    for member, positions in solver.among(client_keys(names)):
        assert positions.tolist() == sorted(positions.tolist()), member
    # One client can't have three solvers.
    assert len(list(solver.among(client_keys(("ann",))))) == 1


def test_various_with_one_member_is_that_member() -> None:
    states = [advance(make_training(solver=solver)) for solver in (Various(0.1, members="sgd"), SGD(0.1, momentum=0.9))]
    assert distance(*states) == 0


MANY = tuple(f"client {k}" for k in range(9))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedem", "local"])
def test_various_solvers_are_the_same_one_by_one_stacked_and_in_another_order(method: str) -> None:
    federation = make_federation(sizes=(7, 3, 12, 14, 5, 9, 4, 8, 6), names=MANY)
    solver, order = Various(0.1), torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
    assert len(list(solver.among(federation.keys))) == 3
    one_by_one, together, chunks, turned = (
        advance(make_training(method, data, engine=engine, solver=solver), 2)
        for data, engine in (
            (federation, OneByOne()),
            (federation, stacked()),
            (federation, stacked(2)),
            (federation.take(order), stacked()),
        )
    )
    assert distance(one_by_one, together) < 1e-9
    assert distance(chunks, together) < 1e-9
    for name, leaf in turned.personal.items():
        torch.testing.assert_close(leaf, together.personal[name][order], rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "fedem"])
def test_various_solvers_fine_tune_and_fit_unseen_clients(method: str) -> None:
    sizes = (7, 3, 12, 14, 5, 9, 4, 8, 6)
    federation = make_federation(sizes=sizes, names=MANY)
    training = make_training(method, federation, solver=Various(0.1))
    state = advance(training, 1)
    unseen = make_federation(sizes=sizes, names=tuple(f"new {k}" for k in range(9)), seed=1)
    found = []
    for engine in (OneByOne(), stacked()):
        personalizer = make_personalizer(training, engine, fine_tune_epochs=1)
        found.append(personalizer.predictors(state, federation))
        found.append(personalizer.personalize(state, unseen.train, unseen.keys))
    for first, second in (found[::2], found[1::2]):
        for name, leaf in first.shared.items():
            torch.testing.assert_close(leaf, second.shared[name], rtol=0, atol=1e-9)
    # A client whose member is Newton ends where Newton alone would take it.
    newton = next(positions for member, positions in Various(0.1).among(federation.keys) if isinstance(member, Newton))
    alone = make_training(method, federation, solver=Newton(0.1, iterations=5))
    reference = make_personalizer(alone, OneByOne(), fine_tune_epochs=1).predictors(state, federation)
    for name, leaf in found[0].shared.items():
        torch.testing.assert_close(leaf[newton], reference.shared[name][newton], rtol=0, atol=1e-9)


def test_various_itself_takes_no_step() -> None:
    with pytest.raises(AssertionError, match="deals out its members"):
        Various().init({})
    with pytest.raises(AssertionError, match="deals out its members"):
        Various().step(lambda tree: (ONE, {}), {}, {}, ONE)
