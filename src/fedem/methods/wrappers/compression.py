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
from typing import final

import torch
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.settings import Settings
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_bytes, tree_map, tree_repeat
from fedem.methods.base import Algorithm, Batch, Local, Mixture
from fedem.methods.fedem import FedEM
from fedem.methods.mixer import Mixed, OneGroup, Round, Uploads, by_samples, weighted_means
from fedem.methods.wrappers import Wrapped

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


# Any method whose clients upload u itself, with smaller uploads: updates of u, rounded, of few components.
#
# Its authors name both as the way on from FedEM: compression, and limiting the components that a client transmits, by
# its current mixture weights.
#
# Shapes: M components, c clients.

_SENT = "sent/components"
_OWN_STEPS = ("survey", "finish", "summand", "update")


@final
@dataclass(frozen=True, eq=False)
class Compressed(Wrapped):
    """A client uploads the difference between its u and the one it received; the server adds the mean to u.

    Rounding touches what is trained. Buffers and counters go as they are: a rounded variance might fall below zero. v_t
    gains ``residual/...``, what earlier uploads left unsaid, which is private. A component whose weight at the client
    is not above the threshold counts as unchanged there: what the round did to it is dropped, and its residual waits.
    Which components are sent is what a server then learns of the client's weights.
    """

    compression: Compression

    @classmethod
    def of(cls, base: Algorithm, compression: Compression) -> Compressed:
        """Wrap ``base``, if it can be."""
        if any(getattr(type(base), step) is not getattr(Algorithm, step) for step in _OWN_STEPS):
            raise UserError(
                f"Uploads of {type(base).__name__} can't be compressed: its clients send more or less than a model to "
                "be averaged, or survey all samples at once; allowed: [compression] off, or methods such as fedem, "
                "fedavg, fedprox, ditto and apfl."
            )
        if compression.threshold and not isinstance(base, FedEM):
            raise UserError(
                f"compression.threshold is {compression.threshold:g}, but {type(base).__name__} has no mixture "
                "weights; allowed: 0, or method fedem."
            )
        if isinstance(base, FedEM) and compression.threshold >= 1 / base.num_components:
            raise UserError(
                f"compression.threshold is {compression.threshold:g}, and with {base.num_components} components all "
                f"weights of a client may be below; allowed: below {1 / base.num_components:.4g}."
            )
        return cls(base.model, base.solver, base, compression)

    @property
    def leading(self) -> int:
        """How many first dimensions of u have a scale for each index: components have, a single model has none."""
        return int(isinstance(self.base, FedEM))

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """As the method does; and nothing is left unsaid."""
        return self.base.init_personal(shared, key) | add_prefix("residual", self._no_residual(shared))

    def _no_residual(self, shared: Tree) -> Tree:
        if self.compression.updates == "none":
            return {}
        return {name: torch.zeros_like(leaf) for name, leaf in shared.items() if name in self.model.trainable}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """As the method does; and remember u as it was received."""
        local, samples = self.base.begin(shared, _without_residual(personal), scores, mask)
        # A client that was fitted after training has left nothing unsaid.
        residual = take_prefix("residual", personal) or self._no_residual(shared)
        extra = add_prefix("received", shared) | add_prefix("residual", residual)
        return _extended(local, extra), samples

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """As the method does."""
        return _extended(self.base.step(_inner(local), batch, learning_rate), local.context)

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """As the method does."""
        return _extended(self.base.tune(_inner(local), batch, learning_rate), local.context)

    def keep(self, local: Local) -> tuple[Tree, Tree]:
        """As the method does: a client that trains for itself alone has nothing to send."""
        return self.base.keep(_inner(local))

    def finish(self, local: Local) -> tuple[Tree, Tree]:
        """The update as it is written, and which components it is of, where not of all; v_t with the new residual."""
        shared, personal = self.base.finish(_inner(local))
        received, residual = (take_prefix(name, local.context) for name in ("received", "residual"))
        update = tree_map(lambda new, old: new - old, shared, received)
        message, rest = write_update(update, residual, self.compression.updates, self.leading)
        if self.compression.threshold:
            sent = personal["log_weights"].exp() > self.compression.threshold
            rest = tree_map(lambda new, old: torch.where(_along(sent, new), new, old), rest, residual)
            message = tree_map(lambda leaf: torch.where(_along(sent, leaf), leaf, 0), message) | {_SENT: sent}
        return message, personal | add_prefix("residual", rest)

    def summand(self, upload: Tree) -> Tree:
        """The update that the upload says; of components that were not sent, none."""
        return read_update({name: leaf for name, leaf in upload.items() if name != _SENT}, self.model.dtype)

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """U + the mean of the updates."""
        return tree_map(torch.add, shared, mean)

    def follow(self, shared: Tree, news: Tree) -> Tree:
        """The last round's u and the server's message (:meth:`fedem.methods.mixer.Mixer.news`) make the new u."""
        return tree_map(torch.add, shared, read_update(news, self.model.dtype))

    def upload_bytes(self, uploads: Tree) -> int:
        """Count what :meth:`pack` leaves of some clients' uploads, ``[c, ...]``."""
        if _SENT not in uploads:
            return tree_bytes(uploads)
        sent, rows = uploads[_SENT], {name: leaf[0, :1] for name, leaf in uploads.items() if name != _SENT}
        return tree_bytes({_SENT: sent}) + int(sent.sum()) * tree_bytes(rows)

    def pack(self, upload: Tree) -> Tree:
        """Leave out the components that are not sent."""
        if _SENT not in upload:
            return upload
        sent = upload[_SENT]
        return {name: leaf if name == _SENT else leaf[sent] for name, leaf in upload.items()}

    def unpack(self, message: Tree) -> Tree:
        """Put zeros where components were left out."""
        if _SENT not in message:
            return message
        sent = message[_SENT]

        def spread(leaf: Tensor) -> Tensor:
            whole = leaf.new_zeros(len(sent), *leaf.shape[1:])
            whole[sent] = leaf
            return whole

        return {name: leaf if name == _SENT else spread(leaf) for name, leaf in message.items()}

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """As the method does."""
        return self.base.predictor(shared, _without_residual(personal))


