"""``python -m benchmarks.images``: a round of FedEM on images, by fedem and in a plain PyTorch loop.

Random images in the shape of the paper's EMNIST: 81,425 of 28 x 28 pixels and 62 classes, dealt to 100 clients by a
Dirichlet of 0.4, 60% of each client's for training; the paper's network, M = 3, batches of 128, one epoch. On a CPU,
where such a round would take many minutes, 5 clients and a fortieth of the images. The engine is the one that suits the
device: clients are stacked on a GPU, and trained one by one on a CPU, where convolutions keep the cores busy.

Shapes: T clients, M components, n samples of a client, B of a batch.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.agreement import TOLERANCE, DisagreementError
from benchmarks.engine import SEED
from benchmarks.measure import Disturbance, Effort, Timing, environment, measure
from benchmarks.methods import time_rounds
from benchmarks.plain_loop import MOMENTUM, WEIGHT_DECAY, responsibilities
from fedem.core.precision import products, where_models_compute
from fedem.core.tree import Tree, tree_index
from fedem.data.dataset import Dataset
from fedem.data.federation import Federation
from fedem.data.partitions import Dirichlet, from_arrays
from fedem.data.samples import Samples
from fedem.engines import Stacked
from fedem.runs.config import Config, Sections
from fedem.runs.recipe import find_device
from fedem.runs.rounds import State, Training
from fedem.runs.trainer import Trainer

NUM_COMPONENTS, NUM_CLASSES, BATCH_SIZE = 3, 62, 128
LEARNING_RATE = 0.03
DROPOUT = {"dropout": 0.25, "dense_dropout": 0.5}
PLAIN = "plain loop"


class Plan(NamedTuple):
    """Sizes of a run; the defaults are the paper's."""

    num_clients: int = 100
    num_images: int = 81_425
    fedem: Effort = Effort(20, 10)  # recordings are made on the way
    plain: Effort = Effort(1, 5)


FULL = Plan()
ON_CPU = Plan(5, 2_035, fedem=Effort(1, 3), plain=Effort(1, 3))
QUICK = Plan(2, 124, fedem=Effort(1, 1), plain=Effort(1, 1))


def make_federation(num_clients: int, num_images: int) -> Federation:
    """Deal random images; their labels mean nothing, and all of them occur equally often."""
    rng = np.random.default_rng(SEED)
    images = rng.integers(0, 256, (num_images, 1, 28, 28), dtype=np.uint8)
    collection = from_arrays(images, np.arange(num_images) % NUM_CLASSES)
    assignment = Dirichlet(num_clients=num_clients, alpha=0.4).assign(collection, SEED)
    return Federation.from_pool(collection.pool, *assignment, collection.ids, seed=SEED)


def make_training(federation: Federation, device: torch.device, precision: str, **settings: Any) -> Training:
    """Prepare rounds with the engine that suits the device and EMNIST's preset, but for ``settings``."""
    asked: Sections = {
        "data": {"name": "emnist"},
        "method": {"name": "fedem", "num_components": NUM_COMPONENTS},
        "run": {"device": str(device), "precision": precision},
        "schedule": {"learning_rate": LEARNING_RATE},
        "model": {"name": "cnn", "pixel_mean": 0.0, "pixel_deviation": 1.0, **DROPOUT},
        "batching": {"batch_size": BATCH_SIZE, "local_epochs": 1},
    }
    return Trainer.prepare(Config.build(asked, settings), Dataset(federation)).placed().training


def network(dropout: float, dense_dropout: float) -> nn.Sequential:
    """Return the paper's network in torch's own layers, under the names that the package's has."""
    return nn.Sequential(
        nn.Identity(),
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Dropout(dense_dropout),
        nn.Linear(128, NUM_CLASSES),
    )


def _learnt(state: State) -> tuple[list[Tree], Tensor]:
    """Return a state's M components, by name of leaf, and its mixture weights ``[T, M]``."""
    shared = tree_index(state.shared, 0)
    return [tree_index(shared, m) for m in range(NUM_COMPONENTS)], state.personal["log_weights"].exp()


