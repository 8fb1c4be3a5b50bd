"""Files from the web: checked, and in their place only when they are whole."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedem.core.errors import UserError, needed

_PIECE = 1 << 18

Listener = Callable[[int, int | None], None]
"""called with the bytes that are there and, where it is known, how many there will be"""


class Remote(NamedTuple):
    """A public file."""

    address: str
    checksum: str = ""
    """the algorithm and the digits, such as "md5:0123..."; empty when its owner publishes none"""

    @property
    def file(self) -> str:
        """Name of the file."""
        return self.address.rpartition("/")[2]


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """Hash a file, or all files of a folder with their names: hexadecimal digits."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            digest.update(f"{file.relative_to(path).as_posix()}\0{digest_of(file, algorithm)}\n".encode())
        return digest.hexdigest()
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, partial(hashlib.new, algorithm, usedforsecurity=False)).hexdigest()


def check(path: Path, remote: Remote) -> None:
    """Refuse a file that is not what its owner published."""
    algorithm, _, expected = remote.checksum.partition(":")
    if expected and (found := digest_of(path, algorithm)) != expected:
        raise UserError(
            f"{path} is damaged or another file: its {algorithm} is {found}; allowed: {expected}, as published for "
            f"{remote.address}. Remove it to download it again, or name your own file with --from."
        )


def download(
    remote: Remote,
    folder: Path,
    listen: Listener = lambda done, total: None,
    *,
    attempts: int = 3,
    timeout: float = 30,
    pause: float = 1,
) -> Path:
    """Download a file into ``folder``, unless it is there; a download that breaks off is begun again."""
    path = folder / remote.file
    part = path.with_name(f"{path.name}.part")
    if path.exists():
        check(path, remote)
        return path
    needed(f"Downloading {remote.address}", "pooch")
    from pooch import HTTPDownloader
    from requests import RequestException

    # Not compressed for the way: lengths are those of the file.
    headers = {"User-Agent": "fedem", "Accept-Encoding": "identity"}
    fetch = HTTPDownloader(_Progress(listen), _PIECE, timeout=timeout, headers=headers)
    try:
        for left in reversed(range(attempts)):
            try:
                fetch(remote.address, part, None)
                break
            except RequestException as error:
                status = None if error.response is None else error.response.status_code
                if not left or (status is not None and status < 500):
                    raise _unreachable(remote, path, f"HTTP {status}" if status else _cause(error)) from None
                time.sleep(pause * (attempts - left - 1))
        check(part, remote)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _unreachable(remote: Remote, path: Path, reason: str) -> UserError:
    algorithm, _, digits = remote.checksum.partition(":")
    checksum = f" Its {algorithm} is {digits}." if digits else ""
    return UserError(
        f"{remote.address} can't be downloaded ({reason}). Fetch {remote.file} by other means and put it at "
        f"{path}, or name it with --from.{checksum}"
    )


def _cause(error: BaseException) -> str:
    """Say what lies at the bottom of an error of the network: a refused connection, a time limit, ..."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__


class _Progress:
    """What pooch takes for a progress bar; it sets ``total`` when an answer begins, 0 where it is not known."""

    def __init__(self, listen: Listener) -> None:
        self._listen = listen

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._done, self._total = 0, total
        self.update(0)

    def update(self, count: int) -> None:
        """Count bytes; pooch counts the last piece as a whole one, and then all of them again."""
        self._done = min(self._done + count, self._total) if self._total else self._done + count
        self._listen(self._done, self._total or None)

    def reset(self) -> None:
        """Do nothing."""

    close = reset
