"""Who is there, and who averages with whom: what every peer works out for itself from the same facts.

Shapes: T clients that are there, C of a round's cohort, tau phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, final

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
    plan: str
    """the fingerprint of its plan"""
    met: bool
    """whether its process has worked with others before, and is no newcomer"""
    rank: int
    """of its process in this meeting"""


def refusals(present: Sequence[Present]) -> dict[int, str]:
    """Say why processes can't take part, by rank; those that worked together before stay, newcomers must fit in."""
    ordered = sorted(present, key=lambda client: (not client.met, client.rank))
    plan, taken, found = ordered[0].plan, set[str](), dict[int, str]()
    for client in ordered:
        if client.plan != plan:
            found.setdefault(
                client.rank,
                f"The plan of client {client.name!r} is {client.plan}, and the others have {plan}; allowed: "
                "one plan for all.",
            )
        elif client.name in taken:
            found.setdefault(
                client.rank, f"There is a client {client.name!r} already; allowed: a name for each, in one process."
            )
        taken.add(client.name)
    return found


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


def _shared_settings(topology: Topology) -> Mapping[str, object]:
    """Return the settings that all graphs have."""
    return {entry.name: getattr(topology, entry.name) for entry in fields(Topology)}


def _as_ring(topology: Topology) -> Ring:
    return Ring(**_shared_settings(topology))  # type: ignore[arg-type]  # the fields of the class they share


def _piece(topology: Topology, keys: Tensor, phases: Sequence[Edges], members: Tensor, seed: int) -> Piece:
    """Weigh the edges among ``members``, who reach each other over all phases together."""
    places = np.full(len(keys), -1, dtype=np.int64)
    places[members.numpy()] = np.arange(len(members))
    inside = [canonical(places[edges][(places[edges] >= 0).all(1)]) for edges in phases]
    given = _Given(**_shared_settings(topology), phases=tuple(inside))  # type: ignore[arg-type]  # likewise
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
