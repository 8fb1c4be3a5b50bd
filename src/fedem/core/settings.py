"""Hyper-parameters as frozen dataclasses that check themselves.

A field says what it allows in its metadata: ``min``, ``above``, ``below``, ``max`` for numbers, ``choices`` for words;
``each``, a function that refuses a word that is not allowed, for several words in a list or with commas between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

import numpy as np

from fedem.core.errors import UserError, unknown

_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "min": (lambda value, bound: value >= bound, "at least"),
    "above": (lambda value, bound: value > bound, "above"),
    "max": (lambda value, bound: value <= bound, "at most"),
    "below": (lambda value, bound: value < bound, "below"),
}


@dataclass(frozen=True, eq=False)
class Settings:
    """A frozen dataclass whose plain fields are checked on construction."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            if kind_of(entry) in _TYPES:
                value = _check(f"{type(self).__name__}.{entry.name}", getattr(self, entry.name), entry)
                object.__setattr__(self, entry.name, value)


def kind_of(entry: Field[Any]) -> str:
    """Return the name of a field's type, however its file has annotations evaluated: as text or as types."""
    return entry.type if isinstance(entry.type, str) else getattr(entry.type, "__name__", "")


def _check(where: str, value: Any, entry: Field[Any]) -> Any:
    """Return the value as a plain Python one if it is allowed."""
    if isinstance(value, np.generic):
        value = value.item()
    if "each" in entry.metadata:
        words = value.split(",") if isinstance(value, str) else value
        if isinstance(words, list | tuple) and all(isinstance(word, str) for word in words):
            kept = [word.strip() for word in words if word.strip()]
            for word in kept:
                entry.metadata["each"](word)
            value = ",".join(kept)
    kinds = _TYPES[kind_of(entry)]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UserError(f"{where} is {value!r}; allowed: {_article(kind_of(entry))}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} is {value!r}; allowed: a finite number.")
    if "choices" in entry.metadata and value not in entry.metadata["choices"]:
        raise unknown(where, value, entry.metadata["choices"])
    limits = [
        (word, bound, holds) for key, (holds, word) in _BOUNDS.items() if (bound := entry.metadata.get(key)) is not None
    ]
    if not all(holds(value, bound) for _, bound, holds in limits):
        allowed = " and ".join(f"{word} {bound}" for word, bound, _ in limits)
        raise UserError(f"{where} is {value!r}; allowed: {allowed}.")
    return value


def _article(kind: str) -> str:
    return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}[kind]


def names_of(*kinds: type[Settings]) -> tuple[str, ...]:
    """Names of the fields that a user sets: those of a plain type."""
    return tuple(entry.name for kind in kinds for entry in fields(kind) if kind_of(entry) in _TYPES)


def complete(where: str, values: Mapping[str, Any], *kinds: type[Settings]) -> dict[str, Any]:
    """Check a user's ``values`` for ``kinds``, found in the section called ``where``, and fill in the defaults."""
    entries = {entry.name: entry for kind in kinds for entry in fields(kind) if kind_of(entry) in _TYPES}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in entries:
            raise unknown(f"key in [{where}]", name, entries)
        checked[name] = _check(f"{where}.{name}", value, entries[name])
    return {name: checked.get(name, entry.default) for name, entry in entries.items()}