def _without_residual(personal: Tree) -> Tree:
    return {name: leaf for name, leaf in personal.items() if not name.startswith("residual/")}


def _extended(local: Local, extra: Tree) -> Local:
    """Put what the wrapper must remember beside the method's own context."""
    remembered = {name: leaf for name, leaf in extra.items() if not name.startswith("base/")}
    return local._replace(context=add_prefix("base", local.context) | remembered)


def _inner(local: Local) -> Local:
    """Return the client as the method knows it."""
    return local._replace(context=take_prefix("base", local.context))


def _along(rows: Tensor, like: Tensor) -> Tensor:
    """Give ``[M]`` values as many dimensions as ``like`` ``[M, ...]`` has."""
    return rows.reshape(-1, *(1,) * (like.ndim - 1))


# A server that tells its clients what changed, in fewer bytes than what there is now.
#
# Shapes: one group, so every leaf is ``[1, ...]``.


@final
@dataclass(frozen=True)
class Changes(OneGroup):
    """A star whose clients upload updates of u; the server adds to u only what its message says of their mean.

    So whoever holds the last round's u and reads the message holds the new one, to the last bit. The memory has the
    message ("news") and what it left unsaid ("rest"), which nobody but the server ever sees.

    Attributes:
        form: how the message is written.
        leading: how many first dimensions of u have a scale for each index.

    """

    form: str
    leading: int

    def init(self, shared: Tree, trained: frozenset[str], keys: Tensor, seed: int) -> tuple[Tree, Tree]:
        """One group; nothing has changed yet, and nothing is left unsaid."""
        groups = tree_repeat(shared, 1)
        still = tree_map(torch.zeros_like, groups)
        return groups, self._written(still, {name: leaf for name, leaf in still.items() if name in trained})

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        """n_t / n over the cohort alone, as far as the message says it."""
        means, rest = weighted_means(by_samples(this), uploads), take_prefix("rest", memory)
        memory = self._written(means, rest)
        dtype = next(iter(rest.values())).dtype
        said = read_update(take_prefix("news", memory), dtype)
        return Mixed(torch.zeros(1, dtype=torch.int64), said, len(this.clients)), memory

    def _written(self, means: Tree, rest: Tree) -> Tree:
        message, rest = write_update(means, rest, self.form, 1 + self.leading)
        return add_prefix("news", message) | add_prefix("rest", rest)

    def news(self, memory: Tree) -> Tree | None:
        """The message."""
        return take_prefix("news", memory)
