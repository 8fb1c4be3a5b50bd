"""What benchmarks are told on their command lines, refused there in a line if it is wrong."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection
from typing import TypeVar

from fedem.core.errors import UserError, check_known

_T = TypeVar("_T")


def refused(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return what reads an argument as ``read`` does, for a parser, which then prints what is wrong with it."""

    def reader(text: str) -> _T:
        try:
            return read(text)
        except UserError as error:
            raise ArgumentTypeError(str(error)) from error

    return reader


def add_names(parser: ArgumentParser, option: str, kind: str, allowed: Collection[str], default: str = "") -> None:
    """Add an option that takes names with commas between, all unless said otherwise; ``kind`` says what they name."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        check_known(kind, found, allowed)
        return found

    asked, every = default or ",".join(allowed), f"of {', '.join(allowed)}"
    parser.add_argument(option, type=refused(read), default=asked, metavar="NAME,...", help=every)
