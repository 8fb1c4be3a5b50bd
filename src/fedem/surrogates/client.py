"""One client's f and g as functions of (u, v), on all of its samples.

Shapes: n samples of the client.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedem.algorithms.base import Batch
from fedem.algorithms.surrogate import Fixed, Surrogate
from fedem.errors import UserError
from fedem.tree import Tree


def require_surrogate(surrogate: object) -> None:
    """Refuse what is no surrogate."""
    if not isinstance(surrogate, Surrogate):
        raise UserError(
            f"The surrogate is a {type(surrogate).__name__}; allowed: an instance of a class derived from "
            "fedem.surrogates.Surrogate, such as fedem.algorithms.fedem.FedEM."
        )


class OneClient:
    """A client with samples ``[n, ...]`` and ``[n]``."""

    def __init__(self, surrogate: Surrogate, inputs: Tensor, targets: Tensor):
        self._surrogate, self._inputs, self._targets = surrogate, inputs, targets
        self._everything = torch.ones(len(targets), dtype=torch.bool)
        weights = torch.full((len(targets),), 1 / len(targets), dtype=surrogate.model.dtype)
        self._batch = Batch(inputs, targets, weights, {}, torch.zeros((), dtype=torch.int64))

    def _scores(self, shared: Tree, personal: Tree) -> Tree:
        samples = self._inputs, self._targets
        return self._surrogate.score(shared, *samples) | self._surrogate.survey(
            shared, personal, *samples, self._everything
        )

    def fix(self, shared: Tree, personal: Tree) -> Fixed:
        """Build g near (u, v)."""
        return self._surrogate.fix(shared, personal, self._scores(shared, personal), self._everything)

    def minimise(self, shared: Tree, personal: Tree, fixed: Fixed) -> Tree:
        """Return the minimiser of g(u, .); ``personal`` is where g was built."""
        return self._surrogate.minimise(shared, self._scores(shared, personal), fixed, self._everything)

    def objective(self, shared: Tree, personal: Tree) -> Tensor:
        """f(u, v)."""
        return self._surrogate.objective(shared, personal, self._batch)

    def majorant(self, shared: Tree, personal: Tree, fixed: Fixed) -> Tensor:
        """g(u, v)."""
        batch = self._batch._replace(samples=fixed.columns)
        return self._surrogate.majorant(shared, personal, fixed.context, batch)

    def try_out(self, shared: Tree, personal: Tree) -> None:
        """Refuse functions whose results don't fit together."""
        name, fixed, size = type(self._surrogate).__name__, self.fix(shared, personal), len(self._targets)
        for leaf, column in fixed.columns.items():
            if column.ndim == 0 or column.shape[-1] != size:
                raise UserError(
                    f"{name}.fix makes columns {leaf!r} of shape {list(column.shape)} for {size} samples; "
                    f"allowed: [..., {size}], the samples last."
                )
        shapes, found = (
            {leaf: list(value.shape) for leaf, value in tree.items()}
            for tree in (personal, self.minimise(shared, personal, fixed))
        )
        if found != shapes:
            raise UserError(f"{name}.minimise returns leaves {found}; allowed: those of init_personal, {shapes}.")
        for function, value in (
            ("objective", self.objective(shared, personal)),
            ("majorant", self.majorant(shared, personal, fixed)),
        ):
            if value.ndim:
                raise UserError(f"{name}.{function} returns shape {list(value.shape)}; allowed: one number, shape [].")
