"""Who is there, and who averages with whom: what every peer works out for itself from the same facts.

Shapes: T clients that are there, C of a round's cohort, tau phases.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from fedem.core.errors import UserError
from fedem.core.random import client_keys
from fedem.core.tree import Tree
from fedem.deploy.peers.meeting import open_store, reach_store
from fedem.graphs import Ring, Topology
from fedem.graphs.weights import Edges, canonical


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


# The workers of one meeting, and what passes between them: facts for all, models for neighbours, sums.


class PeersChangedError(Exception):
    """Somebody is gone or must go: those who are left must meet again."""


class Group:
    """Processes that work together until one of them is gone; every call then raises :class:`PeersChangedError`."""

    def __init__(self, timeout: float):
        # Who, how many and where: from the environment that the agent made for its worker.
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with _together():
            store = (reach_store if self.rank else open_store)(host, port, timeout)
            dist.init_process_group(
                "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=timeout)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # With somebody gone there is nothing left to leave in good order.
        if kind is None:
            dist.destroy_process_group()

    def tell_all(self, content: Any) -> list[Any]:
        """Tell all processes something that JSON can hold; returns what each of them told, by rank."""
        message = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _together():
            dist.all_gather(lengths, torch.tensor([len(message)]))
            longest = int(torch.cat(lengths).max())
            padded = torch.cat([message, message.new_zeros(longest - len(message))])
            messages = [torch.empty_like(padded) for _ in lengths]
            dist.all_gather(messages, padded)
        return [json.loads(bytes(text[: int(length)].numpy())) for text, length in zip(messages, lengths, strict=True)]

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send a buffer to each rank of ``outgoing``, and fill those of ``incoming``, all at the same time."""
        operations = [dist.P2POp(dist.isend, buffer, rank) for rank, buffer in outgoing.items()]
        operations += [dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in incoming.items()]
        if not operations:
            return
        with _together():
            for request in dist.batch_isend_irecv(operations):
                request.wait()

    def total(self, values: Tensor) -> Tensor:
        """Add up everybody's ``values``, of any one shape."""
        together = values.clone()
        with _together():
            dist.all_reduce(together)
        return together


def pack(tree: Tree) -> Tensor:
    """Lay the bytes of all leaves behind each other by name, whatever their types: ``[bytes]`` uint8."""
    return torch.cat([leaf.contiguous().flatten().view(torch.uint8) for _, leaf in sorted(tree.items())])


def unpack(buffer: Tensor, like: Tree) -> Tree:
    """Return the tree that :func:`pack` laid into ``buffer``; its leaves are ``like`` these."""
    found: Tree = {}
    for name, leaf in sorted(like.items()):
        size = leaf.numel() * leaf.element_size()
        # A copy begins where a number of its type may begin.
        found[name] = buffer[:size].clone().view(leaf.dtype).reshape(leaf.shape)
        buffer = buffer[size:]
    return found


@contextmanager
def _together() -> Iterator[None]:
    """Whatever gloo and its store raise means that somebody does not answer, or that another port is needed."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise PeersChangedError(str(error)) from error
