"""Fewer bytes for nearly the same numbers: how a tree is written for a message, and what writing it lost.

A message holds updates, which are small beside what they change. What rounding takes from one is kept where it was
taken, and added to the next before that is rounded (error feedback). So all messages together say the sum of all
updates, but for the last rounding. Seide, Fu, Droppo, Li, Yu: 1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs, Interspeech 2014; Karimireddy, Rebjock, Stich, Jaggi: Error Feedback
Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.

Shapes: M components, c clients; a row is what one scale is for, a leaf of one component.
"""

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from fedem.core.settings import Settings
from fedem.core.tree import Tree, add_prefix, row_of, take_prefix, tree_bytes, tree_map
from fedem.models.base import Model

FORMATS = ("none", "bfloat16", "int8")
_SENT, _RESIDUAL, _NEWS, _REST = "sent/components", "residual", "news", "rest"  # names of leaves, and prefixes
_LARGEST = 127
_SHORT = 2  # numbers of a row that take no more room as bfloat16 than as int8 with a scale


@dataclass(frozen=True)
class Compression(Settings):
    """What the messages of a server and its clients leave out.

    Attributes:
        updates: how clients write what they changed: "none" as it is, "bfloat16" in half the bytes of float32, "int8"
            in about a quarter.
        downloads: how the server writes what changed since the last round, for those who took part in it.
        threshold: a client sends only the components whose mixture weight is above it; 0 sends all.
    """

    updates: str = field(default="none", metadata={"choices": FORMATS})
    downloads: str = field(default="none", metadata={"choices": FORMATS})
    threshold: float = field(default=0.0, metadata={"min": 0, "below": 1})

    @property
    def is_on(self) -> bool:
        return self != Compression()


def write_update(update: Tree, rest: Tree, form: str, leading: int = 0) -> tuple[Tree, Tree]:
    """Write an update in a format of :data:`FORMATS`, and with it the rest that earlier messages left unsaid.

    Leaves that have no rest are written as they are. The first ``leading`` dimensions have a scale for each index.
    Returns the message and the new rest: what :func:`read_update` makes of the message, and it, are update + old rest.
    """
    due = {name: update[name] + left for name, left in rest.items()}
    written = {key: part for name, leaf in due.items() for key, part in _written(name, leaf, form, leading).items()}
    return update | written, {name: leaf - _number(written, name, leaf.dtype) for name, leaf in due.items()}


def read_update(message: Tree, dtype: torch.dtype) -> Tree:
    """Return the update that a message says, its floating leaves of type ``dtype``."""
    return {name: _number(message, name, dtype) for name in message if not name.startswith("scale/")}


def _number(message: Tree, name: str, dtype: torch.dtype) -> Tensor:
    leaf, scale = message[name], message.get(f"scale/{name}")
    if scale is not None:
        # Seven bits times eight: exact in any floating type that models have.
        return leaf.to(dtype) * scale.to(dtype).reshape(*scale.shape, *(1,) * (leaf.ndim - scale.ndim))
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def _written(name: str, leaf: Tensor, form: str, leading: int) -> Tree:
    if form == "none":
        return {name: leaf}
    if form == "bfloat16" or leaf.shape[leading:].numel() <= _SHORT:
        return {name: leaf.to(torch.bfloat16)}
    rows = leaf.reshape(*leaf.shape[:leading], -1)
    scale = (rows.abs().amax(-1) / _LARGEST).to(torch.bfloat16)
    steps = scale.to(leaf.dtype).unsqueeze(-1)
    # Where the scale was rounded down, the largest number loses less than half a step all the same.
    whole = (rows / torch.where(steps == 0, 1, steps)).round().clamp(-_LARGEST, _LARGEST)
    return {name: whole.to(torch.int8).reshape(leaf.shape), f"scale/{name}": scale}


