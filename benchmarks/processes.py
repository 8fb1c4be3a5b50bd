"""``python -m benchmarks.processes``: a round of FedEM in one process, in one with two threads, and in two processes.

On the paper's synthetic data (300 clients, a linear model, stacked) and on random images (the paper's network, clients
one by one). The three arrangements take turns, so that a busy machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import images
from benchmarks.engine import SEED, make_training
from benchmarks.measure import Disturbance, Effort, Timing, environment
from benchmarks.methods import time_rounds
from fedem.data.synthetic import Synthetic
from fedem.engines import Batching
from fedem.engines.processes import joined
from fedem.runs.rounds import Training


class Arrangement(NamedTuple):
    """How the work is done."""

    processes: int
    threads: int
    """of each process"""

    def __str__(self) -> str:
        return f"{self.processes} x {self.threads}"


ARRANGEMENTS = (Arrangement(1, 1), Arrangement(1, 2), Arrangement(2, 1))


class Plan(NamedTuple):
    """Sizes of a run."""

    source: Synthetic
    num_clients: int
    num_images: int
    efforts: dict[str, Effort]
    turns: int


FULL = Plan(
    Synthetic(num_validation=0, num_test=0),
    *(10, 2_040),
    {"synthetic": Effort(20, 20), "images": Effort(1, 1)},  # recordings are made on the way
    turns=3,
)
QUICK = Plan(
    Synthetic(num_clients=5, dimension=6, max_samples=200, num_validation=0, num_test=0),
    *(2, 124),
    {"synthetic": Effort(1, 2), "images": Effort(1, 1)},
    turns=1,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all arrangements, print a table and, if asked, write all figures to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny data; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    parser.add_argument("--work", choices=tuple(FULL.efforts), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    if options.work:
        work(options.work, plan)
        return
    figures = run_all(plan, options.quick, Console(highlight=False))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def work(name: str, plan: Plan) -> None:
    """Be one of the processes: time some rounds and print their seconds."""
    training = _training(name, plan)
    with joined() as team:
        timing = time_rounds(replace(training, team=team), plan.efforts[name])
        if team.leads:
            print(json.dumps(timing.repeats))


def _training(name: str, plan: Plan) -> Training:
    if name == "synthetic":
        return make_training("fedem", plan.source.make(SEED).federation, Batching())
    federation = images.make_federation(plan.num_clients, plan.num_images)
    return images.make_training(federation, torch.device("cpu"), "float32", run={"engine": "one_by_one"})


def run_all(plan: Plan, quick: bool, console: Console) -> dict[str, Any]:
    """Let the arrangements take turns and print their medians; returns all figures."""
    figures: dict[str, Any] = {"environment": environment() | {"cores": os.cpu_count()}, "rounds": {}}
    console.print("{cpu}, {cores} cores, torch {torch}, Python {python}".format(**figures["environment"]))
    busy: list[float | None] = []
    for name in plan.efforts:
        seconds: dict[Arrangement, list[float]] = {arrangement: [] for arrangement in ARRANGEMENTS}
        for _ in range(plan.turns):
            for arrangement in ARRANGEMENTS:
                disturbance = Disturbance()
                seconds[arrangement] += _time(name, arrangement, quick)
                busy.append(disturbance.cores())
        timings = {str(arrangement): Timing(tuple(repeats)) for arrangement, repeats in seconds.items()}
        figures["rounds"][name] = {way: timing.figures() for way, timing in timings.items()}
        _print_rounds(console, name, timings)
    known = [cores for cores in busy if cores is not None]
    figures["cores_busy_with_others"] = sum(known) / len(known) if known else None
    if known:
        console.print(f"Cores busy with other processes: {figures['cores_busy_with_others']:.2f}.")
    return figures


def _time(name: str, arrangement: Arrangement, quick: bool) -> list[float]:
    """Return the seconds of each round, as the first process has them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(arrangement.processes)}
    command = [sys.executable, "-m", "benchmarks.processes", "--work", name, *(["--quick"] if quick else [])]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": str(rank), "OMP_NUM_THREADS": str(arrangement.threads)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(arrangement.processes)
    ]
    printed = [process.communicate()[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    seconds: list[float] = json.loads(printed[0])
    return seconds


def _print_rounds(console: Console, name: str, timings: dict[str, Timing]) -> None:
    table = Table(title=f"One round of FedEM, {name}", box=box.ASCII2, title_justify="left")
    for column in ("processes x threads", "seconds a round", "1 x 1 to this"):
        table.add_column(column, justify="right")
    alone = timings[str(ARRANGEMENTS[0])].median
    for way, timing in timings.items():
        table.add_row(way, f"{timing.median:.4f}", f"{alone / timing.median:.2f}")
    console.print()
    console.print(table)


if __name__ == "__main__":
    main()
