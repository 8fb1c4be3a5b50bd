"""``python -m benchmarks.published_labels``: the synthetic mixture with labels as the published code leaves them.

That code draws how many samples n_m a client has of each component, labels the first n_m rows by component m, and never
moves on: the next component writes over the same rows, and those beyond the largest n_m keep the label 0. Each method
is trained on the samples drawn as the paper says and on the same ones with such labels, with the settings shipped. The
methods and the paper's figures are those of ``experiments/table2``, or of another experiment: ``--table table3`` for
clients held out, ``mocha``, ``decentralised`` or ``time_constrained``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from fedem.data.dataset import Dataset, Truth
from fedem.data.federation import PARTS
from fedem.data.samples import Pool, Samples
from fedem.data.synthetic import Synthetic
from fedem.runs.trainer import run
from fedem.studies import experiments
from fedem.studies.experiments import SLASH, figure_of

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
DATA = "Synthetic"
METHODS = {  # of tables with more methods than are of use here
    "table2": "Local,FedAvg,FedAvg+,pFedMe,FedEM",
    "table3": "FedAvg,FedAvg+,FedEM,FedEM one update",
    "decentralised": "D-FedEM",
}


def left_as_published(samples: Samples, truth: Truth, rng: np.random.Generator) -> Samples:
    """Return the samples with labels written over each other, client by client."""
    inputs, offsets = samples.pool.inputs, samples.offsets.tolist()
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    for weights, (start, end) in zip(truth.mixture_weights.double().numpy(), pairwise(offsets), strict=True):
        counts = rng.multinomial(end - start, weights / weights.sum())
        for component, count in zip(truth.components, counts, strict=True):
            logits = (inputs[start : start + count] @ component).double().numpy()
            logits += truth.noise_scale * rng.standard_normal(count)
            drawn = rng.random(count) < 1 / (1 + np.exp(-logits))
            labels[start : start + count] = torch.from_numpy(drawn).long()
    return Samples(Pool(inputs, labels), samples.offsets)


def published(dataset: Dataset, seed: int) -> Dataset:
    """Return the data with such labels in all parts."""
    assert dataset.truth is not None
    rng, made, truth = np.random.default_rng(seed), dataset.federation, dataset.truth
    train, validation, test = (left_as_published(made.part(name), truth, rng) for name in PARTS)
    return Dataset(replace(made, train=train, validation=validation, test=test).check())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on both kinds of labels, and print the figures beside the paper's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_labels", description=__doc__)
    parser.add_argument("--table", default="table2", help="which experiment")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="as many as the experiment has by default")
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--test", type=int, default=5000, help="test samples of each client")
    given = parser.parse_args(arguments)
    experiment = experiments.find(EXPERIMENTS, given.table)
    methods = METHODS.get(given.table, ",".join(experiment.axes["method"])).split(",")
    found: dict[tuple[str, str], list[list[float]]] = {}
    zeros = []
    for seed in range(given.seeds):
        drawn = Synthetic(num_clients=given.clients, num_test=given.test).make(seed)
        left = published(drawn, seed)
        zeros.append([float((each.federation.test.targets == 0).double().mean()) for each in (drawn, left)])
        with TemporaryDirectory() as nowhere:  # no run is written, nor one taken for it
            entries = experiments.plan(experiment, Path(nowhere), [seed], {"data": [DATA], "method": methods})
        for entry in entries:
            rounds = given.rounds or entry.config.run.rounds
            config = entry.config.replace("run", rounds=rounds, evaluate_every=0)
            for kind, dataset in (("drawn", drawn), ("left", left)):
                summary = dict(run(config, dataset).summary)
                figures = [
                    100 * value for name in experiment.figures if (value := figure_of(summary, name)) is not None
                ]
                assert len(figures) == len(experiment.figures)
                found.setdefault((entry.labels["method"], kind), []).append(figures)
                print(f"{entry.title}, {kind}: {_cell(figures)}", flush=True)
    shares = " and ".join(f"{100 * share:.0f}%" for share in np.mean(zeros, axis=0))
    print(f"\n{', '.join(experiment.figures)}, %. Labels that are 0: {shares}.\n")
    print("| | labels drawn for all rows | as published | the paper |\n| --- | ---: | ---: | ---: |")
    for method in methods:
        ours = [np.mean(found[method, kind], axis=0) for kind in ("drawn", "left")]
        paper = experiment.paper[SLASH.join((DATA, method))]
        print(f"| {method} | {' | '.join(map(_cell, (*ours, paper)))} |")


def _cell(figures: Sequence[float | None]) -> str:
    return " / ".join("-" if figure is None else f"{figure:.1f}" for figure in figures)


if __name__ == "__main__":
    main()
