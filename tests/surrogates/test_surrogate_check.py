"""The trial of a surrogate's conditions: it lets surrogates pass, and finds what was planted."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from helpers import DIMENSION, LOSSES, make_federation, make_model
from robust import load, make_lines
from torch import Tensor, nn

from fedem.core.errors import UserError
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_map
from fedem.methods.base import Batch
from fedem.methods.fedem import FedEM
from fedem.methods.steps import inner_product, square_distance
from fedem.methods.surrogate import Fixed, Surrogate
from fedem.models import Model
from fedem.models.losses import Logistic, SquaredError
from fedem.solvers import SGD
from fedem.surrogates import Verdict, check
from fedem.surrogates.instances import MoreauEnvelope, QuadraticBound

RobustRegression = load()["RobustRegression"]


def verdict_of(surrogate: Surrogate, **options: object) -> Verdict:
    data = make_lines() if isinstance(surrogate, RobustRegression) else make_federation()
    return check(surrogate, data, **({"client": 2, "trials": 4} | options))


def failing(verdict: Verdict) -> str:
    return "; ".join(condition.name for condition in verdict.failures)


LINE = Model(lambda: nn.Linear(3, 1), SquaredError(), torch.float64)
SOUND = {
    "fedem": FedEM(make_model(), SGD()),
    "fedem that shares samples": FedEM(make_model(), SGD(), sharpness=0.2),
    "fedem that parts them": FedEM(make_model(), SGD(), sharpness=3.0),
    "fedem in single precision": FedEM(make_model(dtype=torch.float32), SGD()),
    "envelope": MoreauEnvelope(make_model(), SGD(), iterations=5),
    "quadratic": QuadraticBound(make_model(), SGD(), smoothness=3.0),
    "user": RobustRegression(LINE, SGD()),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_surrogates_pass(name: str) -> None:
    verdict = verdict_of(SOUND[name])
    assert verdict.holds, str(verdict)
    verdict.raise_for_failure()
    assert len(verdict.conditions) == (4 if name == "quadratic" else 7)
    assert "FAILS" not in str(verdict)


@pytest.mark.slow
def test_networks_pass_near_u0_and_no_further() -> None:
    """A layer multiplies the slope of the one before it, so no constant bounds a network's curvature everywhere."""
    network = Model(lambda: nn.Sequential(nn.Linear(DIMENSION, 3), nn.Tanh(), nn.Linear(3, 1)), Logistic())
    assert verdict_of(FedEM(network, SGD()), radius=1.0).holds
    assert "smoothness" in failing(verdict_of(FedEM(network, SGD())))


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_fedem_passes_with_losses_of_bounded_slope_alone(loss: str) -> None:
    """r's Hessian has the posterior variance of the losses' slopes, which squared errors let grow with u's square."""
    verdict = check(FedEM(make_model(loss), SGD()), make_federation(loss), client=3, trials=4)
    assert verdict.holds == LOSSES[loss].has_bounded_slope, str(verdict)
    if not verdict.holds:
        (smooth,) = verdict.failures
        assert "smoothness" in smooth.name
        assert smooth.worst == pytest.approx(2, abs=0.5)
        assert verdict.curvatures[1e4] > 1e4 * verdict.curvatures[1.0]
    alone = FedEM(make_model(loss), SGD(), num_components=1)  # g is f itself
    assert check(alone, make_federation(loss), client=3, trials=4).holds


def test_a_verdict_says_what_was_tried_and_no_more() -> None:
    text = str(verdict_of(SOUND["fedem"]))
    assert re.match(r"FedEM: no violation found within radius 10000 of u0; [\d,]+ points ", text)
    assert "is a partial" not in text
    near = verdict_of(SOUND["fedem"], radius=0.5)
    assert near.radius > 10  # the draws go on from there
    assert list(near.curvatures)[-1] == 0.5
    assert "1 of 7 conditions violated, found within radius" in str(verdict_of(Power(make_model(), SGD(), 4.0)))


@pytest.mark.parametrize("seed", range(3))
def test_the_lipschitz_constant_of_a_parabola_is_found(seed: int) -> None:
    """A constant objective: r is the parabola itself."""
    flat = Model(lambda: nn.Linear(DIMENSION, 1), _Constant(), torch.float64)
    assert verdict_of(QuadraticBound(flat, SGD(), smoothness=5.0), seed=seed).smoothness == pytest.approx(5.0)


class _Constant(Logistic):
    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0 * outputs.squeeze(-1)


