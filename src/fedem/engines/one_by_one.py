"""The reference engine: one client after the other, as a deployed client would run. Any module works."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.core.random import STOCHASTIC_LAYERS, derive
from fedem.core.tree import Tree, tree_index, tree_map
from fedem.engines.base import Batching, BatchPlan, Cohort, Engine, Finished, Tally, Work
from fedem.methods.base import Algorithm, Batch, Trained

_Client = tuple[Tree, Tree, Tensor, Tensor, Tensor]
"""what a client reads and keeps, its samples ``[n, ...]`` and ``[n]``, and a mask of all of them"""


@final
@dataclass(frozen=True)
class OneByOne(Engine):
    """One client after the other."""

    def train(self, algorithm: Algorithm, cohort: Cohort, work: Work) -> Iterator[Finished]:
        for position in range(len(cohort.reads)):
            rate = work.learning_rate if work.scales is None else work.learning_rate * float(work.scales[position])
            trained = _run(algorithm, _client(cohort, position), work.batching, work.keys[position], rate)
            upload, kept = (tree_map(lambda leaf: leaf[None], tree) for tree in (trained.upload, trained.personal))
            yield Finished(torch.tensor([position]), upload, kept)

    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        rows = [function(*_client(cohort, position)) for position in range(len(cohort.reads))]
        return {name: torch.stack([row[name] for row in rows]).double().cpu() for name in rows[0]}


def _client(cohort: Cohort, position: int) -> _Client:
    inputs, targets = cohort.samples.client(position).to(cohort.device)
    everything = torch.ones(len(targets), dtype=torch.bool, device=inputs.device)
    shared = tree_index(cohort.shared, int(cohort.reads[position]))
    return shared, tree_index(cohort.personal, position), inputs, targets, everything


def _run(algorithm: Algorithm, client: _Client, batching: Batching, key: Tensor, learning_rate: float) -> Trained:
    """Run one client's round."""
    shared, personal, inputs, targets, everything = client
    device = inputs.device
    rate = torch.tensor(learning_rate, dtype=algorithm.model.dtype, device=device)
    scores = algorithm.score(shared, inputs, targets) | algorithm.survey(shared, personal, inputs, targets, everything)
    local, samples = algorithm.begin(shared, personal, scores, everything)
    plan = BatchPlan(batching, torch.tensor([len(targets)]), key[None], device)
    layer_key = derive(plan.keys[0], STOCHASTIC_LAYERS)
    with torch.random.fork_rng(devices=[device] if inputs.is_cuda else []):
        # For layers of a user's own that draw from torch's generators: the same draws whoever else is trained.
        torch.default_generator.manual_seed(int(layer_key))
        if inputs.is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int(layer_key))
        for step in range(int(plan.steps)):
            rows = plan.batch(step, 0, 1).positions[0]
            weights = torch.full((len(rows),), 1 / len(rows), dtype=algorithm.model.dtype, device=device)
            columns = tree_map(lambda leaf, rows=rows: leaf[..., rows], samples)
            batch = Batch(inputs[rows], targets[rows], weights, columns, derive(layer_key, step))
            local = algorithm.step(local, batch, rate)
    return algorithm.finish(local)
