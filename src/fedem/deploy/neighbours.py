"""Who is there, and who averages with whom: what every peer works out for itself from the same facts.

Shapes: T clients that are there, C of a round's cohort, tau phases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from fedem.errors import UserError
from fedem.graphs import Ring, Topology
from fedem.graphs.weights import Edges, canonical
from fedem.randomness import client_keys


class Present(NamedTuple):
    """A client that is there, as its peer tells the others."""

    name: str
    samples: int
    """n_t, to train on"""
    round: int
    """rounds of the run that it has done"""
    version: str
    """of fedem"""
    plan: str
    """the fingerprint of its plan"""
    run: str
    """which run those rounds were of; empty where there were none"""
    met: bool
    """whether its process has worked with others before, and is no newcomer"""
    rank: int
    """of its process in this meeting"""


def run_to_go_on_with(present: Sequence[Present]) -> str:
    """Return the run of those who worked together before, or else that of most; empty where most begin a new one."""
    voters = [client for client in present if client.met] or present
    votes = Counter(client.run for client in voters)
    # Where as many begin as go on, they go on; of two runs, all must choose the same.
    return max(votes, key=lambda run: (votes[run], run))


def refusals(present: Sequence[Present], state: Path) -> dict[int, str]:
    """Say why processes can't take part, by rank; those that worked together before stay, newcomers must fit in.

    ``state`` is where this process keeps what its clients learn.
    """
    ordered = sorted(present, key=lambda client: (not client.met, client.rank))
    first, taken, found = ordered[0], set[str](), dict[int, str]()
    agreeing = [client for client in present if (client.version, client.plan) == (first.version, first.plan)]
    run = run_to_go_on_with(agreeing)
    for client in ordered:
        if reason := _objection(client, first, run, taken, state):
            found.setdefault(client.rank, reason)
        taken.add(client.name)
    return found


def _objection(client: Present, first: Present, run: str, taken: Collection[str], state: Path) -> str:
    """Say why a client can't take part with ``first`` and the others, whose names are ``taken``; empty when it can."""
    if client.version != first.version:
        return (
            f"Client {client.name!r} has fedem {client.version}, and the others have {first.version}; allowed: one "
            "version for all."
        )
    if client.plan != first.plan:
        return (
            f"The plan of client {client.name!r} is {client.plan}, and the others have {first.plan}; allowed: one plan "
            "for all."
        )
    if client.name in taken:
        return f"There is a client {client.name!r} already; allowed: a name for each, in one process."
    if client.run not in ("", run):
        return (
            f"Client {client.name!r} has done {client.round} rounds of another run than the others, kept in {state}; "
            "allowed: an empty folder for --state, or, to go on with that run, that most of those who meet first are "
            "of it."
        )
    return ""


def round_to_go_on_with(present: Iterable[Present]) -> int:
    """Return how many rounds are done: as many as the client that got furthest did, each with what it has itself."""
    return max(client.round for client in present)


class Piece(NamedTuple):
    """Clients that reach each other."""

    members: Tensor
    """``[c]`` int64, positions among those present"""
    topology: Topology
    matrices: Tensor
    """``[tau, c, c]``"""


