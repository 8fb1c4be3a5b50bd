"""Autograd functions of our own, called."""

from __future__ import annotations

from typing import Any


def call(function: Any, *arguments: Any) -> Any:
    """Call an autograd function, whose ``apply`` torch leaves untyped."""
    return function.apply(*arguments)
