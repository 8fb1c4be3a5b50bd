"""``python -m benchmarks.gpu``: rounds of FedEM with deep networks on a GPU, beside the floor under them.

Random samples in the shapes of the paper's data: EMNIST (100 clients by a Dirichlet of 0.4, 48,855 images for
training), CIFAR-10 (80 clients of 513 images for training) and Shakespeare (56 roles, 104,066 windows); M = 3, batches
of 128, one epoch.

The floor is one model, in torch's own layers, that trains on as many samples in large batches and scores as many: M
passes over all samples each way, with nothing stacked, drawn or averaged. On a CPU everything is far smaller.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import images
from benchmarks.arguments import add_names
from benchmarks.engine import SEED, advancing
from benchmarks.measure import Effort, environment, measure, operations
from fedem.core.precision import PRECISIONS, products, where_models_compute
from fedem.data.dataset import Dataset
from fedem.data.federation import Federation
from fedem.runs.config import Config, Sections
from fedem.runs.recipe import find_device
from fedem.runs.trainer import Trainer

NUM_COMPONENTS = 3
FLOOR_ROWS = 2048  # a batch that fills a GPU


class Job(NamedTuple):
    """A network, and the shape of the data that it is trained on."""

    data: str
    model: str
    make: Callable[[float], Federation]  # of a share of the paper's size
    official: float | None = None  # seconds a round of the code published with the paper, on an H200


def _emnist(share: float) -> Federation:
    return images.make_federation(max(2, round(100 * share)), max(124, round(81_425 * share)))


def _cifar(share: float) -> Federation:
    rng, clients = np.random.default_rng(SEED), max(2, round(80 * share))
    samples = 855 if share == 1 else 40  # of which 60% are for training
    pixels = rng.integers(0, 256, (clients, samples, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 10, (clients, samples))
    return Federation.from_clients(list(zip(pixels, labels, strict=True)), validation=0.2, test=0.2, seed=SEED)


def _shakespeare(share: float) -> Federation:
    rng, clients = np.random.default_rng(SEED), max(2, round(56 * share))
    sizes = rng.dirichlet(np.ones(clients)) * 104_066 * share
    pairs = [(rng.integers(1, 80, (n, 80)), rng.integers(0, 80, n)) for n in np.maximum(sizes.astype(int), 10)]
    return Federation.from_clients(pairs, validation=0.2, test=0.2, seed=SEED)


JOBS = {
    "EMNIST, CNN": Job("emnist", "cnn", _emnist, official=43.6),
    "CIFAR-10, MobileNet-v2": Job("cifar10", "mobilenet_v2", _cifar, official=120.5),
    "CIFAR-10, ResNet-18": Job("cifar10", "resnet18", _cifar),
    "CIFAR-10, EfficientNet-Lite0": Job("cifar10", "efficientnet_lite0", _cifar),
    "Shakespeare, LSTM": Job("shakespeare", "lstm", _shakespeare),
}


def run_job(job: Job, precision: str, device: torch.device, share: float, effort: Effort) -> dict[str, Any]:
    """Time rounds and the floor under them; count launches and the most memory that tensors took."""
    federation = job.make(share)
    asked: Sections = {
        "data": {"name": job.data},
        "method": {"name": "fedem", "num_components": NUM_COMPONENTS},
        "model": {"name": job.model},
        "run": {"device": str(device), "precision": precision, "engine": "stacked", "evaluate_every": 0},
        "batching": {"batch_size": 128, "local_epochs": 1},
        "schedule": {"learning_rate": 0.01},
    }
    trainer = Trainer.prepare(Config.build(asked), Dataset(federation)).placed()
    training, on_gpu = trainer.training, device.type == "cuda"
    with products(precision, device):
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        advance = advancing(training)
        rounds = measure(advance, effort)
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
        launches = sum(kernel.launches for kernel in operations(advance, device)) if on_gpu else None
        pool = federation.train.to(device)
        alone = _one_model(trainer, pool.read(torch.arange(len(pool), device=device)), precision)
        with where_models_compute():
            floor = measure(alone, effort)
    return {
        "seconds": rounds.median,
        "floor_seconds": floor.median,
        "ratio": rounds.median / floor.median,
        "launches": launches,
        "peak_gpu_bytes": peak,
        "most_together": training.engine.most_together,
        "times_the_official_code": None if job.official is None or share < 1 else job.official / rounds.median,
    }


def _one_model(trainer: Trainer, samples: tuple[Tensor, Tensor], precision: str) -> Callable[[], None]:
    """Return what trains one model on all samples, and scores them, as often as there are components."""
    model, device = trainer.recipe.model, samples[1].device
    module = model.build().to(device)
    for leaf in module.parameters():
        if leaf.ndim == 4:
            leaf.data = leaf.data.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = samples

    def outputs(rows: slice) -> Tensor:
        own = model.prepare(inputs[rows])
        own = own.contiguous(memory_format=torch.channels_last) if own.ndim == 4 else own
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            return module(own).float()

    def passes() -> None:
        parts = [slice(first, first + FLOOR_ROWS) for first in range(0, len(targets), FLOOR_ROWS)]
        for _ in range(NUM_COMPONENTS):
            module.eval()
            with torch.no_grad():
                for rows in parts:
                    outputs(rows)
            module.train()
            for rows in parts:
                optimizer.zero_grad()
                cross_entropy(outputs(rows), targets[rows]).backward()
                optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return passes


def main(arguments: Sequence[str] | None = None) -> None:
    """Time each network in each precision, print a table and, if asked, write all figures to a file as they come."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument(
        "--jobs", default="", help="words, with commas between, that the names of jobs have: lstm,resnet"
    )
    add_names(parser, "--precisions", "precision", PRECISIONS, "tf32,bfloat16")
    parser.add_argument("--quick", action="store_true", help="a smoke run on few samples; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    options = parser.parse_args(arguments)
    device, console = find_device(options.device), Console(highlight=False, width=160)
    on_gpu = device.type == "cuda"
    gpu = {"gpu": torch.cuda.get_device_name(device)} if on_gpu else {}
    figures: dict[str, Any] = {"environment": environment() | gpu, "jobs": {}}
    words = options.jobs.lower().split(",")
    jobs = {name: job for name, job in JOBS.items() if any(word in name.lower() for word in words)}
    if not jobs:
        parser.error(f"no job's name has any of {options.jobs!r}; allowed: parts of {'; '.join(JOBS)}.")
    table = Table(title=f"One round of FedEM, M = {NUM_COMPONENTS}", box=box.ASCII2, title_justify="left")
    for heading in ("", "seconds", "floor", "ratio", "launches", "peak, GiB", "together", "x official"):
        table.add_column(heading, justify="right" if heading else "left")
    share, effort = (0.02, Effort(0, 1)) if options.quick or not on_gpu else (1.0, Effort(3, 3))
    for name, job in jobs.items():
        for precision in options.precisions if on_gpu else ("float32",):
            row = figures["jobs"][f"{name}, {precision}"] = run_job(job, precision, device, share, effort)
            peak, launches = row["peak_gpu_bytes"], row["launches"]
            table.add_row(
                f"{name}, {precision}",
                *(f"{row[key]:.2f}" for key in ("seconds", "floor_seconds", "ratio")),
                "" if launches is None else f"{launches:,}",
                "" if peak is None else f"{peak / 2**30:.1f}",
                str(row["most_together"]),
                "" if row["times_the_official_code"] is None else f"{row['times_the_official_code']:.0f}",
            )
            if options.out:
                options.out.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
