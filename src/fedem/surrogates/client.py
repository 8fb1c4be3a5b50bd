"""One client's f and g as functions of (u, v), on all of its samples, and their trial before work starts.

Shapes: n samples of the client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map as pytree_map

from fedem.algorithms.base import Batch
from fedem.algorithms.surrogate import Fixed, Surrogate
from fedem.errors import UserError
from fedem.tree import Tree

_FEW = 8  # samples: enough to tell whether a round can be run at all


class OneClient:
    """A client with samples ``[n, ...]`` and ``[n]``. Whatever a surrogate's function raises names that function."""

    def __init__(self, surrogate: Surrogate, inputs: Tensor, targets: Tensor, position: int = 0):
        self._surrogate, self._samples, self._position = surrogate, (inputs, targets), position
        self._mask = torch.ones(len(targets), dtype=torch.bool)
        weights = torch.full((len(targets),), 1 / len(targets), dtype=surrogate.model.dtype)
        self._batch = Batch(inputs, targets, weights, {}, torch.zeros((), dtype=torch.int64))

    def call(self, function: str, *arguments: Any) -> Any:
        """Call one of the surrogate's functions."""
        try:
            return self._lift(getattr(self._surrogate, function))(*arguments)
        except Exception as error:  # a user's function may raise anything
            raise UserError(f"{self._name(function)} {self._complaint(error, arguments)}.") from error

    def _lift(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def _complaint(self, error: Exception, arguments: tuple[Any, ...]) -> str:
        return f"failed on client {self._position}: {_reason(error, arguments)}"

    def _name(self, function: str) -> str:
        return f"{type(self._surrogate).__name__}.{function}"

    def _scores(self, shared: Tree, personal: Tree) -> Tree:
        scores = self._tree("score", self.call("score", shared, *self._samples))
        return scores | self._tree("survey", self.call("survey", shared, personal, *self._samples, self._mask))

    def fix(self, shared: Tree, personal: Tree) -> Fixed:
        """Build g near (u, v)."""
        fixed = self.call("fix", shared, personal, self._scores(shared, personal), self._mask)
        if not isinstance(fixed, Fixed):
            raise self._refusal("fix", _described(fixed), "fedem.surrogates.Fixed(columns, context)")
        for tree in fixed:
            self._tree("fix", tree)
        return fixed

    def minimise(self, shared: Tree, personal: Tree, fixed: Fixed) -> Tree:
        """Return the minimiser of g(u, .); ``personal`` is where g was built."""
        return self._tree("minimise", self.call("minimise", shared, self._scores(shared, personal), fixed, self._mask))

    def objective(self, shared: Tree, personal: Tree) -> Tensor:
        """f(u, v)."""
        return self._number("objective", self.call("objective", shared, personal, self._batch))

    def majorant(self, shared: Tree, personal: Tree, fixed: Fixed) -> Tensor:
        """g(u, v)."""
        batch = self._batch._replace(samples=fixed.columns)
        return self._number("majorant", self.call("majorant", shared, personal, fixed.context, batch))

    def draw(self, shared: Tree, key: Tensor) -> Tree:
        """Draw any v."""
        return self._tree("draw_personal", self.call("draw_personal", shared, key))

    def between(self, first: Tree, second: Tree, share: float) -> Tree:
        """Return the v between two others."""
        return self._tree("between", self.call("between", first, second, share))

    def start(self, seed: int, key: Tensor) -> tuple[Tree, Tree]:
        """Draw u and v as training does; refuse trees that don't fit together."""
        shared = self._tree("init_shared", self.call("init_shared", seed))
        missing = sorted(self._surrogate.model.trainable - shared.keys())
        if missing:
            raise self._refusal("init_shared", f"no leaf {missing[0]!r}", "trees with all that the model trains")
        personal = self._tree("init_personal", self.call("init_personal", shared, key))
        found, shapes = _shapes(self.draw(shared, key)), _shapes(personal)
        if found != shapes:
            raise self._refusal("draw_personal", f"leaves {found}", f"those of init_personal, {shapes}")
        return shared, personal

    def try_out(self, shared: Tree, personal: Tree, key: Tensor) -> None:
        """Refuse functions that fail at (u, v), whose results don't fit together, or that can't be stacked."""
        fixed, size = self.fix(shared, personal), len(self._mask)
        for leaf, column in fixed.columns.items():
            if column.ndim == 0 or column.shape[-1] != size:
                found = f"columns {leaf!r} of shape {list(column.shape)} for {size} samples"
                raise self._refusal("fix", found, f"[..., {size}], the samples last")
        kinds, found_kinds = describe(personal), describe(self.minimise(shared, personal, fixed))
        if found_kinds != kinds:
            raise self._refusal("minimise", f"leaves {found_kinds}", f"those of init_personal, {kinds}")
        self.objective(shared, personal)
        self.majorant(shared, personal, fixed)
        # Some solvers only deal out others.
        solver, _ = next(iter(self._surrogate.solver.among(key[None])))
        surrogate, (inputs, targets) = self._surrogate.with_solver(solver), (part[:_FEW] for part in self._samples)
        rate = torch.zeros((), dtype=surrogate.model.dtype)
        OneClient(surrogate, inputs, targets, self._position)._round(shared, personal, key, rate)
        if surrogate.model.not_stackable is None:
            _Twice(surrogate, inputs, targets, self._position)._round(*_twice((shared, personal, key, rate)))

    def _round(self, shared: Tree, personal: Tree, key: Tensor, rate: Tensor) -> None:
        """Call what an engine calls in a round, and what is called before and after it."""
        self.call("init_personal", shared, key)
        fixed = self.fix(shared, personal)
        self.majorant(shared, self.minimise(shared, personal, fixed), fixed)
        self.objective(shared, personal)
        local, columns = self.call("begin", shared, personal, self._scores(shared, personal), self._mask)
        self.call("step", local, self._batch._replace(samples=columns), rate)

    def _tree(self, function: str, value: Any) -> Tree:
        """Refuse what is no tree."""
        if not is_tree(value):
            raise self._refusal(function, _described(value), "a dictionary from names to tensors")
        tree: Tree = value
        return tree

    def _number(self, function: str, value: Any) -> Tensor:
        """Refuse what is no number."""
        if not isinstance(value, Tensor) or value.shape != self._mask.shape[:-1] or not value.is_floating_point():
            raise self._refusal(function, _described(value), "one number, a floating tensor of shape []")
        return value

    def _refusal(self, function: str, found: str, allowed: str) -> UserError:
        return UserError(f"{self._name(function)} returns {found}; allowed: {allowed}.")


class _Twice(OneClient):
    """A client beside itself, stacked as an engine stacks clients: everything has a first dimension of two."""

    def __init__(self, surrogate: Surrogate, inputs: Tensor, targets: Tensor, position: int):
        super().__init__(surrogate, inputs, targets, position)
        self._samples, self._mask, self._batch = _twice((self._samples, self._mask, self._batch))

    def _lift(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return vmap(function)

    def _complaint(self, error: Exception, arguments: tuple[Any, ...]) -> str:
        # torch goes on to ask for a report.
        reason, _, _ = _reason(error, arguments).partition(". ")
        return (
            f"can't be stacked over clients ({reason}); allowed: pure functions of tensors that don't branch on values "
            "(torch.where does what an if would)"
        )


def is_tree(value: object) -> bool:
    """Whether this is a dictionary from names to tensors."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(leaf, Tensor) for name, leaf in value.items()
    )


def describe(tree: Tree) -> dict[str, str]:
    """Say of what kind each leaf is."""
    return {name: f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for name, leaf in tree.items()}


def _shapes(tree: Tree) -> dict[str, list[int]]:
    return {name: list(leaf.shape) for name, leaf in tree.items()}


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        (kind,) = describe({"": value}).values()
        return f"a tensor, {kind}"
    if isinstance(value, dict):
        return f"a dictionary with { ({name: type(leaf).__name__ for name, leaf in value.items()}) }"
    return f"a value of type {type(value).__name__}"


def _twice(value: Any) -> Any:
    """Stack every tensor on itself."""
    return pytree_map(lambda leaf: torch.stack([leaf, leaf]), value)


def _reason(error: Exception, arguments: tuple[Any, ...]) -> str:
    """Say in one line what went wrong."""
    if isinstance(error, KeyError):
        return f"it asks for {error}, and its arguments have the leaves {', '.join(_leaves(arguments)) or 'none'}"
    first = next(iter(str(error).splitlines()), "").rstrip(". ")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _leaves(value: object) -> list[str]:
    """Name the leaves of all trees in tuples of tuples."""
    if isinstance(value, dict):
        return list(map(str, value))
    return [name for part in value for name in _leaves(part)] if isinstance(value, tuple) else []
