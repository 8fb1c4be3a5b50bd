"""``python -m benchmarks.busy``: a round of FedEM beside processes that keep cores busy, by how its threads wait.

The threads of a step wait for the slowest one. By torch's own way they spin for milliseconds meanwhile, on cores that
the slowest, or the other processes, could use. The ways take turns, so that whatever else the machine does disturbs all
of them alike; the ratios of one turn are compared, not the seconds of different ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine import SEED, make_training
from benchmarks.measure import Disturbance, Effort, environment
from benchmarks.methods import time_rounds
from fedem.data.synthetic import Synthetic
from fedem.engines import Batching

WAYS: dict[str, dict[str, str]] = {
    "one thread": {"OMP_NUM_THREADS": "1"},
    "torch's": {"GOMP_SPINCOUNT": "300000"},  # what the GNU library takes where nothing is said: three milliseconds
    "fedem's": {},  # OMP_WAIT_POLICY=PASSIVE
}
"""variables of the environment, by name; the first is what the others are compared with"""


class Plan(NamedTuple):
    """Sizes of a run."""

    source: Synthetic
    effort: Effort
    turns: int
    competitors: tuple[int, ...]


FULL = Plan(Synthetic(num_validation=0, num_test=0), Effort(5, 15), turns=3, competitors=(0, 1, 2))
QUICK = Plan(
    Synthetic(num_clients=5, dimension=6, max_samples=200, num_validation=0, num_test=0), Effort(1, 2), 1, (0, 1)
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all ways, print a table and, if asked, write all figures to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny data; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    parser.add_argument("--turns", type=int, help="how often each way is timed")
    parser.add_argument("--competitors", type=int, nargs="+", help="numbers of processes to keep busy meanwhile")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    if options.work:
        training = make_training("fedem", plan.source.make(SEED).federation, Batching())
        print(json.dumps(time_rounds(training, plan.effort).repeats))
        return
    plan = plan._replace(turns=options.turns or plan.turns, competitors=tuple(options.competitors or plan.competitors))
    figures = run_all(plan, options.quick, Console(highlight=False))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def run_all(plan: Plan, quick: bool, console: Console) -> dict[str, Any]:
    """Let the ways take turns beside each number of competitors and print their ratios; returns all figures."""
    figures: dict[str, Any] = {"environment": environment() | {"cores": os.cpu_count()}, "rounds": {}}
    console.print("{cpu}, {cores} cores, torch {torch}, Python {python}".format(**figures["environment"]))
    busy = []
    for number in plan.competitors:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(plan.turns):
            for way in WAYS:
                with _competition(number):
                    disturbance = Disturbance()
                    seconds[way].append(statistics.median(_time(WAYS[way], quick)))
                    busy.append((disturbance.cores() or 0.0) - number)
        figures["rounds"][str(number)] = seconds
    figures["cores_busy_with_others"] = statistics.mean(busy)
    _print(console, figures["rounds"])
    console.print(f"Cores busy with yet other processes: about {max(0.0, figures['cores_busy_with_others']):.1f}.")
    return figures


@contextmanager
def _competition(number: int) -> Iterator[None]:
    """Keep ``number`` processes busy meanwhile, each with one core's worth of nothing."""
    idlers = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for idler in idlers:
            idler.kill()
            idler.wait()


def _time(way: dict[str, str], quick: bool) -> list[float]:
    """Return the seconds of each round in a process of its own: how threads wait is settled when torch is loaded."""
    unset = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "benchmarks.busy", "--work", *(["--quick"] if quick else [])]
    done = subprocess.run(command, env=kept | way, stdout=subprocess.PIPE, text=True, check=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def _print(console: Console, rounds: Mapping[str, Mapping[str, list[float]]]) -> None:
    first = next(iter(WAYS))
    title = f"One round of FedEM: seconds, and times those of {first} (median of the turns' ratios, least to most)"
    table = Table(title=title, box=box.ASCII2, title_justify="left")
    table.add_column("competitors", justify="right")
    for way in WAYS:
        table.add_column(way, justify="right")
    for number, seconds in rounds.items():
        cells = []
        for repeats in seconds.values():
            ratios = [own / alone for own, alone in zip(repeats, seconds[first], strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells.append(f"{statistics.median(repeats):.3f}, {spread}")
        table.add_row(number, *cells)
    console.print()
    console.print(table)


if __name__ == "__main__":
    main()