@dataclass(frozen=True, eq=False)
class Copy(Surrogate):
    """FedEM's surrogate, to plant mistakes in: FedEM itself is final."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "em", FedEM(self.model, self.solver))

    def init_shared(self, seed: int) -> Tree:
        return self.em.init_shared(seed)

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        return self.em.init_personal(shared, key)

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        return self.em.score(shared, inputs, targets)

    def objective(self, shared: Tree, personal: Tree, batch: Batch) -> Tensor:
        return self.em.objective(shared, personal, batch)

    def fix(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> Fixed:
        return self.em.fix(shared, personal, scores, mask)._replace(context=add_prefix("u", shared))

    def minimise(self, shared: Tree, scores: Tree, fixed: Fixed, mask: Tensor) -> Tree:
        return self.em.minimise(shared, scores, fixed, mask)

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        return self.em.majorant(shared, personal, context, batch)

    def between(self, first: Tree, second: Tree, share: float) -> Tree:
        return self.em.between(first, second, share)


class NotNormalised(Copy):
    """Responsibilities that sum to 0.9."""

    def fix(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> Fixed:
        fixed = super().fix(shared, personal, scores, mask)
        return fixed._replace(columns=tree_map(lambda leaf: leaf + torch.tensor(0.9).log(), fixed.columns))


class Below(Copy):
    """A bound that is tangent, and dips below further away."""

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        return super().majorant(shared, personal, context, batch) - square_distance(shared, take_prefix("u", context))


class Shifted(Copy):
    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        return super().majorant(shared, personal, context, batch) + 1e-3


class Steeper(Copy):
    """The value agrees at u0, and the slope does not."""

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        away = (shared["bias"] - context["u/bias"]).sum()
        return super().majorant(shared, personal, context, batch) + 0.01 * away


class Kinked(Copy):
    """The gradient jumps, a thousandth away from u0."""

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        away = (shared["bias"] - context["u/bias"]).sum()
        return super().majorant(shared, personal, context, batch) + (away.abs() - 1e-3).clamp(min=0)


@dataclass(frozen=True, eq=False)
class Power(Copy):
    """The bound and sum |u - u0|^p, whose gradient is Lipschitz for p = 2 alone."""

    power: float = 2.0
    whole: bool = False  # the Euclidean distance in place of each number's

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        away = tree_map(torch.sub, shared, take_prefix("u", context))
        if self.whole:
            square = inner_product(away, away)
            added = torch.where(square > 0, torch.where(square > 0, square, 1) ** (self.power / 2), 0)
        else:
            added = torch.stack([(leaf.abs() ** self.power).sum() for leaf in away.values()]).sum()
        return super().majorant(shared, personal, context, batch) + added


class DipsFarAway(Copy):
    """A bound with a Lipschitz gradient that is violated a hundred away from u0, and not before."""

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        square = square_distance(shared, take_prefix("u", context))
        beyond = ((square + 1e-12).sqrt() - 100).clamp(min=0)
        return super().majorant(shared, personal, context, batch) - 0.05 * beyond**2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("power", "whole"), [(1.6, False), (1.8, True), (2.0, False), (2.0, True), (2.2, False), (4.0, True), (8.0, False)]
)
def test_powers_other_than_two_have_no_lipschitz_gradient(power: float, whole: bool) -> None:
    verdict = verdict_of(Power(make_model(), SGD(), power, whole))
    assert verdict.holds == (power == 2), str(verdict)
    if power != 2:
        (smooth,) = verdict.failures
        assert smooth.name.startswith("2. smoothness")
        assert smooth.worst == pytest.approx(abs(power - 2), abs=0.05)


class Lazy(Copy):
    """Goes half of the way to the minimiser."""

    def minimise(self, shared: Tree, scores: Tree, fixed: Fixed, mask: Tensor) -> Tree:
        best = super().minimise(shared, scores, fixed, mask)
        even = tree_map(lambda leaf: torch.full_like(leaf, 1 / 3).log(), best)
        return self.between(best, even, 0.5)


class Restless(Copy):
    """v means nothing to it, and changes all the same."""

    def objective(self, shared: Tree, personal: Tree, batch: Batch) -> Tensor:
        return 0.5 * inner_product(shared, shared)

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        return self.objective(shared, personal, batch)


class Leaning(Copy):
    """The same minimiser, with a distance that grows with the way from u0."""

    def fix(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> Fixed:
        fixed = super().fix(shared, personal, scores, mask)
        best = self.minimise(shared, scores, fixed, mask)["log_weights"]
        return fixed._replace(context=fixed.context | {"best": best})

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        away = square_distance(shared, take_prefix("u", context))
        divergence = (context["best"].exp() * (context["best"] - personal["log_weights"])).sum()
        return super().majorant(shared, personal, context, batch) + away * divergence


BOUND, VALUE, SLOPE, SMOOTH = "majorisation", "f and g agree", "their gradients agree", "smoothness"
LEAST, ZERO, ALONE = "minimiser, no v", "zero only where", "and the minimiser alone"
PLANTED: dict[type[Copy], set[str]] = {
    Copy: set(),
    NotNormalised: {BOUND, VALUE, SLOPE},
    Below: {BOUND},
    DipsFarAway: {BOUND},
    Shifted: {VALUE},
    Steeper: {BOUND, SLOPE},  # a line is below on one side
    Kinked: {SMOOTH},
    Lazy: {LEAST, ZERO},  # the distance may be negative
    Restless: {ZERO},
    Leaning: {ALONE},
}


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_planted_mistakes_are_found_and_nothing_else(kind: type[Copy]) -> None:
    verdict, expected = verdict_of(kind(make_model(), SGD())), PLANTED[kind]
    found = {words for words in (BOUND, VALUE, SLOPE, SMOOTH, LEAST, ZERO, ALONE) if words in failing(verdict)}
    assert found == expected, str(verdict)
    assert verdict.holds == (not expected)
    if expected:
        with pytest.raises(
            UserError, match=rf"{kind.__name__} is no partial first-order surrogate: [123]\. .* at .*u0"
        ):
            verdict.raise_for_failure()
        assert str(verdict).count("FAILS at ") == len(expected)


def test_the_point_may_be_given() -> None:
    """Where a client has settled, as after training: one weight is zero."""
    algorithm = FedEM(make_model(), SGD())
    at = algorithm.init_shared(5), {"log_weights": torch.tensor([0.5, 0.5, 0.0]).log()}
    assert verdict_of(algorithm, at=at).holds


def test_a_smoothness_too_small_is_no_bound() -> None:
    assert failing(verdict_of(QuadraticBound(make_model(), SGD(), smoothness=0.01))) == "1. majorisation, g >= f"


def test_what_is_not_a_number_fails() -> None:
    class Broken(Copy):
        def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
            return super().majorant(shared, personal, context, batch) * torch.nan

    found = failing(verdict_of(Broken(make_model(), SGD())))
    assert all(words in found for words in (BOUND, VALUE, SLOPE, SMOOTH, LEAST, ALONE))
