"""Files from the web: continued where they stopped, checked, and in their place only when they are whole."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedem.core.errors import UserError

_PIECE = 1 << 18
_PARTIAL, _PAST_THE_END = 206, 416
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")

Listener = Callable[[int, int | None], None]
"""told the bytes that are there and, where it is known, how many there will be"""


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
        while piece := opened.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


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
    """Download a file into ``folder``, unless it is there; what an earlier attempt left in ``FILE.part`` is kept."""
    path = folder / remote.file
    part = path.with_name(f"{path.name}.part")
    if path.exists():
        check(path, remote)
        return path
    for attempt in range(attempts):
        resumed = part.exists()
        try:
            _continue(remote.address, part, listen, timeout)
        except HTTPError as error:
            error.close()
            if error.code < 500 or attempt == attempts - 1:
                raise _unreachable(remote, path, f"HTTP {error.code}") from None
        # Whatever the network, the server or the name service may do; none of it comes from our own files.
        except (_BrokenError, HTTPException) as error:
            if attempt == attempts - 1:
                raise _unreachable(remote, path, str(error) or type(error).__name__) from None
        else:
            try:
                check(part, remote)
            except UserError:
                part.unlink()
                # What was resumed may have been left by another file; a fresh one tells whether the server's is wrong.
                if not resumed or attempt == attempts - 1:
                    raise
                continue
            os.replace(part, path)
            return path
        time.sleep(pause * attempt)
    raise AssertionError("the last attempt returns or raises")


class _BrokenError(Exception):
    """The connection could not be made, or was cut."""


def _unreachable(remote: Remote, path: Path, reason: str) -> UserError:
    algorithm, _, digits = remote.checksum.partition(":")
    checksum = f" Its {algorithm} is {digits}." if digits else ""
    return UserError(
        f"{remote.address} can't be downloaded ({reason}). Fetch {remote.file} by other means and put it at "
        f"{path}, or name it with --from.{checksum}"
    )


def _continue(address: str, part: Path, listen: Listener, timeout: float) -> None:
    """Append to ``part`` what it lacks; raises when the answer is cut off."""
    have = part.stat().st_size if part.exists() else 0
    request = Request(address, headers={"User-Agent": "fedem"} | ({"Range": f"bytes={have}-"} if have else {}))
    try:
        response = urlopen(request, timeout=timeout)
    except HTTPError as error:
        found = _RANGE.fullmatch(error.headers.get("Content-Range") or "")
        if error.code != _PAST_THE_END or not have:
            raise
        error.close()
        if found and int(found[2]) == have:
            return  # it was whole already
        part.unlink()
        raise _BrokenError("what was there is longer than the file") from None
    except OSError as error:  # URLError is one
        raise _BrokenError(str(getattr(error, "reason", error))) from None
    with response:
        _append(response, part, have, listen)


def _append(response: HTTPResponse, part: Path, have: int, listen: Listener) -> None:
    """Write an answer behind what is there, or anew when the server does not know of ranges."""
    length = response.headers.get("Content-Length")
    if response.status == _PARTIAL:
        found = _RANGE.fullmatch(response.headers.get("Content-Range") or "")
        if not found or found[1] is None or int(found[1]) != have:
            part.unlink(missing_ok=True)
            raise _BrokenError("the server answered with another part than was asked for")
        total: int | None = int(found[2])
    else:
        have, total = 0, int(length) if length and length.isdigit() else None
    with part.open("ab" if have else "wb") as file:
        while True:
            listen(have, total)
            try:
                piece = response.read(_PIECE)
            except OSError as error:
                raise _BrokenError(str(error)) from None
            if not piece:
                break
            file.write(piece)
            have += len(piece)
    if total is not None and have != total:
        raise _BrokenError(f"the answer was cut off after {have:,} of {total:,} bytes")
