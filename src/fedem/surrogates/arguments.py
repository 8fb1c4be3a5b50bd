"""What users pass to ``check`` and ``optimise``, refused before work starts."""

from __future__ import annotations

from textwrap import shorten

import numpy as np
from torch import Tensor

from fedem.algorithms.surrogate import Surrogate
from fedem.errors import UserError
from fedem.federation import Federation
from fedem.samples import Pool, Samples
from fedem.surrogates.client import describe, is_tree
from fedem.tree import Tree, tree_map

_WHOLE = (int, np.integer)


def require_surrogate(surrogate: object) -> None:
    """Refuse what is no surrogate."""
    if not isinstance(surrogate, Surrogate):
        raise UserError(
            f"The surrogate is a {type(surrogate).__name__}; allowed: an instance of a class derived from "
            "fedem.surrogates.Surrogate, such as fedem.algorithms.fedem.FedEM."
        )
    try:
        surrogate.with_solver(surrogate.solver)
    except Exception as error:  # whatever a constructor of a user's own raises
        raise UserError(
            f"{type(surrogate).__name__} can't be made again from its fields ({error}); allowed: a frozen dataclass, "
            "without a constructor of its own."
        ) from error


def require(name: str, value: object, holds: bool, allowed: str) -> None:
    """Refuse a ``value`` of which something does not hold."""
    if not holds:
        raise UserError(f"{name} is {shorten(repr(value), 80)}; allowed: {allowed}.")


def require_count(name: str, value: object) -> None:
    """Refuse what is no number of things."""
    require(name, value, isinstance(value, _WHOLE) and bool(value >= 1), "a whole number, at least 1")


def require_seed(seed: object) -> None:
    """Refuse what is no seed."""
    require("seed", seed, isinstance(seed, _WHOLE), "a whole number")


def samples_of(data: object, client: object) -> Pool:
    """Look up a client's (training) samples."""
    samples = data.train if isinstance(data, Federation) else data
    if not isinstance(samples, Samples):
        raise UserError(f"data is a value of type {type(data).__name__}; allowed: a fedem.Federation, or its samples.")
    if not isinstance(client, _WHOLE) or not 0 <= client < samples.num_clients or not int(samples.sizes[client]):
        raise UserError(f"client is {client!r}; allowed: 0 to {samples.num_clients - 1}, one that has samples.")
    return samples.client(int(client))


def place_of(at: object, shared: Tree, personal: Tree) -> tuple[Tree, Tree]:
    """Return the (u0, v0) that was given, in double precision; it must be of the same kind as (u, v)."""
    if not isinstance(at, tuple) or len(at) != 2 or not all(map(is_tree, at)):
        raise UserError(f"at is {shorten(repr(at), 80)}; allowed: (u0, v0), two dictionaries from names to tensors.")
    first, second = map(doubled, at)
    for name, given, own in (("u0", first, shared), ("v0", second, personal)):
        if describe(given) != describe(own):
            raise UserError(f"at has {name} with leaves {describe(given)}; allowed: {describe(own)}.")
    return first, second


def doubled(tree: Tree) -> Tree:
    """Convert floating leaves to double precision."""

    def double(leaf: Tensor) -> Tensor:
        return leaf.double() if leaf.is_floating_point() else leaf

    return tree_map(double, tree)
