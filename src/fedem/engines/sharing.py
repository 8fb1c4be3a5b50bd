"""Engines of several processes: each runs its share of the clients, and all get everybody's results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.algorithms.base import Algorithm
from fedem.engines.base import Cohort, Engine, Finished, Tally
from fedem.engines.batches import Batching
from fedem.team import Team, placed
from fedem.tree import Tree


def share_out(engine: Engine, team: Team) -> Engine:
    """Return an engine that works as ``engine`` does, by all processes together."""
    return engine if team.size == 1 else Shared(engine, team)


@final
@dataclass(frozen=True)
class Shared(Engine):
    """Another engine in each process. Fewer clients than processes are run by all of them, and nothing is exchanged."""

    base: Engine
    team: Team

    @property
    def most_together(self) -> int:
        """As this process has it."""
        return self.base.most_together

    def train(
        self,
        algorithm: Algorithm,
        cohort: Cohort,
        batching: Batching,
        keys: Tensor,
        learning_rate: float,
        scales: Tensor | None = None,
    ) -> Iterator[Finished]:
        """Train every client; all finish together."""
        sizes = cohort.samples.sizes
        if len(sizes) < self.team.size:
            yield from self.base.train(algorithm, cohort, batching, keys, learning_rate, scales)
            return
        own = self.team.share(sizes)
        theirs = None if scales is None else scales[own]
        chunks = list(self.base.train(algorithm, cohort.take(own), batching, keys[own], learning_rate, theirs))
        uploads, personal = (
            placed([(own[chunk.positions], getattr(chunk, name)) for chunk in chunks], len(sizes))
            for name in ("uploads", "personal")
        )
        yield Finished(torch.arange(len(sizes)), *self.team.total(uploads, personal))

    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        """Sum ``function`` over each client's samples, ``[C]`` float64 on the CPU."""
        sizes = cohort.samples.sizes
        # In every process somebody must have samples.
        if int((sizes > 0).sum()) < self.team.size:
            return self.base.tally(algorithm, function, cohort)
        own = self.team.share(sizes)
        sums = self.base.tally(algorithm, function, cohort.take(own))
        return self.team.total(placed([(own, sums)], len(sizes)))[0]
