"""Arrays in npz archives: what a header says is checked against what is there before any memory is taken for it."""

import struct
import sys
import tokenize
import warnings
import zlib
from collections.abc import Sequence
from lzma import LZMAError
from math import prod
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from fedem.core.errors import UserError
from fedem.data.limits import check_memory

# What numpy and zipfile raise for an archive that is damaged; RuntimeError for a password or an unknown compression.
DAMAGED = (OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error, LZMAError, RuntimeError)
DAMAGED_HEADER = (*DAMAGED, ArithmeticError, LookupError, MemoryError, SyntaxError, struct.error, tokenize.TokenError)
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_arrays(path: Path, names: Sequence[str], max_memory: float) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """Read those of the arrays called ``names`` that an npz archive has; also return the names of all that are there.

    Pickles are refused, and never run.
    """
    try:
        with warnings.catch_warnings(), ZipFile(path) as archive:
            warnings.simplefilter("ignore")  # old headers take longer to read, which is no concern of the user's
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            wanted = {name: members[name] for name in dict.fromkeys(names) if name in members}
            needed = 0
            for name, info in wanted.items():
                with archive.open(info) as file:
                    needed += _declared(path, name, file, info.file_size)
            check_memory(path, needed, max_memory, needed)
            found = {}
            for name, info in wanted.items():
                with archive.open(info) as file:
                    found[name] = np.asarray(np.lib.format.read_array(file, allow_pickle=False))
                _check_letters(path, name, found[name])
            return found, tuple(members)
    except UserError:
        raise
    except DAMAGED_HEADER as error:
        why = type(error).__name__
        raise UserError(f"{path} is not an npz archive of plain arrays, or it is damaged ({why}).") from None


def _check_letters(path: Path, name: str, array: NDArray[Any]) -> None:
    """Refuse text with numbers that stand for no letter: numpy takes any, and Python fails where it meets one."""
    if array.dtype.kind == "U" and array.size and array.dtype.itemsize:
        codes = np.ascontiguousarray(array).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if (largest := int(codes.max())) > sys.maxunicode:
            said = f"{path} is not an npz archive of plain arrays: {name!r} has a letter {largest:#x}"
            raise UserError(f"{said}; allowed: up to {sys.maxunicode:#x}. The file is damaged.")


def _declared(path: Path, name: str, file: IO[bytes], size: int) -> int:
    """Return the bytes of an array as its header has them; refuse others than its ``size`` in the archive leaves."""
    version = np.lib.format.read_magic(file)
    # The third version has other letters in the names of fields, and is read in the same way.
    shape, _, dtype = _HEADERS.get(version, np.lib.format.read_array_header_2_0)(file)
    said = f"{path} is not an npz archive of plain arrays: {name!r}"
    if dtype.hasobject:
        raise UserError(f"{said} holds Python objects ({dtype}); allowed: numbers, booleans or text.")
    count, there = prod(shape) * dtype.itemsize, size - file.tell()
    if count != there or any(length < 0 for length in shape):
        kind = f"{dtype} of shape {list(shape)}"
        raise UserError(f"{said} says that it is {kind}, {count:,} bytes, where {there:,} are; the file is damaged.")
    return count
