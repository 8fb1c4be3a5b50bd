"""The simulator's engine: many clients at once through ``torch.func.vmap``.

Clients are sorted by their number of steps, so that those still active are always a prefix and nothing is masked or
copied when one finishes. Samples stay flat; only a batch is ever padded, and those whose last batch is short take it
apart from the others.

Shapes: C clients of the cohort, c of a chunk, A active, B the width of a batch, M components, n samples of a client, N
of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from fedem.core.random import STOCHASTIC_LAYERS, derive
from fedem.core.tree import Tree, tree_bytes, tree_cat, tree_floats, tree_index, tree_map
from fedem.data.samples import Pool, Samples
from fedem.engines.base import Batching, BatchPlan, Cohort, Engine, Finished, Positions, Tally, Work, blocks
from fedem.engines.device import budget, is_out_of_memory, release
from fedem.methods.base import Algorithm, Batch, Local

_T = TypeVar("_T")

_TALLY_CLIENTS = 256
_TALLY_ROWS = 1 << 15  # samples judged at once: enough to fill two cores, little enough for their caches
_SCORE_ROWS = 1 << 17  # the same for scores
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
        """Yield the clients chunk by chunk."""
        scale = torch.ones(()) if work.scales is None else work.scales
        rate = (work.learning_rate * scale.double()).to(cohort.device, algorithm.model.dtype)
        rows = self._rows(algorithm, cohort, _SCORE_ROWS)
        scores, rows = self._shrinking(cohort.device, rows, lambda count: flat_scores(algorithm, cohort, count))
        for members in self._chunks(algorithm, cohort, work.batching):
            waiting = [members]
            while waiting:
                these = waiting.pop()
                limit = self._found.get("limit", len(these))
                if len(these) > limit:
                    waiting += reversed(these.split(limit))
                    continue
                finished = self._try(algorithm, cohort, work, these, scores, rows, rate)
                if finished is None:
                    waiting.append(these)
                    continue
                self._found["most_together"] = max(self.most_together, len(these))
                yield finished

    def _try(
        self,
        algorithm: Algorithm,
        cohort: Cohort,
        work: Work,
        members: Tensor,
        scores: Tree | None,
        rows: int,
        rate: Tensor,
    ) -> Finished | None:
        """Train ``members`` together; where memory runs out, halve how many may be from now on and return None."""
        try:
            plan = BatchPlan(work.batching, cohort.samples.sizes[members], work.keys[members], cohort.device)
            theirs = rate[members.to(rate.device)] if rate.ndim else rate
            return self._train_chunk(algorithm, Chunk.of(cohort, members), plan, scores, rows, theirs)
        except RuntimeError as error:
            if len(members) == 1 or not is_out_of_memory(error):
                raise
            self._found["limit"] = len(members) // 2
        release(cohort.device)
        return None

    def _shrinking(self, device: torch.device, rows: int, work: Callable[[int], _T]) -> tuple[_T, int]:
        """Do ``work`` over ``rows`` samples at once, or over half as many where memory runs out, and so on."""
        rows = min(rows, self._found.get("rows", rows))
        while True:
            try:
                return work(rows), rows
            except RuntimeError as error:
                if rows == 1 or not is_out_of_memory(error):
                    raise
                rows = self._found["rows"] = rows // 2
            release(device)

    def _stacked(self, function: Callable[..., Any], deep: bool, *dims: int | None) -> Callable[..., Any]:
        """Return a method's function for many clients; unless ``deep``, recorded where the same shapes come back."""
        if deep:
            return vmap(function, in_dims=dims)
        key = function, dims
        if key not in self._replays:
            self._replays[key] = Replay(vmap(function, in_dims=dims), self.record_after)
        return self._replays[key]

    def _train_chunk(
        self, algorithm: Algorithm, chunk: Chunk, plan: BatchPlan, flat: Tree | None, rows: int, rate: Tensor
    ) -> Finished:
        deep = len(algorithm.model.trainable) > _MOST_RECORDED
        step = self._stacked(algorithm.step, deep, 0, 0, 0 if rate.ndim else None)
        begin = self._stacked(algorithm.begin, deep, chunk.shared_dim, 0, 0, 0)
        local, samples, starts = begin_clients(begin, algorithm, chunk, flat, rows)
        layer_keys = derive(plan.keys, STOCHASTIC_LAYERS)
        steps = plan.steps

        def advance(local: Local, index: int, first: int, last: int) -> Local:
            """Step number ``index`` of the clients from ``first`` up to ``last``."""
            where = plan.batch(index, first, last)
            some = slice(first, last)
            inputs, targets = chunk.some(some).read(where)
            weights = where.mask.to(algorithm.model.dtype) / where.mask.sum(1, keepdim=True)
            masks = (where.mask,) if where.padded else ()
            columns = _columns(samples, starts[some], where)
            batch = Batch(inputs, targets, weights, columns, derive(layer_keys[some], index), masks)
            stepped: Local = step(local, batch, rate[some] if rate.ndim else rate)
            return stepped

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
        last = Local(*(tree_cat(trees) for trees in zip(*reversed(done), strict=True)))
        trained = vmap(algorithm.finish)(last)
        return Finished(chunk.members, trained.upload, trained.personal)

    def _max_bytes(self, cohort: Cohort) -> int:
        """Return the bytes that clients may take together, found once for a device."""
        return self.max_bytes or self._found.setdefault(str(cohort.device), budget(cohort.device))

    def _rows(self, algorithm: Algorithm, cohort: Cohort, wanted: int) -> int:
        """Return how many samples may go through all of a client's models at once, ``wanted`` at most."""
        return max(1, min(wanted, self._max_bytes(cohort) // bytes_per_sample(algorithm, cohort)))

    def _chunks(self, algorithm: Algorithm, cohort: Cohort, batching: Batching) -> Iterator[Tensor]:
        """Cut the cohort, longest-running clients first."""
        sizes = cohort.samples.sizes
        order = torch.argsort(sizes, descending=True, stable=True)
        if self.chunk_size:
            yield from order.split(self.chunk_size)
            return
        if batching.batch_size == 0:
            # A batch is as wide as a client is large, so clients of very different sizes would be mostly padding.
            for run in similar(sizes[order].tolist()):
                yield from self._fitting(algorithm, cohort, batching, order[run])
            return
        yield from self._fitting(algorithm, cohort, batching, order)

    def _fitting(self, algorithm: Algorithm, cohort: Cohort, batching: Batching, order: Tensor) -> Iterator[Tensor]:
        """Cut clients, in this order, into as many together as memory holds."""
        # Parameters, gradients, momentum and the temporaries of a step; activations and their gradients; samples.
        model_bytes = 8 * (tree_bytes(tree_index(cohort.shared, 0)) + tree_bytes(tree_index(cohort.personal, 0)))
        row_bytes = 2 * bytes_per_sample(algorithm, cohort)
        sizes = cohort.samples.sizes[order]
        widths = batching.widths(sizes)
        own_bytes = cohort.samples.num_bytes // max(1, len(cohort.samples))
        while len(order):
            per_client = model_bytes + row_bytes * int(widths[0]) + own_bytes * int(sizes[0])
            count = max(1, self._max_bytes(cohort) // max(per_client, 1))
            yield order[:count]
            order, widths, sizes = order[count:], widths[count:], sizes[count:]

    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        """Walk through all clients' samples in blocks."""
        rows = self._rows(algorithm, cohort, _TALLY_ROWS)
        return self._shrinking(cohort.device, rows, lambda count: self._tally(function, cohort, count))[0]

    def _tally(self, function: Tally, cohort: Cohort, rows: int) -> Tree:
        sizes = cohort.samples.sizes
        order = torch.argsort(sizes, descending=True, stable=True)
        order = order[sizes[order] > 0]
        most = min(rows, self.chunk_size or _TALLY_CLIENTS)
        if cohort.samples.pool.device != cohort.device:
            largest = cohort.samples.num_bytes * int(sizes.max()) // len(cohort.samples)
            most = max(1, min(most, self._max_bytes(cohort) // max(1, largest)))
        pieces = []
        for members in order.split(most):
            width = max(1, rows // len(members))
            pieces.append(_tally_chunk(function, Chunk.of(cohort, members), width))
        return tree_map(lambda sums: sums.new_zeros(len(sizes)).index_copy(0, order, sums), tree_cat(pieces))


def _slice(local: Local, which: slice) -> Local:
    return Local(*(tree_index(tree, which) for tree in local))


def _columns(samples: Tree, starts: Tensor, where: Positions) -> Tree:
    """Pick the columns of each client's batch: ``[..., columns] -> [A, ..., B]``."""
    index = starts[:, None] + where.positions
    return tree_map(
        lambda leaf: leaf.index_select(-1, index.flatten()).unflatten(-1, index.shape).movedim(-2, 0), samples
    )


def _tally_chunk(function: Tally, chunk: Chunk, width: int) -> Tree:
    stacked = vmap(function, in_dims=(chunk.shared_dim, 0, 0, 0, 0))
    totals: Tree = {}
    for num_active, where in blocks(chunk.sizes, width, chunk.starts.device):
        shared, personal = chunk.active(num_active)
        for name, sums in stacked(shared, personal, *chunk.read(where), where.mask).items():
            total = totals.setdefault(name, torch.zeros(len(chunk.members), dtype=torch.float64, device=sums.device))
            total[:num_active] += sums
    return {name: total.cpu() for name, total in totals.items()}


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
        samples, starts = cohort.samples, cohort.samples.offsets[members]
        places = starts
        if samples.pool.device != device:
            samples = samples.take(members).to(device)
            starts = samples.offsets[:-1]
        return cls(
            members,
            shared,
            None if common else 0,
            tree_index(cohort.personal, members.to(device)),
            samples,
            starts.to(device),
            places.to(device),
            cohort.samples.sizes[members],
        )

    def some(self, which: slice) -> Chunk:
        """Some of the clients, a run of them."""
        return replace(
            self,
            members=self.members[which],
            shared=self.shared if self.shared_dim is None else tree_index(self.shared, which),
            personal=tree_index(self.personal, which),
            starts=self.starts[which],
            places=self.places[which],
            sizes=self.sizes[which],
        )

    def read(self, where: Positions) -> Pool:
        """Read the inputs ``[A, B, ...]`` and targets ``[A, B]`` at ``where``, of the first A clients."""
        return self.samples.read(self.starts[: len(where.positions), None] + where.positions)

    def active(self, num_active: int) -> tuple[Tree, Tree]:
        """Return shared and personal of the first clients."""
        first = self.some(slice(num_active))
        return first.shared, first.personal


def bytes_per_sample(algorithm: Algorithm, cohort: Cohort) -> int:
    """Estimate what one sample takes on its way through all of a client's models."""
    components = sum(leaf[0].numel() for leaf in tree_floats(cohort.shared).values())
    inputs = cohort.samples.pool.inputs[:1].numel() * 4
    return inputs + max(1, components // algorithm.model.num_parameters) * max(4, algorithm.model.bytes_per_sample)


def similar(sizes: list[int]) -> Iterator[slice]:
    """Cut falling ``sizes`` where they have halved."""
    start = 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or 2 * sizes[end] < sizes[start]:
            yield slice(start, end)
            start = end


def flat_scores(algorithm: Algorithm, cohort: Cohort, rows: int) -> Tree | None:
    """Score all samples under the one tree that everybody reads, without stacking; None when they read several."""
    if len(next(iter(cohort.shared.values()))) > 1:
        return None
    shared = tree_index(cohort.shared, 0)
    if not algorithm.has_scores:
        return {}
    samples, total = cohort.samples, len(cohort.samples)
    pieces = [
        algorithm.score(shared, *samples.span(start, min(start + rows, total)).to(cohort.device))
        for start in range(0, total, rows)
    ]
    return {name: torch.cat([piece[name] for piece in pieces], dim=-1) for name in pieces[0]}


def begin_clients(
    begin: Callable[..., Any], algorithm: Algorithm, chunk: Chunk, flat: Tree | None, rows: int
) -> tuple[Local, Tree, Tensor]:
    """Begin the clients' rounds, those of similar size together, so that little is padded.

    Returns:
        the clients' states ``[c, ...]``, what they made for each sample ``[..., columns]``, and the column of each
        client's first sample ``[c]``
    """
    locals_, columns, starts, total = [], [], [], 0
    for run in similar(chunk.sizes.tolist()):
        some = chunk.some(run)
        scores, mask = _padded_scores(algorithm, some, flat, rows)
        if algorithm.has_survey:
            scores = scores | _survey(algorithm, some)
        local, samples = begin(some.shared, some.personal, scores, mask)
        locals_.append(local)
        columns.append(tree_map(lambda leaf: leaf.movedim(0, -2).flatten(-2), samples))
        starts.append(total + mask.shape[1] * torch.arange(len(mask), device=mask.device))
        total += mask.numel()
    local = Local(*(tree_cat(trees) for trees in zip(*locals_, strict=True)))
    joined = {name: torch.cat([piece[name] for piece in columns], dim=-1) for name in columns[0]}
    return local, joined, torch.cat(starts)


def _survey(algorithm: Algorithm, chunk: Chunk) -> Tree:
    """Let each client look at all of its samples at once."""
    ((_, where),) = blocks(chunk.sizes, int(chunk.sizes.max()), chunk.starts.device)
    stacked = vmap(algorithm.survey, in_dims=(chunk.shared_dim, 0, 0, 0, 0))
    found: Tree = stacked(chunk.shared, chunk.personal, *chunk.read(where), where.mask)
    return found


def _padded_scores(algorithm: Algorithm, chunk: Chunk, flat: Tree | None, rows: int) -> tuple[Tree, Tensor]:
    """Return the chunk's scores padded to its largest client, ``[c, ..., n]``, and their mask ``[c, n]``."""
    ((_, where),) = blocks(chunk.sizes, int(chunk.sizes.max()), chunk.starts.device)
    if flat is not None:
        index = (chunk.places[:, None] + where.positions).flatten()
        # [..., N] -> [..., c, n] -> [c, ..., n]
        return tree_map(
            lambda leaf: leaf.index_select(-1, index).unflatten(-1, where.positions.shape).movedim(-2, 0), flat
        ), where.mask
    if not algorithm.has_scores:
        return {}, where.mask
    stacked = vmap(algorithm.score, in_dims=(chunk.shared_dim, 0, 0))
    pieces: list[Tree] = []
    for num_active, block in blocks(chunk.sizes, max(1, rows // len(chunk.sizes)), chunk.starts.device):
        shared, _ = chunk.active(num_active)
        piece = stacked(shared, *chunk.read(block))
        missing = len(chunk.sizes) - num_active
        pieces.append(tree_map(lambda leaf, k=missing: torch.cat([leaf, leaf.new_zeros(k, *leaf.shape[1:])]), piece))
    return {name: torch.cat([piece[name] for piece in pieces], dim=-1) for name in pieces[0]}, where.mask


class Replay:
    """A pure function of trees of tensors, recorded for the shapes that it has been called with ``after`` times.

    A call through nested vmap and grad costs about a millisecond of Python, whatever the data. Where the same shapes
    come back round after round, the tensor operations behind a call are recorded (``make_fx``) and from then on run
    directly: same operations, same bits. Recording costs about as much as sixty calls save, so it waits until a shape
    has proved to come back.
    """

    def __init__(self, function: Callable[..., Any], after: int):
        self._function, self._after = function, after
        self._calls: Counter[Any] = Counter()
        self._recordings: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, or its recording."""
        key = tuple(_kind(leaf) for leaf in tree_leaves(arguments))
        if key in self._recordings:
            return self._recordings[key](*arguments)
        self._calls[key] += 1
        if self._calls[key] <= self._after or len(self._recordings) >= _MOST_SHAPES:
            if len(self._calls) > 8 * _MOST_SHAPES:
                self._calls.clear()
            return self._function(*arguments)
        self._recordings[key] = self._record(arguments)
        return self._recordings[key](*arguments)

    def _record(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        function = self._function
        # make_fx counts parameters, and vmap hides them.
        wrapped: dict[int, Callable[..., Any]] = {
            3: lambda a, b, c: function(a, b, c),
            4: lambda a, b, c, d: function(a, b, c, d),
        }
        recording: Callable[..., Any] = make_fx(wrapped[len(arguments)])(*arguments)
        return recording


def _kind(leaf: Tensor) -> tuple[Any, ...]:
    # Strides too: a recording may view what another layout would have to copy.
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
