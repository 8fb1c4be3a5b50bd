"""EMNIST by class: 814,255 handwritten digits and letters, 28 x 28, 62 classes (Cohen and others 2017).

They are read from the official files in MNIST's idx format, training images first, then test images. Those store an
image column by column; here it stands upright. Strokes are white on black.

Shapes: n images of a block.
"""

from __future__ import annotations

import gzip
import math
import string
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedem.data.store import ROWS, Block, Files, Public, Remote, opened, pick

SHAPE = (1, 28, 28)
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase  # what each of the 62 labels stands for

_BYTES = 8  # idx's code for entries of one byte


def idx_blocks(file: IO[bytes] | gzip.GzipFile, rows: int = ROWS) -> Iterator[NDArray[np.uint8]]:
    """Read an idx file of bytes, ``rows`` entries of its first axis at a time."""
    zeros, kind, axes = struct.unpack(">HBB", _exactly(file, 4))
    if zeros or kind != _BYTES or not axes:
        raise ValueError("it is not an idx file of bytes")
    count, *shape = struct.unpack(f">{axes}I", _exactly(file, 4 * axes))
    for start in range(0, count, rows):
        size = min(rows, count - start)
        yield np.frombuffer(_exactly(file, size * math.prod(shape)), np.uint8).reshape(size, *shape)
    if file.read(1):  # reading the end also checks a compressed file's checksum
        raise ValueError("it goes on behind its last entry")


def _exactly(file: IO[bytes] | gzip.GzipFile, count: int) -> bytes:
    content = file.read(count)
    if len(content) != count:
        raise EOFError("it ends too early")
    return content


def _pairs(files: Files, source: Path, part: str) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield images as they are stored ``[n, 28, 28]`` and labels ``[n]`` of train or test."""
    with ExitStack() as stack:
        streams = []
        for what in ("images-idx3", "labels-idx1"):
            name = pick(files, f"emnist-byclass-{part}-{what}-ubyte", source)
            file = stack.enter_context(files[name]())
            plain = stack.enter_context(gzip.GzipFile(fileobj=file)) if name.endswith(".gz") else file
            streams.append(idx_blocks(plain))
        yield from zip(*streams, strict=True)


@dataclass(frozen=True)
class Emnist(Public):
    """EMNIST by class, all of it; a part of it is chosen when it is partitioned."""

    name: ClassVar[str] = "emnist"
    title: ClassVar[str] = "EMNIST by class, 28 x 28 images of characters, 62 classes"
    usual: ClassVar[str] = "dirichlet"
    remotes: ClassVar[tuple[Remote, ...]] = (
        Remote("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "md5:58c8d27c78d21e728a6bc7b3cc06412e"),
    )
    patterns: ClassVar[tuple[str, ...]] = ("emnist",)
    labels: ClassVar[tuple[str, ...]] = tuple(CHARACTERS)
    images: ClassVar[tuple[int, int, int]] = SHAPE

    def read(self, source: Path) -> Iterator[Block]:
        with opened(source) as files:
            for part in ("train", "test"):
                for images, labels in _pairs(files, source, part):
                    if images.shape[1:] != SHAPE[1:] or len(images) != len(labels):
                        raise ValueError(f"{part} holds images {images.shape} and labels {labels.shape}")
                    yield Block(images.transpose(0, 2, 1)[:, None], labels)
