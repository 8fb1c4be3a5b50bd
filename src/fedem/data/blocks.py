"""Raw files -> blocks of samples: what every reader of a public data set goes through.

Shapes: n samples of a block, C channels, H rows, W columns.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedem.errors import UserError

ROWS = 1 << 15
"""samples of a block, where the source has no blocks of its own"""

Files = dict[str, Callable[[], IO[bytes]]]
"""paths within a source, with slashes, and how each is opened"""


class Block(NamedTuple):
    """Samples that follow each other."""

    inputs: NDArray[np.generic]
    """``[n, ...]``"""
    targets: NDArray[np.integer]
    """``[n]``"""
    owner: str | None = None
    """whose samples these are, in a data set that has clients of its own"""
    coarse: NDArray[np.integer] | None = None
    """``[n]``, groups of the labels, in a data set that has them"""
    lines: int | None = None
    """of the owner's text, in a data set made from text"""


@contextmanager
def opened(path: Path) -> Iterator[Files]:
    """List the files of a folder, of a tar or zip archive, or the file itself. Nothing is unpacked to the disk."""
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file())
        yield {file.relative_to(path).as_posix(): partial(_open, file) for file in found}
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            members = {member.name: member for member in tar.getmembers() if member.isreg()}
            yield {name: partial(_extract, tar, members[name]) for name in sorted(members)}
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if not name.endswith("/"))
            yield {name: partial(archive.open, name) for name in names}
    else:
        yield {path.name: partial(_open, path)}


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member)
    assert file is not None, "regular files alone are listed"
    return file


def pick(files: Files, name: str, source: Path) -> str:
    """Return the path of the file called ``name``, compressed or not, in whatever folder."""
    for path in files:
        if path.removesuffix(".gz").rpartition("/")[2] == name:
            return path
    raise UserError(f"{source} has no {name}; allowed: the official files, all of them.")


def plain_images(path: Path, shape: tuple[int, int, int], *, owned: bool, coarse: bool = False) -> Iterator[Block]:
    """Read an npz of x (uint8 images), y, and client or coarse (optional unless ``owned`` or ``coarse``).

    Args:
        path: the file.
        shape: C, H, W; the images may be ``[n, C, H, W]``, ``[n, H, W, C]`` or, with one channel, ``[n, H, W]``.
        owned: whether each sample must have a client.
        coarse: whether each sample must have a group of labels.

    """
    with np.load(path, allow_pickle=False) as archive:
        found = {name: np.asarray(archive[name]) for name in ("x", "y", "client", "coarse") if name in archive}
        present = ", ".join(archive.files)
    for name in ("x", "y", *(("client",) if owned else ()), *(("coarse",) if coarse else ())):
        if name not in found:
            raise UserError(f"{path} has no array {name!r} (it has: {present}); this data set needs it.")
    inputs = channels_first(path, found["x"], shape)
    for name, column in found.items():
        if len(column) != len(inputs):
            raise UserError(f"{path} has {len(inputs)} images but {len(column)} of {name!r}; allowed: as many of each.")
        if name in ("y", "coarse") and (column.ndim != 1 or column.dtype.kind not in "iu"):
            raise UserError(f"{path}: {name} is {column.dtype} of shape {column.shape}; allowed: integers, one each.")
    if "client" in found:
        names, codes = np.unique(found["client"].astype(str), return_inverse=True)
        parts = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
        spans = list(zip(names.tolist(), parts, strict=True))
    else:
        spans = [(None, np.arange(start, min(start + ROWS, len(inputs)))) for start in range(0, len(inputs), ROWS)]
    for owner, rows in spans:
        yield Block(inputs[rows], found["y"][rows], owner, found["coarse"][rows] if coarse else None)


def channels_first(path: Path, images: NDArray[np.generic], shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return images as ``[n, C, H, W]``, a view; refuse other shapes and types."""
    channels, height, width = shape
    if images.dtype == np.uint8:
        pixels = images.view(np.uint8)
        if images.shape[1:] == shape:
            return pixels
        if images.shape[1:] == (height, width, channels):
            return pixels.transpose(0, 3, 1, 2)
        if images.shape[1:] == (height, width) and channels == 1:
            return pixels[:, None]
    raise UserError(
        f"{path}: x is {images.dtype} of shape {images.shape}; allowed: uint8 images of {height} x {width} "
        f"with {channels} channel{'s' if channels > 1 else ''}, first or last."
    )
