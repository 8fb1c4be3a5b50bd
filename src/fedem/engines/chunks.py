"""Clients that are stacked together, and what they read.

Shapes: C clients of the cohort, c of a chunk, A active, B the width of a batch, n samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedem.algorithms.base import Algorithm
from fedem.engines.base import Cohort
from fedem.engines.batches import Positions
from fedem.samples import Pool, Samples
from fedem.tree import Tree, tree_floats, tree_index


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

    def part(self, which: slice) -> Chunk:
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
        first = self.part(slice(num_active))
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
    if type(algorithm).score is Algorithm.score:
        return {}
    samples, total = cohort.samples, len(cohort.samples)
    pieces = [
        algorithm.score(shared, *samples.span(start, min(start + rows, total)).to(cohort.device))
        for start in range(0, total, rows)
    ]
    return {name: torch.cat([piece[name] for piece in pieces], dim=-1) for name in pieces[0]}
