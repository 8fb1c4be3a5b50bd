"""Fewer bytes for nearly the same numbers: how a tree is written for a message, and what writing it lost.

A message holds updates, which are small beside what they change. What rounding takes from one is kept where it was
taken, and added to the next before that is rounded (error feedback). So all messages together say what all updates come
to, but for the last rounding. Seide, Fu, Droppo, Li, Yu: 1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs, Interspeech 2014; Karimireddy, Rebjock, Stich, Jaggi: Error Feedback
Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.

Shapes: a row is what one scale is for, a leaf of one component.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedem.settings import Settings
from fedem.tree import Tree

FORMATS = ("none", "bfloat16", "int8")
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
        """Whether anything is left out."""
        return self != Compression()


def write_update(update: Tree, rest: Tree, form: str, leading: int = 0) -> tuple[Tree, Tree]:
    """Write an update in a format, and what earlier ones left over with it.

    Args:
        update: what is to be said.
        rest: what earlier messages left unsaid of some leaves; the others are written as they are.
        form: one of :data:`FORMATS`.
        leading: how many first dimensions have a scale for each index.

    Returns:
        the message and the new rest: what :func:`read_update` makes of the message, and the rest, are update + old rest

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
    """Return the leaves that stand for one leaf in a message."""
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
