"""The simulator's engine: many clients at once through ``torch.func.vmap``.

Clients are sorted by their number of steps, so that those still active are always a prefix and nothing is masked or
copied when one finishes. Samples stay flat; only a batch is ever padded. Where a padded row is dear, as in a deep
network, everybody's last batch, which may be short, waits for the end, and those of similar size are taken together.

Shapes: C clients of the cohort, c of a chunk, A active, B the width of a batch, n samples of a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.func import vmap

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
from fedem.engines.device import budget, copy_all, is_out_of_memory, release, sent
from fedem.engines.replay import Captured, Replay, Traced
from fedem.methods.base import Algorithm, Batch, Local, Step
from fedem.models.base import Model

_T = TypeVar("_T")
_TALLY_ROWS = 1 << 15  # samples judged at once: enough to fill two cores, little enough for their caches
_SCORE_ROWS = 1 << 17  # the same for scores
_FIT_ROWS = 1 << 16  # the same for fits, with their padding
_MOST_TRACED = 64  # leaves of a model: on a CPU, to record a deep one takes longer than it ever saves
_LARGE_CALL = 16  # as many calls of a small model on a GPU are worth a recording as one of a large model
_LEAST_WIDTH = 16  # batches smaller than that are as quick as one of that size


@final
@dataclass(frozen=True)
class Stacked(Engine):
    """Many clients at once.

    Attributes:
        chunk_size: clients stacked together; 0 chooses as many as ``max_bytes`` hold. It never changes a result beyond
            rounding. Where memory runs out all the same, it is halved, and training goes on.
        max_bytes: bytes that a chunk may take, roughly; 0 for a share of what is free.
        record_after: calls with the same shapes before they are recorded and replayed; it changes no result at all. On
            a GPU a call of a large model counts as sixteen.
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
            self._replays.clear()  # recordings hold memory too
            release(cohort.device)

    def _steps(self, step: Step, model: Model, rate_dim: int | None, device: torch.device) -> Callable[..., Local]:
        """Return a local step of many clients, recorded where the same shapes come back."""
        stacked, key = vmap(step, in_dims=(0, 0, rate_dim)), (step, rate_dim)
        if device.type == "cuda":
            after = self.record_after // (_LARGE_CALL if model.is_large else 1)
            return self._replays.setdefault(key, Captured(stacked, after))
        if len(model.trainable) > _MOST_TRACED:
            return stacked
        return self._replays.setdefault(key, Traced(stacked, self.record_after))

    def _begins(self, algorithm: Algorithm, shared_dim: int | None) -> Callable[..., Any]:
        """Return how many clients begin a round, recorded likewise."""
        stacked, key = vmap(algorithm.begin, in_dims=(shared_dim, 0, 0, 0)), (algorithm.begin, shared_dim)
        if len(algorithm.model.trainable) > _MOST_TRACED:
            return stacked
        return self._replays.setdefault(key, Traced(stacked, self.record_after))

    def _train_chunk(self, algorithm: Algorithm, chunk: Chunk, work: Work, flat: Tree | None, rows: int) -> Finished:
        device = chunk.starts.device
        scale = torch.ones(()) if work.scales is None else work.scales
        rate = sent((work.learning_rate * scale.double()).to(algorithm.model.dtype), device)
        plan = BatchPlan(work.batching, chunk.sizes, work.keys, device)
        begin = self._begins(algorithm, chunk.shared_dim)
        local, samples, starts = _begin_clients(begin, algorithm, chunk, flat, rows)
        layer_keys, order, taken = derive(plan.keys, STOCHASTIC_LAYERS), torch.arange(len(plan.steps)), None
        *_, last = stages = algorithm.stages(plan.steps)
        for stage in stages:
            if stage.enter is not None:
                local = vmap(stage.enter)(local)
            step = self._steps(stage.step, algorithm.model, 0 if rate.ndim else None, device)
            walk = Walk(step, chunk, plan, layer_keys, samples, starts, rate, taken)
            if stage is last and algorithm.model.is_large:  # padding is dear
                local, order = walk.last_steps(walk.to_the_end(local, stage.num_steps - 1))
            else:
                local = walk.to_the_end(local, stage.num_steps)
            taken = stage.num_steps if taken is None else taken + stage.num_steps
        trained = vmap(algorithm.finish)(local)
        return Finished(chunk.members[order], trained.upload, trained.personal)

    def _max_bytes(self, cohort: Cohort) -> int:
        """Return the bytes that clients may take together, found once for a device."""
        return self.max_bytes or self._found.setdefault(str(cohort.device), budget(cohort.device))

    def _in_rows(self, algorithm: Algorithm, cohort: Cohort, most: int, work: Callable[[int], _T]) -> tuple[_T, int]:
        """Do ``work`` with as many samples as may go through all of a client's models at once, ``most`` at most."""
        # Where nothing is trained, components of a large model see samples one after the other, unless they share
        # layers; and nothing is kept for a way back, so what one component holds in training is enough for all.
        one = _bytes_per_sample(algorithm, cohort, one_by_one=algorithm.model.is_large)
        wanted = max(1, min(most, self._max_bytes(cohort) // one))
        return self._shrinking(cohort, "rows", wanted, work)

    def _chunks(self, algorithm: Algorithm, cohort: Cohort, batching: Batching) -> Iterator[Tensor]:
        """Cut the cohort, longest-running clients first."""
        sizes = cohort.samples.sizes
        order = torch.argsort(sizes, descending=True, stable=True)
        if self.chunk_size:
            yield from order.split(self.chunk_size)
            return
        # Parameters, gradients, momentum and the temporaries of a step; activations and some gradients; samples.
        model_bytes = 8 * (tree_bytes(tree_index(cohort.shared, 0)) + tree_bytes(tree_index(cohort.personal, 0)))
        row_bytes = _bytes_per_sample(algorithm, cohort)
        own_bytes = cohort.samples.num_bytes // max(1, len(cohort.samples))
        # Where a batch is as wide as a client is large, clients of very different sizes would be mostly padding.
        for run in [slice(None)] if batching.batch_size else similar(sizes[order].tolist()):
            some = order[run]
            while len(some):
                largest = sizes[some[0]]
                per_client = model_bytes + row_bytes * int(batching.widths(largest)) + own_bytes * int(largest)
                count = max(1, self._max_bytes(cohort) // max(per_client, 1))
                count = -(-len(some) // -(-len(some) // count))  # as even parts as can be
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
                    if name not in totals:
                        totals[name] = sums.new_zeros(len(members), *sums.shape[1:], dtype=torch.float64)
                    totals[name][:num_active] += sums
            for name, total in totals.items():
                everybody = torch.zeros(len(sizes), *total.shape[1:], dtype=torch.float64)
                found.setdefault(name, everybody)[members] = total.cpu()
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
    """Cut every leaf; all of it is returned as it is, for a deep network has hundreds of leaves."""
    if which.start in (None, 0) and which.stop == len(next(iter(local.shared.values()))):
        return local
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
        shared = tree_index(cohort.shared, int(groups[0]) if common else sent(groups, device))
        personal, places = (
            tree_index(cohort.personal, sent(members, device)),
            sent(cohort.samples.offsets[members], device),
        )
        samples, starts, sizes = cohort.samples, places, cohort.samples.sizes[members]
        if samples.pool.device != device:
            samples = samples.take(members).to(device)
            starts = sent(samples.offsets[:-1], device)
        return cls(members, shared, None if common else 0, personal, samples, starts, places, sizes)

    def some(self, which: slice) -> Chunk:
        cut = {name: getattr(self, name)[which] for name in ("members", "starts", "places", "sizes")}
        shared = self.shared if self.shared_dim is None else tree_index(self.shared, which)
        return replace(self, shared=shared, personal=tree_index(self.personal, which), **cut)

    def read(self, where: Positions) -> Pool:
        """Read the clients' inputs ``[c, B, ...]`` and targets ``[c, B]`` at ``where``."""
        return self.samples.read(self.starts[:, None] + where.positions)


@dataclass(frozen=True)
class Walk:
    """The way of clients, stacked together, through their batches."""

    step: Callable[..., Local]
    chunk: Chunk
    plan: BatchPlan
    layer_keys: Tensor  # [c]
    samples: Tree  # [..., columns], what begin made of all samples
    starts: Tensor  # [c] each client's first column
    rate: Tensor  # [c], or one for all
    taken: Tensor | None  # [c] steps that each client has taken already, on the CPU; None for none

    @property
    def _on_gpu(self) -> bool:
        """Where a step overwrites what the one before returned, and as few shapes as can be are recorded."""
        return self.starts.is_cuda

    def to_the_end(self, local: Local, steps: Tensor) -> Local:
        """Take the next ``steps`` ``[c]``, which are falling, of each client."""
        ends = _room_for(local)
        count = rows = len(steps)
        for index in range(int(steps.max()) + 1):
            num_active = int((steps > index).sum())
            if num_active < count:
                through = slice(num_active, count)
                _copy(_slice(ends, through), _slice(local, through))
                count = num_active
            if not count:
                break
            # On a GPU a few that are through go on, for nothing.
            height = min(_rounded(count), rows) if self._on_gpu else count
            if height < rows:
                local, rows = _slice(local, slice(height)), height
            some = slice(height)
            local = self._advance(local, index if self.taken is None else self.taken[some] + index, some)
        return ends

    def last_steps(self, local: Local) -> tuple[Local, Tensor]:
        """Take each client's last step, those with batches of similar size together; return the order of clients."""
        last = self.plan.steps - 1
        widths = self.plan.counts(last, slice(None))
        order = torch.argsort(widths, descending=True, stable=True)
        ends = _room_for(local)
        for run in similar(widths[order].clamp(min=_LEAST_WIDTH).tolist()):
            some, width = order[run], 0
            if self._on_gpu:
                width = 1 << (int(widths[some[0]]) - 1).bit_length()
                height = min(_rounded(len(some)), len(order))  # as many as there are is a shape that is there already
                some = torch.cat([some, some[-1:].expand(height - len(some))])
            own = local
            if not torch.equal(some, torch.arange(len(order))):
                here = sent(some, self.starts.device)
                own = Local(*(tree_index(tree, here) for tree in local))
            advanced = self._advance(own, last[some], some, width)
            _copy(_slice(ends, run), _slice(advanced, slice(len(order[run]))))
        return ends, order

    def _advance(self, local: Local, index: int | Tensor, some: slice | Tensor, width: int = 0) -> Local:
        """Take step ``index`` of ``some``, whose batches are padded to ``width`` at least."""
        where, chunk = self.plan.batch(index, some, width), self.chunk
        if isinstance(index, Tensor):
            index = sent(index, self.starts.device)
        if isinstance(some, Tensor):
            some = sent(some, self.starts.device)
        inputs, targets = chunk.samples.read(chunk.starts[some][:, None] + where.positions)
        weights = where.mask.to(self.rate.dtype) / where.mask.sum(1, keepdim=True)
        masks = (where.mask,) if where.padded else ()
        columns = _columns(self.samples, self.starts[some], where)
        batch = Batch(inputs, targets, weights, columns, derive(self.layer_keys[some], index), masks)
        return self.step(local, batch, self.rate[some] if self.rate.ndim else self.rate)


def _rounded(count: int) -> int:
    """Round up to a number of four bits and zeros, at most an eighth more."""
    unit = 1 << max(0, count.bit_length() - 4)
    return -(-count // unit) * unit


def _room_for(local: Local) -> Local:
    return Local(*(tree_map(torch.empty_like, tree) for tree in local))


def _copy(place: Local, local: Local) -> None:
    copy_all((ours[name], tree[name]) for ours, tree in zip(place, local, strict=True) for name in tree)


def _join(parts: Iterable[Local]) -> Local:
    return Local(*map(tree_cat, zip(*parts, strict=True)))


def _bytes_per_sample(algorithm: Algorithm, cohort: Cohort, one_by_one: bool = False) -> int:
    """Estimate what one sample takes on its way through all of a client's models, together or ``one_by_one``."""
    model, inputs = algorithm.model, cohort.samples.pool.inputs[:1].numel() * 4
    numbers = sum(leaf[0].numel() for leaf in tree_floats(cohort.shared).values())
    together = 1 if one_by_one else max(1, numbers // model.num_parameters)
    return inputs + together * max(4, model.bytes_per_sample)


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
    return _join(locals_), tree_cat(columns, -1), torch.cat(starts)


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
