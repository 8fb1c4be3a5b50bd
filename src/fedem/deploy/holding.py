"""Files that one process at a time holds; the system lets go of them when that process ends, however it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedem.errors import UserError


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Hold a file, which is made when missing and stays; ``what`` it stands for is refused to a second process."""
    import fcntl  # not on every system, and needed by peers alone

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{what} is in use by another process, which holds {path}; allowed: one process at a time."
            ) from None
        yield


def end_with_holder(path: Path) -> None:
    """Have this process end, at once and without a word, when the one that holds the file is gone."""
    import fcntl

    def wait() -> None:
        try:
            with path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # returns when nobody holds it any more
        finally:
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
