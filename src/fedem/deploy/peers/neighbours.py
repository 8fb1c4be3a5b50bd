"""Who takes part, and who averages with whom: what every peer works out for itself, from the same descriptions.

Shapes: T clients that are there, C of a round's cohort, tau phases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from fedem.core.errors import UserError, counted
from fedem.core.random import client_keys
from fedem.core.schema import Flag, Listed, Row, Table, Text, Whole, parse_json
from fedem.graphs import Ring, Topology
from fedem.graphs.weights import Edges, canonical, component_labels

_Messages = dict[int, list[int]]  # whose models pass, as positions in the cohort, by the other process's rank


_CLIENT = Row((Text("(?s).+", "a name"), Whole(least=1), Whole(least=0), Text()))  # name, n_t, rounds done, run
_NAMES = {"version": Text(), "plan": Text(), "new_run": Text("(?s).+", "a name")}
_TOLD = Table(_NAMES | {"met": Flag(), "clients": Listed(_CLIENT)})


class PresentClient(NamedTuple):
    """A client that is there, as its process describes it to the others."""

    name: str
    samples: int  # n_t, to train on
    round: int  # rounds of the run that it has done
    version: str  # of fedem
    plan: str  # the fingerprint of its plan
    run: str  # which run those rounds were of; empty where there were none
    met: bool  # whether its process has worked with others before, and is not a newcomer
    rank: int  # of its process in this meeting


def read_present(messages: Sequence[bytes]) -> tuple[list[PresentClient], str]:
    """Read what each process says of itself, by rank; returns the clients, and what the first would call a new run."""
    present, new_run = [], ""
    for rank, message in enumerate(messages):
        who = f"What the peer of rank {rank} says of itself"
        told = parse_json(message, who, _TOLD)
        if not told["clients"]:
            raise UserError(f"{who} can't be read: it has no clients; allowed: one or more.")
        for name, samples, done, run in told["clients"]:
            present.append(PresentClient(name, samples, done, told["version"], told["plan"], run, told["met"], rank))
        new_run = new_run or told["new_run"]
    return present, new_run


def run_to_go_on_with(present: Sequence[PresentClient]) -> str:
    """Return the run of those who worked together before, or else that of most; empty where most begin a new one."""
    voters = [client for client in present if client.met] or present
    votes = Counter(client.run for client in voters)
    # Where as many begin as go on, they go on; of two runs, all must choose the same.
    return max(votes, key=lambda run: (votes[run], run))


def round_to_go_on_with(present: Iterable[PresentClient]) -> int:
    """Return how many rounds are done: as many as the client that got furthest did, each with what it has itself."""
    return max(client.round for client in present)


def refusals(present: Sequence[PresentClient], state: Path) -> dict[int, str]:
    """Say why processes can't take part, by rank; those that worked together before stay, newcomers must fit in."""
    ordered = sorted(present, key=lambda client: (not client.met, client.rank))
    first, names, found = ordered[0], set[str](), dict[int, str]()
    run = run_to_go_on_with([one for one in present if (one.version, one.plan) == (first.version, first.plan)])
    for client in ordered:
        reason, name, others = "", repr(client.name), "and the others have"
        if client.version != first.version:
            reason = f"Client {name} has fedem {client.version}, {others} {first.version}; allowed: the same for all."
        elif client.plan != first.plan:
            reason = f"The plan of client {name} is {client.plan}, {others} {first.plan}; allowed: the same for all."
        elif client.name in names:
            reason = f"There is a client {name} already; allowed: a name for each, in one process."
        elif client.run not in ("", run):
            done = f"{counted(client.round, 'round')} of another run than the others, kept in {state}"
            mend = "an empty folder for --state, or, to go on, that most of those who meet first are of that run"
            reason = f"Client {name} has done {done}; allowed: {mend}."
        if reason:
            found.setdefault(client.rank, reason)
        names.add(client.name)
    return found


class Component(NamedTuple):
    """Clients that reach each other over the graph."""

    members: Tensor  # [c] int64, positions among those present
    topology: Topology
    matrices: Tensor  # [tau, c, c]


@dataclass(frozen=True, eq=False)
class PeerGraph:
    """The graph over those who are there."""

    keys: Tensor  # [T], of their names
    components: tuple[Component, ...]  # one where the graph is connected, which it may no longer be after a loss
    remark: str = ""  # what differs from the plan; empty when nothing does

    @classmethod
    def over(cls, topology: Topology, names: Sequence[str], seed: int) -> PeerGraph:
        """Lay a graph over those who are there; its pieces if it falls apart, a ring if there is none for so many."""
        keys = client_keys(names)
        everybody = torch.arange(len(keys))
        shared = {entry.name: getattr(topology, entry.name) for entry in fields(Topology)}
        try:
            return cls(keys, (Component(everybody, topology, topology.matrices(keys, seed)),))
        except UserError as error:
            reason = str(error)
        try:
            phases = topology.edges(keys, seed)
        except UserError:
            ring = Ring(**shared)
            remark = f"{reason} Until others come, the {len(keys)} who are there average over a ring."
            return cls(keys, (Component(everybody, ring, ring.matrices(keys, seed)),), remark)
        components, labels = [], component_labels(len(keys), np.concatenate(phases))
        for label in range(labels.max() + 1):
            members = torch.from_numpy(np.flatnonzero(labels == label))
            inside = _GivenEdges(**shared, phases=tuple(_among(len(keys), members, edges) for edges in phases))
            try:
                matrices = inside.matrices(keys[members], seed)
            except UserError:  # the fastest weights need a connected graph in every single round
                inside = replace(inside, weights="metropolis")
                matrices = inside.matrices(keys[members], seed)
            components.append(Component(members, inside, matrices))
        remark = f"The graph of the {len(keys)} who are there has {len(components)} pieces; each goes on by itself."
        return cls(keys, tuple(components), remark)

    def matrix(self, round_index: int, key: int) -> Tensor:
        """Return the mixing matrix of a round, ``[T, T]`` float64; ``key`` is the source of what is random in it."""
        whole = torch.zeros(len(self.keys), len(self.keys), dtype=torch.float64)
        for members, topology, matrices in self.components:
            whole[members[:, None], members] = topology.draw(matrices, round_index, self.keys[members], key)
        return whole


def routes(matrix: Tensor, ranks: Sequence[int], rank: int) -> tuple[_Messages, _Messages]:
    """Read what process ``rank`` sends and gets off a round's matrix ``[C, C]``; ``ranks`` ``[C]`` are the clients'.

    A client's model goes to each process once, however many of its neighbours live there.
    """
    owners, linked = torch.tensor(ranks), matrix > 0
    mine, sends, receives = owners == rank, _Messages(), _Messages()
    for other in sorted(set(ranks) - {rank}):
        theirs = owners == other
        for messages, senders, readers in ((sends, mine, theirs), (receives, theirs, mine)):
            if positions := (senders & linked[readers].any(0)).nonzero().flatten().tolist():
                messages[other] = positions
    return sends, receives


@final
@dataclass(frozen=True)
class _GivenEdges(Topology):
    phases: tuple[Edges, ...] = ()  # known already, [E, 2] in each

    def edges(self, keys: Tensor, seed: int) -> list[Edges]:
        return list(self.phases)


def _among(count: int, members: Tensor, edges: Edges) -> Edges:
    """Return the edges among ``members``, between positions in that list."""
    positions = np.full(count, -1, dtype=np.int64)
    positions[members.numpy()] = np.arange(len(members))
    return canonical(positions[edges][(positions[edges] >= 0).all(1)])
