"""The seam between a method for one client and the many of a federation: engines, the reference one, and batches.

Samples are shuffled afresh each epoch, by the client's own key.

Shapes: G groups, C clients of the cohort, c clients finished together, A active ones (the first A), B a batch's width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from fedem.core.random import STOCHASTIC_LAYERS, derive
from fedem.core.settings import Settings
from fedem.core.tree import Tree, tree_cat, tree_index, tree_map, tree_stack
from fedem.data.samples import Samples
from fedem.engines.device import sent
from fedem.methods.base import Algorithm, Batch, Trained

_SCORED = 1 << 13  # samples of a client scored at once

# (shared, personal, inputs, targets, mask) -> sums over the samples of one client, [...] each
Tally = Callable[[Tree, Tree, Tensor, Tensor, Tensor], Tree]
# what a client reads and keeps, its samples [n, ...] and [n], and a mask of all of them
_Client = tuple[Tree, Tree, Tensor, Tensor, Tensor]


class Cohort(NamedTuple):
    """Some clients as an engine sees them: everything on its device, but for samples that do not fit there at once."""

    shared: Tree  # [G, ...]
    reads: Tensor  # [C] int64: each client's group
    personal: Tree  # [C, ...]
    samples: Samples  # of the C clients, in the same order

    @property
    def device(self) -> torch.device:
        """Where the clients are trained."""
        return next(iter(self.shared.values())).device

    def take(self, members: Tensor) -> Cohort:
        """Return some of the clients, positions ``[c]`` in ascending order."""
        if len(members) == len(self.reads):
            return self
        where = members.to(self.device)
        return Cohort(self.shared, self.reads[members], tree_index(self.personal, where), self.samples.take(members))


class Finished(NamedTuple):
    """Some clients after their round."""

    positions: Tensor  # [c] int64, in the cohort
    uploads: Tree  # [c, ...]
    personal: Tree  # [c, ...]


@dataclass(frozen=True)
class Batching(Settings):
    """How a client walks through its samples in a round.

    Attributes:
        batch_size: samples per step; 0 takes all of a client's samples at once. -1 chooses it from the clients' numbers
            of samples, so that a median client takes several steps in a round, where the learning rate is left to the
            data too; else it is 128.
        local_epochs: passes over the client's samples in a round. The last batch of a pass may be smaller. 0 chooses
            likewise; with a given learning rate it is 1.
        local_steps: when above 0, exactly this many steps instead, passing over the samples as often as that takes.
        drop_short: leave out the last batch of a pass where it is smaller than the others: a few samples have poor
            statistics for batch normalisation. The next pass shuffles anew, so that all samples have their turn. A
            client with fewer samples than a batch takes them all.
    """

    batch_size: int = field(default=128, metadata={"min": -1})
    local_epochs: int = field(default=1, metadata={"min": 0})
    local_steps: int = field(default=0, metadata={"min": 0})
    drop_short: bool = field(default=False, metadata={"came_later": True})

    def widths(self, sizes: Tensor) -> Tensor:
        """Return the size of a full batch of each client, ``[C]``."""
        return sizes if self.batch_size == 0 else sizes.clamp(max=self.batch_size)

    def steps_per_pass(self, sizes: Tensor) -> Tensor:
        """Return how many batches each client has, ``[C]``."""
        widths = self.widths(sizes)
        return sizes // widths if self.drop_short else _ceil_divide(sizes, widths)

    def num_steps(self, sizes: Tensor) -> Tensor:
        """Return how many steps each client takes in a round, ``[C]``."""
        if self.local_steps:
            return torch.full_like(sizes, self.local_steps)
        return self.local_epochs * self.steps_per_pass(sizes)


class Work(NamedTuple):
    """What the C clients of a cohort do in a round."""

    batching: Batching  # how they walk through their samples
    keys: Tensor  # [C] the clients' keys for this round
    learning_rate: float
    scales: Tensor | None = None  # [C] what it is multiplied by for each client; None for one

    def take(self, members: Tensor) -> Work:
        """Return the work of some of the clients, positions ``[c]``."""
        scales = None if self.scales is None else self.scales[members]
        return self._replace(keys=self.keys[members], scales=scales)


@dataclass(frozen=True)
class Engine(Settings, ABC):
    """Runs a method for many clients. All engines agree up to rounding."""

    note: str = field(default="", kw_only=True)  # why it is not the one hoped for, where it is not
    # By method and solver that clients have had: an engine may record what comes back.
    _variants: dict[Any, Algorithm] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def most_together(self) -> int:
        """How many clients were trained at once at most, so far."""
        return 1

    @abstractmethod
    def train(self, algorithm: Algorithm, cohort: Cohort, work: Work) -> Iterator[Finished]:
        """Train every client of the cohort for one round."""

    @abstractmethod
    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        """Sum ``function`` over each client's samples, ``[C, ...]`` float64 on the CPU; one at least must have some."""

    @abstractmethod
    def fit(self, algorithm: Algorithm, cohort: Cohort, max_iterations: int | None = None) -> Tree | None:
        """Fit everybody's v_t as clients unseen in training do (``Algorithm.adapt``), ``[C, ...]``, and train nothing.

        What the cohort has of v_t plays no part. None where v_t can't be had from the scores of samples.
        """

    def train_dealt(
        self, algorithm: Algorithm, cohort: Cohort, work: Work, names: Tensor, num_steps: int | None = None
    ) -> Iterator[Finished]:
        """Train the cohort, those with the same solver together; the keys of their ``names`` ``[C]`` choose it."""
        for solver, members in algorithm.solver.among(names):
            own = algorithm
            if solver is not algorithm.solver:  # one of those that it deals out (:class:`~fedem.solvers.Various`)
                own = self._variants.setdefault((algorithm, solver), algorithm.with_solver(solver))
            # A solver may walk through the samples otherwise than ``work`` says.
            walk = Batching(0, local_steps=solver.whole_steps) if solver.whole_steps else work.batching
            if num_steps is not None:
                walk = replace(walk, local_steps=num_steps)
            for chunk in self.train(own, cohort.take(members), work.take(members)._replace(batching=walk)):
                yield chunk._replace(positions=members[chunk.positions])


