"""The simulator's engine: many clients at once through ``torch.func.vmap``.

Clients are sorted by their number of steps, so that those still active are always a prefix and nothing is masked or
copied when one finishes. Samples stay flat; only a batch is ever padded, and those whose last batch is short take it
apart from the others.

Shapes: C clients of the cohort, c of a chunk, A active, B the width of a batch, n samples of a client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from fedem.core.random import STOCHASTIC_LAYERS, derive
from fedem.core.tree import Tree, tree_bytes, tree_cat, tree_floats, tree_index, tree_map
from fedem.data.samples import Pool, Samples
from fedem.engines.base import (
    Batching,
    BatchPlan,
    Cohort,
    Engine,
    Finished,
    Positions,
    Tally,
    Work,
    alike,
    blocks,
    similar,
)
from fedem.engines.device import budget, is_out_of_memory, release
from fedem.methods.base import Algorithm, Batch, Local

_T = TypeVar("_T")
_TALLY_ROWS = 1 << 15  # samples judged at once: enough to fill two cores, little enough for their caches
_SCORE_ROWS = 1 << 17  # the same for scores
_FIT_ROWS = 1 << 16  # the same for fits, with their padding
_MOST_SHAPES = 256  # recorded at most: sampled cohorts may never come back
_MOST_RECORDED = 64  # leaves of a model: recording a deep one takes longer than it ever saves


@final
@dataclass(frozen=True)
class Stacked(Engine):
    """Many clients at once.

    Attributes:
        chunk_size: clients stacked together; 0 chooses as many as ``max_bytes`` hold. It never changes a result beyond
            rounding. Where memory runs out all the same, it is halved, and training goes on.
        max_bytes: bytes that a chunk may take, roughly; 0 for a share of what is free.
        record_after: calls with the same shapes before they are recorded and replayed; it changes no result at all.
    """

    chunk_size: int = field(default=0, metadata={"min": 0})
    max_bytes: int = field(default=0, metadata={"min": 0})
    record_after: int = field(default=16, metadata={"min": 0})
    _replays: dict[Any, Replay] = field(default_factory=dict, init=False, repr=False, compare=False)
    _found: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def most_together(self) -> int:
        return self._found.get("most_together", 0)

    def train(self, algorithm: Algorithm, cohort: Cohort, work: Work) -> Iterator[Finished]:
        scores, rows = self._in_rows(algorithm, cohort, _SCORE_ROWS, partial(_flat_scores, algorithm, cohort))

        def train_first(count: int) -> Finished:
            members = left[:count]
            return self._train_chunk(algorithm, Chunk.of(cohort, members), work.take(members), scores, rows)

        for left in self._chunks(algorithm, cohort, work.batching):
            while len(left):
                finished, count = self._shrinking(cohort, "clients", len(left), train_first)
                self._found["most_together"] = max(self.most_together, count)
                yield finished
                left = left[count:]

    def _shrinking(self, cohort: Cohort, what: str, count: int, work: Callable[[int], _T]) -> tuple[_T, int]:
        """Do ``work`` with ``count`` at once, or with half as many where memory runs out, remembered as ``what``."""
        count = min(count, self._found.get(what, count))
        while True:
            try:
                return work(count), count
            except RuntimeError as error:
                if count == 1 or not is_out_of_memory(error):
                    raise
                count = self._found[what] = count // 2
            release(cohort.device)

    def _stacked(self, function: Callable[..., Any], deep: bool, *dims: int | None) -> Callable[..., Any]:
        """Return a method's function for many clients; unless ``deep``, recorded where the same shapes come back."""
        stacked = vmap(function, in_dims=dims)
        return stacked if deep else self._replays.setdefault((function, dims), Replay(stacked, self.record_after))

    def _train_chunk(self, algorithm: Algorithm, chunk: Chunk, work: Work, flat: Tree | None, rows: int) -> Finished:
        scale = torch.ones(()) if work.scales is None else work.scales
        rate = (work.learning_rate * scale.double()).to(chunk.starts.device, algorithm.model.dtype)
        deep = len(algorithm.model.trainable) > _MOST_RECORDED
        step = self._stacked(algorithm.step, deep, 0, 0, 0 if rate.ndim else None)
        begin = self._stacked(algorithm.begin, deep, chunk.shared_dim, 0, 0, 0)
        local, samples, starts = _begin_clients(begin, algorithm, chunk, flat, rows)
        plan = BatchPlan(work.batching, chunk.sizes, work.keys, chunk.starts.device)
        layer_keys, steps = derive(plan.keys, STOCHASTIC_LAYERS), plan.steps

        def advance(local: Local, index: int, first: int, last: int) -> Local:
            where, some = plan.batch(index, first, last), slice(first, last)
            inputs, targets = chunk.some(some).read(where)
            weights = where.mask.to(algorithm.model.dtype) / where.mask.sum(1, keepdim=True)
            masks = (where.mask,) if where.padded else ()
            columns = _columns(samples, starts[some], where)
            batch = Batch(inputs, targets, weights, columns, derive(layer_keys[some], index), masks)
            return step(local, batch, rate[some] if rate.ndim else rate)

        done: list[Local] = []
        for index in range(int(steps.max())):
            num_active, num_staying = int((steps > index).sum()), int((steps > index + 1).sum())
            if algorithm.model.is_large and 0 < num_staying < num_active:
                # Padding would cost more than a second call.
                done.append(advance(_slice(local, slice(num_staying, None)), index, num_staying, num_active))
                local = advance(_slice(local, slice(num_staying)), index, 0, num_staying)
                continue
            local = advance(local, index, 0, num_active)
            if num_staying < num_active:
                done.append(_slice(local, slice(num_staying, None)))
                local = _slice(local, slice(num_staying))
        trained = vmap(algorithm.finish)(Local(*map(tree_cat, zip(*reversed(done), strict=True))))
        return Finished(chunk.members, trained.upload, trained.personal)

    def _max_bytes(self, cohort: Cohort) -> int:
        """Return the bytes that clients may take together, found once for a device."""
        return self.max_bytes or self._found.setdefault(str(cohort.device), budget(cohort.device))

    def _in_rows(self, algorithm: Algorithm, cohort: Cohort, most: int, work: Callable[[int], _T]) -> tuple[_T, int]:
        """Do ``work`` with as many samples as may go through all of a client's models at once, ``most`` at most."""
        wanted = max(1, min(most, self._max_bytes(cohort) // _bytes_per_sample(algorithm, cohort)))
        return self._shrinking(cohort, "rows", wanted, work)

    def _chunks(self, algorithm: Algorithm, cohort: Cohort, batching: Batching) -> Iterator[Tensor]:
        """Cut the cohort, longest-running clients first."""
        sizes = cohort.samples.sizes
        order = torch.argsort(sizes, descending=True, stable=True)
        if self.chunk_size:
            yield from order.split(self.chunk_size)
            return
        # Parameters, gradients, momentum and the temporaries of a step; activations and their gradients; samples.
        model_bytes = 8 * (tree_bytes(tree_index(cohort.shared, 0)) + tree_bytes(tree_index(cohort.personal, 0)))
        row_bytes = 2 * _bytes_per_sample(algorithm, cohort)
        own_bytes = cohort.samples.num_bytes // max(1, len(cohort.samples))
        # Where a batch is as wide as a client is large, clients of very different sizes would be mostly padding.
        for run in [slice(None)] if batching.batch_size else similar(sizes[order].tolist()):
            some = order[run]
            while len(some):
                largest = sizes[some[0]]
                per_client = model_bytes + row_bytes * int(batching.widths(largest)) + own_bytes * int(largest)
                count = max(1, self._max_bytes(cohort) // max(per_client, 1))
                yield some[:count]
                some = some[count:]

    def _most_beside(self, cohort: Cohort) -> int:
        """Return how many clients may stand beside each other by what is copied for them: their own trees."""
        shared = tree_index(cohort.shared, 0) if len(next(iter(cohort.shared.values()))) > 1 else {}
        own_bytes = tree_bytes(shared) + tree_bytes(tree_index(cohort.personal, 0))
        return self.chunk_size or max(1, self._max_bytes(cohort) // max(1, own_bytes))

    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        return self._in_rows(algorithm, cohort, _TALLY_ROWS, partial(self._tally, function, cohort))[0]

    def _tally(self, function: Tally, cohort: Cohort, rows: int) -> Tree:
        sizes, most = cohort.samples.sizes, self._most_beside(cohort)
        if cohort.samples.pool.device != cohort.device:
            largest = cohort.samples.num_bytes * int(sizes.max()) // len(cohort.samples)
            most = max(1, min(most, self._max_bytes(cohort) // max(1, largest)))
        found: Tree = {}
        for members in (some for run in alike(sizes, rows) for some in run.split(most) if int(sizes[run[0]])):
            chunk = Chunk.of(cohort, members)
            stacked = vmap(function, in_dims=(chunk.shared_dim, 0, 0, 0, 0))
            totals: Tree = {}
            for num_active, where in blocks(chunk.sizes, max(1, rows // len(members)), cohort.device):
                some = chunk.some(slice(num_active))
                for name, sums in stacked(some.shared, some.personal, *some.read(where), where.mask).items():
                    total = totals.setdefault(name, torch.zeros(len(members), dtype=torch.float64, device=sums.device))
                    total[:num_active] += sums
            for name, total in totals.items():
                found.setdefault(name, torch.zeros(len(sizes), dtype=torch.float64))[members] = total.cpu()
        return found

    def fit(self, algorithm: Algorithm, cohort: Cohort, max_iterations: int | None = None) -> Tree | None:
        fit = partial(self._fit, algorithm, cohort, max_iterations)
        return self._in_rows(algorithm, cohort, _FIT_ROWS, fit)[0]

    def _fit(self, algorithm: Algorithm, cohort: Cohort, max_iterations: int | None, rows: int) -> Tree | None:
        can_fit, positions, trees = True, [], []

        def fit_one(shared: Tree, scores: Tree, mask: Tensor) -> Tree:
            nonlocal can_fit
            tree = algorithm.adapt(shared, scores, mask, max_iterations)
            can_fit = tree is not None
            return tree or {}

        most = self._most_beside(cohort)
        for members in (some for run in alike(cohort.samples.sizes, rows) for some in run.split(most)):
            here = members.sort().values
            some = cohort.take(here)
            chunk = Chunk.of(some, some.samples.sizes.argsort(descending=True, stable=True))
            where = Positions.first(chunk.sizes, chunk.starts.device)
            scores = _padded_scores(algorithm, chunk, where, _flat_scores(algorithm, some, rows), rows)
            fitted = vmap(fit_one, in_dims=(chunk.shared_dim, 0, 0))(chunk.shared, scores, where.mask)
            if not can_fit:
                return None
            positions.append(here[chunk.members])
            trees.append(fitted)
        return tree_index(tree_cat(trees), torch.cat(positions).argsort().to(cohort.device))


def _slice(local: Local, which: slice) -> Local:
    return Local(*(tree_index(tree, which) for tree in local))


def _columns(flat: Tree, starts: Tensor, where: Positions) -> Tree:
    """Pick the columns at ``where``, counted from each client's first one: ``[..., columns] -> [A, ..., B]``."""
    index = starts[:, None] + where.positions
    return tree_map(lambda leaf: leaf.index_select(-1, index.flatten()).unflatten(-1, index.shape).movedim(-2, 0), flat)


@dataclass(frozen=True)
class Chunk:
    """Clients stacked together, sorted by falling number of samples."""

    members: Tensor  # [c] positions in the cohort
    shared: Tree  # [...] when all read the same group, else [c, ...]
    shared_dim: int | None  # None or 0, for vmap
    personal: Tree  # [c, ...]
    samples: Samples  # on the device: of the whole cohort or, where that is too large, of the chunk
    starts: Tensor  # [c] each client's first sample among these, on the device
    places: Tensor  # [c] each client's first sample among the cohort's, on the device
    sizes: Tensor  # [c] on the CPU

    @classmethod
    def of(cls, cohort: Cohort, members: Tensor) -> Chunk:
        """Stack ``members``; samples that are not on the device are sent there, theirs alone."""
        device = cohort.device
        groups = cohort.reads[members]
        common = bool((groups == groups[0]).all())
        shared = tree_index(cohort.shared, int(groups[0]) if common else groups.to(device))
        personal, places = tree_index(cohort.personal, members.to(device)), cohort.samples.offsets[members].to(device)
        samples, starts, sizes = cohort.samples, places, cohort.samples.sizes[members]
        if samples.pool.device != device:
            samples = samples.take(members).to(device)
            starts = samples.offsets[:-1].to(device)
        return cls(members, shared, None if common else 0, personal, samples, starts, places, sizes)

    def some(self, which: slice) -> Chunk:
        cut = {name: getattr(self, name)[which] for name in ("members", "starts", "places", "sizes")}
        shared = self.shared if self.shared_dim is None else tree_index(self.shared, which)
        return replace(self, shared=shared, personal=tree_index(self.personal, which), **cut)

    def read(self, where: Positions) -> Pool:
        """Read the clients' inputs ``[c, B, ...]`` and targets ``[c, B]`` at ``where``."""
        return self.samples.read(self.starts[:, None] + where.positions)


def _bytes_per_sample(algorithm: Algorithm, cohort: Cohort) -> int:
    """Estimate what one sample takes on its way through all of a client's models."""
    components = sum(leaf[0].numel() for leaf in tree_floats(cohort.shared).values())
    inputs = cohort.samples.pool.inputs[:1].numel() * 4
    return inputs + max(1, components // algorithm.model.num_parameters) * max(4, algorithm.model.bytes_per_sample)


def _flat_scores(algorithm: Algorithm, cohort: Cohort, rows: int) -> Tree | None:
    """Score all samples, if any, under the one tree that everybody reads; None when they read several."""
    samples, total = cohort.samples, len(cohort.samples)
    if total and len(next(iter(cohort.shared.values()))) > 1:
        return None
    if not algorithm.has_scores:
        return {}
    shared = tree_index(cohort.shared, int(cohort.reads[0]))
    spans = (samples.span(start, min(start + rows, total)) for start in range(0, max(1, total), rows))
    return tree_cat([algorithm.score(shared, *span.to(cohort.device)) for span in spans], -1)


def _begin_clients(
    begin: Callable[..., Any], algorithm: Algorithm, chunk: Chunk, flat: Tree | None, rows: int
) -> tuple[Local, Tree, Tensor]:
    """Return the clients' states ``[c, ...]``, what they made of samples ``[..., columns]``, their first columns."""
    locals_, columns, starts, total = [], [], [], 0
    for run in similar(chunk.sizes.tolist()):  # those of similar size together, so that little is padded
        some = chunk.some(run)
        where = Positions.first(some.sizes, some.starts.device)
        scores = _padded_scores(algorithm, some, where, flat, rows)
        if algorithm.has_survey:  # each client looks at all of its samples at once
            survey = vmap(algorithm.survey, in_dims=(some.shared_dim, 0, 0, 0, 0))
            scores = scores | survey(some.shared, some.personal, *some.read(where), where.mask)
        local, samples = begin(some.shared, some.personal, scores, where.mask)
        locals_.append(local)
        columns.append(tree_map(lambda leaf: leaf.movedim(0, -2).flatten(-2), samples))
        starts.append(total + where.mask.shape[1] * torch.arange(len(where.mask), device=where.mask.device))
        total += where.mask.numel()
    return Local(*map(tree_cat, zip(*locals_, strict=True))), tree_cat(columns, -1), torch.cat(starts)


def _padded_scores(algorithm: Algorithm, chunk: Chunk, where: Positions, flat: Tree | None, rows: int) -> Tree:
    """Return the scores of all samples, padded to the largest client, ``[c, ..., n]``."""
    if flat is not None:
        return _columns(flat, chunk.places, where)
    if not algorithm.has_scores:
        return {}
    stacked = vmap(algorithm.score, in_dims=(chunk.shared_dim, 0, 0))
    pieces: list[Tree] = []
    for num_active, block in blocks(chunk.sizes, max(1, rows // len(chunk.sizes)), chunk.starts.device):
        some, missing = chunk.some(slice(num_active)), len(chunk.sizes) - num_active
        piece = stacked(some.shared, *some.read(block))
        pieces.append(tree_map(lambda leaf, k=missing: torch.cat([leaf, leaf.new_zeros(k, *leaf.shape[1:])]), piece))
    return tree_cat(pieces, -1)


class Replay:
    """A pure function of trees of tensors, recorded for the shapes that it has been called with ``after`` times.

    A call through nested vmap and grad costs about a millisecond of Python, whatever the data. Where the same shapes
    come back round after round, the tensor operations behind a call are recorded (``make_fx``) and from then on run
    directly: same operations, same bits. Recording costs about what sixty calls save, so it waits for a shape's return.
    """

    def __init__(self, function: Callable[..., Any], after: int):
        self._function, self._after = function, after
        self._calls: Counter[Any] = Counter()
        self._recordings: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        # Strides too: a recording may view what another layout would have to copy.
        key = tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in tree_leaves(arguments))
        if key not in self._recordings:
            self._calls[key] += 1
            if self._calls[key] <= self._after or len(self._recordings) >= _MOST_SHAPES:
                if len(self._calls) > 8 * _MOST_SHAPES:
                    self._calls.clear()
                return self._function(*arguments)
            from torch.fx.experimental.proxy_tensor import make_fx

            # make_fx counts parameters, and vmap hides them.
            self._recordings[key] = make_fx(lambda given: self._function(*given))(arguments)
        return self._recordings[key](arguments)
