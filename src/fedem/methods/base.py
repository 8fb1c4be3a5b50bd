"""The contract of a method, written for one client.

A method is a step of federated surrogate optimisation. Near (u, v_t) a client builds a surrogate g_t of its loss, sets
v_t to its minimiser and improves u with a local solver; the clients' u are then mixed. Here u is ``shared`` and v_t is
``personal``, both trees of tensors.

No function sees other clients, a device or a network. An engine runs them for one client or, through
``torch.func.vmap``, for many at once; so they are pure and don't branch on values.

Shapes: n samples of the client, B samples of a batch, M components.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torch import Tensor

from fedem.core.settings import Settings
from fedem.core.tree import Tree, tree_bytes
from fedem.models.base import Model
from fedem.solvers import Solver


class Batch(NamedTuple):
    """Some of a client's samples. Rows whose weight is zero are padding."""

    inputs: Tensor
    """``[B, ...]``"""
    targets: Tensor
    """``[B]``"""
    weights: Tensor
    """``[B]``, summing to one: the objective of a batch is the mean over its samples"""
    samples: Tree
    """the batch's columns of what ``begin`` made for each sample, ``[..., B]``"""
    key: Tensor
    """int64: the source of the random numbers of whatever layers draw"""
    masks: tuple[Tensor, ...] = ()
    """one ``[B]`` bool, false where a row is padding; none where no row is (vmap takes no None)"""

    @property
    def mask(self) -> Tensor | None:
        """The mask, if there is one."""
        return self.masks[0] if self.masks else None


class Local(NamedTuple):
    """What a client holds while it trains."""

    shared: Tree
    """its copy of u"""
    personal: Tree
    """v_t"""
    memory: Tree
    """the local solver's"""
    context: Tree
    """what ``begin`` fixed for the round, such as u as it was received"""


class Mixture(NamedTuple):
    """A client's predictor: a mixture of models. One model is a mixture of one."""

    components: Tree
    """``[M, ...]``"""
    log_weights: Tensor
    """``[M]``"""


@dataclass(frozen=True, eq=False)
class Algorithm(Settings, ABC):
    """A method for one client. Subclasses are final frozen dataclasses whose further fields are hyper-parameters."""

    model: Model
    solver: Solver

    def with_solver(self, solver: Solver) -> Self:
        """Return the same method with another local solver."""
        return replace(self, solver=solver)

    @abstractmethod
    def init_shared(self, seed: int) -> Tree:
        """Draw the initial u."""

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """Return a client's initial v_t beside the initial u; ``key`` (int64) is the source of its random numbers."""
        return {}

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Return what the surrogate needs to know of each sample under u, ``[..., n]``.

        A column depends on its own sample alone, so an engine may cut or join samples as it likes.
        """
        return {}

    def survey(self, shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        """Return what the surrogate needs to know of all samples together under (u, v_t), such as a full gradient.

        Arguments are as in ``begin``, which gets the leaves among the scores. A client's samples must then fit into
        memory at once, so few methods ask for it.
        """
        return {}

    @abstractmethod
    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """Build the surrogate near (u, v_t) and set v_t to its minimiser.

        Args:
            shared: u as received.
            personal: v_t as the client kept it.
            scores: of all its training samples, ``[..., n]``; and what ``survey`` found.
            mask: ``[n]`` bool, false where a column is padding.

        Returns:
            the client's state, and what fixes the surrogate sample by sample, ``[..., n]``

        """

    @abstractmethod
    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """Take one step of the local solver."""

    def finish(self, local: Local) -> tuple[Tree, Tree]:
        """Return what the client uploads, and its v_t."""
        return local.shared, local.personal

    def summand(self, upload: Tree) -> Tree:
        """Return what an upload counts as in the mean; it may have other leaves than u, a numerator and its mass."""
        return upload

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """Take the server's step from u and the mean of the summands, ``share`` of all samples having taken part."""
        return mean

    def upload_bytes(self, uploads: Tree) -> int:
        """Count the bytes of some clients' messages, ``uploads [c, ...]``."""
        return tree_bytes(uploads)

    def pack(self, upload: Tree) -> Tree:
        """Return what of one client's upload goes over a network."""
        return upload

    def unpack(self, message: Tree) -> Tree:
        """Return the upload again from what :meth:`pack` left of it."""
        return message

    @abstractmethod
    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """Return the client's predictor."""

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """Fit v_t for a client unseen in training, from u and the scores of its samples (perhaps none).

        ``max_iterations`` bounds an iterative rule; None means to convergence. Where v_t can't be had from scores,
        return None: the client then trains its v_t by the method's own steps, and u stays as it is.
        """
        return None

    @property
    def tuning_rate(self) -> float | None:
        """Learning rate of fine-tuning where the method has one of its own; None takes the schedule's first."""
        return None

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """Take one step of fine-tuning, when a client trains for itself alone."""
        return self.step(local, batch, learning_rate)

    def keep(self, local: Local) -> tuple[Tree, Tree]:
        """Return u and v_t as a client that fine-tuned has them, for its predictor."""
        return local.shared, local.personal

    def check(self, inputs: Tensor) -> None:
        """Refuse a model that the method can't train; ``inputs`` are a few samples."""
