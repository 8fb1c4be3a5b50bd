"""Uploads that would spoil a mean: how they are scaled down, outvoted or left out before it is taken.

Karimireddy, He, Jaggi: Learning from History for Byzantine Robust Optimization, ICML 2021 (clipping); Yin, Chen,
Ramchandran, Bartlett: Byzantine-Robust Distributed Learning, ICML 2018 (coordinate-wise median, trimmed mean);
Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning, IEEE TSP 2022 (geometric median); Blanchard, El
Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries, NeurIPS 2017 (Multi-Krum); He, Karimireddy, Jaggi:
Byzantine-Robust Decentralized Learning via ClippedGossip, 2022 (graphs).

What a client trained, its floating buffers and its counters are judged apart, and of several models each by itself:
a block has a row for each model, or one where there is one model or all have its leaves in common.

Shapes: C clients of the cohort, c of a piece, g of them that average, R rows of a block, P numbers of a leaf's row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar, NamedTuple, Self, final

import torch
from torch import Tensor

from fedem.core.settings import Settings
from fedem.core.tree import Tree, row_of, tree_floats, tree_index, tree_map
from fedem.graphs import Topology
from fedem.methods.base import Algorithm
from fedem.methods.decentralised import Graph
from fedem.methods.mixer import (
    Mixed,
    Mixer,
    Round,
    RoundPlan,
    Served,
    Start,
    Uploads,
    Welcome,
    gather,
    weighted_means,
)

_EXACT = 1e-9  # weights that are as close as this to a half, or to each other, are so but for rounding
_STEEPNESS = 5  # how fast the limit of lengths widens with their spread
_FEWEST = 12  # clients that show how much they differ
Pieces = Sequence[tuple[Tensor, Tree]]  # uploads that are all there, as they came in


class Blocks(NamedTuple):
    """Which numbers of an upload are judged together."""

    trained: frozenset[str]  # names of leaves that clients train
    several: bool = False  # whether u is several models, [M, ...]
    common: frozenset[str] = frozenset()  # leaves that these have in common

    @classmethod
    def of_method(cls, algorithm: Algorithm) -> Self:
        return cls(algorithm.model.trainable, algorithm.has_several_models, algorithm.common)

    def of(self, tree: Tree) -> list[list[str]]:
        """Divide the names of a tree's leaves: trained, buffers or counters, each model's own or common to all."""
        found: dict[tuple[bool, bool, bool], list[str]] = {}
        for name, leaf in tree.items():
            kind = (leaf.is_floating_point(), name in self.trained, self._has_rows(name))
            found.setdefault(kind, []).append(name)
        return list(found.values())

    def _has_rows(self, name: str) -> bool:
        return self.several and name not in self.common

    def rows(self, name: str, leaf: Tensor) -> Tensor:
        """Lay out a leaf of some clients by the rows of its block, ``[c, ...] -> [c, R, P]``."""
        return leaf.reshape(len(leaf), leaf.shape[1] if self._has_rows(name) else 1, -1)

    def squares(self, names: Iterable[str], changes: Tree) -> Tensor:
        """Return the squared norms of a block's rows, ``[c, R]`` float64."""
        parts = [torch.linalg.vector_norm(_float(self.rows(name, changes[name])), dim=-1) for name in names]
        return torch.stack([part.double() for part in parts]).square().sum(0)

    def shaped(self, name: str, values: Tensor, leaf: Tensor) -> Tensor:
        """Give values of rows ``[c, R]`` as many dimensions as a leaf ``[c, ...]`` has, so that they broadcast."""
        leading = values.shape if self._has_rows(name) else values.shape[:1]
        return values.reshape(*leading, *(1,) * (leaf.ndim - len(leading)))

    def mean(self, name: str, leaf: Tensor, weights: Tensor) -> Tensor:
        """Add up a leaf's rows over clients by weights ``[C, R]``, to ``[1, ...]``."""
        rows = self.rows(name, leaf)
        return torch.einsum("crp,cr->rp", rows, weights.to(rows)).reshape(1, *leaf.shape[1:])


