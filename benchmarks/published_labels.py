"""``python -m benchmarks.published_labels``: the synthetic mixture with labels as the published code leaves them.

That code draws how many samples n_m a client has of each component, labels the first n_m rows by component m, and never
moves on: the next component writes over the same rows, and those beyond the largest n_m keep the label 0. Each method
is trained on the samples drawn as the paper says and on the same ones with such labels, with the settings shipped.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from fedem.data.dataset import Dataset, Truth
from fedem.data.federation import PARTS
from fedem.data.samples import Pool, Samples
from fedem.data.synthetic import Synthetic
from fedem.runs.config import Config
from fedem.runs.trainer import run

PAPER = {  # Table 2: average and bottom decile, %
    "local": (65.7, 58.4),
    "fedavg": (68.2, 58.9),
    "fedavg+": (68.9, 60.2),
    "pfedme": (69.2, 61.2),
    "fedem": (74.7, 66.7),
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_labels", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--test", type=int, default=5000, help="test samples of each client")
    given = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    zeros = []
    for seed in range(given.seeds):
        drawn = Synthetic(num_clients=given.clients, num_test=given.test).make(seed)
        left = published(drawn, seed)
        zeros.append([float((each.federation.test.targets == 0).double().mean()) for each in (drawn, left)])
        for method in PAPER:
            for name, dataset in (("drawn", drawn), ("left", left)):
                run_settings = {"rounds": given.rounds, "seed": seed, "evaluate_every": 0}
                asked = {"data": {"name": "synthetic"}, "method": {"name": method}, "run": run_settings}
                summary = run(Config.build(asked), dataset).summary
                figures = (100 * summary["test_accuracy"], 100 * summary["bottom_decile"])
                found.setdefault((method, name), []).append(figures)
                print(f"seed {seed}, {method}, {name}: {figures[0]:.1f} / {figures[1]:.1f}", flush=True)
    shares = " and ".join(f"{100 * share:.0f}%" for share in np.mean(zeros, axis=0))
    print(f"\nLabels that are 0: {shares}.\n\n| | labels drawn for all rows | as published | the paper |")
    print("| --- | ---: | ---: | ---: |")
    for method, theirs in PAPER.items():
        ours = (np.mean(found[method, name], axis=0) for name in ("drawn", "left"))
        cells = [f"{average:.1f} / {decile:.1f}" for average, decile in (*ours, theirs)]
        print(f"| {method} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
