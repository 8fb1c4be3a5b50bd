"""Trials of the definition's three conditions, for one client and in double precision.

Shapes: d trained numbers of u, p numbers of v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from fedem.core.errors import UserError
from fedem.core.random import COMPONENTS, PERSONAL, derive
from fedem.core.tree import Tree, tree_flat, tree_map
from fedem.data.federation import Federation
from fedem.data.samples import Samples
from fedem.methods.steps import inner_product, square_distance, trained_leaves
from fedem.methods.surrogate import Fixed, Surrogate, draw_about
from fedem.models.base import Model
from fedem.surrogates.optimising import (
    OneClient,
    doubled,
    place_of,
    require,
    require_count,
    require_seed,
    require_surrogate,
    samples_of,
)

_WIDTHS = (0.01, 0.1, 1.0, 10.0)  # of the draws about u0: near and far
_SHARES = (1e-3, 0.1, 1.0)  # of the way from the minimiser to another v
_MOST_DIRECTIONS = 16
_PROBED = 8
_STEP, _FLAT, _SLOPE = 1e-4, 1e-5, 1e-5  # of differences in u; singular values and slopes that count as none
_HALVINGS, _LAST, _GROWTH = 20, 6, 8.0  # of a segment; by how much quotients may grow in the last ones, 64 at a jump
_NO_GAP, _APART = 1e-13, 1e-3  # a distance that counts as none, and how far apart two v are then at most


class _Point(NamedTuple):
    """A place to try, and what to call it."""

    shared: Tree
    personal: Tree
    name: str


class _Place(NamedTuple):
    """A place on the way from u0 to another u."""

    share: float
    """of the way"""
    slope: Tensor
    """the gradient of r there, ``[d]``"""
    rounding: float
    """a change of it that may be rounding"""


@dataclass
class _Worst:
    """The largest violation so far."""

    name: str
    allowed: float
    value: float = 0.0
    where: str = "no point"

    def see(self, violation: float | Tensor, where: str) -> None:
        """Take note of one violation; what is not a number is as bad as can be."""
        found = float(violation)
        found = math.inf if math.isnan(found) else found
        if found > self.value:
            self.value, self.where = found, where

    def condition(self) -> Condition:
        return Condition(self.name, self.value, self.allowed, self.where)


def check(
    surrogate: Surrogate,
    data: Federation | Samples,
    *,
    client: int = 0,
    at: tuple[Tree, Tree] | None = None,
    seed: int = 0,
    trials: int = 12,
    tolerance: float = 1e-8,
) -> Verdict:
    """Try whether g is a partial first-order surrogate of f near (u0, v0), on one client's (training) samples.

    Trials can refute a condition and never prove it. Violations count relative to 1 + the size of what is compared.

    Args:
        surrogate: f and g; its model is rebuilt in double precision.
        data: where the client is.
        client: its position.
        at: (u0, v0); drawn by ``seed`` when not given.
        seed: of all that is drawn.
        trials: points drawn, near (u0, v0) and far from it.
        tolerance: the largest violation that counts as rounding.

    """
    require_surrogate(surrogate)
    require_seed(seed)
    require_count("trials", trials)
    require("tolerance", tolerance, isinstance(tolerance, int | float) and tolerance > 0, "a number above 0")
    inputs, targets = samples_of(data, client)
    model = Model(surrogate.model.build, surrogate.model.loss, torch.float64)
    model.probe(inputs[:_PROBED])
    surrogate.check(inputs)
    double = replace(surrogate, model=model)
    return _Trial.of(double, OneClient(double, inputs, targets, client), at, seed, trials, tolerance).verdict()


@dataclass
class _Trial:
    """One surrogate, fixed at one point, and the points where it is tried."""

    surrogate: Surrogate
    client: OneClient
    shared: Tree
    personal: Tree
    fixed: Fixed
    draws: list[_Point]
    tolerance: float
    smoothness: float = field(default=0.0, init=False)

    @classmethod
    def of(
        cls,
        surrogate: Surrogate,
        client: OneClient,
        at: tuple[Tree, Tree] | None,
        seed: int,
        trials: int,
        tolerance: float,
    ) -> _Trial:
        keys = derive(derive(seed, PERSONAL), torch.arange(trials + 1))
        shared, personal = map(doubled, client.start(int(derive(seed, COMPONENTS)), keys[trials]))
        client.try_out(shared, personal, keys[trials])
        if at is None:
            personal = doubled(client.draw(shared, keys[trials]))
        else:
            shared, personal = place_of(at, shared, personal)
        draws = []
        for number in range(trials):
            width = _WIDTHS[number % len(_WIDTHS)]
            there = draw_about(shared, derive(keys[number], COMPONENTS), surrogate.model.trainable, width)
            drawn = doubled(client.draw(shared, keys[number]))
            draws.append(_Point(there, drawn, f"draw {number} (u within about {width:g} of u0)"))
        return cls(surrogate, client, shared, personal, client.fix(shared, personal), draws, tolerance)

    def verdict(self) -> Verdict:
        conditions = [self._majorisation(), *self._tangency(), self._lipschitz()]
        if self.personal:
            conditions += [self._minimiser(), self._separation(), self._dependence()]
        return Verdict(type(self.surrogate).__name__, tuple(worst.condition() for worst in conditions), self.smoothness)

    def _objective(self, shared: Tree, personal: Tree) -> Tensor:
        return self.client.objective(shared, personal)

    def _majorant(self, shared: Tree, personal: Tree) -> Tensor:
        return self.client.majorant(shared, personal, self.fixed)

    def _minimise(self, shared: Tree) -> Tree:
        return self.client.minimise(shared, self.personal, self.fixed)

    def _majorisation(self) -> _Worst:
        worst = _Worst("1. majorisation, g >= f", self.tolerance)
        least = self._minimise(self.shared)
        trained = self.surrogate.model.trainable
        for there, drawn, name in [_Point(self.shared, self.personal, "u0"), *self.draws]:
            # On both sides: what is too steep is below on one of them.
            opposite = there | {leaf: 2 * self.shared[leaf] - there[leaf] for leaf in trained}
            for shared, place in ((there, name), (opposite, f"{name}, mirrored")):
                for personal, called in ((self.personal, "v0"), (least, "the minimising v"), (drawn, "the drawn v")):
                    value, bound = self._objective(shared, personal), self._majorant(shared, personal)
                    worst.see(_excess(value, bound), f"{place}, {called}")
        return worst

    def _gradients(self, shared: Tree) -> tuple[Tensor, Tensor]:
        """Return the gradients of f and of g in u at v0, ``[d]`` each."""
        trained = trained_leaves(self.surrogate.model, shared)
        slopes = (
            grad(lambda leaves, function=function: function(shared | leaves, self.personal))(trained)
            for function in (self._objective, self._majorant)
        )
        first, second = (tree_flat(slope) for slope in slopes)
        return first, second

    def _tangency(self) -> tuple[_Worst, _Worst]:
        values, slopes = (
            _Worst(f"2. tangency, {what} agree at (u0, v0)", self.tolerance) for what in ("f and g", "their gradients")
        )
        value, bound = (function(self.shared, self.personal) for function in (self._objective, self._majorant))
        values.see((bound - value).abs() / (1 + value.abs()), "(u0, v0)")
        slope, other = self._gradients(self.shared)
        slopes.see((other - slope).abs().max() / (1 + slope.abs().max()), "(u0, v0)")
        return values, slopes

    def _lipschitz(self) -> _Worst:
        worst = _Worst("2. smoothness, growth of the quotients of grad (g - f)", _GROWTH)
        for there, _, name in self.draws[: len(_WIDTHS)]:
            quotients = self._quotients(there)
            self.smoothness = max(self.smoothness, *quotients)
            before, last = quotients[-1 - _LAST], quotients[-1]
            worst.see(last / before if before else last, f"between u0 and {name}")
        return worst

    def _quotients(self, there: Tree) -> list[float]:
        """Halve the way from u0 towards where the gradient of r changes most: at a jump the quotient doubles each time.

        Returns:
            |change| / |length| of each half that was kept; infinite where a gradient is not finite
        """
        length = math.sqrt(float(square_distance(trained_leaves(self.surrogate.model, there), self.shared)))
        near, far = self._place(there, 0.0), self._place(there, 1.0)
        quotients = []
        for _ in range(_HALVINGS):
            middle = self._place(there, (near.share + far.share) / 2)
            first, second = (float((b.slope - a.slope).norm()) for a, b in ((near, middle), (middle, far)))
            if not math.isfinite(first + second):
                return [math.inf] * _HALVINGS
            near, far = (near, middle) if first > second else (middle, far)
            change = max(first, second)
            quotients.append(change / (length * (far.share - near.share)) if change > middle.rounding else 0.0)
        return quotients

    def _place(self, there: Tree, share: float) -> _Place:
        trained = trained_leaves(self.surrogate.model, there)
        between = tree_map(lambda leaf, start: torch.lerp(start, leaf, share), trained, self.shared)
        slope, other = self._gradients(there | between)
        return _Place(share, other - slope, 1e-11 * (1 + float(slope.norm())))

    def _minimiser(self) -> _Worst:
        worst = _Worst("3. minimiser, no v makes g(u, v) smaller", self.tolerance)
        others = [("v0", self.personal), *((f"the v of {name}", drawn) for _, drawn, name in self.draws)]
        for there, _, name in [_Point(self.shared, self.personal, "u0"), *self.draws[: len(_WIDTHS)]]:
            least = self._minimise(there)
            value = self._majorant(there, least)
            for called, other in others:
                for share in _SHARES:
                    bound = self._majorant(there, self.client.between(least, other, share))
                    worst.see(_excess(value, bound), f"{name}, {share:g} of the way to {called}")
        return worst

    def _separation(self) -> _Worst:
        """Build g near (u0, v) for the drawn v: where the minimiser is another, g must be smaller there."""
        worst = _Worst("3. distance, zero only where v0 is the minimiser", _APART)
        for _, drawn, name in self.draws:
            fixed = self.client.fix(self.shared, drawn)
            least = self.client.minimise(self.shared, drawn, fixed)
            before, after = (self.client.majorant(self.shared, v, fixed) for v in (drawn, least))
            if float(before - after) <= _NO_GAP * (1 + abs(float(after))):
                worst.see(_difference(drawn, least).abs().max(), f"u0, v of {name}")
        return worst

    def _dependence(self) -> _Worst:
        """Where a step in u leaves the minimiser as it is, it must leave g(u, v0) - g(u, v) as it is."""
        worst = _Worst("3. distance, a function of v0 and the minimiser alone", _SLOPE)
        size = len(tree_flat(trained_leaves(self.surrogate.model, self.shared)))
        count = min(size, len(tree_flat(self.personal)) + 4, _MOST_DIRECTIONS)
        for there, _, name in [_Point(self.shared, self.personal, "u0"), *self.draws[1:3]]:
            moves, slopes = zip(*(self._derivative(there, number) for number in range(count)), strict=True)
            slope = torch.stack(slopes)
            _, values, rows = torch.linalg.svd(torch.stack(moves, dim=1), full_matrices=False)
            seen = rows[values > _FLAT * max(1.0, float(values.max()))]
            unexplained = slope - seen.T @ (seen @ slope)
            worst.see(unexplained.norm() / (1 + slope.norm()), name)
        return worst

    def _derivative(self, shared: Tree, number: int) -> tuple[Tensor, Tensor]:
        """Differentiate the minimiser ``[p]`` and the distance along a direction in u, one for each ``number``."""
        trained = trained_leaves(self.surrogate.model, shared)
        direction = draw_about(tree_map(torch.zeros_like, trained), derive(0, number), trained)
        step = _STEP / math.sqrt(float(inner_product(direction, direction)))
        minimisers, distances = [], []
        for sign in (1, -1):
            there = shared | tree_map(lambda leaf, way, sign=sign: leaf + sign * step * way, trained, direction)
            minimisers.append(self._minimise(there))
            distances.append(self._majorant(there, self.personal) - self._majorant(there, minimisers[-1]))
        return _difference(*minimisers) / (2 * _STEP), (distances[0] - distances[1]) / (2 * _STEP)


def _excess(value: Tensor, bound: Tensor) -> Tensor:
    """Return by how much ``value`` is above ``bound``, relatively; an infinite bound is above everything."""
    return torch.where(bound == math.inf, 0, (value - bound) / (1 + value.abs()))


def _difference(first: Tree, second: Tree) -> Tensor:
    """Subtract two v as a vector ``[p]``; infinities of the same sign are equal."""
    a, b = tree_flat(first), tree_flat(second)
    return torch.where(a == b, 0, a - b)


@dataclass(frozen=True)
class Condition:
    """One of the conditions, and where it was tried hardest."""

    name: str
    worst: float
    """the largest violation; infinite where something was not a number"""
    allowed: float
    where: str
    """the place of the largest violation"""

    @property
    def holds(self) -> bool:
        """Whether no violation was larger than allowed."""
        return self.worst <= self.allowed


@dataclass(frozen=True)
class Verdict:
    """Whether g is a partial first-order surrogate of f, as far as trials can show."""

    surrogate: str
    conditions: tuple[Condition, ...]
    smoothness: float
    """the largest Lipschitz constant of the gradient of g - f that was met, a lower bound of the definition's L"""

    @property
    def holds(self) -> bool:
        """Whether all conditions do."""
        return not self.failures

    @property
    def failures(self) -> tuple[Condition, ...]:
        """Those that don't hold."""
        return tuple(condition for condition in self.conditions if not condition.holds)

    def raise_for_failure(self) -> None:
        """Refuse a surrogate that failed."""
        if self.failures:
            first = self.failures[0]
            raise UserError(
                f"{self.surrogate} is no partial first-order surrogate: {first.name} is violated by {first.worst:.3g} "
                f"at {first.where}; allowed: {first.allowed:.3g}."
            )

    def __str__(self) -> str:
        width = max(len(condition.name) for condition in self.conditions)
        article = "a" if self.holds else "no"
        lines = [f"{self.surrogate} is {article} partial first-order surrogate (worst violation of what is allowed):"]
        for condition in self.conditions:
            outcome = "holds" if condition.holds else f"FAILS at {condition.where}"
            figures = f"{condition.worst:8.2e} of {condition.allowed:.0e}"
            lines.append(f"  {condition.name:<{width}}  {figures}  {outcome}")
        return "\n".join([*lines, f"  the gradient of g - f has a Lipschitz constant of {self.smoothness:.3g} or more"])