def _float(leaf: Tensor) -> Tensor:
    return leaf if leaf.is_floating_point() else leaf.double()


def capped(weights: Tensor, most: float) -> Tensor:
    """Return the weights ``[C]`` nearest in proportion to those given, which sum to one, with none above ``most``.

    Water-filling: min(most, level * weight), the level being such that they sum to one. Where even equal weights are
    above, they are equal.

    >>> capped(torch.tensor([0.6, 0.3, 0.1]), 0.5).tolist()
    [0.5, 0.375, 0.125]
    """
    count = len(weights)
    if most * count <= 1:
        return torch.full_like(weights, 1 / count)
    ordered = weights.sort(descending=True).values
    full = torch.arange(count, dtype=weights.dtype, device=weights.device)  # how many have the most
    level = (1 - most * full) / ordered.flip(0).cumsum(0).flip(0)
    fits = (level * ordered <= most * (1 + _EXACT)) & (most * full < 1)
    first = int(fits.to(torch.int64).argmax())
    return (level[first] * weights).clamp(max=most)


class Defended(NamedTuple):
    """Whom a server averages: perhaps fewer clients than took part, or one that stands for all."""

    this: Round
    uploads: Uploads


@dataclass(frozen=True)
class Defence(Settings, ABC):
    """How uploads are kept from spoiling the mean.

    Attributes:
        max_weight: the largest share of the mean that one client may have, whatever its number of samples; what is
            above it goes to the others, in proportion. Where there are fewer than 1 / max_weight clients, all count
            alike.
    """

    gathers: ClassVar[bool] = True  # whether it must see all uploads of a round first
    over_graph: ClassVar[bool] = False  # whether clients that average with their neighbours can have it

    max_weight: float = field(default=1.0, metadata={"above": 0, "max": 1})

    @abstractmethod
    def defend(self, start: Tree, this: Round, weights: Tensor, uploads: Uploads, blocks: Blocks) -> Defended:
        """Return whom to average in place of a cohort that starts from ``start`` ``[1, ...]`` (empty: from zero).

        ``weights`` ``[C]`` are what clients count, summing to one. A rule that gathers gets uploads that are all there.
        """

    def gossip(self, matrix: Tensor, own: Tensor, uploads: Pieces, blocks: Blocks) -> Tree:
        """Average the uploads of C clients for g of them, which are at ``own`` ``[g]``, by weights ``[g, C]``."""
        raise AssertionError("only rules that go over a graph are asked")


@final
@dataclass(frozen=True)
class PlainMean(Defence):
    """The mean of all uploads, which bears nothing; ``max_weight`` may hold."""

    gathers: ClassVar[bool] = False

    def defend(self, start: Tree, this: Round, weights: Tensor, uploads: Uploads, blocks: Blocks) -> Defended:
        return Defended(this, uploads)


