"""What all sides do, and how each reports it: torch and numpy alone, so that every environment can import it.

A job is FedAvg from given parameters, with given cohorts: one local epoch of SGD without momentum, a mean of the
clients' models weighted by their samples, a server rate of 1.

Shapes: T clients, N samples of all clients, R rounds, C clients of a cohort.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Leaves = dict[str, Tensor]
_LOSS_ROWS = 2_000


class Job(NamedTuple):
    """One job, as it stands in a file."""

    network: str
    inputs: Tensor
    """``[N, ...]`` float32 or, of images, uint8"""
    targets: Tensor
    """``[N]`` int64"""
    offsets: list[int]
    """T + 1 numbers: where each client's samples start"""
    cohorts: list[list[int]]
    """R times C positions of clients"""
    start: Leaves
    batch_size: int
    learning_rate: float
    warm_up: int
    """rounds that don't count"""

    def build(self) -> nn.Sequential:
        """Return the network with its first parameters."""
        network = NETWORKS[self.network](tuple(self.inputs.shape[1:]), int(self.targets.max()) + 1)
        network.load_state_dict(self.start)
        return network

    def floats(self) -> Job:
        """Return the job with pixels as shares of 255."""
        return self if self.inputs.is_floating_point() else self._replace(inputs=self.inputs.float() / 255)

    def to(self, device: str) -> Job:
        """Move the samples to ``device``."""
        return self._replace(inputs=self.inputs.to(device), targets=self.targets.to(device))

    def client(self, position: int) -> tuple[Tensor, Tensor]:
        """Return one client's inputs and targets."""
        some = slice(self.offsets[position], self.offsets[position + 1])
        return self.inputs[some], self.targets[some]

    def size(self, position: int) -> int:
        """Return how many samples a client has."""
        return self.offsets[position + 1] - self.offsets[position]

    def loss(self, leaves: Leaves) -> float:
        """Return the mean cross-entropy on samples spread evenly over all clients', at most two thousand."""
        network = self.build()
        network.load_state_dict({name: leaf.cpu() for name, leaf in leaves.items()})
        rows = torch.linspace(0, len(self.targets) - 1, min(_LOSS_ROWS, len(self.targets))).long()
        some = self._replace(inputs=self.inputs[rows.to(self.inputs.device)].cpu()).floats()
        with torch.no_grad():
            return float(cross_entropy(network(some.inputs), self.targets[rows.to(self.targets.device)].cpu()))

    def save(self, path: Path) -> None:
        """Write everything to one npz file."""
        settings = self._asdict()
        arrays = {name: settings.pop(name).numpy() for name in ("inputs", "targets")}
        arrays |= {f"start/{name}": leaf.numpy() for name, leaf in settings.pop("start").items()}
        np.savez(path, settings=np.array(json.dumps(settings)), **arrays)

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read what :meth:`save` wrote."""
        with np.load(path) as archive:
            settings: dict[str, Any] = json.loads(str(archive["settings"]))
            tensors = {name: torch.from_numpy(archive[name]) for name in archive.files if name != "settings"}
        start = {name.removeprefix("start/"): leaf for name, leaf in tensors.items() if name.startswith("start/")}
        return cls(inputs=tensors["inputs"], targets=tensors["targets"], start=start, **settings)


def _linear(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(shape[0], classes))


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    hidden = nn.Linear(shape[0], 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(200, classes))


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Build the layers of pfl's ``simple_cnn`` and fedem's ``cnn`` without dropout, which each side would draw anew."""
    channels, height, width = shape
    convolved = nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    dense = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128), nn.ReLU()
    return nn.Sequential(*convolved, *dense, nn.Linear(128, classes))


NETWORKS: dict[str, Callable[[tuple[int, ...], int], nn.Sequential]] = {"linear": _linear, "mlp": _mlp, "cnn": _cnn}


def make_job(
    network: str, inputs: Tensor, targets: Tensor, sizes: list[int], cohorts: list[list[int]], **settings: Any
) -> Job:
    """Put a job together, and draw its first parameters."""
    offsets = [0, *np.cumsum(sizes).tolist()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = NETWORKS[network](tuple(inputs.shape[1:]), int(targets.max()) + 1).state_dict()
    return Job(network, inputs, targets, offsets, cohorts, dict(start), **settings)


def train_client(network: nn.Module, job: Job, position: int) -> None:
    """Take one client's steps: the inner loop of pfl, in plain torch; batches stand as the samples do."""
    solver = torch.optim.SGD(network.parameters(), lr=job.learning_rate)
    for inputs, targets in batches(job, position):
        solver.zero_grad()
        cross_entropy(network(inputs), targets).backward()
        solver.step()


def batches(job: Job, position: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut one client's samples into batches."""
    inputs, targets = job.client(position)
    yield from zip(inputs.split(job.batch_size), targets.split(job.batch_size), strict=True)


class Clock:
    """Notes when rounds end; called once before the first and once after each."""

    def __init__(self, device: str):
        self.marks: list[float] = []
        self.device = device

    def __call__(self) -> None:
        """Note the time once all work is done."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())


def report(train: Callable[[Job, Clock], Leaves]) -> None:
    """Run a side's program: do the job of the first argument on a device, write its figures to the last argument."""
    path, device, out = sys.argv[1:]
    job, clock = Job.load(Path(path)), Clock(device)
    found = train(job, clock)
    seconds = np.diff(clock.marks)
    if len(seconds) != len(job.cohorts):
        raise RuntimeError(f"{len(seconds)} rounds were timed; allowed: {len(job.cohorts)}, one for each cohort.")
    figures = {"seconds": seconds[job.warm_up :].tolist(), "loss": job.loss(found), "loss_before": job.loss(job.start)}
    Path(out).write_text(json.dumps(figures))
