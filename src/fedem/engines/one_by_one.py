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
from fedem.methods.base import Algorithm, Batch


def seed_layers(seed: int, device: torch.device) -> None:
    """Seed torch's own generators, of the CPU and of ``device``, and no others."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def run_client(
    algorithm: Algorithm,
    shared: Tree,
    personal: Tree,
    inputs: Tensor,
    targets: Tensor,
    batching: Batching,
    key: Tensor,
    learning_rate: float,
) -> tuple[Tree, Tree]:
    """Run one client's round on its samples ``[n, ...]``; returns what it uploads and its personal tree."""
    rate = torch.tensor(learning_rate, dtype=algorithm.model.dtype, device=inputs.device)
    everything = torch.ones(len(targets), dtype=torch.bool, device=inputs.device)
    scores = algorithm.score(shared, inputs, targets) | algorithm.survey(shared, personal, inputs, targets, everything)
    local, samples = algorithm.begin(shared, personal, scores, everything)
    plan = BatchPlan(batching, torch.tensor([len(targets)]), key[None], inputs.device)
    layer_key = derive(plan.keys[0], STOCHASTIC_LAYERS)
    with torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
        # For layers of a user's own that draw from torch's generator: the same draws whoever else is trained.
        seed_layers(int(layer_key), inputs.device)
        for step in range(int(plan.steps)):
            rows = plan.batch(step, 0, 1).positions[0]
            weights = torch.full((len(rows),), 1 / len(rows), dtype=algorithm.model.dtype, device=inputs.device)
            columns = tree_map(lambda leaf, rows=rows: leaf[..., rows], samples)
            batch = Batch(inputs[rows], targets[rows], weights, columns, derive(layer_key, step))
            local = algorithm.step(local, batch, rate)
    finished = algorithm.finish(local)
    return finished.upload, finished.personal


@final
@dataclass(frozen=True)
class OneByOne(Engine):
    """One client after the other."""

    def train(self, algorithm: Algorithm, cohort: Cohort, work: Work) -> Iterator[Finished]:
        for position in range(len(cohort.reads)):
            shared = tree_index(cohort.shared, int(cohort.reads[position]))
            personal = tree_index(cohort.personal, position)
            data = cohort.samples.client(position).to(cohort.device)
            rate = work.learning_rate if work.scales is None else work.learning_rate * float(work.scales[position])
            outcome = run_client(algorithm, shared, personal, *data, work.batching, work.keys[position], rate)
            upload, kept = (tree_map(lambda leaf: leaf[None], tree) for tree in outcome)
            yield Finished(torch.tensor([position]), upload, kept)

    def tally(self, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
        rows = []
        for position in range(len(cohort.reads)):
            inputs, targets = cohort.samples.client(position).to(cohort.device)
            everything = torch.ones(len(targets), dtype=torch.bool, device=inputs.device)
            shared = tree_index(cohort.shared, int(cohort.reads[position]))
            rows.append(function(shared, tree_index(cohort.personal, position), inputs, targets, everything))
        return {name: torch.stack([row[name] for row in rows]).double().cpu() for name in rows[0]}