class Positions(NamedTuple):
    """One batch of each active client: positions among the client's own samples."""

    positions: Tensor  # [A, B] int64; padding repeats the last sample
    mask: Tensor  # [A, B] bool
    padded: bool  # whether the mask is false anywhere

    @classmethod
    def first(cls, counts: Tensor, device: torch.device, width: int = 0) -> Positions:
        """Return the first ``counts`` ``[A]``, on the CPU, positions of each client, ``width`` at least."""
        width, least = max(width, int(counts.max())), int(counts.min())
        counts, columns = sent(counts, device)[:, None], torch.arange(width, device=device)
        return cls(torch.minimum(columns, counts - 1), columns < counts, padded=least < width)


class BatchPlan:
    """All batches of C clients in one round, shuffled with one sort by their ``keys`` ``[C]`` for this round."""

    def __init__(self, batching: Batching, sizes: Tensor, keys: Tensor, device: torch.device):
        # What decides on shapes stays on the CPU: asking a GPU would wait for all that it has still to do.
        self._sizes, self._widths, self._device = sizes, batching.widths(sizes), device
        self._steps_per_epoch = batching.steps_per_pass(sizes)
        self.steps = batching.num_steps(sizes)
        self.keys = sent(keys, device)
        epochs = _ceil_divide(self.steps, self._steps_per_epoch)
        # A segment is one client's pass; rows are sorted by (segment, hash).
        segment_client = torch.arange(len(sizes)).repeat_interleave(epochs)
        first_segment = epochs.cumsum(0) - epochs
        segment_epoch = torch.arange(len(segment_client)) - first_segment[segment_client]
        segment_sizes = sizes[segment_client]
        starts = segment_sizes.cumsum(0) - segment_sizes
        self._starts = starts[first_segment]
        total = int(segment_sizes.sum())
        numbers = torch.arange(len(segment_client), device=device)
        segment = numbers.repeat_interleave(sent(segment_sizes, device), output_size=total)
        position = torch.arange(total, device=device) - sent(starts, device)[segment]
        own = derive(self.keys[sent(segment_client, device)], sent(segment_epoch, device))
        words = derive(own[segment], position)
        self._order = _shuffled(segment, words, position, len(segment_client), int(sizes.max()))

    def counts(self, step: int | Tensor, which: slice | Tensor) -> Tensor:
        """Return how many samples are in batch number ``step``, one for all or of each, of ``which`` clients."""
        return self._find(step, which)[0]

    def batch(self, step: int | Tensor, which: slice | Tensor, width: int = 0) -> Positions:
        """Return batch ``step``, ``width`` at least, of ``which`` clients; who has no such batch gets its last."""
        counts, begins = self._find(step, which)
        where = Positions.first(counts, self._device, width)
        return where._replace(positions=self._order[sent(begins, self._device)[:, None] + where.positions])

    def _find(self, step: int | Tensor, which: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the size of each batch, and where it begins."""
        sizes, widths, each = self._sizes[which], self._widths[which], self._steps_per_epoch[which]
        taken = torch.clamp(self.steps[which] - 1, max=step)
        epoch, index = taken // each, taken % each
        counts = torch.minimum(widths, sizes - index * widths)
        return counts, self._starts[which] + epoch * sizes + index * widths


def blocks(sizes: Tensor, width: int, device: torch.device) -> Iterator[tuple[int, Positions]]:
    """Walk through all samples of clients sorted by falling ``sizes`` ``[C]``, ``width`` columns at a time, in order.

    Yields the number of active clients and their positions; clients without samples never become active.
    """
    for start in range(0, int(sizes.max()) if len(sizes) else 0, width):
        num_active = int((sizes > start).sum())
        where = Positions.first((sizes[:num_active] - start).clamp(max=width), device)
        yield num_active, where._replace(positions=start + where.positions)


def similar(sizes: list[int]) -> Iterator[slice]:
    """Cut falling ``sizes`` where they have halved."""
    start = 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or 2 * sizes[end] < sizes[start]:
            yield slice(start, end)
            start = end


def alike(sizes: Tensor, most: int) -> Iterator[Tensor]:
    """Cut clients into those of similar ``sizes`` ``[C]``, with ``most`` samples at most once they are padded.

    Yields positions, largest clients first. Clients without samples are among themselves.
    """
    order = sizes.argsort(descending=True, stable=True)
    for run in similar(sizes[order].tolist()):
        yield from order[run].split(max(1, most // max(1, int(sizes[order[run.start]]))))


def _shuffled(segment: Tensor, words: Tensor, position: Tensor, num_segments: int, largest: int) -> Tensor:
    """Return the positions ordered by segment, then by 32 bits of their word, then by position."""
    hashes, position_bits = words & 0xFFFFFFFF, largest.bit_length()
    if num_segments.bit_length() + position_bits > 31:
        return position[torch.sort((segment << 32) | hashes, stable=True).indices]
    # All three fit into one word: sorting values is much faster than finding an order, and numpy's sort than torch's.
    packed = (((segment << 32) | hashes) << position_bits) | position
    ordered = torch.sort(packed).values if packed.is_cuda else torch.from_numpy(np.sort(packed.numpy()))
    return ordered & ((1 << position_bits) - 1)


def _ceil_divide(a: Tensor, b: Tensor) -> Tensor:
    return -(-a // b)


@final
@dataclass(frozen=True)
class OneByOne(Engine):
    """The reference: one client after the other, as a deployed client would run. Any module works."""

    def train(self, algorithm: Algorithm, cohort: Cohort, work: Work) -> Iterator[Finished]:
        for position in range(len(cohort.reads)):
            rate = work.learning_rate if work.scales is None else work.learning_rate * float(work.scales[position])
            trained = _run(algorithm, _client(cohort, position), work.batching, work.keys[position], rate)
            upload, kept = (tree_map(lambda leaf: leaf[None], tree) for tree in (trained.upload, trained.personal))
            yield Finished(torch.tensor([position]), upload, kept)

    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        rows = [function(*_client(cohort, position)) for position in range(len(cohort.reads))]
        return {name: torch.stack([row[name] for row in rows]).double().cpu() for name in rows[0]}

    def fit(self, algorithm: Algorithm, cohort: Cohort, max_iterations: int | None = None) -> Tree | None:
        trees: list[Tree] = []
        for position in range(len(cohort.reads)):
            shared, _, *data, everything = _client(cohort, position)
            # A column depends on its own sample alone, so a large client is scored piece by piece.
            pieces = zip(*(array.split(_SCORED) for array in data), strict=True)
            scores = tree_cat([algorithm.score(shared, *piece) for piece in pieces], -1)
            tree = algorithm.adapt(shared, scores, everything, max_iterations)
            if tree is None:
                return None
            trees.append(tree)
        return tree_stack(trees)


def _client(cohort: Cohort, position: int) -> _Client:
    inputs, targets = cohort.samples.client(position).to(cohort.device)
    everything = torch.ones(len(targets), dtype=torch.bool, device=inputs.device)
    shared = tree_index(cohort.shared, int(cohort.reads[position]))
    return shared, tree_index(cohort.personal, position), inputs, targets, everything


def _run(algorithm: Algorithm, client: _Client, batching: Batching, key: Tensor, learning_rate: float) -> Trained:
    shared, personal, inputs, targets, everything = client
    device = inputs.device
    rate = torch.tensor(learning_rate, dtype=algorithm.model.dtype, device=device)
    plan = BatchPlan(batching, torch.tensor([len(targets)]), key[None], device)
    scores = algorithm.score(shared, inputs, targets) | algorithm.survey(shared, personal, inputs, targets, everything)
    local, samples = algorithm.begin(shared, personal, scores, everything)
    layer_key = derive(plan.keys[0], STOCHASTIC_LAYERS)
    with torch.random.fork_rng(devices=[device] if inputs.is_cuda else []):
        # For layers of a user's own that draw from torch's generators: the same draws whoever else is trained.
        torch.default_generator.manual_seed(int(layer_key))
        if inputs.is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int(layer_key))
        steps = count()
        for stage in algorithm.stages(plan.steps):
            local = local if stage.enter is None else stage.enter(local)
            for step in islice(steps, int(stage.num_steps)):
                rows = plan.batch(step, slice(1)).positions[0]
                weights = torch.full((len(rows),), 1 / len(rows), dtype=algorithm.model.dtype, device=device)
                columns = tree_map(lambda leaf, rows=rows: leaf[..., rows], samples)
                batch = Batch(inputs[rows], targets[rows], weights, columns, derive(layer_key, step))
                local = stage.step(local, batch, rate)
    return algorithm.finish(local)
