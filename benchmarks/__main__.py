"""``python -m benchmarks``: a round of the stacked engine beside plain PyTorch loops and the floor."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import many_clients
from benchmarks.agreement import check_agreement
from benchmarks.engine import LEARNING_RATES, NUM_COMPONENTS, SEED, as_server, make_training
from benchmarks.floor import floor_seconds
from benchmarks.measure import Disturbance, Effort, Timing, environment, measure, show_disturbance
from benchmarks.plain_loop import LOOPS, Client, Server, run_round
from fedem.data.federation import Federation
from fedem.data.synthetic import Synthetic
from fedem.engines import Batching

TITLES = {
    "stacked": "stacked engine",
    "plain_loop": "plain loop, DataLoader",
    "shared_loop": "... components share batches",
    "index_loop": "... and index tensors",
    "floor": "floor: matrix products alone",
}


class Plan(NamedTuple):
    """Sizes of a run of all benchmarks; the defaults are the paper's."""

    source: Synthetic
    crowd: many_clients.Crowd
    stacked: Effort
    loops: Effort
    floor: Effort


FULL = Plan(
    Synthetic(num_validation=0, num_test=0),
    many_clients.Crowd(),
    stacked=Effort(20, 30),  # recordings are made on the way
    loops=Effort(1, 5),
    floor=Effort(5, 20),
)
QUICK = Plan(
    Synthetic(num_clients=5, dimension=6, max_samples=200, num_validation=0, num_test=0),
    many_clients.QUICK,
    stacked=Effort(1, 2),
    loops=Effort(1, 1),
    floor=Effort(1, 2),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything, print the tables and, if asked, write all figures to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run on tiny data; its figures mean nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    options = parser.parse_args(arguments)
    figures = run_all(QUICK if options.quick else FULL, Console(highlight=False))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def run_all(plan: Plan, console: Console) -> dict[str, Any]:
    """Check that all do the same mathematics, time them and print; returns all figures."""
    figures: dict[str, Any] = {"environment": environment(), "agreement": {}, "rounds": {}}
    console.print("{cpu}, {threads} threads, torch {torch}, Python {python}".format(**figures["environment"]))
    federation = plan.source.make(SEED).federation
    figures["data"] = {
        "num_clients": federation.num_clients,
        "num_samples": len(federation.train),
        "dimension": federation.input_shape[0],
    }
    console.print("{num_clients} clients, {num_samples} samples, {dimension} features".format(**figures["data"]))
    for method in NUM_COMPONENTS:
        differences = check_agreement(method, federation)
        figures["agreement"][method] = differences
        found = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
        console.print(f"{method}: the loops do the engine's mathematics; largest difference: {found}", soft_wrap=True)
    disturbance = Disturbance()
    for method in NUM_COMPONENTS:
        timings = time_method(method, federation, plan)
        figures["rounds"][method] = {name: timing.figures() for name, timing in timings.items()} | _ratios(timings)
        _print_rounds(console, method, timings)
    figures["many_clients"] = many_clients.compare(plan.crowd)
    many_clients.show(console, figures["many_clients"])
    figures["cores_busy_with_others"] = disturbance.cores()
    show_disturbance(console, figures["cores_busy_with_others"])
    return figures


def time_method(method: str, federation: Federation, plan: Plan) -> dict[str, Timing]:
    """Time a round of one method, one contestant after the other."""
    batching = Batching()
    training = make_training(method, federation, batching)
    state = initial = training.init()
    timings: dict[str, Timing] = {}

    def advance() -> None:
        nonlocal state
        state, _ = training.step(state)

    timings["stacked"] = measure(advance, plan.stacked)
    for name, prepare in LOOPS.items():
        torch.manual_seed(SEED)
        clients = prepare(federation.train, batching.batch_size)
        loop = _Loop(as_server(initial, federation.num_clients), clients, LEARNING_RATES[method])
        timings[name] = measure(loop.advance, plan.loops)
    timings["floor"] = floor_seconds(federation.train.inputs, NUM_COMPONENTS[method], plan.floor)
    return timings


class _Loop:
    """A plain loop that goes on from round to round."""

    def __init__(self, server: Server, clients: Sequence[Client], learning_rate: float):
        self._server, self._clients, self._learning_rate = server, clients, learning_rate

    def advance(self) -> None:
        """Run one round."""
        self._server = run_round(self._server, self._clients, self._learning_rate)


def _ratios(timings: Mapping[str, Timing]) -> dict[str, float]:
    stacked = timings["stacked"].median
    return {
        "plain_to_stacked": timings["plain_loop"].median / stacked,
        "shared_to_stacked": timings["shared_loop"].median / stacked,
        "index_to_stacked": timings["index_loop"].median / stacked,
        "stacked_to_floor": stacked / timings["floor"].median,
    }


def _print_rounds(console: Console, method: str, timings: Mapping[str, Timing]) -> None:
    table = Table(title=f"One round of {method}, M = {NUM_COMPONENTS[method]}", box=box.ASCII2, title_justify="left")
    table.add_column("")
    table.add_column("seconds a round", justify="right")
    table.add_column("ratio to stacked", justify="right")
    for name, timing in timings.items():
        table.add_row(TITLES[name], f"{timing.median:.4f}", f"{timing.median / timings['stacked'].median:.3f}")
    console.print()
    console.print(table)
    ratios = _ratios(timings)
    console.print(
        f"A round of {method} in a plain loop (a DataLoader, a local solver for each component in turn) takes "
        f"{ratios['plain_to_stacked']:.1f} times the stacked engine's."
    )
    console.print(f"The stacked engine takes {ratios['stacked_to_floor']:.1f} times the floor of its multiply-adds.")


if __name__ == "__main__":
    main()
