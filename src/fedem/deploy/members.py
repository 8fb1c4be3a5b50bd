"""The clients of a peer's process, and what they have learnt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fedem.config import Config
from fedem.deploy.holding import held
from fedem.deploy.keeping import Kept, place
from fedem.deploy.node import Node
from fedem.deploy.plan import Plan
from fedem.errors import UserError
from fedem.graphs import File
from fedem.mixing.graph import Graph
from fedem.mixing.local_layers import LocalLayers
from fedem.models.pretrained import INSTALLED
from fedem.randomness import COMPONENTS, client_keys, derive
from fedem.runs import RunFolder
from fedem.tree import Tree, tree_floats, tree_sorted


def graph_of(plan: Plan) -> Graph:
    """Return what peers average over; refuse plans that need a server."""
    mixer = plan.parts.mixer
    graph = mixer.base if isinstance(mixer, LocalLayers) else mixer
    if not isinstance(graph, Graph):
        raise UserError(
            f"Method {plan.config.name('method')} needs a server; allowed among peers: dfedem, dsgd, and methods with "
            "a graph (graph.name)."
        )
    if isinstance(graph.topology, File):
        raise UserError(
            "graph.name is 'file', a graph of certain clients; allowed among peers, who come and go: others."
        )
    return graph


def check_start(config: Config) -> None:
    """Refuse a start from a file that others may not have, or have another one of: each peer draws its own."""
    weights = config.values("model").get("weights", "")
    if weights not in ("", INSTALLED):
        raise UserError(
            f"model.weights is {weights!r}, a file of this machine, and there is no server to send it to all; allowed "
            f"among peers: none, or {INSTALLED!r}, which a package brings (efficientnet_lite0)."
        )


@dataclass
class Member:
    """A client of this process, and what it has learnt."""

    node: Node
    path: Path
    round: int
    """rounds of the run that it has done"""
    shared: Tree
    personal: Tree
    run: str = ""
    """which run that was: a word that those who began it agreed on; empty before the first round"""

    @classmethod
    def open(cls, node: Node, state: Path) -> Member:
        """Take up what the client has kept under this plan, or start."""
        plan = node.plan
        path = place(state, f"peers-{plan.fingerprint[:12]}", node.name)
        if path.exists():
            kept = Kept.load(path)
            if kept.plan.fingerprint != plan.fingerprint or kept.shared is None or not kept.run:
                raise UserError(f"{path} was not kept by a peer under this plan; allowed: another folder for --state.")
            return cls(node, path, kept.round, kept.shared, kept.personal, kept.run)
        seed = plan.config.run.seed
        draw = derive(seed, COMPONENTS)
        if graph_of(plan).starts_apart:
            draw = derive(client_keys([node.name])[0], COMPONENTS, seed)
        shared = tree_sorted(plan.parts.algorithm.init_shared(int(draw)))
        return cls(node, path, 0, shared, node.first_personal(shared))

    def keep(self) -> None:
        """Write what it has learnt."""
        Kept(self.node.plan, self.round, self.personal, self.shared, run=self.run, client=self.node.name).save(
            self.path
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes off its file."""
        with held(self.path.with_suffix(".lock"), f"What client {self.node.name!r} has learnt"):
            yield

    @property
    def log(self) -> RunFolder:
        """Where its metrics.jsonl is."""
        return RunFolder(self.path.with_suffix(""))

    def check(self, upload: Tree, rate: float) -> None:
        """Refuse to pass on what is no longer a number."""
        if (name := spoilt(upload)) is not None:
            raise UserError(
                f"Training of client {self.node.name!r} diverged in round {self.round + 1}: {name!r} is no longer "
                f"finite at learning rate {rate:g}; a plan with a smaller schedule.learning_rate is needed."
            )


def spoilt(tree: Tree) -> str | None:
    """Return the name of a leaf with numbers that are not finite, if there is one."""
    names = (name for name, leaf in tree_floats(tree).items() if not bool(torch.isfinite(leaf).all()))
    return next(names, None)
