"""Trials of the definition's three conditions, for one client and in double precision.

Shapes: d trained numbers of u, p numbers of v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedem.core.errors import UserError
from fedem.core.random import COMPONENTS, PERSONAL, derive
from fedem.core.tree import Tree, tree_double, tree_flat, tree_map, tree_stack
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
_RAYS = 4
_NEAR = tuple(10.0**-k for k in range(2, 8))  # distances from u0 for exponents below two
_DISTANCES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)  # times the radius: for those above, and for bounds that fail far away
_FARTHEST = 1e8  # where double precision still tells neighbouring u apart
_DECADES = 3  # of those distances, the last ones, over which growth is measured
_HALVINGS, _LAST = 26, 6  # of a segment, and the last ones, over which growth is measured
_POWER = 0.05  # of a distance by which quotients may grow: one over a logarithm is more
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
    radius: float = 1e4,
) -> Verdict:
    """Look for violations of the definition of a partial first-order surrogate, on one client's (training) samples.

    Trials can refute a condition and never prove it. They are in double precision, for the client at position
    ``client``, at ``trials`` points drawn near (u0, v0) and far from it, and along rays from u0 up to the ``radius``;
    (u0, v0) is ``at``, or drawn too. Violations count relative to 1 + the size of what is compared; ``tolerance`` is
    the largest that counts as rounding.
    """
    require_surrogate(surrogate)
    require("seed", seed, isinstance(seed, WHOLE), "a whole number")
    require_counts(trials=trials)
    require("tolerance", tolerance, isinstance(tolerance, int | float) and tolerance > 0, "a number above 0")
    finite = isinstance(radius, int | float) and 0 < radius <= _FARTHEST
    require("radius", radius, finite, f"a number above 0, at most {_FARTHEST:g}")
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
    return _Trial(double, one, shared, personal, one.fix(shared, personal), places, radius).verdict(tolerance)


@dataclass
class _Trial:
    surrogate: Surrogate
    client: OneClient
    shared: Tree
    personal: Tree
    fixed: Fixed
    places: list[_Point]  # u0 and v0, then what was drawn
    radius: float
    smoothness: float = field(default=0.0, init=False)
    curvatures: list[float] = field(default_factory=list, init=False)  # the largest quotients met at each radius
    points: int = field(default=0, init=False)

    def verdict(self, tolerance: float) -> Verdict:
        trials = [
            ("1. majorisation, g >= f", tolerance, self._majorisation()),
            ("2. tangency, f and g agree at (u0, v0)", tolerance, self._equal_values()),
            ("2. tangency, their gradients agree at (u0, v0)", tolerance, self._equal_slopes()),
            ("2. smoothness, power by which quotients of grad (g - f) grow", _POWER, self._lipschitz()),
        ]
        if self.personal:
            trials += [
                ("3. minimiser, no v makes g(u, v) smaller", tolerance, self._minimiser()),
                ("3. distance, zero only where v0 is the minimiser", _APART, self._separation()),
                ("3. distance, a function of v0 and the minimiser alone", _SLOPE, self._dependence()),
            ]
        conditions = tuple(_worst(*trial) for trial in trials)
        away = (trained_leaves(self.surrogate.model, there) for there, _, _ in self.places)
        farthest = max(self.radius, *(math.sqrt(float(square_distance(there, self.shared))) for there in away))
        curvatures = dict(zip(self._radii, self.curvatures, strict=True))
        return Verdict(type(self.surrogate).__name__, conditions, self.smoothness, farthest, self.points, curvatures)

    @property
    def _radii(self) -> list[float]:
        return [share * self.radius for share in _DISTANCES]

    def _majorant(self, shared: Tree, personal: Tree) -> Tensor:
        self.points += 1
        return self.client.majorant(shared, personal, self.fixed)

    def _minimise(self, shared: Tree) -> Tree:
        return self.client.minimise(shared, self.personal, self.fixed)

    def _majorisation(self) -> _Violations:
        least, trained = self._minimise(self.shared), self.surrogate.model.trainable
        far = [(self._about(radius, ray), radius, ray) for ray in range(_RAYS) for radius in self._radii]
        for there, drawn, name in [
            *self.places,
            *((there, self.places[-1][1], f"{radius:g} from u0 along ray {ray}") for there, radius, ray in far),
        ]:
            # On both sides: what is too steep is below on one of them.
            opposite = there | {leaf: 2 * self.shared[leaf] - there[leaf] for leaf in trained}
            for shared, place in ((there, name), (opposite, f"{name}, mirrored")):
                for personal, called in ((self.personal, "v0"), (least, "the minimising v"), (drawn, "the drawn v")):
                    value, bound = self.client.objective(shared, personal), self._majorant(shared, personal)
                    yield _excess(value, bound), f"{place}, {called}"

    def _gradients(self, places: Sequence[tuple[Tree, Tree]]) -> tuple[Tensor, Tensor]:
        """Return the gradients of f and of g in u at k places (u, v), ``[k, d]`` each."""

        def both(shared: Tree, personal: Tree) -> tuple[Tensor, ...]:
            trained, functions = trained_leaves(self.surrogate.model, shared), (self.client.objective, self._majorant)
            return tuple(tree_flat(grad(lambda u, f=f: f(shared | u, personal))(trained)) for f in functions)

        if self.surrogate.model.not_stackable is None:
            self.points += len(places) - 1  # all in one call
            slopes, others = vmap(both)(*(tree_stack(trees) for trees in zip(*places, strict=True)))
        else:
            slopes, others = (torch.stack(rows) for rows in zip(*(both(*place) for place in places), strict=True))
        return slopes, others

    def _ray(self, number: int) -> Tree:
        """Draw a direction in the trained leaves of u, of length one; the same for the same ``number``."""
        nowhere = tree_map(torch.zeros_like, trained_leaves(self.surrogate.model, self.shared))
        drawn = draw_about(nowhere, derive(0, number), nowhere)
        return tree_map(lambda leaf: leaf / math.sqrt(float(inner_product(drawn, drawn))), drawn)

    def _about(self, radius: float, number: int) -> Tree:
        return self.shared | tree_map(lambda way, leaf: leaf + radius * way, self._ray(number), self.shared)

    def _equal_values(self) -> _Violations:
        value, bound = (function(self.shared, self.personal) for function in (self.client.objective, self._majorant))
        yield (bound - value).abs() / (1 + value.abs()), "(u0, v0)"

    def _equal_slopes(self) -> _Violations:
        slope, other = self._gradients([(self.shared, self.personal)])
        yield (other - slope).abs().max() / (1 + slope.abs().max()), "(u0, v0)"

    def _lipschitz(self) -> _Violations:
        """Yield by which power of a distance the quotients of the gradient of r grow: none for a Lipschitz gradient.

        Towards u0, towards where the gradient changes most between two u, and with the radius about u0.
        """
        closer = [(self.shared, self._about(d, r), self.personal) for d in _NEAR for r in range(_RAYS)]
        near = self._quotients(closer, 0)
        before, after = near.reshape(len(_NEAR), _RAYS)[[-1 - _DECADES, -1]]
        for ray in range(_RAYS):
            yield _power(before[ray], after[ray], 10.0**_DECADES), f"u0, coming closer along ray {ray}"
        ways = [(self.shared, there, self.personal) for there, _, _ in self.places[1 : 1 + len(_WIDTHS)]]
        names = [f"a point between u0 and {name}" for _, _, name in self.places[1 : 1 + len(_WIDTHS)]]
        for radius, ray in product(self._radii, range(_RAYS)):
            personal = self.places[ray % len(self.places)][1]
            ways.append((self._about(radius, ray), self._about(radius, ray + 1), personal))
            names.append(f"a point within {radius:g} of u0")
        found = self._quotients(ways, _HALVINGS)
        for name, before, after in zip(names, found[-1 - _LAST], found[-1], strict=True):
            yield _power(before, after, 2.0**_LAST), name
        self.smoothness = float(torch.cat([near.flatten(), found.flatten()]).max())
        self.curvatures = found[:, -len(_DISTANCES) * _RAYS :].amax(0).reshape(-1, _RAYS).amax(1).tolist()
        # Where they are bounded the largest may be met late: what counts is that they never stop growing.
        powers = [_power(before, after, 10.0) for before, after in pairwise(self.curvatures[-1 - _DECADES :])]
        yield min(powers), f"points that leave u0, within {self.radius:g}"

    def _quotients(self, ways: Sequence[tuple[Tree, Tree, Tree]], halvings: int) -> Tensor:
        """Halve k ways between two u, at a v, towards where the gradient of r changes most: at a jump quotients double.

        Returns |change| / |length| of the whole and of each half that was kept, ``[halvings + 1, k]``; infinite where a
        gradient is not finite, and zero where a change may be rounding.
        """
        model = self.surrogate.model
        lengths = torch.stack([square_distance(trained_leaves(model, end), start).sqrt() for start, end, _ in ways])

        def at(shares: Tensor) -> tuple[Tensor, Tensor]:
            """Return the gradient of r at these shares of the ways, ``[k, d]``, and changes that may be rounding."""
            places = []
            for share, (start, end, personal) in zip(shares, ways, strict=True):
                trained = trained_leaves(model, end)
                places.append((end | tree_map(lambda b, a, s=share: torch.lerp(a, b, s), trained, start), personal))
            slopes, others = self._gradients(places)
            return others - slopes, 1e-11 * (1 + slopes.norm(dim=1))

        first, last = torch.zeros(len(ways), dtype=torch.float64), torch.ones(len(ways), dtype=torch.float64)
        (low, _), (high, rounding), quotients = at(first), at(last), []
        for halving in range(halvings + 1):
            if halving:
                middle = (first + last) / 2
                here, rounding = at(middle)
                left = (here - low).norm(dim=1) > (high - here).norm(dim=1)
                first, last = torch.where(left, first, middle), torch.where(left, middle, last)
                low, high = torch.where(left[:, None], low, here), torch.where(left[:, None], here, high)
            change = (high - low).norm(dim=1)
            quotient = change / (lengths * (last - first))
            quotients.append(torch.where(change <= rounding, 0, quotient).nan_to_num(nan=math.inf, posinf=math.inf))
        return torch.stack(quotients)

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
        minimisers, distances = [], []
        for step in (_STEP, -_STEP):
            there = shared | tree_map(lambda way, leaf, step=step: leaf + step * way, self._ray(number), shared)
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


def _power(before: float | Tensor, after: float | Tensor, ratio: float) -> float:
    """Return by which power of a ``ratio`` of distances quotients grew; what grew out of nothing is a jump."""
    before, after = float(before), float(after)
    if not after or not math.isfinite(after):
        return math.inf if after else 0.0
    return math.log(after / before) / math.log(ratio) if before else 1.0


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
    """What trials found of the definition of a partial first-order surrogate: violations, or none."""

    surrogate: str
    conditions: tuple[Condition, ...]
    smoothness: float  # the largest Lipschitz constant of grad (g - f) that was met, at most the definition's L
    radius: float  # how far from u0 was tried
    points: int  # how many u and v were tried
    curvatures: dict[float, float]  # by radius, the largest |change of grad (g - f)| / |change of u| that was met

    @property
    def holds(self) -> bool:
        """Whether no violation was found."""
        return not self.failures

    @property
    def failures(self) -> tuple[Condition, ...]:
        """Those that are violated."""
        return tuple(condition for condition in self.conditions if not condition.holds)

    def raise_for_failure(self) -> None:
        """Refuse a surrogate that failed."""
        if self.failures:
            first = self.failures[0]
            problem = f"{first.name} is violated by {first.worst:.3g} at {first.where}; allowed: {first.allowed:.3g}"
            raise UserError(f"{self.surrogate} is no partial first-order surrogate: {problem}.")

    def __str__(self) -> str:
        width = max(len(condition.name) for condition in self.conditions)
        found = "no violation" if self.holds else f"{len(self.failures)} of {len(self.conditions)} conditions violated,"
        tried = f"{found} found within radius {self.radius:g} of u0; {self.points:,} points"
        lines = [f"{self.surrogate}: {tried} (worst violation of what is allowed):"]
        for condition in self.conditions:
            outcome = "none found" if condition.holds else f"FAILS at {condition.where}"
            figures = f"{condition.worst:8.2e} of {condition.allowed:.0e}"
            lines.append(f"  {condition.name:<{width}}  {figures}  {outcome}")
        met = ", ".join(f"{value:.3g} within {radius:g}" for radius, value in self.curvatures.items())
        return "\n".join([*lines, f"  Lipschitz constants of grad (g - f) that were met: {met}"])
