"""Hyper-parameters as frozen dataclasses that check themselves.

A field says what it allows in its metadata: ``min``, ``above``, ``below``, ``max`` for numbers, ``choices`` for words
(of a field of type ``int | str``, both);
``each``, a function that refuses a word that is not allowed, for several words in a list or with commas between them.
Where a default is not what held before the setting came, ``before`` is: runs that were written then go on as they were.
One that says ``came_later`` has no part in the hash of a deployment's plan where it has its default.
A field that training does not depend on says in ``acts`` where it does act: on clients "unseen" in training once it is
over, or on everybody's predictor whenever there are "scores".
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from types import UnionType
from typing import Any

import numpy as np

from fedem.core.errors import UserError, unknown

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a word"),
    "int | str": ((int, str), "a whole number or a word"),
}
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
        for name, entry in entries_of(type(self)).items():
            object.__setattr__(self, name, _check(f"{type(self).__name__}.{name}", getattr(self, name), entry))


def _kind(entry: Field[Any]) -> str:
    """Return the name of a field's type, however its file has annotations evaluated: as text or as types."""
    if isinstance(entry.type, str | UnionType):
        return str(entry.type)
    return getattr(entry.type, "__name__", "")


def entries_of(*kinds: type[Settings]) -> dict[str, Field[Any]]:
    """Return the fields that a user sets, by name: those of a plain type."""
    return {entry.name: entry for kind in kinds for entry in fields(kind) if _kind(entry) in _TYPES}


def allowed(entry: Field[Any]) -> str:
    """Say what a field allows."""
    if "each" in entry.metadata:
        return "names, with commas between them"
    words = " or ".join(entry.metadata.get("choices", ()))
    if words and int not in _TYPES[_kind(entry)][0]:
        return words
    limits = [f"{word} {entry.metadata[key]}" for key, (_, word) in _BOUNDS.items() if key in entry.metadata]
    numbers = " and ".join(limits) or _TYPES[_kind(entry)][1]
    return f"{numbers}, or {words}" if words else numbers


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
    kinds, what = _TYPES[_kind(entry)]
    is_choice, both = value in entry.metadata.get("choices", ()), {int, str} <= {*kinds}
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UserError(f"{where} is {value!r}; allowed: {allowed(entry) if both else what}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} is {value!r}; allowed: a finite number.")
    if both and isinstance(value, str):
        if not is_choice:
            raise UserError(f"{where} is {value!r}; allowed: {allowed(entry)}.")
        return value
    if "choices" in entry.metadata and not both and not is_choice:
        raise unknown(where, value, entry.metadata["choices"])
    if not all(holds(value, entry.metadata[key]) for key, (holds, _) in _BOUNDS.items() if key in entry.metadata):
        raise UserError(f"{where} is {value!r}; allowed: {allowed(entry)}.")
    return value


def names_of(*kinds: type[Settings]) -> tuple[str, ...]:
    """Return the names of the fields that a user sets."""
    return tuple(entries_of(*kinds))


def complete(where: str, values: Mapping[str, Any], *kinds: type[Settings]) -> dict[str, Any]:
    """Check a user's ``values`` for ``kinds``, found in the section called ``where``, and fill in the defaults."""
    entries = entries_of(*kinds)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in entries:
            raise unknown(f"key in [{where}]", name, entries)
        checked[name] = _check(f"{where}.{name}", value, entries[name])
    return {name: checked.get(name, entry.default) for name, entry in entries.items()}
