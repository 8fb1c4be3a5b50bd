"""Trials of the definition's three conditions, for one client and in double precision.

Shapes: d trained numbers of u, p numbers of v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import grad

from fedem.core.errors import UserError
from fedem.core.random import COMPONENTS, PERSONAL, derive
from fedem.core.tree import Tree, tree_double, tree_flat, tree_map
from fedem.data.federation import Federation
from fedem.data.samples import Samples
from fedem.methods.steps import inner_product, square_distance, trained_leaves
from fedem.methods.surrogate import Fixed, Surrogate, draw_about
from fedem.models.base import Model
from fedem.surrogates.optimising import WHOLE, OneClient, describe, is_tree, require, require_counts, require_surrogate

_WIDTHS = (0.01, 0.1, 1.0, 10.0)  # of the draws about u0: near and far
_SHARES = (1e-3, 0.1, 1.0)  # of the way from the minimiser to another v
_MOST_DIRECTIONS = 16
_STEP, _FLAT, _SLOPE = 1e-4, 1e-5, 1e-5  # of differences in u; singular values and slopes that count as none
_HALVINGS, _LAST, _GROWTH = 20, 6, 8.0  # of a segment; by how much quotients may grow in the last ones, 64 at a jump
_NO_GAP, _APART = 1e-13, 1e-3  # a distance that counts as none, and how far apart two v are then at most

_Point = tuple[Tree, Tree, str]  # u, v, and what to call the place
_Violations = Iterator[tuple[float | Tensor, str]]  # by how much a condition is violated, and where


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

    Trials can refute a condition and never prove it. They are in double precision, for the client at position
    ``client``, at ``trials`` points drawn near (u0, v0) and far from it; (u0, v0) is ``at``, or drawn too. Violations
    count relative to 1 + the size of what is compared; ``tolerance`` is the largest that counts as rounding.
    """
    require_surrogate(surrogate)
    require("seed", seed, isinstance(seed, WHOLE), "a whole number")
    require_counts(trials=trials)
    require("tolerance", tolerance, isinstance(tolerance, int | float) and tolerance > 0, "a number above 0")
    samples = data.train if isinstance(data, Federation) else data
    if not isinstance(samples, Samples):
        raise UserError(f"data is a value of type {type(data).__name__}; allowed: a fedem.Federation, or its samples.")
    there = isinstance(client, WHOLE) and 0 <= client < samples.num_clients and bool(samples.sizes[client])
    require("client", client, there, f"0 to {samples.num_clients - 1}, one that has samples")
    inputs, targets = samples.client(int(client))
    model = Model(surrogate.model.build, surrogate.model.loss, torch.float64)
    model.probe(inputs[:8])
    surrogate.check(inputs)
    double = replace(surrogate, model=model)
    one = OneClient(double, inputs, targets, client)
    keys = derive(derive(seed, PERSONAL), torch.arange(trials + 1))
    shared, personal = map(tree_double, one.start(int(derive(seed, COMPONENTS)), keys[trials]))
    one.try_out(shared, personal, keys[trials])
    if at is None:
        personal = tree_double(one.tree("draw_personal", shared, keys[trials]))
    else:
        pair = isinstance(at, tuple) and len(at) == 2 and all(map(is_tree, at))
        require("at", at, pair, "(u0, v0), two dictionaries from names to tensors")
        drawn, (shared, personal) = (shared, personal), map(tree_double, at)
        for name, given, own in zip(("u0", "v0"), (shared, personal), drawn, strict=True):
            if describe(given) != describe(own):
                raise UserError(f"at has {name} with leaves {describe(given)}; allowed: {describe(own)}.")
    places: list[_Point] = [(shared, personal, "u0")]
    for number in range(trials):
        width = _WIDTHS[number % len(_WIDTHS)]
        u = draw_about(shared, derive(keys[number], COMPONENTS), model.trainable, width)
        v = tree_double(one.tree("draw_personal", shared, keys[number]))
        places.append((u, v, f"draw {number} (u within about {width:g} of u0)"))
    return _Trial(double, one, shared, personal, one.fix(shared, personal), places).verdict(tolerance)