class PlainLoop:
    """FedEM as a careful user of PyTorch writes it: clients and components in turn, batches by index tensors."""

    def __init__(
        self,
        state: State,
        samples: Samples,
        batch_size: int = BATCH_SIZE,
        local_epochs: int = 1,
        dropout: Mapping[str, float] = DROPOUT,
    ):
        self.components, self.weights = _learnt(state)
        self._device = self.weights.device
        own = samples.to(self._device)
        self._clients = [own.client(position) for position in range(own.num_clients)]
        self._batch_size, self._local_epochs = batch_size, local_epochs
        self._models = [network(**dropout).to(self._device) for _ in range(NUM_COMPONENTS)]

    def advance(self) -> None:
        """Run one round."""
        total = sum(len(targets) for _, targets in self._clients)
        sums = [{name: torch.zeros_like(leaf) for name, leaf in tree.items()} for tree in self.components]
        for position, (images, targets) in enumerate(self._clients):
            for model, tree in zip(self._models, self.components, strict=True):
                model.load_state_dict(tree)
            posterior = responsibilities(self._losses(images, targets), self.weights[position])
            self.weights[position] = posterior.mean(0)
            self._train(images, targets, posterior)
            for model, tree in zip(self._models, sums, strict=True):
                for name, leaf in model.state_dict().items():
                    tree[name].add_(leaf, alpha=len(targets) / total)
        self.components = sums
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.no_grad()
    def _losses(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return each component's loss on each sample, without dropout, ``[n, M]``."""
        inputs = images.float() / 255
        return torch.stack([cross_entropy(m.eval()(inputs), targets, reduction="none") for m in self._models], dim=1)

    def _train(self, images: Tensor, targets: Tensor, posterior: Tensor) -> None:
        pairs = [
            (
                model.train(),
                torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
            )
            for model in self._models
        ]
        for _ in range(self._local_epochs):
            order = torch.randperm(len(targets), device=self._device)
            for rows in order.split(self._batch_size or len(targets)):
                inputs, labels, shares = images[rows].float() / 255, targets[rows], posterior[rows]
                for m, (model, optimizer) in enumerate(pairs):
                    loss = (shares[:, m] * cross_entropy(model(inputs), labels, reduction="none")).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()


def check_agreement(device: torch.device) -> float:
    """Compare a round of both from the same start, with full-batch steps and no dropout, on a few images.

    Returns:
        the largest difference, over components and mixture weights

    """
    still = dict.fromkeys(DROPOUT, 0.0)
    with products("float32", device):
        training = make_training(
            make_federation(QUICK.num_clients, QUICK.num_images),
            device,
            "float32",
            model=still,
            batching={"batch_size": 0, "local_epochs": 2},  # a single step would not show a difference in momentum
        )
        state = training.init()
        loop = PlainLoop(state, training.federation.train, 0, 2, still)
        loop.advance()
        after, _ = training.step(state)
    components, weights = _learnt(after)
    gaps = [(loop.weights - weights).abs().max()]
    for one, other in zip(loop.components, components, strict=True):
        gaps += [(leaf - other[name]).abs().max() for name, leaf in one.items()]
    # torch's maximum, unlike Python's, is NaN as soon as anything is.
    difference = float(torch.stack(gaps).max())
    if not difference <= TOLERANCE:
        raise DisagreementError(
            f"The plain loop and fedem's engine differ by {difference:.1e} after a round; allowed: {TOLERANCE:g}."
        )
    return difference


def run_all(plan: Plan, device: torch.device, console: Console) -> dict[str, Any]:
    """Check that both do the same mathematics, time them and print; returns all figures."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    figures: dict[str, Any] = {"environment": environment() | ({"gpu": gpu} if gpu else {}), "rounds": {}}
    console.print("{cpu}, {threads} threads, torch {torch}, Python {python}".format(**figures["environment"]))
    federation = make_federation(plan.num_clients, plan.num_images)
    figures["data"] = {"num_clients": federation.num_clients, "num_images": len(federation.train)}
    console.print("{num_clients} clients, {num_images:,} images for training".format(**figures["data"]))
    figures["agreement"] = check_agreement(device)
    console.print(f"The loop does the engine's mathematics; largest difference: {figures['agreement']:.1e}")
    disturbance = Disturbance()
    rounds = figures["rounds"]
    # On a CPU "tf32" is float32, and bfloat16 is no faster.
    for precision in ("tf32", "bfloat16") if gpu else ("float32",):
        training = make_training(federation, device, precision)
        with products(precision, device):
            timing, peak = _with_peak(partial(time_rounds, training, plan.fedem), device)
        engine = "stacked" if isinstance(training.engine, Stacked) else "one by one"
        rounds[f"{engine}, {precision}"] = timing.figures() | peak
    torch.manual_seed(SEED)
    loop = PlainLoop(training.init(), training.federation.train)
    with products("tf32", device), where_models_compute():
        timing, peak = _with_peak(partial(measure, loop.advance, plan.plain), device)
    rounds[PLAIN] = timing.figures() | peak
    for row in rounds.values():
        row["images_per_second"] = len(federation.train) / row["seconds"]
    figures["plain_to_fedem"] = _ratios(figures["rounds"])[PLAIN]
    figures["cores_busy_with_others"] = disturbance.cores()
    _print(console, figures, gpu)
    return figures


def _with_peak(timed: Callable[[], Timing], device: torch.device) -> tuple[Timing, dict[str, int]]:
    """Return the timing, and the most memory that tensors took on a GPU meanwhile."""
    gc.collect()
    if device.type != "cuda":
        return timed(), {}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return timed(), {"peak_gpu_bytes": torch.cuda.max_memory_allocated(device)}


def _ratios(rounds: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the times beside that of the first."""
    first = next(iter(rounds.values()))["seconds"]
    return {name: row["seconds"] / first for name, row in rounds.items()}


def _print(console: Console, figures: Mapping[str, Any], gpu: str | None) -> None:
    title = f"One round of FedEM on images, M = {NUM_COMPONENTS}{f', {gpu}' if gpu else ''}"
    table = Table(title=title, box=box.ASCII2, title_justify="left")
    table.add_column("")
    for heading in ("seconds a round", "ratio", "images/s", *(("GPU peak, MiB",) if gpu else ())):
        table.add_column(heading, justify="right")
    ratios = _ratios(figures["rounds"])
    for name, row in figures["rounds"].items():
        peak = [f"{row['peak_gpu_bytes'] / (1 << 20):,.0f}"] if gpu else []
        table.add_row(name, f"{row['seconds']:.3f}", f"{ratios[name]:.2f}", f"{row['images_per_second']:,.0f}", *peak)
    console.print(table)
    console.print(f"A round in the plain loop takes {figures['plain_to_fedem']:.2f} times fedem's.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print and, if asked, write the figures to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.images", description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--quick", action="store_true", help="a smoke run on few images; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    plan = QUICK if options.quick else FULL if device.type == "cuda" else ON_CPU
    figures = run_all(plan, device, Console(highlight=False))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
