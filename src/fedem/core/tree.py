"""Trees of tensors: a model, a client's state or a checkpoint is a dictionary from names to tensors."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def tree_map(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply ``function`` leaf by leaf to trees with the same names."""
    return {name: function(leaf, *(other[name] for other in others)) for name, leaf in tree.items()}


def tree_stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees along a new first dimension."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def tree_cat(trees: Sequence[Tree], dim: int = 0) -> Tree:
    """Concatenate trees along a dimension, their first one unless said otherwise."""
    return {name: torch.cat([tree[name] for tree in trees], dim) for name in trees[0]}


def tree_index(tree: Tree, index: int | slice | Tensor) -> Tree:
    """Index the first dimension of every leaf."""
    return {name: leaf[index] for name, leaf in tree.items()}


def tree_repeat(tree: Tree, count: int) -> Tree:
    """Stack ``count`` copies along a new first dimension."""
    return {name: leaf[None].repeat(count, *(1,) * leaf.ndim) for name, leaf in tree.items()}


def tree_sorted(tree: Tree) -> Tree:
    """Order the leaves by name, so that whatever adds them up does so in one order wherever the tree came from."""
    return dict(sorted(tree.items()))


def tree_to(tree: Tree, device: torch.device) -> Tree:
    """Move every leaf to ``device``."""
    return {name: leaf.to(device) for name, leaf in tree.items()}


def tree_double(tree: Tree) -> Tree:
    """Convert the floating leaves to double precision."""
    return {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in tree.items()}


def tree_bytes(tree: Tree) -> int:
    """Count the bytes of all leaves."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.values())


def tree_floats(tree: Tree) -> Tree:
    """Return the floating leaves: what can be averaged and measured."""
    return {name: leaf for name, leaf in tree.items() if leaf.is_floating_point()}


def tree_flat(tree: Tree, batch_dims: int = 0) -> Tensor:
    """Lay all floating leaves behind each other: a vector, or one for each of the first ``batch_dims`` indices."""
    # By name: a tree that comes back from a file may have another order.
    return torch.cat([leaf.reshape(*leaf.shape[:batch_dims], -1) for _, leaf in sorted(tree_floats(tree).items())], -1)


def tree_towards(old: Tree, new: Tree, rate: float) -> Tree:
    """(1 - rate) old + rate new; counters are the new ones."""
    return tree_map(lambda a, b: a + rate * (b - a) if b.is_floating_point() else b, old, new)


def row_of(values: Tensor, like: Tensor) -> Tensor:
    """Give ``[c]`` values as many dimensions as ``like`` has, so that they broadcast over its rows."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def add_prefix(prefix: str, tree: Tree) -> Tree:
    """Put ``prefix/`` before every name, so that several trees can live in one."""
    return {f"{prefix}/{name}": leaf for name, leaf in tree.items()}


def take_prefix(prefix: str, tree: Tree) -> Tree:
    """Return the part of ``tree`` that :func:`add_prefix` marked, under its own names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): leaf for name, leaf in tree.items() if name.startswith(start)}