@dataclass
class _Trial:
    surrogate: Surrogate
    client: OneClient
    shared: Tree
    personal: Tree
    fixed: Fixed
    places: list[_Point]  # u0 and v0, then what was drawn
    smoothness: float = field(default=0.0, init=False)

    def verdict(self, tolerance: float) -> Verdict:
        trials = [
            ("1. majorisation, g >= f", tolerance, self._majorisation()),
            ("2. tangency, f and g agree at (u0, v0)", tolerance, self._equal_values()),
            ("2. tangency, their gradients agree at (u0, v0)", tolerance, self._equal_slopes()),
            ("2. smoothness, growth of the quotients of grad (g - f)", _GROWTH, self._lipschitz()),
        ]
        if self.personal:
            trials += [
                ("3. minimiser, no v makes g(u, v) smaller", tolerance, self._minimiser()),
                ("3. distance, zero only where v0 is the minimiser", _APART, self._separation()),
                ("3. distance, a function of v0 and the minimiser alone", _SLOPE, self._dependence()),
            ]
        return Verdict(type(self.surrogate).__name__, tuple(_worst(*trial) for trial in trials), self.smoothness)

    def _majorant(self, shared: Tree, personal: Tree) -> Tensor:
        return self.client.majorant(shared, personal, self.fixed)

    def _minimise(self, shared: Tree) -> Tree:
        return self.client.minimise(shared, self.personal, self.fixed)

    def _majorisation(self) -> _Violations:
        least, trained = self._minimise(self.shared), self.surrogate.model.trainable
        for there, drawn, name in self.places:
            # On both sides: what is too steep is below on one of them.
            opposite = there | {leaf: 2 * self.shared[leaf] - there[leaf] for leaf in trained}
            for shared, place in ((there, name), (opposite, f"{name}, mirrored")):
                for personal, called in ((self.personal, "v0"), (least, "the minimising v"), (drawn, "the drawn v")):
                    value, bound = self.client.objective(shared, personal), self._majorant(shared, personal)
                    yield _excess(value, bound), f"{place}, {called}"

    def _gradients(self, shared: Tree) -> list[Tensor]:
        """Return the gradients of f and of g in u at v0, ``[d]`` each."""
        trained, functions = trained_leaves(self.surrogate.model, shared), (self.client.objective, self._majorant)
        return [tree_flat(grad(lambda u, f=f: f(shared | u, self.personal))(trained)) for f in functions]

    def _equal_values(self) -> _Violations:
        value, bound = (function(self.shared, self.personal) for function in (self.client.objective, self._majorant))
        yield (bound - value).abs() / (1 + value.abs()), "(u0, v0)"

    def _equal_slopes(self) -> _Violations:
        slope, other = self._gradients(self.shared)
        yield (other - slope).abs().max() / (1 + slope.abs().max()), "(u0, v0)"

    def _lipschitz(self) -> _Violations:
        for there, _, name in self.places[1 : 1 + len(_WIDTHS)]:
            quotients = self._quotients(there)
            self.smoothness = max(self.smoothness, *quotients)
            before, last = quotients[-1 - _LAST], quotients[-1]
            yield last / before if before else last, f"between u0 and {name}"

    def _quotients(self, there: Tree) -> list[float]:
        """Halve the way from u0 towards where the gradient of r changes most: at a jump the quotient doubles each time.

        Returns |change| / |length| of each half that was kept; infinite where a gradient is not finite.
        """
        trained = trained_leaves(self.surrogate.model, there)
        length = math.sqrt(float(square_distance(trained, self.shared)))

        def place(share: float) -> tuple[float, Tensor, float]:
            """A share of the way, the gradient of r there ``[d]``, and a change of it that may be rounding."""
            between = tree_map(lambda leaf, start: torch.lerp(start, leaf, share), trained, self.shared)
            slope, other = self._gradients(there | between)
            return share, other - slope, 1e-11 * (1 + float(slope.norm()))

        near, far = place(0.0), place(1.0)
        quotients = []
        for _ in range(_HALVINGS):
            middle = place((near[0] + far[0]) / 2)
            first, second = (float((b[1] - a[1]).norm()) for a, b in ((near, middle), (middle, far)))
            if not math.isfinite(first + second):
                return [math.inf] * _HALVINGS
            near, far = (near, middle) if first > second else (middle, far)
            change = max(first, second)
            quotients.append(change / (length * (far[0] - near[0])) if change > middle[2] else 0.0)
        return quotients

    def _minimiser(self) -> _Violations:
        others = [("v0", self.personal), *((f"the v of {name}", drawn) for _, drawn, name in self.places[1:])]
        for there, _, name in self.places[: 1 + len(_WIDTHS)]:
            least = self._minimise(there)
            value = self._majorant(there, least)
            for called, other in others:
                for share in _SHARES:
                    bound = self._majorant(there, self.client.tree("between", least, other, share))
                    yield _excess(value, bound), f"{name}, {share:g} of the way to {called}"

    def _separation(self) -> _Violations:
        """Build g near (u0, v) for the drawn v: where the minimiser is another, g must be smaller there."""
        for _, drawn, name in self.places[1:]:
            fixed = self.client.fix(self.shared, drawn)
            least = self.client.minimise(self.shared, drawn, fixed)
            before, after = (self.client.majorant(self.shared, v, fixed) for v in (drawn, least))
            if float(before - after) <= _NO_GAP * (1 + abs(float(after))):
                yield _difference(drawn, least).abs().max(), f"u0, v of {name}"

    def _dependence(self) -> _Violations:
        """Where a step in u leaves the minimiser as it is, it must leave g(u, v0) - g(u, v) as it is."""
        size = len(tree_flat(trained_leaves(self.surrogate.model, self.shared)))
        count = min(size, len(tree_flat(self.personal)) + 4, _MOST_DIRECTIONS)
        for there, _, name in [self.places[0], *self.places[2:4]]:
            moves, slopes = zip(*(self._derivative(there, number) for number in range(count)), strict=True)
            slope = torch.stack(slopes)
            _, values, rows = torch.linalg.svd(torch.stack(moves, dim=1), full_matrices=False)
            seen = rows[values > _FLAT * max(1.0, float(values.max()))]
            unexplained = slope - seen.T @ (seen @ slope)
            yield unexplained.norm() / (1 + slope.norm()), name

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


