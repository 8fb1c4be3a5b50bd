"""``python -m benchmarks.flower``: a round behind a Flower server beside flwr's own FedAvg, on one loopback network.

All contestants have the same nodes, samples and model, and take turns. A round is mostly Flower's own: it starts a
process for each message, and both sides look for messages every three seconds. So what a round takes varies by seconds,
and means over many rounds are compared; and, since they hardly depend on what else the machine does, the processor
seconds of a node's process, from its start to its end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import flower_plain
from benchmarks.measure import Disturbance, environment
from fedem.deploy.flower.project import write_app
from fedem.deploy.flower.trial import DIMENSION, Loopback, draw_clients, ended_as_interrupted, start_nodes
from fedem.deploy.plan import Plan
from fedem.runs.config import Config
from fedem.runs.folder import RunFolder

NUM_COMPONENTS, SEED = 3, 0
LIMIT = 600.0
"""Seconds a run may take before the benchmark gives up."""

PROJECT = """\
[project]
name = "plain"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "benchmarks"

[tool.flwr.app.components]
serverapp = "plain:server_app"
clientapp = "plain:client_app"

[tool.flwr.app.config]
rounds = 1
nodes = 1
copies = 1
dimension = 1
hidden = 1
batch = 128
out = ""
"""


# Every Python program of the network starts here; those that answer a message note what they have cost.
WATCH = """
import atexit, os, sys, time

def note():
    with open(os.environ["BENCHMARK_COSTS"], "a") as file:
        file.write(f"{time.process_time()}\\n")

if any(word.endswith("flwr-clientapp") for word in sys.orig_argv):
    atexit.register(note)
"""


class Contestant(NamedTuple):
    """Who is timed: a method of ours, or flwr's FedAvg with some models in one message."""

    title: str
    method: str | None
    copies: int


CONTESTANTS = {
    "plain": Contestant("flwr's FedAvg, plain torch", None, 1),
    "plain_many": Contestant(f"... with {NUM_COMPONENTS} models in a message", None, NUM_COMPONENTS),
    "fedavg": Contestant("ours, FedAvg", "fedavg", 1),
    "fedem": Contestant(f"ours, FedEM with M = {NUM_COMPONENTS}", "fedem", NUM_COMPONENTS),
}
PAIRS = {"fedavg": "plain", "fedem": "plain_many"}
"""Whose payload is the same."""


class Size(NamedTuple):
    """How much is run: ``turns`` runs of each contestant, of ``rounds`` rounds, the first of which doesn't count."""

    nodes: int = 3
    rounds: int = 5
    turns: int = 3
    hidden: int = 500


QUICK = Size(nodes=2, rounds=2, turns=1, hidden=10)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all contestants, print the table and, if asked, write all figures to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flower", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run; its figures mean nothing")
    parser.add_argument("--nodes", type=int, default=Size().nodes)
    parser.add_argument("--rounds", type=int, default=Size().rounds, help="of a run, at least 2")
    parser.add_argument("--turns", type=int, default=Size().turns, help="runs of each contestant")
    parser.add_argument("--hidden", type=int, default=Size().hidden, help="units of each of the two hidden layers")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else Size(options.nodes, options.rounds, options.turns, options.hidden)
    if min(size.rounds, 1 + size.turns) < 2:
        parser.error("--rounds must be at least 2, and --turns at least 1")
    with ended_as_interrupted(), TemporaryDirectory(prefix="fedem-flower-", ignore_cleanup_errors=True) as folder:
        figures = compare(Path(folder), size)
    _print(Console(highlight=False), figures)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")


