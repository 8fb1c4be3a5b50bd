"""Mistakes in a surrogate of a user's own: each is named before work starts, whoever is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import make_federation, make_model
from robust import load, make_lines
from torch import nn

from fedem.core.errors import UserError
from fedem.core.random import uniform
from fedem.core.tree import tree_map
from fedem.methods.decentralised import Graph
from fedem.methods.fedavg import FedAvg
from fedem.methods.fedem import FedEM
from fedem.methods.mixer import Star
from fedem.models import Model
from fedem.models.losses import SquaredError
from fedem.solvers import SGD
from fedem.solvers.optimizers import Various
from fedem.surrogates import Fixed, Surrogate, check, optimise

RobustRegression = load()["RobustRegression"]
LINE = Model(lambda: nn.Linear(3, 1), SquaredError(), torch.float64)
LINES = make_lines((12, 5, 20))


def checked(surrogate: Surrogate) -> None:
    check(surrogate, LINES, client=1, trials=1)


def optimised(surrogate: Surrogate) -> None:
    heard: list[int] = []
    try:
        optimise(surrogate, LINES, rounds=1, learning_rate=0.1, listener=lambda done, _: heard.append(done))
    finally:
        assert not heard, "a mistake must be found before work starts"


def wrong(**functions: Callable[..., Any]) -> Surrogate:
    """The guide's surrogate, with other functions; each is passed what the right one returns, and its arguments."""

    def other(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        right = getattr(RobustRegression, name)
        return lambda self, *arguments: function(right(self, *arguments), *arguments)

    return type("Mine", (RobustRegression,), {name: other(name, made) for name, made in functions.items()})(LINE, SGD())


def single(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tree_map(torch.Tensor.float, tree)


def fail(right: object, *arguments: object) -> None:
    raise ArithmeticError("no scale")


MISTAKES: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "a plain number": (
        {"objective": lambda right, *_: float(right)},
        r"Mine\.objective returns a value of type float; allowed: one number, a floating tensor of shape \[\]",
    ),
    "a number a sample": (
        {"majorant": lambda right, *arguments: right * arguments[-1].weights},
        r"Mine\.majorant returns a tensor, float64 \[5\]; allowed: one number",
    ),
    "a whole number": (
        {"objective": lambda right, *_: right.long()},
        r"Mine\.objective returns a tensor, int64 \[\]; allowed: one number, a floating",
    ),
    "a plain pair": (
        {"fix": lambda right, *_: tuple(right)},
        r"Mine\.fix returns a value of type tuple; allowed: fedem\.surrogates\.Fixed\(columns, context\)",
    ),
    "columns that are no tensors": (
        {"fix": lambda right, *_: Fixed({"distances": [1.0]}, {})},
        r"Mine\.fix returns a dictionary with {'distances': 'list'}; allowed: a dictionary from names to tensors",
    ),
    "a column too few": (
        {"fix": lambda right, *_: Fixed({"squares": right.columns["distances"]}, {})},
        r"Mine\.minimise failed on client 1: it asks for 'distances', .* have the leaves .*squares",
    ),
    "samples first": (
        {"fix": lambda right, *_: Fixed({"distances": right.columns["distances"][:, None]}, {})},
        r"Mine\.fix returns columns 'distances' of shape \[5, 1\] for 5 samples; allowed: \[..., 5\], the samples last",
    ),
    "single precision": (
        {"minimise": lambda right, *_: single(right)},
        r"minimise returns leaves {'log_scale': 'float32 \[\]'}; allowed: those of init_personal, "
        r"{'log_scale': 'float64 \[\]'}",
    ),
    "another shape": (
        {"minimise": lambda right, *_: tree_map(lambda leaf: leaf[None], right)},
        r"minimise returns leaves {'log_scale': 'float64 \[1\]'}; allowed: .*'float64 \[\]'",
    ),
    "no minimiser": (
        {"minimise": lambda right, *_: {}},
        r"minimise returns leaves {}; allowed: those of init_personal, {'log_scale'",
    ),
    "nothing to begin with": (
        {"init_personal": lambda right, *_: {}},
        r"draw_personal returns leaves {'log_scale': \[\]}; allowed: those of init_personal, {}",
    ),
    "no tree to begin with": (
        {"init_personal": lambda right, *_: right["log_scale"]},
        r"Mine\.init_personal returns a tensor, float64 \[\]; allowed: a dictionary from names to tensors",
    ),
    "a model without its bias": (
        {"init_shared": lambda right, *_: {"weight": right["weight"]}},
        r"Mine\.init_shared returns no leaf 'bias'; allowed: trees with all that the model trains",
    ),
    "an exception": ({"fix": fail}, r"Mine\.fix failed on client 1: ArithmeticError: no scale\.$"),
    "a branch": (
        {"fix": lambda right, *_: right if right.columns["distances"].sum() > 0 else Fixed({}, {})},
        r"Mine\.fix can't be stacked over clients \(.*data-dependent control flow\); allowed: .* don't branch",
    ),
    "a value that is asked for": (
        {"minimise": lambda right, *_: tree_map(lambda leaf: leaf.new_tensor(float(leaf)), right)},
        r"Mine\.minimise can't be stacked over clients \(.*\.item\(\).*\); allowed: ",
    ),
    "a draw from nowhere": (
        {"init_personal": lambda right, *_: {"log_scale": torch.rand((), dtype=torch.float64)}},
        r"Mine\.init_personal can't be stacked over clients \(.*random.*\); allowed: pure functions",
    ),
    "a step that branches": (
        {"step": lambda right, *_: right if right.shared["bias"].sum() < torch.inf else None},
        r"Mine\.step can't be stacked over clients",
    ),
    "a step that fails": ({"step": fail}, r"Mine\.step failed on client 1: ArithmeticError: no scale"),
}


@pytest.mark.parametrize("ask", [checked, optimised])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str, ask: Callable[[Surrogate], None]) -> None:
    functions, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        ask(wrong(**functions))