@final
@dataclass(frozen=True, eq=False)
class Codec:
    """Writes and reads the messages of a server that averages and of its clients, who upload u itself.

    A client's message is the difference between its u and the one it received; the server adds the mean to u. Rounding
    touches what is trained. Buffers and counters go as they are: a rounded variance might fall below zero. What a
    client's messages left unsaid, the residual, is private to it and stands in its personal tree beside v_t
    (``residual/...``). Of a component whose weight is not above the threshold, the update is dropped and the residual
    waits. Where downloads are written too, the server adds to u only what its message says of the mean, and the
    mixer's memory has the message ("news") and what it left unsaid ("rest").
    """

    compression: Compression
    model: Model
    leading: int  # how many first dimensions of u have a scale for each index: 1 for components, 0 for a single model
    common: frozenset[str] = frozenset()  # leaves that components have in common, which are always sent

    @property
    def adds_up(self) -> bool:
        """Whether means of some messages and of the others add up to those of all: the server rounds nothing."""
        return self.compression.downloads == "none"

    def first_residual(self, shared: Tree) -> Tree:
        on = self.compression.updates != "none"
        return {name: torch.zeros_like(leaf) for name, leaf in shared.items() if on and name in self.model.trainable}

    def encode(self, trained: Tree, received: Tree, personal: Tree, residual: Tree) -> tuple[Tree, Tree]:
        """Write what a client's round changed, from u as ``received`` to u as ``trained``; v_t decides what is sent.

        Returns the update as it is written, with the components it is of where not of all; and the new residual.
        """
        update = tree_map(lambda new, old: new - old, trained, received)
        message, rest = write_update(update, residual, self.compression.updates, self.leading)
        if self.compression.threshold:
            sent = personal["log_weights"].exp() > self.compression.threshold
            held = self._by_component(rest)
            rest |= tree_map(lambda new, old: torch.where(row_of(sent, new), new, old), held, residual)
            message = self._without_unsent(message, sent) | {_SENT: sent}
        return message, rest

    def rewrite(self, message: Tree, update: Tree) -> Tree:
        """Return the message that says another ``update`` of some leaves, of the same components and with no rest."""
        written = write_update(update, tree_map(torch.zeros_like, update), self.compression.updates, self.leading)[0]
        return message | (self._without_unsent(written, message[_SENT]) if _SENT in message else written)

    def _without_unsent(self, message: Tree, sent: Tensor) -> Tree:
        """Put zeros for the components that are not ``sent`` ``[M]``."""
        rows = self._by_component(message)
        return message | tree_map(lambda leaf: torch.where(row_of(sent, leaf), leaf, 0), rows)

    def _by_component(self, tree: Tree) -> Tree:
        """Return the leaves that each component has its own of."""
        return {n: leaf for n, leaf in tree.items() if n != _SENT and n.removeprefix("scale/") not in self.common}

    def decode(self, message: Tree) -> Tree:
        """Return the update that a message says; of components that were not sent, none."""
        return read_update({name: leaf for name, leaf in message.items() if name != _SENT}, self.model.dtype)

    def pack(self, message: Tree) -> Tree:
        """Leave out the components that are not sent, for a network."""
        if _SENT not in message:
            return message
        sent = message[_SENT]
        return message | {name: leaf[sent] for name, leaf in self._by_component(message).items()}

    def unpack(self, packed: Tree) -> Tree:
        """Put zeros where :meth:`pack` left out components."""
        if _SENT not in packed:
            return packed
        sent, rows = packed[_SENT], self._by_component(packed)
        zeros = tree_map(lambda leaf: leaf.new_zeros(len(sent), *leaf.shape[1:]), rows)
        return packed | tree_map(lambda whole, leaf: whole.index_put((sent,), leaf), zeros, rows)

    def num_bytes(self, messages: Tree) -> int:
        """Count the bytes of some clients' packed messages, ``[c, ...]``."""
        if _SENT not in messages:
            return tree_bytes(messages)
        rows = self._by_component(messages)
        always = {name: leaf for name, leaf in messages.items() if name not in rows}
        one = {name: leaf[0, :1] for name, leaf in rows.items()}
        return tree_bytes(always) + int(messages[_SENT].sum()) * tree_bytes(one)

    def first_memory(self, shared: Tree) -> Tree:
        """Return what the server remembers of its messages beside the first u ``[1, ...]``."""
        if self.compression.downloads == "none":
            return {}
        still = tree_map(torch.zeros_like, shared)
        return self._announced(still, {name: leaf for name, leaf in still.items() if name in self.model.trainable})

    def announce(self, mean: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """Return what the server adds to u for a mean of updates ``[1, ...]``, and what it remembers of its message."""
        if self.compression.downloads == "none":
            return mean, {}
        memory = self._announced(mean, take_prefix(_REST, memory))
        return read_update(take_prefix(_NEWS, memory), self.model.dtype), memory

    def _announced(self, mean: Tree, rest: Tree) -> Tree:
        message, rest = write_update(mean, rest, self.compression.downloads, 1 + self.leading)
        return add_prefix(_NEWS, message) | add_prefix(_REST, rest)

    def news(self, memory: Tree) -> Tree:
        """Return the server's message for those who took part in the last round, ``[1, ...]``; empty for none."""
        return take_prefix(_NEWS, memory)


def split_residual(personal: Tree) -> tuple[Tree, Tree]:
    """Divide what a client keeps into v_t and the residual of its messages."""
    residual = take_prefix(_RESIDUAL, personal)
    return {name: leaf for name, leaf in personal.items() if not name.startswith(f"{_RESIDUAL}/")}, residual


def join_residual(personal: Tree, residual: Tree) -> Tree:
    """Put both together again."""
    return personal | add_prefix(_RESIDUAL, residual)
