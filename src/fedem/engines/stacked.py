"""The simulator's engine: many clients at once through ``torch.func.vmap``.

Clients are sorted by their number of steps, so that those still active are always a prefix and nothing is masked or
copied when one finishes. Samples stay flat; only a batch is ever padded, and those whose last batch is short take it
apart from the others.

Shapes: C clients of the cohort, c of a chunk, A active, B the width of a batch, M components, n samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.func import vmap

from fedem.algorithms.base import Algorithm, Batch, Local
from fedem.engines.base import Cohort, Engine, Finished, Tally
from fedem.engines.batches import Batching, BatchPlan, Positions, blocks
from fedem.engines.beginning import begin_clients
from fedem.engines.chunks import Chunk, bytes_per_sample, flat_scores, similar
from fedem.engines.memory import budget, is_out_of_memory, release
from fedem.engines.replay import Replay
from fedem.randomness import STOCHASTIC_LAYERS, derive
from fedem.tree import Tree, tree_bytes, tree_cat, tree_index, tree_map

_T = TypeVar("_T")

_TALLY_CLIENTS = 256
_TALLY_ROWS = 1 << 15  # samples judged at once: enough to fill two cores, little enough for their caches
_SCORE_ROWS = 1 << 17  # the same for scores
_MOST_RECORDED = 64  # leaves of a model: recording a deep one takes longer than it ever saves


@final
@dataclass(frozen=True)
class Stacked(Engine):
    """Many clients at once.

    Attributes:
        chunk_size: clients stacked together; 0 chooses as many as ``memory`` holds. It never changes a result beyond
            rounding. Where memory runs out all the same, it is halved, and training goes on.
        memory: bytes that a chunk may take, roughly; 0 for a share of what is free.
        record_after: calls with the same shapes before they are recorded and replayed; it changes no result at all.

    """

    chunk_size: int = field(default=0, metadata={"min": 0})
    memory: int = field(default=0, metadata={"min": 0})
    record_after: int = field(default=16, metadata={"min": 0})
    _replays: dict[Any, Replay] = field(default_factory=dict, init=False, repr=False, compare=False)
    _found: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def most_together(self) -> int:
        """How many clients were stacked at most, so far."""
        return self._found.get("most_together", 0)

    def train(
        self,
        algorithm: Algorithm,
        cohort: Cohort,
        batching: Batching,
        keys: Tensor,
        learning_rate: float,
        scales: Tensor | None = None,
    ) -> Iterator[Finished]:
        """Yield the clients chunk by chunk."""
        scale = torch.ones(()) if scales is None else scales
        rate = (learning_rate * scale.double()).to(cohort.device, algorithm.model.dtype)
        rows = self._rows(algorithm, cohort, _SCORE_ROWS)
        scores, rows = self._shrinking(cohort.device, rows, lambda count: flat_scores(algorithm, cohort, count))
        for members in self._chunks(algorithm, cohort, batching):
            waiting = [members]
            while waiting:
                these = waiting.pop()
                limit = self._found.get("limit", len(these))
                if len(these) > limit:
                    waiting += reversed(these.split(limit))
                    continue
                finished = self._try(algorithm, cohort, batching, keys, these, scores, rows, rate)
                if finished is None:
                    waiting.append(these)
                    continue
                self._found["most_together"] = max(self.most_together, len(these))
                yield finished

    def _try(
        self,
        algorithm: Algorithm,
        cohort: Cohort,
        batching: Batching,
        keys: Tensor,
        members: Tensor,
        scores: Tree | None,
        rows: int,
        rate: Tensor,
    ) -> Finished | None:
        """Train ``members`` together; where memory runs out, halve how many may be from now on and return None."""
        try:
            plan = BatchPlan(batching, cohort.samples.sizes[members], keys[members], cohort.device)
            theirs = rate[members.to(rate.device)] if rate.ndim else rate
            return self._train_chunk(algorithm, Chunk.of(cohort, members), plan, scores, rows, theirs)
        except RuntimeError as error:
            if len(members) == 1 or not is_out_of_memory(error):
                raise
            self._found["limit"] = len(members) // 2
        release(cohort.device)
        return None

    def _shrinking(self, device: torch.device, rows: int, work: Callable[[int], _T]) -> tuple[_T, int]:
        """Do ``work`` over so many samples at once, or over half as many where memory runs out, and so on."""
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
            inputs, targets = chunk.part(some).read(where)
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
        finished = Local(*(tree_cat(trees) for trees in zip(*reversed(done), strict=True)))
        uploads, personal = vmap(algorithm.finish)(finished)
        return Finished(chunk.members, uploads, personal)

    def _memory(self, cohort: Cohort) -> int:
        """Return the bytes that clients may take together, found once for a device."""
        return self.memory or self._found.setdefault(str(cohort.device), budget(cohort.device))

    def _rows(self, algorithm: Algorithm, cohort: Cohort, wanted: int) -> int:
        """Return how many samples may go through all of a client's models at once, ``wanted`` at most."""
        return max(1, min(wanted, self._memory(cohort) // bytes_per_sample(algorithm, cohort)))

    def _chunks(self, algorithm: Algorithm, cohort: Cohort, batching: Batching) -> Iterator[Tensor]:
        """Cut the cohort, longest-running clients first."""
        sizes = cohort.samples.sizes
        order = torch.argsort(sizes, descending=True, stable=True)
        if self.chunk_size:
            yield from order.split(self.chunk_size)
            return
        if batching.batch_size == 0:
            # A batch is as wide as a client is large, so clients of very different sizes would be mostly padding.
            for part in similar(sizes[order].tolist()):
                yield from self._fitting(algorithm, cohort, batching, order[part])
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
            count = max(1, self._memory(cohort) // max(per_client, 1))
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
            most = max(1, min(most, self._memory(cohort) // max(1, largest)))
        pieces = []
        for members in order.split(most):
            width = max(1, rows // len(members))
            pieces.append(_tally_chunk(function, Chunk.of(cohort, members), width))
        return tree_map(lambda sums: sums.new_zeros(len(sizes)).index_copy(0, order, sums), tree_cat(pieces))


def _slice(local: Local, part: slice) -> Local:
    return Local(*(tree_index(tree, part) for tree in local))


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
