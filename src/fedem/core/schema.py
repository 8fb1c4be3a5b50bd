"""What the files that fedem reads may hold, declared as data: keys, types and ranges.

A file that was damaged, or written by others, ends in one sentence that names it, the key, the value and what is
allowed. Reading one goes in two steps. The first refuses what no file of ours has, whatever it is for: text that is not
UTF-8, nesting without end, numbers that are not finite or larger than 64 bits, a key twice. The second compares the
content with a :class:`Kind`.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fedem.core.errors import UserError

_DEEPEST = 64  # tables and lists in each other
_LONGEST_WHOLE = 30  # digits of a number that is turned into one: many take quadratic time
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1
_LONGEST_KEY = 60  # characters of a key that a message shows
_CONTAINERS, _NUMBERS = frozenset({dict, list}), frozenset({int, float, Decimal})
_TOO_DEEP = ("is nested too deeply", f"{_DEEPEST} tables and lists in each other")
_SIZES = "finite numbers, and whole ones of at most 64 bits"
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _shortened.maxlong = 60
_shortened.maxlevel, _shortened.maxdict = 2, 3


class Problem(NamedTuple):
    """What is wrong with a value: where in it, what stands there, and what may."""

    key: str
    found: str
    allowed: str

    def below(self, name: str | int) -> Problem:
        """Return the same problem as seen from the table, or the list, around it."""
        own = f"[{name}]" if isinstance(name, int) else name
        between = "." if self.key and not self.key.startswith("[") else ""
        return self._replace(key=f"{own}{between}{self.key}")

    def __str__(self) -> str:
        return f"{self.key or 'the content'} {self.found}; allowed: {self.allowed}"


class Kind(ABC):
    """What a value may be."""

    @property
    @abstractmethod
    def allowed(self) -> str:
        """What is allowed, in words."""

    @abstractmethod
    def problem(self, value: object) -> Problem | None:
        """Return the first thing that is wrong; None where nothing is."""

    def _is_not(self, value: object) -> Problem:
        return Problem("", f"is {shown(value)}", self.allowed)


@dataclass(frozen=True)
class Anything(Kind):
    """Whatever JSON can hold."""

    allowed = "anything"

    def problem(self, value: object) -> Problem | None:
        return None


@dataclass(frozen=True)
class Number(Kind):
    """A finite number, perhaps within bounds; ``above`` is a bound that it may not have itself."""

    least: float | None = None
    above: float | None = None
    most: float | None = None

    _types: ClassVar[tuple[type[int] | type[float], ...]] = (int, float)
    _noun = "a number"

    @property
    def allowed(self) -> str:
        bounds = {"at least": self.least, "above": self.above, "at most": self.most}
        return ", ".join([self._noun, *(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)])

    def problem(self, value: object) -> Problem | None:
        if (
            not isinstance(value, self._types)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
        ):
            return self._is_not(value)
        return None


@dataclass(frozen=True)
class Whole(Number):
    """A whole number."""

    _types = (int,)
    _noun = "a whole number"


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    allowed = "true or false"

    def problem(self, value: object) -> Problem | None:
        return None if isinstance(value, bool) else self._is_not(value)


@dataclass(frozen=True)
class Text(Kind):
    """A text, perhaps of a ``pattern`` that ``words`` describe, or one of some ``choices``."""

    pattern: str = ""
    words: str = "a text"
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        return ", ".join(self.choices) or self.words

    def problem(self, value: object) -> Problem | None:
        fits = isinstance(value, str) and (not self.choices or value in self.choices)
        if fits and self.pattern:
            fits = re.fullmatch(self.pattern, str(value)) is not None
        return None if fits else self._is_not(value)


@dataclass(frozen=True)
class Maybe(Kind):
    """Null, or of another kind."""

    kind: Kind

    @property
    def allowed(self) -> str:
        return f"{self.kind.allowed}, or null"

    def problem(self, value: object) -> Problem | None:
        found = None if value is None else self.kind.problem(value)
        return found if found is None or found.key else self._is_not(value)


@dataclass(frozen=True)
class Listed(Kind):
    """A list of values of one kind, perhaps of one ``length``."""

    each: Kind
    length: int | None = None

    @property
    def allowed(self) -> str:
        return "a list" if self.length is None else f"a list of {self.length}"

    def problem(self, value: object) -> Problem | None:
        if not isinstance(value, list) or self.length not in (None, len(value)):
            return self._is_not(value)
        for position, item in enumerate(value):
            if (found := self.each.problem(item)) is not None:
                return found.below(position)
        return None


@dataclass(frozen=True)
class Row(Kind):
    """A list of values, each of a kind of its own."""

    kinds: tuple[Kind, ...]

    @property
    def allowed(self) -> str:
        return f"a list of {len(self.kinds)}"

    def problem(self, value: object) -> Problem | None:
        if not isinstance(value, list) or len(value) != len(self.kinds):
            return self._is_not(value)
        for position, (kind, item) in enumerate(zip(self.kinds, value, strict=True)):
            if (found := kind.problem(item)) is not None:
                return found.below(position)
        return None


@dataclass(frozen=True)
class Table(Kind):
    """Values by their names: some that must be there, some that may, and the kind of all others."""

    needed: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)
    others: Kind | None = Anything()  # None: no others are allowed
    names: Kind = Anything()  # of all

    allowed = "a table of names and values"

    def problem(self, value: object) -> Problem | None:
        if not isinstance(value, dict):
            return self._is_not(value)
        for name, kind in self.needed.items():
            if name not in value:
                return Problem(name, "is missing", kind.allowed)
        known = {**self.optional, **self.needed}
        for name, item in value.items():
            if (found := self.names.problem(name)) is not None:
                return found._replace(key=f"the name {shown(name)}")
            kind_of = known.get(name, self.others)
            if kind_of is None:
                return Problem(name, "is unknown", ", ".join(known))
            if (found := kind_of.problem(item)) is not None:
                return found.below(name)
        return None


# A file beside the one that names it: no folder, nothing hidden, nothing that a system reads in another way.
FILE_NAME = Text(r"[A-Za-z0-9_][A-Za-z0-9._-]*", "the name of a file beside it: letters, digits, '-', '_' and '.'")
HASH = Text(r"[0-9a-f]{64}", "64 hexadecimal digits")
ANYTHING = Anything()


def shown(value: object) -> str:
    """Return a value as it is written, cut short where it is long or deep."""
    return f"{value:.3e}" if isinstance(value, Decimal) else _shortened.repr(value)


def check(what: object, value: object, kind: Kind) -> None:
    """Refuse a value that is not of this kind; ``what`` is the file, or whatever else it came from."""
    if (found := kind.problem(value)) is not None:
        raise UserError(f"{what} can't be read: {found}.")


def read_json(path: Path, kind: Kind = ANYTHING) -> Any:
    """Read a file of JSON; one that is not there is a FileNotFoundError."""
    return parse_json(read_bytes(path, "JSON"), path, kind)


def read_json_if_there(path: Path, kind: Kind = ANYTHING) -> Any:
    """Read a file of JSON; None where there is none."""
    try:
        return read_json(path, kind)
    except FileNotFoundError:
        return None


def parse_json(content: bytes | str, what: object, kind: Kind = ANYTHING) -> Any:
    """Return what JSON says; ``what`` it came from is named where something is wrong with it."""

    def load(text: str) -> Any:
        return json.loads(text, object_pairs_hook=_once, parse_int=_whole)

    found = _parse(content, what, "JSON", load)
    check(what, found, kind)
    return found


def read_toml(path: Path, what: str = "TOML") -> dict[str, Any]:
    """Read a file of TOML, which is a ``what``; one that is not there is a FileNotFoundError."""
    return parse_toml(read_bytes(path, what), path, what)


def parse_toml(content: bytes | str, where: object, what: str = "TOML") -> dict[str, Any]:
    """Return what TOML says."""

    def load(text: str) -> Any:
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            raise
        except ValueError:  # Python's own limit
            raise ValueError("a number has thousands of digits; allowed: whole numbers of at most 64 bits") from None

    found: dict[str, Any] = _parse(content, where, what, load)
    return found


def read_bytes(path: Path, what: str) -> bytes:
    """Read a file that is a ``what``; one that is not there is a FileNotFoundError."""
    try:
        return path.read_bytes()
    except NotADirectoryError as error:  # one of the folders above is a file
        raise FileNotFoundError(*error.args) from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} can't be read as {what}: {error.strerror}.") from None


def _parse(content: bytes | str, where: object, what: str, load: Callable[[str], Any]) -> Any:
    try:
        found = load(content if isinstance(content, str) else content.decode("utf-8"))
        problem = _unusual(found)
    except RecursionError:
        problem = Problem("", *_TOO_DEEP)
    except ValueError as error:  # of the text's encoding, or of the format
        raise UserError(f"{where} can't be read as {what}: {error}.") from None
    if problem is not None:
        raise UserError(f"{where} can't be read as {what}: {problem}.")
    return found


def _within(key: str, name: object) -> str:
    """Return the key of a place in a table, by its name, or in a list, by its position."""
    if isinstance(name, int):
        return f"{key}[{name}]"
    return f"{key}.{name}" if key else str(name)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a table; of a key that is there twice nobody knows which is meant."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} is there twice; allowed: once")
        found[name] = value
    return found


def _whole(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= _LONGEST_WHOLE else Decimal(digits)


def _unusual(content: object) -> Problem | None:
    """Return where content is nested too deeply, or has a number that is not finite or too large; without recursion."""
    left: list[tuple[str, int, Any]] = [("", 1, content)] if type(content) in _CONTAINERS else []
    while left:
        key, depth, here = left.pop()
        for name, item in here.items() if isinstance(here, dict) else enumerate(here):
            kind = type(item)
            if kind in _CONTAINERS:
                if depth == _DEEPEST:
                    return Problem(key[:_LONGEST_KEY], *_TOO_DEEP)
                left.append((_within(key, name), depth + 1, item))
            elif kind in _NUMBERS and not _SMALLEST <= item <= _LARGEST and not (kind is float and math.isfinite(item)):
                return Problem(_within(key, name), f"is {shown(item)}", _SIZES)
    return None
