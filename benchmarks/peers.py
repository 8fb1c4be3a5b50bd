"""``python -m benchmarks.peers``: peers on this machine: a round, a meeting, a loss and a return, in seconds."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedem.deploy.peers.meeting import host_meeting, make_key
from fedem.deploy.plan import Plan
from fedem.runs.config import Config

NAMES = ("ann", "bob", "cem", "dan")
ROUNDS = 40
"""rounds timed, after as many that are not"""


class Peers:
    """Four processes over a ring, with one client each, on this machine."""

    def __init__(self, folder: Path, hidden: int, patience: int):
        self.folder, self.patience, self.store = folder, patience, host_meeting(0)
        rng = np.random.default_rng(0)
        inputs, owners = rng.normal(size=(400, 20)).astype(np.float32), np.repeat(NAMES, 100)
        np.savez(folder / "data.npz", x=inputs, y=(inputs[:, 0] > 0).astype(np.int64), client=owners)
        config = Config.build(
            {
                "data": {"name": "file", "path": str(folder / "data.npz")},
                "method": {"name": "dfedem", "num_components": 3},
                "graph": {"name": "ring"},
                "model": {"name": "mlp", "hidden": hidden} if hidden else {"name": "linear"},
                "run": {"rounds": 10**6, "evaluate_every": 0},
            }
        )
        plan = Plan.make(config, config.make_data())
        plan.save(folder / "plan")
        make_key(folder / "plan")
        self.parameters = plan.model.num_parameters
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start a client's process."""
        options = {"--plan": "plan", "--data": "data.npz", "--client": name, "--state": "state", "--min-peers": "3"}
        options |= {"--meet": f"127.0.0.1:{self.store.port}", "--max-peers": "4", "--patience": str(self.patience)}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fedem", "peer", *(word for pair in options.items() for word in pair)],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """End a process and its worker at once."""
        os.killpg(self.processes.pop(name).pid, signal.SIGKILL)

    def lines(self) -> list[dict[str, Any]]:
        """Return the first client's metrics."""
        paths = list(self.folder.glob(f"state/*/{NAMES[0]}/metrics.jsonl"))
        return (
            [json.loads(line) for line in paths[0].read_text().splitlines(True) if line.endswith("\n")] if paths else []
        )

    def wait(self, condition: Callable[[list[dict[str, Any]]], bool]) -> float:
        """Return how long it takes until something is so."""
        started = time.perf_counter()
        while not condition(self.lines()):
            if time.perf_counter() - started > 300:
                raise RuntimeError((self.folder / f"{NAMES[0]}.log").read_text())
            time.sleep(0.02)
        return time.perf_counter() - started


def measure(hidden: int, patience: int) -> dict[str, float]:
    """Time one size of models."""
    with tempfile.TemporaryDirectory() as folder:
        peers = Peers(Path(folder), hidden, patience)
        try:
            for name in NAMES:
                peers.start(name)
            start = peers.wait(lambda lines: bool(lines) and lines[-1]["peers"] == len(NAMES))
            begun = len(peers.lines())
            peers.wait(lambda lines: len(lines) >= begun + 2 * ROUNDS)
            timed = peers.lines()[begun + ROUNDS : begun + 2 * ROUNDS]
            peers.kill(NAMES[-1])
            loss = peers.wait(lambda lines: lines[-1]["peers"] == len(NAMES) - 1)
            peers.start(NAMES[-1])
            back = peers.wait(lambda lines: lines[-1]["peers"] == len(NAMES))
        finally:
            for name in list(peers.processes):
                peers.kill(name)
    return {
        "parameters of a component": peers.parameters,
        "bytes sent in a round": timed[-1]["bytes_up"],
        "a round": statistics.median(line["seconds"] for line in timed),
        "start": start,
        "on without one": loss,
        "one comes back": back,
    }


def main() -> None:
    """Print the figures of a small and a larger model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patience", type=int, default=15)
    patience = parser.parse_args().patience
    for hidden in (0, 1000):
        print(json.dumps(measure(hidden, patience)), f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
