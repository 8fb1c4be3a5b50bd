"""Peers for tests: a small federation in a file, its plan, the simulator's end, and peers as processes and threads."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from patience import patient
from torch import Tensor

from fedem.deploy.kept import Kept
from fedem.deploy.peers.meeting import AgentFolder, make_key
from fedem.deploy.peers.work import Peer, Task
from fedem.deploy.plan import Plan
from fedem.runs.config import Config
from fedem.runs.rounds import State
from fedem.runs.trainer import Trainer

SIZES = {"ann": 20, "bob": 30, "cem": 45, "dan": 25}


def write_clients(path: Path) -> None:
    """Clients that differ, in one file."""
    rng, lines = np.random.default_rng(0), ["client,a,b,y"]
    for name, size in SIZES.items():
        x, direction = rng.normal(size=(size, 2)), rng.normal(size=2)
        lines += [f"{name},{a:.4f},{b:.4f},{int(a * direction[0] + b * direction[1] > 0)}" for a, b in x]
    path.write_text("\n".join(lines) + "\n")


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Deployment:
    """A folder with the data, the plan and everybody's state."""

    def __init__(
        self,
        folder: Path,
        rounds: int = 4,
        method: str = "dfedem",
        graph: dict[str, Any] | None = None,
        defence: dict[str, Any] | None = None,
    ):
        self.data, self.plan, self.state = folder / "clients.csv", folder / "plan", folder / "state"
        write_clients(self.data)
        hyper = {"num_components": 2} if method == "dfedem" else {}
        self.config = Config.build(
            {
                "data": {"name": "file", "path": str(self.data)},
                "method": {"name": method, **hyper},
                "graph": graph or {"name": "ring"},
                "defence": defence or {"name": "none"},
                "run": {"rounds": rounds, "evaluate_every": 2},
            }
        )
        Plan.make(self.config, self.config.make_data()).save(self.plan)
        make_key(self.plan)

    def with_run(self, **values: Any) -> Self:
        """Change the run's settings."""
        self.config = self.config.replace("run", **values)
        Plan.make(self.config, self.config.make_data()).save(self.plan)
        return self

    def simulated(self) -> State:
        """Where the simulator ends; clients in the order of their names."""
        trainer = Trainer.prepare(self.config, self.config.make_data())
        state = trainer.training.init()
        for _ in range(self.config.run.rounds):
            state, _ = trainer.training.step(state)
        return state

    def kept(self, name: str) -> Kept:
        return Kept.load(next(self.state.glob(f"*/{name}.safetensors")))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return what a client wrote down of its rounds, without a line that is being written."""
        paths = list(self.state.glob(f"*/{name}/metrics.jsonl"))
        if not paths:
            return []
        return [json.loads(line) for line in paths[0].read_text().splitlines(keepends=True) if line.endswith("\n")]

    def check_equals_simulator(self) -> None:
        """Everybody ends where the simulator does."""
        state = self.simulated()
        for position, name in enumerate(sorted(SIZES)):
            kept = self.kept(name)
            assert kept.round == state.round
            for found, expected in ((kept.shared, state.shared), (kept.personal, state.personal)):
                assert found is not None
                assert found.keys() == expected.keys()
                for key, leaf in found.items():
                    torch.testing.assert_close(leaf, expected[key][position].cpu(), rtol=0, atol=1e-5)

    def peer(
        self,
        port: int,
        clients: Sequence[str],
        plan: Path | None = None,
        least: int = 2,
        most: int = 9,
        state: Path | None = None,
    ) -> Process:
        """Start a process."""
        options: dict[str, Any] = {"--plan": plan or self.plan, "--data": self.data}
        options |= {"--state": state or self.state}
        options |= {"--meet": f"127.0.0.1:{port}", "--min-peers": least, "--max-peers": most}
        options |= {"--patience": math.ceil(patient(3))}
        arguments = [str(word) for pair in options.items() for word in pair]
        return Process(self.state.parent, *arguments, *(word for name in clients for word in ("--client", name)))


class Process:
    """``fedem peer`` in a group of processes of its own."""

    count = 0

    def __init__(self, folder: Path, *arguments: str):
        Process.count += 1
        self._log = folder / f"process-{Process.count}.log"
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedem", "peer", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it, and all that it started, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(patient(30))

    def kill_agent(self) -> None:
        """End the process that was started, and none that it started."""
        self._process.kill()
        self._process.wait(patient(30))

    def has_left_overs(self) -> bool:
        """Whether processes that it started are still there."""
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def ends(self, seconds: float = 150) -> int:
        """Wait for its end; returns its exit code."""
        try:
            return self._process.wait(patient(seconds))
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None

    def is_running(self) -> bool:
        return self._process.poll() is None


def wait_for(condition: Callable[[], object], processes: Sequence[Process], seconds: float = 150) -> None:
    """Wait until something is so; fail when it takes too long or a process ends before."""
    deadline = time.monotonic() + patient(seconds)
    while not condition():
        alive = all(process.is_running() for process in processes)
        if time.monotonic() > deadline or not (alive or condition()):
            raise AssertionError("\n---\n".join(process.said() for process in processes))
        time.sleep(0.05)


class Threads:
    """Stands in for a group of processes: its members are threads, and messages lie in queues."""

    def __init__(self, size: int):
        self.size = size
        self._told: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=patient(60))
        self.messages: dict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)

    def gather(self, rank: int, content: Any) -> list[Any]:
        self._told[rank] = content
        self._barrier.wait()
        found = list(self._told)
        self._barrier.wait()
        return found


class Member:
    """One thread's end of a group."""

    def __init__(self, threads: Threads, rank: int):
        self.threads, self.rank, self.size = threads, rank, threads.size

    def gather(self, content: Any) -> list[bytes]:
        return self.threads.gather(self.rank, json.dumps(content).encode())

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        for rank, buffer in outgoing.items():
            self.threads.messages[self.rank, rank].put(buffer.clone())
        for rank, buffer in incoming.items():
            buffer.copy_(self.threads.messages[rank, self.rank].get(timeout=patient(60)))

    def total(self, values: Tensor) -> Tensor:
        return torch.stack(self.threads.gather(self.rank, values)).sum(0)


def as_group(member: Member) -> Any:
    """Return a thread's end as what it stands in for, a process's end of a group, of whatever type that is."""
    return member


def work_together(deployment: Deployment, processes: list[list[str]], folder: Path) -> list[list[str]]:
    """Let peers run to the end; returns what each told its user."""
    threads = Threads(len(processes))
    tasks = [Task(deployment.plan, deployment.data, tuple(names), deployment.state, print) for names in processes]
    # One after the other: models are drawn from torch's generator, of which there is one for all threads.
    members = [task.open() for task in tasks]

    def run(rank: int) -> list[str]:
        told: list[str] = []
        agent = AgentFolder(folder / f"agent{rank}", 0, 1)
        agent.path.mkdir(exist_ok=True)
        Peer(as_group(Member(threads, rank)), members[rank], agent, told.append).run_rounds()
        assert agent.read("run")
        return told

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(run, range(len(processes))))