def _worst(name: str, allowed: float, violations: _Violations) -> Condition:
    """Find the largest violation; what is not a number is as bad as can be."""
    worst, where = 0.0, "no point"
    for violation, place in violations:
        found = math.inf if math.isnan(float(violation)) else float(violation)
        if found > worst:
            worst, where = found, place
    return Condition(name, worst, allowed, where)


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
    worst: float  # the largest violation; infinite where something was not a number
    allowed: float
    where: str  # the place of the largest violation

    @property
    def holds(self) -> bool:
        """Whether no violation was larger than allowed."""
        return self.worst <= self.allowed


@dataclass(frozen=True)
class Verdict:
    """Whether g is a partial first-order surrogate of f, as far as trials can show."""

    surrogate: str
    conditions: tuple[Condition, ...]
    smoothness: float  # the largest Lipschitz constant of grad (g - f) that was met, at most the definition's L

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
            problem = f"{first.name} is violated by {first.worst:.3g} at {first.where}; allowed: {first.allowed:.3g}"
            raise UserError(f"{self.surrogate} is no partial first-order surrogate: {problem}.")

    def __str__(self) -> str:
        width = max(len(condition.name) for condition in self.conditions)
        article = "a" if self.holds else "no"
        lines = [f"{self.surrogate} is {article} partial first-order surrogate (worst violation of what is allowed):"]
        for condition in self.conditions:
            outcome = "holds" if condition.holds else f"FAILS at {condition.where}"
            figures = f"{condition.worst:8.2e} of {condition.allowed:.0e}"
            lines.append(f"  {condition.name:<{width}}  {figures}  {outcome}")
        return "\n".join([*lines, f"  the gradient of g - f has a Lipschitz constant of {self.smoothness:.3g} or more"])
