"""Flower's server and clients in one process: messages are handed over, and some go wrong on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deployments
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedem.core.tree import Tree
from fedem.deploy import client_app
from fedem.deploy.flower.messages import to_record, to_tree
from fedem.deploy.flower.server import serve
from fedem.deploy.kept import Kept, kept_path
from fedem.deploy.plan import RunConfig
from fedem.runs.rounds import State
from fedem.runs.trainer import Trainer

_NOT_CALLED = "a part of Flower's interface that no test was known to use"
Spoil = Callable[[int, Message, Message], Message | None]
"""(node, what it was asked, its answer) -> the answer that arrives, if one does"""


def node_info(node: int, key: str, name: str = "") -> NodeInfo:
    """Return what the SuperLink says of a node with a key, perhaps registered under a name."""
    public = f"-----BEGIN PUBLIC KEY-----\n{key}\n-----END PUBLIC KEY-----\n"
    return NodeInfo(node_id=node, public_key=public.encode(), name=name)


class LocalGrid(Grid):
    """Nodes with a config each; ``node_configs`` may change while a run goes on, as nodes come and go."""

    def __init__(self, app: ClientApp, node_configs: dict[int, dict[str, Any]], run_config: dict[str, Any]):
        # Flower's own programs tell a process so which run it works for.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.node_configs, self.run_config = app, node_configs, run_config
        self.keys: dict[
            int, tuple[str, str]
        ] = {}  # of nodes that have one: what it is, and the name it was registered under
        self.sent: list[tuple[int, str]] = []
        self.timeouts: list[float | None] = []
        self.spoil: Spoil = lambda node, asked, answer: answer

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        self.timeouts.append(timeout)
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.sent.append((node, message.metadata.message_type))
            context = Context(1, node, self.node_configs[node], RecordDict(), self.run_config)
            reply = self.spoil(node, message, self.app(message, context))
            if reply is not None:
                replies.append(reply)
        return replies[::-1]  # in no order that matters

    def get_node_ids(self) -> Iterable[int]:
        return list(self.node_configs)

    def get_nodes(self) -> Iterable[NodeInfo]:
        keys = {node: self.keys.get(node) for node in self.node_configs}
        return [node_info(node, *key) if key else NodeInfo(node_id=node) for node, key in keys.items()]

    # Flower's interface has these too.

    def set_run(self, run: Run) -> None:
        raise AssertionError(_NOT_CALLED)

    @property
    def run(self) -> Run:
        raise AssertionError(_NOT_CALLED)

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise AssertionError(_NOT_CALLED)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise AssertionError(_NOT_CALLED)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise AssertionError(_NOT_CALLED)


def node_configs(folder: Path, sample: Path, names: Iterable[str]) -> dict[int, dict[str, Any]]:
    """One node a client, numbered from 11."""
    state = str(folder / "state")
    return {11 + at: {"data": str(sample), "client": name, "state": state} for at, name in enumerate(names)}


class Deployed:
    """A plan, its nodes and whatever they write, below one folder."""

    def __init__(
        self,
        folder: Path,
        values: dict[str, Any] | None = None,
        sample: Path | None = None,
        **sections: dict[str, Any],
    ):
        self.folder, self.sample = folder, sample or deployments.write_sample(folder)
        self.plan, self.trainer = deployments.make_plan(self.sample, **sections)
        self.plan.save(folder / "plan")
        self.run_config = deployments.run_config(folder, **(values or {}))
        self.nodes = node_configs(folder, self.sample, self.trainer.federation.names)
        self.grid = LocalGrid(client_app(folder / "plan"), self.nodes, self.run_config)

    def serve(self, **values: Any) -> State:
        return serve(self.plan, RunConfig.read(self.run_config | values), self.grid)

    def kept(self, name: str) -> Kept:
        return Kept.load(kept_path(self.folder / "state", "trial", name))

    @property
    def run_folder(self) -> Path:
        return self.folder / "server" / "trial"

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_folder / "metrics.jsonl").read_text().splitlines()]


def simulated(trainer: Trainer, rounds: int = 3) -> State:
    state = trainer.training.init()
    for _ in range(rounds):
        state, _ = trainer.training.step(state)
    return state


def equal(one: Tree, other: Tree, tolerance: float = 1e-10) -> None:
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        torch.testing.assert_close(leaf, other[name], rtol=tolerance, atol=tolerance)


def scaled(asked: Message, answer: Message, factor: float) -> Message:
    """The answer with what it changes in the model multiplied."""
    record, before = answer.content.array_records["arrays"], asked.content.array_records["arrays"]
    layout = {name: (tuple(array.shape), torch.float64) for name, array in record.items()}
    own, received = to_tree(record, layout), to_tree(before, layout)
    content = RecordDict(dict(answer.content))
    content["arrays"] = to_record({name: received[name] + factor * (own[name] - received[name]) for name in own})
    return Message(content, reply_to=asked)
