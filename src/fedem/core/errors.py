"""The one error that a user is meant to read, and the messages that many places share."""

import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module


class UserError(ValueError):
    """Bad input: the message names the value received and what is allowed."""


class Notice(UserWarning):
    """What a user should know of, though the work goes on: the command line prints it as a note."""


def notify(text: str) -> None:
    """Say something to the user beside the work."""
    warnings.warn(Notice(text), stacklevel=3)


def unknown(kind: str, name: object, allowed: Iterable[str]) -> UserError:
    """Return the error for a ``name`` that is not among those ``allowed``."""
    names = sorted(allowed)
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return UserError(f"Unknown {kind} {name!r}; allowed: {', '.join(names) or 'none'}.{hint}")


def check_known(kind: str, names: Iterable[str], allowed: Collection[str]) -> None:
    """Refuse names that are not among those ``allowed``."""
    for name in names:
        if not isinstance(name, str) or name not in allowed:  # from a file it may be anything
            raise unknown(kind, name, allowed)


def counted(number: int, one: str, several: str = "") -> str:
    """Say how many there are, such as "1 client", "2,000 clients".

    >>> counted(1, "node is", "nodes are"), counted(3, "seed")
    ('1 node is', '3 seeds')
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def reason(error: BaseException) -> str:
    r"""Return what another library's error says, in one line.

    >>> reason(KeyError("x")), reason(RuntimeError("too large\nframe #0: ..."))
    ("KeyError: 'x'", 'RuntimeError: too large')
    """
    said = next(filter(None, map(str.strip, str(error).splitlines())), "")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Say in an error what it is about, such as a file or one of many runs."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from error


def needed(what: object, *packages: str, extra: str = "") -> None:
    """Refuse what needs packages that are not installed, and say how to install them: with an ``extra`` of fedem."""
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            said = f"{what} needs the package {package}, which is not installed"
            install = f"fedem[{extra}]" if extra else package
            raise UserError(f"{said}: pip install '{install}'.") from None
