"""``python -m benchmarks.methods``: a round of every method beside what its gradient evaluations should cost.

The floor is counted, not declared: one round is run client by client with a model that counts the samples that pass
through it. A pass with its gradient counts one, a pass alone a third. FedAvg's time for the same count is the measure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.arguments import add_names
from benchmarks.engine import SEED
from benchmarks.measure import Disturbance, Effort, Timing, environment, measure
from fedem.core.tree import Tree
from fedem.data.dataset import Dataset
from fedem.data.synthetic import Synthetic
from fedem.engines import OneByOne
from fedem.methods import METHODS
from fedem.models import Model
from fedem.runs.config import Config
from fedem.runs.rounds import Training
from fedem.runs.trainer import Trainer

REFERENCE = "fedavg"
LINEAR, LAYERED = "linear", "mlp"  # the second where a method tells layers apart
MODELS: dict[str, dict[str, Any]] = {LINEAR: {}, LAYERED: {"hidden": 20, "layers": 1}}
TIMED = [name for name in METHODS if name != "fedbn"]  # which takes networks that normalise batches, for images
_FORWARD = 1 / 3
"""cost of a pass without a gradient: of three matrix products one remains"""


class CountingModel(Model):
    """A model that counts the samples that pass through it, in gradients."""

    gradients = 0.0

    def training_losses(
        self, parameters: Tree, inputs: Tensor, targets: Tensor, mask: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Tree]:
        """Count whole gradients."""
        self.gradients += len(targets)
        return super().training_losses(parameters, inputs, targets, mask, key)

    def losses(self, parameters: Tree, inputs: Tensor, targets: Tensor) -> Tensor:
        """Count passes alone."""
        self.gradients += _FORWARD * len(targets)
        return super().losses(parameters, inputs, targets)


def model_of(method: str) -> str:
    """Return the model that a method is timed with."""
    return LAYERED if METHODS[method].needs_layers else LINEAR


def prepare(method: str, model: str, dataset: Dataset) -> Training:
    """Prepare a method with the settings shipped for it."""
    given = {"run": {"device": "cpu"}, "data": {"name": "synthetic"}, "method": {"name": method}}
    given["model"] = {"name": model, **MODELS[model]}
    return Trainer.prepare(Config.build(given), dataset).training


def count_gradients(training: Training, rounds: Sequence[int]) -> float:
    """Count the gradients of some rounds, on average."""
    algorithm = training.algorithm
    model = CountingModel(algorithm.model.build, algorithm.model.loss, algorithm.model.dtype)
    model.not_stackable = "it counts, and a stack of models would count once"
    counting = replace(training, algorithm=replace(algorithm, model=model), engine=OneByOne())
    state = counting.init()
    for index in rounds:
        counting.step(replace(state, round=index))
    return model.gradients / len(rounds)


def time_rounds(training: Training, effort: Effort) -> Timing:
    """Time rounds one after the other."""
    state = training.init()

    def advance() -> None:
        nonlocal state
        state, _ = training.step(state)

    return measure(advance, effort)


def run_all(source: Synthetic, efforts: Mapping[str, Effort], names: Sequence[str], console: Console) -> dict[str, Any]:
    """Time and count all methods, each beside FedAvg at that moment; print and return the figures."""
    dataset = source.make(SEED)
    references = {model: prepare(REFERENCE, model, dataset) for model in (LINEAR, LAYERED)}
    units = {model: count_gradients(reference, [0]) for model, reference in references.items()}
    disturbance, figures = Disturbance(), {}
    for name in names:
        model = model_of(name)
        effort = efforts[model]
        rounds = range(effort.warm_up, effort.warm_up + effort.repeats)
        training = prepare(name, model, dataset)
        state = training.init()
        # Where the number of steps is drawn for each round, all timed rounds are counted.
        varying = (
            training.mixer.plan(state.shared, state.memory, training.round(0, training.sample(0))).num_steps is not None
        )
        gradients = count_gradients(training, rounds if varying else [0]) / units[model]
        beside = time_rounds(references[model], effort)
        timing = time_rounds(training, effort)
        seconds = sum(timing.repeats) / len(timing.repeats) if varying else timing.median
        figures[name] = {
            "model": model,
            "seconds": seconds,
            "fedavg_seconds": beside.median,
            "gradients": gradients,
            "ratio": seconds / beside.median / gradients,
        }
    _print(console, figures)
    return {"environment": environment(), "methods": figures, "cores_busy_with_others": disturbance.cores()}


def _print(console: Console, figures: dict[str, dict[str, Any]]) -> None:
    table = Table(title="A round beside FedAvg's, per gradient", box=box.ASCII2, title_justify="left")
    table.add_column("method")
    table.add_column("model")
    for heading in ("seconds", "FedAvg's", "gradients", "ratio"):
        table.add_column(heading, justify="right")
    for name, row in figures.items():
        table.add_row(
            name,
            row["model"],
            f"{row['seconds']:.4f}",
            f"{row['fedavg_seconds']:.4f}",
            f"{row['gradients']:.2f}",
            f"{row['ratio']:.2f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print and, if asked, write the figures to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny data; its figures mean nothing")
    add_names(parser, "--methods", "method", TIMED)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    options = parser.parse_args(arguments)
    source = Synthetic(num_validation=0, num_test=0)
    effort = {LINEAR: Effort(20, 30), LAYERED: Effort(5, 8)}  # recordings are made on the way
    if options.quick:
        source = Synthetic(num_clients=5, dimension=6, max_samples=200, num_validation=0, num_test=0)
        effort = dict.fromkeys(effort, Effort(1, 2))
    figures = run_all(source, effort, options.methods, Console(highlight=False))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