@pytest.mark.parametrize("ask", [checked, optimised])
def test_the_cause_is_kept(ask: Callable[[Surrogate], None]) -> None:
    with pytest.raises(UserError) as found:
        ask(wrong(fix=fail))
    assert isinstance(found.value.__cause__, ArithmeticError)


def test_failures_where_the_conditions_are_tried_are_named_too() -> None:
    for name in ("draw_personal", "between"):
        with pytest.raises(UserError, match=rf"Mine\.{name} failed on client 1: ArithmeticError"):
            checked(wrong(**{name: fail}))


def test_a_surrogate_without_mistakes_may_return_what_it_likes() -> None:
    """Draws in another precision, members of a solver that only deals out others, a branch where none is stacked."""
    drawn = wrong(draw_personal=lambda right, shared, key: {"log_scale": uniform(key, 1)[0].float()})
    assert check(drawn, LINES, trials=2).holds
    members = RobustRegression(LINE, Various(members="sgd,newton"))
    assert len(optimise(members, LINES, rounds=1, learning_rate=0.1).history) == 2

    class Looking(nn.Linear):
        """Asks for a value, which vmap does not allow."""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) if float(inputs.detach().sum()) < torch.inf else inputs

    branching = wrong(fix=lambda right, *_: right if right.columns["distances"].sum() > 0 else Fixed({}, {}))
    alone = type(branching)(Model(lambda: Looking(3, 1), SquaredError(), torch.float64), SGD())
    assert check(alone, LINES, trials=1).holds
    assert len(optimise(alone, LINES, rounds=1, learning_rate=0.1).history) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client": 9}, "client is 9; allowed: 0 to 4"),
        ({"client": "a"}, "client is 'a'; allowed: 0 to 4, one that has samples"),
        ({"data": [1]}, r"data is a value of type list; allowed: a fedem\.Federation"),
        ({"trials": 0}, "trials is 0; allowed: a whole number, at least 1"),
        ({"trials": "many"}, "trials is 'many'; allowed"),
        ({"tolerance": 0.0}, r"tolerance is 0\.0; allowed: a number above 0"),
        ({"seed": "a"}, "seed is 'a'; allowed: a whole number"),
        ({"radius": 0}, "radius is 0; allowed: a number above 0, at most 1e\\+08"),
        ({"radius": float("inf")}, "radius is inf; allowed"),
        ({"at": 3}, r"at is 3; allowed: \(u0, v0\), two dictionaries"),
        ({"at": ({}, {"log_weights": 1.0})}, r"at is \(.*\); allowed: \(u0, v0\), two dictionaries"),
        ({"at": ({}, {})}, r"at has u0 with leaves {}; allowed: {'weight': 'float64 \[3, 1, 4\]'"),
        ({"at": (make_model().init(0), {})}, r"at has u0 with leaves {'weight': 'float64 \[1, 4\]'"),
        (
            {"at": (FedEM(make_model(), SGD()).init_shared(0), {"log_weights": torch.zeros(2)})},
            r"at has v0 with leaves {'log_weights': 'float64 \[2\]'}; allowed: {'log_weights': 'float64 \[3\]'}",
        ),
    ],
)
def test_questions_to_check_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(FedEM(make_model(), SGD()), **({"data": make_federation()} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; allowed: a whole number, at least 1"),
        ({"steps": 0}, "steps is 0; allowed: a whole number, at least 1"),
        ({"steps": 1.5}, r"steps is 1\.5; allowed"),
        ({"learning_rate": 0.0}, r"learning_rate is 0\.0; allowed: above 0"),
        ({"batch_size": -1}, "batch_size is -1; allowed: at least 0"),
        ({"clients_per_round": 9}, "clients_per_round is 9"),
        ({"clients_per_round": "all"}, "clients_per_round is 'all'; allowed: a number"),
        ({"mixer": "ring"}, r"mixer is 'ring'; allowed: None for a server, or a mixer such as fedem\.methods\.Graph"),
        ({"mixer": Graph}, r"mixer is <class .*>; allowed: None for a server"),
        ({"mixer": Star("equal")}, r"mixer\.weighting is 'equal'; allowed: samples"),
        ({"seed": 0.5}, r"seed is 0\.5; allowed: a whole number"),
        ({"federation": make_federation().train}, r"federation is .*; allowed: a fedem\.Federation"),
    ],
)
def test_questions_to_optimise_that_are_refused(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"federation": make_federation(), "rounds": 1, "learning_rate": 0.1}
    with pytest.raises(UserError, match=message):
        optimise(FedEM(make_model(), SGD()), **(good | options))


def test_a_constructor_of_its_own_is_refused() -> None:
    class Own(RobustRegression):
        def __init__(self) -> None:
            super().__init__(LINE, SGD())

    for ask in (checked, optimised):
        with pytest.raises(UserError, match=r"Own can't be made again from its fields \(.*\); allowed: a frozen data"):
            ask(Own())


def test_other_methods_are_no_surrogates() -> None:
    other: Any = FedAvg(make_model(), SGD())
    for ask in (checked, optimised):
        with pytest.raises(UserError, match="The surrogate is a FedAvg; allowed: "):
            ask(other)