@dataclass(frozen=True, eq=False)
class Neighbourhood:
    """The graph over those who are there.

    Attributes:
        keys: ``[T]``, of their names.
        pieces: one where the graph is connected, which it may no longer be after a loss.
        remark: what differs from the plan; empty when nothing does.

    """

    keys: Tensor
    pieces: tuple[Piece, ...]
    remark: str = ""

    @classmethod
    def around(cls, topology: Topology, names: Sequence[str], seed: int) -> Neighbourhood:
        """Lay a graph over those who are there.

        Where it falls apart, they go on in its pieces; where there is none for so many clients, in a ring.
        """
        keys = client_keys(names)
        everybody = torch.arange(len(keys))
        try:
            return cls(keys, (Piece(everybody, topology, topology.matrices(keys, seed)),))
        except UserError as error:
            reason = str(error)
        try:
            phases = topology.edges(keys, seed)
        except UserError:
            ring = _as_ring(topology)
            remark = f"{reason} Until others come, the {len(keys)} who are there average over a ring."
            return cls(keys, (Piece(everybody, ring, ring.matrices(keys, seed)),), remark)
        pieces = tuple(_piece(topology, keys, phases, members, seed) for members in _components(len(keys), phases))
        remark = f"The graph of the {len(keys)} who are there has {len(pieces)} pieces; each goes on by itself."
        return cls(keys, pieces, remark)

    def matrix(self, round_index: int, key: int) -> Tensor:
        """Return the mixing matrix of a round, ``[T, T]`` float64; ``key`` is the source of what is random in it."""
        whole = torch.zeros(len(self.keys), len(self.keys), dtype=torch.float64)
        for members, topology, matrices in self.pieces:
            part = topology.draw(matrices, round_index, self.keys[members], key)
            whole[members[:, None], members] = part
        return whole


class Routes(NamedTuple):
    """Whose models a process sends where and gets from where in a round: positions in the cohort, by rank."""

    sends: dict[int, list[int]]
    receives: dict[int, list[int]]


def routes(matrix: Tensor, ranks: Sequence[int], rank: int) -> Routes:
    """Read the messages of process ``rank`` off a round's matrix ``[C, C]``, whose clients live in ``ranks`` ``[C]``.

    A client's model goes to each process once, however many of its neighbours live there.
    """
    owners, linked = torch.tensor(ranks), matrix > 0
    mine, found = owners == rank, Routes({}, {})
    for other in sorted(set(ranks) - {rank}):
        theirs = owners == other
        for messages, senders, readers in ((found.sends, mine, theirs), (found.receives, theirs, mine)):
            if positions := (senders & linked[readers].any(0)).nonzero().flatten().tolist():
                messages[other] = positions
    return found


@final
@dataclass(frozen=True)
class _Given(Topology):
    """Edges that are known already, ``[E, 2]`` a phase."""

    phases: tuple[Edges, ...] = ()

    def edges(self, keys: Tensor, seed: int) -> list[Edges]:
        """Return them."""
        return list(self.phases)


def _shared_settings(topology: Topology) -> dict[str, Any]:
    """Return the settings that all graphs have."""
    return {entry.name: getattr(topology, entry.name) for entry in fields(Topology)}


def _as_ring(topology: Topology) -> Ring:
    return Ring(**_shared_settings(topology))


def _piece(topology: Topology, keys: Tensor, phases: Sequence[Edges], members: Tensor, seed: int) -> Piece:
    """Weigh the edges among ``members``, who reach each other over all phases together."""
    places = np.full(len(keys), -1, dtype=np.int64)
    places[members.numpy()] = np.arange(len(members))
    inside = [canonical(places[edges][(places[edges] >= 0).all(1)]) for edges in phases]
    given = _Given(**_shared_settings(topology), phases=tuple(inside))
    try:
        return Piece(members, given, given.matrices(keys[members], seed))
    except UserError:
        # The fastest weights need a connected graph in every single round.
        given = replace(given, weights="metropolis")
        return Piece(members, given, given.matrices(keys[members], seed))


def _components(count: int, phases: Sequence[Edges]) -> list[Tensor]:
    """Return the positions that reach each other, ``[c]`` each in ascending order."""
    edges = torch.from_numpy(np.concatenate(phases))
    reach = torch.eye(count)
    reach[edges[:, 0], edges[:, 1]] = reach[edges[:, 1], edges[:, 0]] = 1
    while not torch.equal(further := (reach @ reach).clamp(max=1), reach):
        reach = further
    first = reach.argmax(1)  # whom a client reaches first is the same for all of a piece
    return [(first == leader).nonzero().flatten() for leader in first.unique()]
