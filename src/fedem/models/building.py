"""Modules that start afresh, again and again."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

from torch import nn

from fedem.errors import UserError


def rebuilder(source: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that copies ``source`` and initialises the copy afresh."""
    for name, part in source.named_modules():
        own = any(leaf.requires_grad for leaf in part.parameters(recurse=False))
        if own and not callable(getattr(part, "reset_parameters", None)):
            raise UserError(
                f"Part {name or 'the module'!r} ({type(part).__name__}) has parameters but no reset_parameters(), so "
                "components could not start differently; pass a function that builds the module instead."
            )

    def rebuild() -> nn.Module:
        module = deepcopy(source)
        for part in module.modules():
            # What is frozen was given for its values.
            if any(leaf.requires_grad for leaf in part.parameters(recurse=False)):
                part.reset_parameters()  # type: ignore[operator]  # its presence is checked above
        return module

    return rebuild
