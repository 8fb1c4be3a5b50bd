"""``python -m benchmarks.many_clients``: a round costs what its cohort costs, up to a million clients.

Making the data, splitting them and starting a training take time in proportion to the clients; a round should not. Each
size is measured in a fresh process. A million clients need about 8 GiB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine import NUM_COMPONENTS, SEED, make_training
from benchmarks.measure import Disturbance, Effort, environment, measure, show_disturbance
from fedem.core.tree import tree_bytes
from fedem.data.federation import Federation
from fedem.data.synthetic import Synthetic
from fedem.engines import Batching

_FLOAT_BYTES = 4
Found = TypeVar("Found")


class Crowd(NamedTuple):
    """Sizes of the measurement."""

    sizes: tuple[int, ...] = (1_000, 100_000)
    """numbers of clients; the others are compared with the first"""
    cohort_size: int = 100
    samples: int = 50
    dimension: int = 20
    effort: Effort = Effort(warm_up=20, repeats=50)


MILLION = Crowd(sizes=(10_000, 100_000, 1_000_000), cohort_size=1_000)
QUICK = Crowd(sizes=(50, 500), cohort_size=10, samples=8, dimension=4, effort=Effort(1, 2))


def compare(crowd: Crowd) -> dict[str, Any]:
    """Measure each number of clients, in a fresh process so that its memory is its own."""
    groups = [_in_fresh_process(crowd, count) for count in crowd.sizes]
    ratios = [group["seconds"] / groups[0]["seconds"] for group in groups]
    return {"cohort_size": crowd.cohort_size, "groups": groups, "ratios_to_first": ratios}


def _in_fresh_process(crowd: Crowd, num_clients: int) -> dict[str, float]:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train_crowd, crowd, num_clients).result()


def _make(crowd: Crowd, num_clients: int) -> Federation:
    source = Synthetic(
        num_clients=num_clients,
        dimension=crowd.dimension,
        min_samples=crowd.samples,
        max_samples=crowd.samples,
        num_validation=0,
        num_test=0,
    )
    return source.make(SEED).federation


def _split(federation: Federation) -> None:
    """Split all samples into parts to train on, to validate and to test."""
    samples = federation.train
    rows = torch.arange(len(samples))
    Federation.from_pool(samples.pool, federation.names, rows, samples.offsets, ids=rows, seed=SEED)


def _timed(run: Callable[[], Found]) -> tuple[Found, float]:
    started = time.perf_counter()
    return run(), time.perf_counter() - started


def train_crowd(crowd: Crowd, num_clients: int) -> dict[str, float]:
    """Run FedEM rounds of a small cohort among ``num_clients`` clients in this process."""
    # The first gradient makes torch import a good deal; that memory is not of the training measured here.
    tiny = make_training("fedem", _make(crowd, 2), Batching())
    tiny.step(tiny.init())
    federation, data_seconds = _timed(lambda: _make(crowd, num_clients))
    _, split_seconds = _timed(lambda: _split(federation))
    peak_of_data = _peak_bytes()
    resident = _forget_peak()
    training = make_training("fedem", federation, Batching(), crowd.cohort_size)
    state, start_seconds = _timed(training.init)

    def advance() -> None:
        nonlocal state
        state, _ = training.step(state)

    timing = measure(advance, crowd.effort)
    peak_of_training = _peak_bytes()
    bytes_per_client = tree_bytes(state.personal) / num_clients
    allowed = NUM_COMPONENTS["fedem"] * _FLOAT_BYTES
    if bytes_per_client != allowed:
        raise RuntimeError(f"A client's state takes {bytes_per_client:g} bytes; allowed: {allowed}, its weights.")
    return {
        "num_clients": num_clients,
        "seconds": timing.median,
        "fastest": min(timing.repeats),
        "data_seconds": data_seconds,
        "split_seconds": split_seconds,
        "start_seconds": start_seconds,
        "data_bytes": training.federation.train.num_bytes,
        "peak_bytes": max(peak_of_data, peak_of_training),
        "resident_bytes_before_training": resident,
        "peak_increase_in_training_bytes": max(0, peak_of_training - resident),
        "state_bytes_per_client": bytes_per_client,
    }


def show(console: Console, figures: Mapping[str, Any]) -> None:
    """Print one column for each number of clients."""
    groups = figures["groups"]
    table = Table(title=f"FedEM, {figures['cohort_size']:,} clients a round", box=box.ASCII2, title_justify="left")
    table.add_column("clients in all")
    for group in groups:
        table.add_column(f"{group['num_clients']:,}", justify="right")
    mebibyte = 1 << 20
    for title, key, scale, digits in (
        ("seconds a round", "seconds", 1, 4),
        ("seconds to make the data", "data_seconds", 1, 2),
        ("seconds to split them", "split_seconds", 1, 2),
        ("seconds to start", "start_seconds", 1, 2),
        ("training data, MiB", "data_bytes", mebibyte, 0),
        ("peak memory in all, MiB", "peak_bytes", mebibyte, 0),
        ("resident before training, MiB", "resident_bytes_before_training", mebibyte, 0),
        ("peak increase in training, MiB", "peak_increase_in_training_bytes", mebibyte, 1),
        ("state a client, bytes", "state_bytes_per_client", 1, 0),
    ):
        table.add_row(title, *(f"{group[key] / scale:,.{digits}f}" for group in groups))
    console.print()
    console.print(table)
    for group, ratio in list(zip(groups, figures["ratios_to_first"], strict=True))[1:]:
        console.print(
            f"With {group['num_clients']:,} clients a round takes {ratio:.2f} times as long as with "
            f"{groups[0]['num_clients']:,}.",
            soft_wrap=True,
        )


def _peak_bytes() -> int:
    """Return the most memory that this process ever had resident (or since :func:`_forget_peak`).

    Linux's getrusage counts what the parent had when it started this process, so the process's own mark comes first.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _forget_peak() -> int:
    """Let the peak start afresh from what is resident now, and return that.

    Making the data needs more memory than training does, so its peak would hide that of training. Where the system
    can't forget (other than Linux), the peak so far is returned and the increase is understated.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure up to a million clients, print and, if asked, write all figures to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_clients", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of few clients; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    options = parser.parse_args(arguments)
    console, disturbance = Console(highlight=False), Disturbance()
    figures: dict[str, Any] = {
        "environment": environment(),
        "many_clients": compare(QUICK if options.quick else MILLION),
    }
    figures["cores_busy_with_others"] = disturbance.cores()
    console.print("{cpu}, {threads} threads, torch {torch}, Python {python}".format(**figures["environment"]))
    show(console, figures["many_clients"])
    show_disturbance(console, figures["cores_busy_with_others"])
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
