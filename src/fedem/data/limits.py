"""How much memory a file may ask for: it is refused before it gets it.

A small file can say that it is large: a zip archive of 4 MB unpacks to 4 GB, and a damaged header may ask for anything.
"""

from pathlib import Path

from fedem.core.errors import UserError
from fedem.core.memory import free_host_bytes

GIB = 1 << 30
RATIO = 200  # how many times its size a packed file may become; one-hot columns and pictures stay well below
_HARMLESS = 256 << 20  # bytes up to which nobody asks how well they were packed
_SHARE = 0.5  # of the memory that is free


def check_memory(path: Path, needed: int, max_memory: float, unpacked: int = 0) -> None:
    """Refuse a file that needs more bytes of memory than there may be, or becomes far larger than it is.

    Args:
        path: the file.
        needed: bytes of memory that it takes to hold its content.
        max_memory: GiB that it may take, whatever its ratio; 0: half of what is free, and at most ``RATIO`` times.
        unpacked: bytes of its content, where it is packed.
    """
    mend = "data.max_memory (--max-memory), in GiB, allows more"
    allowed = round(max_memory * GIB) if max_memory else int(_SHARE * free_host_bytes())
    if needed > allowed:
        whose = "data.max_memory" if max_memory else "half of what is free"
        said = f"{path} needs about {_size(needed)} of memory; allowed: {_size(allowed)}, {whose}"
        raise UserError(f"{said}. {mend}.")
    size = path.stat().st_size
    if not max_memory and unpacked > max(_HARMLESS, RATIO * size):
        said = f"{path} has {_size(size)} and asks for at least {_size(unpacked)} once it is unpacked"
        raise UserError(f"{said}; allowed: {RATIO} times its size. If that is meant to be so, {mend}.")


def _size(count: int) -> str:
    """Write a number of bytes for people: 3.9 MiB.

    >>> _size(1536), _size(3 << 40)
    ('1.5 KiB', '3,072.0 GiB')
    """
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
