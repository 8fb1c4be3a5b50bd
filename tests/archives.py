"""Small files in the formats of public data sets."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedem.data import Public
from fedem.data.store import Block, open_canonical, prepare

RNG = np.random.default_rng(0)


def images(count: int, *shape: int) -> NDArray[np.uint8]:
    """Random pixels."""
    return RNG.integers(0, 256, (count, *shape), dtype=np.uint8)


def join(blocks: list[Block]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Lay blocks end to end."""
    return np.concatenate([block.inputs for block in blocks]), np.concatenate([block.targets for block in blocks])


def ids_of(tmp_path: Path, kind: type[Public], source: Path) -> list[int]:
    """All samples' ids, sorted, after a conversion to a folder of its own."""
    place = prepare(kind(folder=str(tmp_path / f"canonical of {source.name}")), source)
    return sorted(open_canonical(place)[0].ids.tolist())


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    """Write a zip archive."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files below a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