def compare(folder: Path, size: Size) -> dict[str, Any]:
    """Let all take turns on one network; returns all figures."""
    clients = draw_clients(folder / "data", size.nodes, SEED)
    apps = {name: _app(folder, name, one, size) for name, one in CONTESTANTS.items()}
    disturbance = Disturbance()
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    spent: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    (folder / "watch").mkdir()
    (folder / "watch" / "sitecustomize.py").write_text(WATCH, encoding="utf-8")
    costs = folder / "costs"
    costs.touch()
    with Loopback(folder / "network") as network:
        network.environment |= {"PYTHONPATH": str(folder / "watch"), "BENCHMARK_COSTS": str(costs)}
        start_nodes(network, clients)
        for turn in range(size.turns):
            for name, one in CONTESTANTS.items():
                before = len(_numbers(costs))
                lines[name] += _turn(network, apps[name], folder / "runs" / f"{name}-{turn}", one, size)
                # Messages of training come first; those of the first round don't count.
                spent[name] += _numbers(costs)[before:][size.nodes : size.nodes * size.rounds]
    rows = {
        name: {
            "seconds": statistics.fmean(line["seconds"] for line in found),
            "deviation": statistics.pstdev([line["seconds"] for line in found]),
            "rounds": [line["seconds"] for line in found],
            "processor_seconds": statistics.fmean(spent[name]),
            "bytes_up": found[0]["bytes_up"],
        }
        for name, found in lines.items()
    }
    added = {
        name: {key: rows[name][key] / rows[other][key] - 1 for key in ("seconds", "processor_seconds")}
        for name, other in PAIRS.items()
    }
    return {
        "environment": environment(),
        "size": size._asdict(),
        "rounds": rows,
        "added": added,
        "cores_busy_with_others": disturbance.cores(),
    }


def _app(folder: Path, name: str, one: Contestant, size: Size) -> Path:
    """Write a contestant's app."""
    app = folder / "apps" / name.replace("_", "-")
    if one.method is None:
        app.mkdir(parents=True)
        (app / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
        shutil.copy(flower_plain.__file__, app / "plain.py")
        return app
    config = Config.build(
        {
            "data": {"name": "file", "path": str(folder / "data"), "standardize": False},
            "method": {"name": one.method, **({"num_components": one.copies} if one.copies > 1 else {})},
            "model": {"name": "mlp", "hidden": size.hidden},
            "run": {"rounds": size.rounds, "evaluate_every": 0, "seed": SEED},
        }
    )
    return write_app(app, Plan.make(config, config.make_data()))


def _turn(network: Loopback, app: Path, place: Path, one: Contestant, size: Size) -> list[dict[str, Any]]:
    """Carry out one run; returns a line a round but for the first."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if one.method is None:
        place.mkdir()
        settings: dict[str, str | int | float | bool] = {
            "rounds": size.rounds,
            "nodes": size.nodes,
            "copies": one.copies,
            "dimension": DIMENSION,
            "hidden": size.hidden,
            "out": str(place / "metrics.jsonl"),
        }
    else:
        settings = {"experiment": place.name, "folder": str(place.parent), "min-clients": size.nodes, "timeout": 120.0}
    run = network.submit(app, settings)
    run.finish(LIMIT)
    found = RunFolder(place).metrics()
    if len(found) != size.rounds:
        raise run.failure(f"came to round {len(found)} of {size.rounds}")
    return found[1:]


def _numbers(path: Path) -> list[float]:
    return [float(line) for line in path.read_text(encoding="utf-8").split()]


def _print(console: Console, figures: Mapping[str, Any]) -> None:
    size, busy = figures["size"], figures["cores_busy_with_others"]
    console.print("{cpu}, torch {torch}, Python {python}".format(**figures["environment"]))
    table = Table(title="One round behind a Flower server", box=box.ASCII2, title_justify="left")
    for title in ("", "seconds a round", "deviation", "added", "processor seconds a message", "added", "kB up"):
        table.add_column(title, justify="right" if title else "left")
    for name, row in figures["rounds"].items():
        added = figures["added"].get(name, {})
        wall, work = (f"{added[key]:+.1%}" if added else "" for key in ("seconds", "processor_seconds"))
        table.add_row(
            CONTESTANTS[name].title,
            f"{row['seconds']:.2f}",
            f"{row['deviation']:.2f}",
            wall,
            f"{row['processor_seconds']:.2f}",
            work,
            f"{row['bytes_up'] / 1000:,.0f}",
        )
    console.print(table)
    console.print(
        f"{size['nodes']} nodes, {size['turns']} turns of {size['rounds'] - 1} rounds that count; added: to the time "
        "of flwr's FedAvg with as large a payload.",
        soft_wrap=True,
    )
    if busy is not None:
        console.print(f"Besides this process {busy:.1f} cores were busy, with the network's programs and others.")


if __name__ == "__main__":
    main()
