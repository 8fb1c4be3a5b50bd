"""The simulator's engine: many clients at once through ``torch.func.vmap``.

Clients are sorted by their number of steps, so that those still active are always a prefix and nothing is masked or
copied when one finishes. Samples stay flat; only a batch is ever padded.

Shapes: C clients of the cohort, c of a chunk, A active, B the width of a batch, M components, n samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.func import vmap

from fedem.algorithms.base import Algorithm, Batch, Local
from fedem.engines.base import Cohort, Engine, Finished, Tally
from fedem.engines.batches import Batching, BatchPlan, Positions, blocks
from fedem.engines.replay import Replay
from fedem.samples import Samples
from fedem.tree import Tree, tree_bytes, tree_cat, tree_floats, tree_index, tree_map

_TALLY_CLIENTS = 256
_TALLY_ROWS = 1 << 15  # samples judged at once: enough to fill two cores, little enough for their caches
_SCORE_ROWS = 1 << 17  # the same for scores


@final
@dataclass(frozen=True)
class Stacked(Engine):
    """Many clients at once.

    Attributes:
        chunk_size: clients stacked together; 0 chooses as many as ``memory`` holds. It never changes a result beyond
            rounding.
        memory: bytes that a chunk may take, roughly.
        record_after: calls with the same shapes before they are recorded and replayed; it changes no result at all.

    """

    chunk_size: int = field(default=0, metadata={"min": 0})
    memory: int = field(default=2 << 30, metadata={"min": 1})
    record_after: int = field(default=16, metadata={"min": 0})
    _replays: dict[Any, Replay] = field(default_factory=dict, init=False, repr=False, compare=False)

    def train(
        self, algorithm: Algorithm, cohort: Cohort, batching: Batching, keys: Tensor, learning_rate: float
    ) -> Iterator[Finished]:
        """Yield the clients chunk by chunk."""
        device = cohort.samples.inputs.device
        sizes = cohort.samples.sizes
        rate = torch.tensor(learning_rate, dtype=algorithm.model.dtype, device=device)
        rows = self._rows(algorithm, cohort, _SCORE_ROWS)
        scores = _flat_scores(algorithm, cohort, rows)
        for members in self._chunks(algorithm, cohort, batching):
            plan = BatchPlan(batching, sizes[members].to(device), keys[members].to(device))
            yield self._train_chunk(algorithm, _Chunk.of(cohort, members), plan, scores, rows, rate)

    def _stacked(self, function: Callable[..., Any], shared_dim: int | None, *rest: int | None) -> Callable[..., Any]:
        """Return a method's function for many clients, recorded where the same shapes come back."""
        key = function, shared_dim
        if key not in self._replays:
            self._replays[key] = Replay(vmap(function, in_dims=(shared_dim, *rest)), self.record_after)
        return self._replays[key]

    def _train_chunk(
        self, algorithm: Algorithm, chunk: _Chunk, plan: BatchPlan, flat: Tree | None, rows: int, rate: Tensor
    ) -> Finished:
        step = self._stacked(algorithm.step, 0, 0, None)
        begin = self._stacked(algorithm.begin, chunk.shared_dim, 0, 0, 0)
        local, samples, starts = _begin(begin, algorithm, chunk, flat, rows)
        steps = plan.steps.cpu()
        done: list[Local] = []
        num_active = len(steps)
        for index in range(int(steps.max())):
            still_active = int((steps > index).sum())
            if still_active < num_active:
                num_active = still_active
                done.append(_slice(local, slice(num_active, None)))
                local = _slice(local, slice(num_active))
            where = plan.batch(index, num_active)
            inputs, targets = chunk.rows(where)
            weights = where.mask.to(algorithm.model.dtype) / where.mask.sum(1, keepdim=True)
            local = step(local, Batch(inputs, targets, weights, _columns(samples, starts, where)), rate)
        finished = Local(*(tree_cat(trees) for trees in zip(local, *reversed(done), strict=True)))
        uploads, personal = vmap(algorithm.finish)(finished)
        return Finished(chunk.members, uploads, personal)

    def _rows(self, algorithm: Algorithm, cohort: Cohort, wanted: int) -> int:
        """Return how many samples may go through all of a client's models at once, ``wanted`` at most."""
        return max(1, min(wanted, self.memory // _bytes_per_sample(algorithm, cohort)))

    def _chunks(self, algorithm: Algorithm, cohort: Cohort, batching: Batching) -> Iterator[Tensor]:
        """Cut the cohort, longest-running clients first."""
        sizes = cohort.samples.sizes
        order = torch.argsort(sizes, descending=True, stable=True)
        if self.chunk_size:
            yield from order.split(self.chunk_size)
            return
        if batching.batch_size == 0:
            # A batch is as wide as a client is large, so clients of very different sizes would be mostly padding.
            for part in _similar(sizes[order].tolist()):
                yield from self._fitting(algorithm, cohort, batching, order[part])
            return
        yield from self._fitting(algorithm, cohort, batching, order)

    def _fitting(self, algorithm: Algorithm, cohort: Cohort, batching: Batching, order: Tensor) -> Iterator[Tensor]:
        """Cut clients, in this order, into as many together as memory holds."""
        # Parameters, gradients, momentum and the temporaries of a step; activations and their gradients.
        model_bytes = 8 * (tree_bytes(tree_index(cohort.shared, 0)) + tree_bytes(tree_index(cohort.personal, 0)))
        row_bytes = 2 * _bytes_per_sample(algorithm, cohort)
        widths = batching.widths(cohort.samples.sizes[order])
        while len(order):
            per_client = model_bytes + row_bytes * int(widths[0])
            count = max(1, self.memory // max(per_client, 1))
            yield order[:count]
            order, widths = order[count:], widths[count:]

    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        """Walk through all clients' samples in blocks."""
        rows = self._rows(algorithm, cohort, _TALLY_ROWS)
        sizes = cohort.samples.sizes
        order = torch.argsort(sizes, descending=True, stable=True)
        order = order[sizes[order] > 0]
        pieces = []
        for members in order.split(min(rows, self.chunk_size or _TALLY_CLIENTS)):
            width = max(1, rows // len(members))
            pieces.append(_tally_chunk(function, _Chunk.of(cohort, members), width))
        return tree_map(lambda sums: sums.new_zeros(len(sizes)).index_copy(0, order, sums), tree_cat(pieces))


@dataclass(frozen=True)
class _Chunk:
    """Clients stacked together, sorted by falling number of samples."""

    members: Tensor  # [c] positions in the cohort
    shared: Tree  # [...] when all read the same group, else [c, ...]
    shared_dim: int | None  # None or 0, for vmap
    personal: Tree  # [c, ...]
    samples: Samples  # of the whole cohort
    starts: Tensor  # [c] first row of each client, on the device
    sizes: Tensor  # [c] on the device

    @classmethod
    def of(cls, cohort: Cohort, members: Tensor) -> _Chunk:
        device = cohort.samples.inputs.device
        groups = cohort.reads[members]
        common = bool((groups == groups[0]).all())
        shared = tree_index(cohort.shared, int(groups[0]) if common else groups.to(device))
        return cls(
            members,
            shared,
            None if common else 0,
            tree_index(cohort.personal, members.to(device)),
            cohort.samples,
            cohort.samples.offsets[members].to(device),
            cohort.samples.sizes[members].to(device),
        )

    def part(self, which: slice) -> _Chunk:
        """Some of the clients, a run of them."""
        return replace(
            self,
            members=self.members[which],
            shared=self.shared if self.shared_dim is None else tree_index(self.shared, which),
            personal=tree_index(self.personal, which),
            starts=self.starts[which],
            sizes=self.sizes[which],
        )

    def rows(self, where: Positions) -> tuple[Tensor, Tensor]:
        """Read the inputs ``[A, B, ...]`` and targets ``[A, B]`` at ``where``."""
        rows = self.starts[: len(where.positions), None] + where.positions

        def read(flat: Tensor) -> Tensor:
            # index_select is several times faster than indexing on a CPU.
            return flat.index_select(0, rows.flatten()).reshape(*rows.shape, *flat.shape[1:])

        return read(self.samples.inputs), read(self.samples.targets)

    def active(self, num_active: int) -> tuple[Tree, Tree]:
        """Return shared and personal of the first clients."""
        first = self.part(slice(num_active))
        return first.shared, first.personal


def _bytes_per_sample(algorithm: Algorithm, cohort: Cohort) -> int:
    """Estimate what one sample takes on its way through all of a client's models."""
    components = sum(leaf[0].numel() for leaf in tree_floats(cohort.shared).values())
    inputs = cohort.samples.inputs[:1].numel() * 4
    return inputs + max(1, components // algorithm.model.num_parameters) * max(4, algorithm.model.bytes_per_sample)


def _flat_scores(algorithm: Algorithm, cohort: Cohort, rows: int) -> Tree | None:
    """Score all samples under the one tree that everybody reads, without stacking; None when they read several."""
    if len(next(iter(cohort.shared.values()))) > 1:
        return None
    shared = tree_index(cohort.shared, 0)
    pieces = [
        algorithm.score(shared, inputs, targets)
        for inputs, targets in zip(cohort.samples.inputs.split(rows), cohort.samples.targets.split(rows), strict=True)
    ]
    return {name: torch.cat([piece[name] for piece in pieces], dim=-1) for name in pieces[0]}


def _begin(
    begin: Callable[..., Any], algorithm: Algorithm, chunk: _Chunk, flat: Tree | None, rows: int
) -> tuple[Local, Tree, Tensor]:
    """Begin the clients' rounds, those of similar size together, so that little is padded.

    Returns:
        the clients' states ``[c, ...]``, what they made for each sample ``[..., columns]``, and the column of each
        client's first sample ``[c]``
    """
    locals_, columns, starts, total = [], [], [], 0
    for part in _similar(chunk.sizes.tolist()):
        some = chunk.part(part)
        scores, mask = _padded_scores(algorithm, some, flat, rows)
        local, samples = begin(some.shared, some.personal, scores, mask)
        locals_.append(local)
        columns.append(tree_map(lambda leaf: leaf.movedim(0, -2).flatten(-2), samples))
        starts.append(total + mask.shape[1] * torch.arange(len(mask), device=mask.device))
        total += mask.numel()
    local = Local(*(tree_cat(trees) for trees in zip(*locals_, strict=True)))
    joined = {name: torch.cat([piece[name] for piece in columns], dim=-1) for name in columns[0]}
    return local, joined, torch.cat(starts)


def _similar(sizes: list[int]) -> Iterator[slice]:
    """Cut falling ``sizes`` where they have halved."""
    start = 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or 2 * sizes[end] < sizes[start]:
            yield slice(start, end)
            start = end


def _padded_scores(algorithm: Algorithm, chunk: _Chunk, flat: Tree | None, rows: int) -> tuple[Tree, Tensor]:
    """Return the chunk's scores padded to its largest client, ``[c, ..., n]``, and their mask ``[c, n]``."""
    ((_, where),) = blocks(chunk.sizes, int(chunk.sizes.max()))
    if flat is not None:
        index = (chunk.starts[:, None] + where.positions).flatten()
        # [..., N] -> [..., c, n] -> [c, ..., n]
        return tree_map(
            lambda leaf: leaf.index_select(-1, index).unflatten(-1, where.positions.shape).movedim(-2, 0), flat
        ), where.mask
    if type(algorithm).score is Algorithm.score:
        return {}, where.mask
    stacked = vmap(algorithm.score, in_dims=(chunk.shared_dim, 0, 0))
    pieces: list[Tree] = []
    for num_active, block in blocks(chunk.sizes, max(1, rows // len(chunk.sizes))):
        shared, _ = chunk.active(num_active)
        piece = stacked(shared, *chunk.rows(block))
        missing = len(chunk.sizes) - num_active
        pieces.append(tree_map(lambda leaf, k=missing: torch.cat([leaf, leaf.new_zeros(k, *leaf.shape[1:])]), piece))
    return {name: torch.cat([piece[name] for piece in pieces], dim=-1) for name in pieces[0]}, where.mask


def _slice(local: Local, part: slice) -> Local:
    return Local(*(tree_index(tree, part) for tree in local))


def _columns(samples: Tree, starts: Tensor, where: Positions) -> Tree:
    """Pick the columns of each client's batch: ``[..., columns] -> [A, ..., B]``."""
    index = starts[: len(where.positions), None] + where.positions
    return tree_map(
        lambda leaf: leaf.index_select(-1, index.flatten()).unflatten(-1, index.shape).movedim(-2, 0), samples
    )


def _tally_chunk(function: Tally, chunk: _Chunk, width: int) -> Tree:
    stacked = vmap(function, in_dims=(chunk.shared_dim, 0, 0, 0, 0))
    totals: Tree = {}
    for num_active, where in blocks(chunk.sizes, width):
        shared, personal = chunk.active(num_active)
        for name, sums in stacked(shared, personal, *chunk.rows(where), where.mask).items():
            total = totals.setdefault(name, torch.zeros(len(chunk.members), dtype=torch.float64, device=sums.device))
            total[:num_active] += sums
    return {name: total.cpu() for name, total in totals.items()}
