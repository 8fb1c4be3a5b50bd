"""A deployment tried on one machine: the same app, programs, certificates and keys as between real ones."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedem.config import Config
from fedem.data.synthetic import Synthetic
from fedem.deploy.loopback import Loopback, Program
from fedem.deploy.plan import Plan
from fedem.deploy.starting import write_app
from fedem.errors import UserError
from fedem.records import Record
from fedem.runs import RunFolder
from fedem.sections import Layer, RunSettings

EXPERIMENT = "trial"
FEWEST, MOST = 2, 50
"""Nodes of a trial: a process or two each, and a federation is of several."""
SHORT: Layer = {"run": {"rounds": 5, "evaluate_every": 5}}
"""What a trial has unless other settings are asked for: every message to a node takes seconds."""
DIMENSION = 20
"""Features of the clients that are drawn."""
_STARTING, _BETWEEN = 120.0, 30.0
"""Seconds that a run may take to start, and the server between the answers to one message and the next."""

Listener = Callable[[Record], None]


class Client(NamedTuple):
    """A node's client: its name, and where its samples are."""

    name: str
    data: Path


def check_nodes(nodes: int) -> int:
    """Refuse a number of nodes that no trial has."""
    if not FEWEST <= nodes <= MOST:
        raise UserError(f"A trial of {nodes} nodes is asked for; allowed: {FEWEST} to {MOST}.")
    return nodes


def draw_clients(folder: Path, nodes: int, seed: int) -> list[Client]:
    """Draw a small synthetic mixture, a file for each client, by which it is named."""
    source = Synthetic(
        num_clients=nodes, dimension=DIMENSION, size_mean=6.0, size_sigma=0.5, num_validation=0, num_test=0
    )
    federation = source.make(seed).federation
    folder.mkdir(parents=True, exist_ok=True)
    clients = []
    for number in range(nodes):
        samples = federation.take(torch.tensor([number])).train
        client = Client(f"client-{number}", folder / f"client-{number}.npz")
        np.savez(client.data, x=samples.inputs.numpy(), y=samples.targets.numpy())
        clients.append(client)
    return clients


def choose_clients(names: Sequence[str], path: Path, nodes: int) -> list[Client]:
    """Return the first clients of a file, one for each node."""
    if len(names) < nodes:
        raise UserError(f"{path} has {len(names)} clients; allowed for a trial of {nodes} nodes: at least as many.")
    return [Client(name, path) for name in names[:nodes]]


def run_trial(
    folder: Path, config: Config, clients: Sequence[Client], *, timeout: float = 120.0, listener: Listener | None = None
) -> RunFolder:
    """Carry out a deployed run on this machine; every process that it started has ended when it returns or raises.

    Args:
        folder: where everything goes: the app, certificates and keys, logs, what the clients keep, and the run.
        config: the run; its data are sample data, from which the plan is made.
        clients: one a node.
        timeout: seconds that a round waits for its slowest node.
        listener: called with each round's record.

    """
    folder = folder.absolute()
    write_app(folder / "app", Plan.make(config, config.make_data()))
    place = RunFolder(folder / "runs" / EXPERIMENT)
    with ended_as_interrupted(), Loopback(folder) as network:
        nodes = start_nodes(network, clients)
        settings: dict[str, str | int | float | bool] = {
            "experiment": EXPERIMENT,
            "folder": str(place.path.parent),
            "min-clients": len(clients),
            "timeout": timeout,
        }
        limit = _longest(config.run, timeout)
        _follow(network.submit(folder / "app", settings), network, nodes, place, listener, limit)
    return place


def _longest(run: RunSettings, timeout: float) -> float:
    """Return how many seconds a run takes in which every message waits as long as it may."""
    scored = sum(run.is_scored(done + 1) for done in range(run.rounds))
    messages = run.rounds + scored + 1  # to train, to score, and to keep what has come out
    return _STARTING + messages * (timeout + _BETWEEN)


def start_nodes(network: Loopback, clients: Sequence[Client]) -> list[Program]:
    """Start a SuperNode a client, each with a key of its own; returns when the SuperLink has let all in."""
    keys = [network.register(f"node-{number}") for number in range(len(clients))]
    nodes = [
        network.start_node(
            key.name,
            {
                "data": str(client.data.absolute()),
                "client": client.name,
                "state": str(network.folder / "state" / key.name),
            },
            key,
            wait=False,
        )
        for client, key in zip(clients, keys, strict=True)
    ]
    for node in nodes:
        node.wait_until_in()
    return nodes


def _follow(
    run: Program,
    network: Loopback,
    nodes: Sequence[Program],
    place: RunFolder,
    listener: Listener | None,
    limit: float,
) -> None:
    """Tell the listener of each round until the run is over; an error with logs when it did not come to its end.

    After ``limit`` seconds it hangs, and that is an error too.
    """
    told, over, deadline = 0, False, time.monotonic() + limit
    while not over:
        over = run.process.poll() is not None
        news = place.metrics()[told:]
        told += len(news)
        if listener is not None:
            for record in news:
                listener(record)
        for program in (network.superlink, network.executor, *nodes):
            if program.process.poll() is not None:
                raise program.failure(f"ended with code {program.process.returncode} amid the run")
        if not over and time.monotonic() > deadline:
            raise run.failure(f"has not ended within {limit:.0f} s, and {told} rounds are done")
        time.sleep(0.2)
    said = [f"{node.name}: {line}" for node in nodes for line in node.said().splitlines() if "ERROR" in line]
    if place.summary() is None:
        raise UserError("\n".join([str(run.failure("did not come to its end")), *said]))
    # In a deployment that is all right; in a trial everybody is there, so something is wrong.
    lacking = [record["round"] for record in place.metrics() if record["clients"] < len(nodes)]
    if lacking:
        why = [line for line in run.said().splitlines() if "WARNING" in line]
        raise UserError(
            "\n".join(
                [f"Not all of {len(nodes)} nodes answered in rounds {', '.join(map(str, lacking))}:", *why, *said]
            )
        )


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Treat a request to end this process like Ctrl-C, so that what it started is ended first."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