@final
@dataclass(frozen=True)
class Clip(Defence):
    """The mean of changes of which none is much longer than those of the others.

    With several models a client's length is that of its longest change, and all models have one limit, since a client
    hardly moves models that do not suit it. Let q be the length that all but a ``share`` of the cohort keep to, and m
    the median length. The limit is ``q min(loosest, max(tightest, (q / m)^5))``: the more clients differ anyway, the
    more is let through. Fewer than 12 show little of that, and the limit is ``q loosest``. A longer change is scaled
    down to it. Over a graph lengths are distances between a client's model and its neighbours', and each client has a
    limit of its own.

    Attributes:
        share: of the clients may be hostile: so many are not asked how long a change may be.
        tightest: how many times q a change may be long where clients are alike.
        loosest: ... and where they differ, whatever their spread, or are few.
    """

    over_graph: ClassVar[bool] = True

    share: float = field(default=0.25, metadata={"min": 0, "below": 0.5})
    # Honest clients of the synthetic mixture, whose sizes differ 20-fold, come to 12.2 times q (docs/defences.md).
    tightest: float = field(default=3.0, metadata={"min": 1})
    loosest: float = field(default=15.0, metadata={"min": 1})

    def limit(self, lengths: Tensor) -> Tensor:
        """Return how long a change may be, where clients have these lengths ``[C]``; infinite if most are not finite.

        >>> Clip().limit(torch.tensor([1.0] * 11 + [90.0])).item()
        3.0
        """
        ordered, count = lengths.sort().values, len(lengths)
        upper, median = ordered[max(1, count - ceil(self.share * count)) - 1], ordered[(count - 1) // 2]
        spread = torch.where(upper > 0, upper / median, 1) ** _STEEPNESS
        loosest = max(self.tightest, self.loosest)
        limit = upper * (spread.clamp(self.tightest, loosest) if count >= _FEWEST else loosest)
        return torch.where(limit.isfinite(), limit, torch.inf)

    def factors(self, squares: Tensor) -> Tensor:
        """Return what rows with these squared norms are scaled by ``[C, R]``: one for those within the limit."""
        norms = squares.sqrt()
        limit = self.limit(norms.amax(1))
        return torch.where(norms <= limit, 1.0, limit / norms)

    def defend(self, start: Tree, this: Round, weights: Tensor, uploads: Uploads, blocks: Blocks) -> Defended:
        uploads = list(uploads)
        names = blocks.of(uploads[0][1])
        # [C, R] of each block, in the order in which uploads came.
        parts = [[blocks.squares(block, changes) for block in names] for changes in _changes(start, uploads)]
        factors = [self.factors(torch.cat(squares)) for squares in zip(*parts, strict=True)]
        if all(bool((found == 1).all()) for found in factors):
            return Defended(this, uploads)
        by_leaf = {name: found for block, found in zip(names, factors, strict=True) for name in block}
        clipped, first = [], 0
        for (positions, trees), changes in zip(uploads, _changes(start, uploads), strict=True):
            here, found = slice(first, first := first + len(positions)), dict(trees)
            for name, leaf in trees.items():
                factor = blocks.shaped(name, by_leaf[name][here], leaf)
                # Counters move by whole steps.
                shorter = changes[name] * factor.to(leaf.dtype) if leaf.is_floating_point() else changes[name] * factor
                moved = start[name] + shorter if start else shorter
                found[name] = torch.where(factor == 1, leaf, moved.to(leaf.dtype))
            clipped.append((positions, found))
        return Defended(this, clipped)

    def gossip(self, matrix: Tensor, own: Tensor, uploads: Pieces, blocks: Blocks) -> Tree:
        """x_i + sum_j W_ij clip(x_j - x_i, limit_i), the limits being of the distances to the client's neighbours."""
        trees, mixed = gather(uploads), weighted_means(matrix, uploads)
        names = [block for block in blocks.of(trees) if trees[block[0]].is_floating_point()]
        for row, (weights, place) in enumerate(zip(matrix, own.tolist(), strict=True)):
            heard = [other for other in weights.nonzero().flatten().tolist() if other != place]
            if not heard:
                continue
            mine, theirs = tree_index(trees, slice(place, place + 1)), tree_index(trees, torch.tensor(heard))
            for block in names:
                apart = {name: theirs[name] - mine[name] for name in block}
                factors = self.factors(blocks.squares(block, apart))
                if bool((factors < 1).any()):
                    shares = weights[heard, None].to(factors) * factors
                    for name in block:
                        mixed[name][row] = (mine[name] + blocks.mean(name, apart[name], shares))[0]
        return mixed


def _changes(start: Tree, uploads: Pieces) -> Iterator[Tree]:
    for _, trees in uploads:
        yield {name: leaf - start[name] for name, leaf in trees.items()} if start else trees


def finite_alone(this: Round, uploads: Pieces) -> Defended:
    """Leave out clients with numbers that are not finite, as if they had not answered; if they are most, nobody."""
    pairs = [(here, _finite(trees)) for here, trees in uploads]
    stay = torch.zeros(len(this.clients), dtype=torch.bool)
    for here, finite in pairs:
        stay[here] = finite
    if bool(stay.all()) or 2 * int(stay.sum()) <= len(stay):
        return Defended(this, uploads)
    places, fewer = stay.cumsum(0) - 1, []
    for (here, trees), (_, finite) in zip(uploads, pairs, strict=True):
        if bool(finite.any()):
            fewer.append(
                (places[here[finite]], tree_map(lambda leaf, finite=finite: leaf[finite.to(leaf.device)], trees))
            )
    return Defended(this._replace(clients=this.clients[stay], sizes=this.sizes[stay]), fewer)


def _finite(trees: Tree) -> Tensor:
    """Say whose numbers are all finite, ``[c]`` bool on the CPU."""
    # The largest number is finite where all are, and found in one pass.
    numbers = (leaf.reshape(len(leaf), -1) for leaf in tree_floats(trees).values())
    largest = [torch.linalg.vector_norm(rows, torch.inf, dim=1) for rows in numbers]
    return torch.stack([found.isfinite() for found in largest]).all(0).cpu()


@dataclass(frozen=True)
class _Centre(Defence):
    """A point amid the uploads in place of their mean. Clients count by their weights; counters get their median."""

    def defend(self, start: Tree, this: Round, weights: Tensor, uploads: Uploads, blocks: Blocks) -> Defended:
        trees = gather(uploads)
        one = this._replace(clients=this.clients[:1], sizes=torch.ones_like(this.sizes[:1]))
        return Defended(one, [(torch.zeros(1, dtype=torch.int64), self._amid(trees, weights, blocks))])

    def _amid(self, trees: Tree, weights: Tensor, blocks: Blocks) -> Tree:
        numbers = {name: leaf for name, leaf in trees.items() if leaf.is_floating_point()}
        counters = {name: medians(leaf, weights)[0] for name, leaf in trees.items() if name not in numbers}
        found = self.centre(numbers, weights, blocks) | counters
        return {name: found[name][None] for name in trees}

    @abstractmethod
    def centre(self, trees: Tree, weights: Tensor, blocks: Blocks) -> Tree:
        """Return the point amid the floating leaves ``[C, ...]`` of clients with these weights ``[C]``."""


def ranked(leaf: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sort every number of a leaf over the clients ``[C, ...]``; and the weight of those up to there ``[C, ...]``."""
    ordered, order = leaf.sort(dim=0)
    weights = weights.to(leaf.device)
    if float(weights.amax() - weights.amin()) <= _EXACT:
        return ordered, row_of(weights.cumsum(0), leaf)
    return ordered, weights[order].cumsum(0)


def medians(leaf: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest median of every number of a leaf over the clients, ``[C, ...] -> [...]``."""
    ordered, below = ranked(leaf, weights)
    ends = ((below < 0.5 - _EXACT).sum(0), (below <= 0.5 + _EXACT).sum(0).clamp(max=len(leaf) - 1))
    low, high = (ordered.gather(0, end.expand(leaf.shape[1:])[None])[0] for end in ends)
    return low, high


@final
@dataclass(frozen=True)
class Median(_Centre):
    """The median of every single number, by the clients' weights; amid two medians their mean.

    It stays among the others' numbers as long as hostile clients have less than half of the weight.
    """

    def centre(self, trees: Tree, weights: Tensor, blocks: Blocks) -> Tree:
        # low + (high - low) / 2, so that the median of equal numbers is theirs, and none overflows.
        return tree_map(lambda leaf: torch.lerp(*medians(leaf, weights), 0.5), trees)


@final
@dataclass(frozen=True)
class TrimmedMean(_Centre):
    """The mean of every single number without the smallest and the largest of them.

    They are cut by weight: of the client at the edge only a part may count. It stays among the others' numbers as long
    as hostile clients have no more than ``share`` of the weight. Over a graph a client does so among itself and its
    neighbours, by the weights of its row of the matrix.

    Attributes:
        share: of the weight that is cut off at either end.
    """

    over_graph: ClassVar[bool] = True

    share: float = field(default=0.25, metadata={"min": 0, "below": 0.5})

    def centre(self, trees: Tree, weights: Tensor, blocks: Blocks) -> Tree:
        return tree_map(lambda leaf: self._trimmed(leaf, weights), trees)

    def _trimmed(self, leaf: Tensor, weights: Tensor) -> Tensor:
        ordered, below = ranked(leaf, weights)
        ends = torch.cat([torch.zeros_like(below[:1]), below]).clamp(self.share, 1 - self.share)
        parts = ends.diff(dim=0)
        # Whoever is cut off but for rounding is cut off.
        parts = torch.where(parts > _EXACT, parts, 0.0)
        return (ordered * (parts / parts.sum(0)).to(leaf.dtype)).sum(0)

    def gossip(self, matrix: Tensor, own: Tensor, uploads: Pieces, blocks: Blocks) -> Tree:
        trees, mixed = gather(uploads), weighted_means(matrix, uploads)
        for row, weights in enumerate(matrix):
            heard = weights.nonzero().flatten()
            for name, leaf in trees.items():
                if leaf.is_floating_point():
                    mixed[name][row] = self._trimmed(leaf[heard.to(leaf.device)], weights[heard])
        return mixed


@final
@dataclass(frozen=True)
class GeometricMedian(_Centre):
    """The point with the least sum of distances to the clients' models, by their weights; each model by itself.

    Weiszfeld's iterations from the coordinate-wise median: a mean by weight over distance, over and over. Distances
    below ``tolerance`` of the usual one count as that.

    Attributes:
        tolerance: iterations end when none moves the point further than this part of the clients' median distance.
        iterations: how many there are at most.
    """

    tolerance: float = field(default=1e-5, metadata={"above": 0, "below": 1})
    iterations: int = field(default=100, metadata={"min": 1})

    def centre(self, trees: Tree, weights: Tensor, blocks: Blocks) -> Tree:
        found = Median().centre(trees, weights, blocks)
        for block in blocks.of(trees):
            here = {name: trees[name] for name in block}
            shares = weights.to(next(iter(here.values())).device)[:, None]
            point = {name: found[name][None] for name in block}
            distances = blocks.squares(block, tree_map(torch.sub, here, point)).sqrt()
            usual = medians(distances, weights)[1]
            least = (self.tolerance * usual).clamp(min=torch.finfo(torch.float64).tiny)
            for _ in range(self.iterations):
                pulls = shares / distances.clamp(min=least)
                pulls = pulls / pulls.sum(0)
                before, point = point, {name: blocks.mean(name, leaf, pulls) for name, leaf in here.items()}
                moved = blocks.squares(block, tree_map(torch.sub, point, before)).sqrt()[0]
                distances = blocks.squares(block, tree_map(torch.sub, here, point)).sqrt()
                if bool((moved <= least).all()):
                    break
            found |= tree_index(point, 0)
        return found


@final
@dataclass(frozen=True)
class MultiKrum(_Centre):
    """The mean, by weight, of the clients that have others close by; each model by itself.

    Of C clients f may be hostile. A client's score is the sum of its squared distances to the C - f - 2 others that are
    closest to it; those with the C - f least scores are averaged. It needs C > 2 f + 2, so with fewer clients f is the
    largest number for which that holds.

    Attributes:
        share: of the clients that may be hostile: f is its part of C, rounded up.
    """

    share: float = field(default=0.25, metadata={"min": 0, "below": 0.5})

    def num_hostile(self, count: int) -> int:
        return max(0, min(ceil(self.share * count), (count - 3) // 2))

    def centre(self, trees: Tree, weights: Tensor, blocks: Blocks) -> Tree:
        count, found = len(weights), dict[str, Tensor]()
        kept = count - self.num_hostile(count)
        for block in blocks.of(trees):
            rows = [blocks.rows(name, trees[name]).transpose(0, 1) for name in block]
            # Differences, not products: models are close together and far from zero.
            apart = [torch.cdist(row, row, compute_mode="donot_use_mm_for_euclid_dist").double() for row in rows]
            squares = torch.stack([distance.square() for distance in apart]).sum(0)  # [R, C, C]
            # A client is closest to itself, at no distance.
            scores = squares.sort(-1).values[..., : max(1, kept - 1)].sum(-1)
            ranks = scores.argsort(dim=-1, stable=True).argsort(-1)
            shares = torch.where(ranks < kept, weights.to(ranks.device), 0.0).T  # [C, R]
            shares = shares / shares.sum(0)
            found |= {name: blocks.mean(name, trees[name], shares)[0] for name in block}
        return found


DEFENCES: dict[str, type[Defence]] = {
    "mean": PlainMean,
    "clip": Clip,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "geometric_median": GeometricMedian,
    "multi_krum": MultiKrum,
}


@dataclass(frozen=True)
class _Around(Mixer):
    """A mixer that remembers, reads and says what the one within it does."""

    base: Mixer

    @property
    def graph(self) -> Topology | None:
        return self.base.graph

    @property
    def plain(self) -> Mixer:
        return self.base.plain

    def init(self, start: Start) -> tuple[Tree, Tree]:
        return self.base.init(start)

    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        return self.base.read(shared, memory, clients)

    def plan(self, shared: Tree, memory: Tree, this: Round) -> RoundPlan:
        return self.base.plan(shared, memory, this)

    def advance(self, shared: Tree, memory: Tree, this: Round, mixed: Mixed) -> tuple[Mixed, Tree]:
        return self.base.advance(shared, memory, this, mixed)

    def weights(self, this: Round) -> Tensor:
        return self.base.weights(this)

    def share(self, this: Round, of_samples: float) -> float:
        return self.base.share(this, of_samples)

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        return self.base.welcome(shared, memory)

    def check(self, keys: Tensor, seed: int) -> None:
        self.base.check(keys, seed)

    def summary(self, memory: Tree, cohort_size: int) -> dict[str, float]:
        return self.base.summary(memory, cohort_size)


@final
@dataclass(frozen=True)
class DefendedServer(_Around):
    """A server that averages (``base``) what a rule makes of the uploads. It remembers nothing of its own."""

    is_server_mean: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    rule: Defence
    blocks: Blocks
    of_updates: bool = False  # whether uploads are changes, as compressed messages have them, and not models

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "adds_up", self.base.adds_up and not self.rule.gathers)

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        count = len(this.clients)
        if self.rule.gathers:
            this, uploads = finite_alone(this, list(uploads))
        if float((weights := self.base.weights(this)).amax()) > self.rule.max_weight:
            weights = capped(weights, self.rule.max_weight)
            this = this._replace(sizes=weights)
        start = {} if self.of_updates else shared
        defended = self.rule.defend(start, this, weights, uploads, self.blocks)
        mixed, memory = self.base.mix(shared, memory, *defended)
        return mixed._replace(num_messages=count), memory


@final
@dataclass(frozen=True)
class DefendedGraph(_Around):
    """Clients that average with their neighbours by a rule, each from what it sees itself."""

    over_graph: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    base: Graph
    rule: Defence
    blocks: Blocks

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        turn, memory = self.base.turn(shared, memory, this, uploads)
        everybody = torch.arange(len(this.clients))
        means = self.rule.gossip(turn.matrix, everybody, list(turn.uploads), self.blocks)
        return Mixed(this.clients, means, turn.num_messages), memory
