"""Any method whose clients upload u itself, with smaller uploads: updates of u, rounded, of few components.

Its authors name both as the way on from FedEM: compression, and limiting the components that a client transmits, by its
current mixture weights.

Shapes: M components, c clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.algorithms.base import Algorithm, Batch, Local, Mixture
from fedem.algorithms.fedem import FedEM
from fedem.algorithms.wrapping import Wrapped
from fedem.compression import Compression, read_update, write_update
from fedem.errors import UserError
from fedem.tree import Tree, add_prefix, take_prefix, tree_bytes, tree_map

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
        """The last round's u and the server's message (:meth:`fedem.mixing.base.Mixer.news`) make the new u."""
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
