"""The canonical form of a data set: arrays that are mapped from their files, and what is known of them.

It is a folder: ``inputs.npy``, ``targets.npy``, ``ids.npy``, where the data set has them ``owners.npy`` and
``coarse.npy``, and ``about.json``. Images are uint8 and have their channels first, characters are int8, targets int64.

Shapes: N samples, n of a block.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedem.data.blocks import Block
from fedem.data.collection import Collection, content_ids, fingerprint_of, numbered
from fedem.errors import UserError
from fedem.randomness import client_keys
from fedem.samples import Pool

FORMAT = 2
ABOUT = "about.json"


@dataclass(frozen=True)
class About:
    """What ``about.json`` says.

    Attributes:
        format: version of the format.
        name: of the data set and its variant.
        samples: N.
        fingerprint: a hash of all samples, whatever their order.
        labels: names of the classes.
        owners: names of the clients, sorted; empty when the data set has none.
        lines: of each owner's text; empty when samples do not come from text.
        files: shape, dtype and bytes of each array's file.
        raw: sha256 of each raw file or folder that the samples were read from.

    """

    format: int
    name: str
    samples: int
    fingerprint: str
    labels: list[str]
    owners: list[str]
    lines: list[int]
    files: dict[str, dict[str, Any]]
    raw: dict[str, str]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def read_about(place: Path) -> About:
    """Read what a canonical data set says of itself; raises OSError or ValueError when it is damaged."""
    content = json.loads((place / ABOUT).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{ABOUT} is not of format {FORMAT}")
    wrong = sorted(_KINDS.keys() ^ content.keys()) or [name for name, kind in _KINDS.items() if not kind(content[name])]
    if wrong:
        raise ValueError(f"{ABOUT}: {wrong[0]!r} is missing, unknown or of a wrong kind")
    about = About(**content)
    files = {"inputs", "targets", "ids", *(("owners",) if about.owners else ())}
    sizes = [entry["shape"][:1] for entry in about.files.values()]
    if (
        about.files.keys() - {"coarse"} != files
        or any(size != [about.samples] for size in sizes)
        or about.samples < 1
        or len(about.lines) not in (0, len(about.owners))
    ):
        raise ValueError(f"{ABOUT} does not fit itself")
    return about


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, list) and all(map(kind, values))


def _is_dict(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, dict) and all(map(kind, values.values()))


def _is_file(entry: Any) -> bool:
    kinds = {"shape": _is_list(_is_count), "dtype": _is_text, "bytes": _is_count}
    return isinstance(entry, dict) and entry.keys() == kinds.keys() and all(kinds[key](entry[key]) for key in kinds)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "format": _is_count,
    "name": _is_text,
    "samples": _is_count,
    "fingerprint": _is_text,
    "labels": _is_list(_is_text),
    "owners": _is_list(_is_text),
    "lines": _is_list(_is_count),
    "files": _is_dict(_is_file),
    "raw": _is_dict(_is_text),
}


def open_canonical(place: Path) -> tuple[Collection, About]:
    """Map the arrays from their files; raises OSError or ValueError when they are damaged."""
    about = read_about(place)
    arrays = {name: torch.from_numpy(_mapped(place, name, entry)) for name, entry in about.files.items()}
    if "owners" in arrays and not 0 <= int(arrays["owners"].min()) <= int(arrays["owners"].max()) < len(about.owners):
        raise ValueError(f"some samples belong to none of the {len(about.owners):,} clients")
    collection = Collection(
        Pool(arrays["inputs"], arrays["targets"]),
        arrays["ids"],
        about.fingerprint,
        arrays.get("owners"),
        tuple(about.owners),
        arrays.get("coarse"),
    )
    return collection, about


def _mapped(place: Path, name: str, entry: dict[str, Any]) -> NDArray[Any]:
    path = place / f"{name}.npy"
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise ValueError(f"{path.name} has {size:,} bytes instead of {entry['bytes']:,}")
    # Copied where it is written to: torch wants arrays that could be, and the file stays as it is.
    array: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    if [*array.shape] != entry["shape"] or str(array.dtype) != entry["dtype"]:
        raise ValueError(f"{path.name} holds {array.dtype} of shape {array.shape}")
    return array


def write_canonical(
    place: Path,
    name: str,
    labels: Sequence[str],
    raw: dict[str, str],
    blocks: Iterable[Block],
    listen: Callable[[int], None],
) -> None:
    """Write a canonical data set beside its place and move it there; one that is there is replaced.

    Args:
        place: its folder.
        name: of the data set and its variant.
        labels: names of the classes.
        raw: hashes of what the samples are read from.
        blocks: the samples.
        listen: told how many are written.

    """
    begun, old = (place.with_name(f".{place.name}.{ending}") for ending in ("tmp", "old"))
    for leftover in (begun, old):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    begun.mkdir()
    try:
        _write(begun, name, labels, raw, blocks, listen)
        if place.exists():
            os.rename(place, old)
        os.rename(begun, place)
    finally:
        shutil.rmtree(begun, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write(
    folder: Path,
    name: str,
    labels: Sequence[str],
    raw: dict[str, str],
    blocks: Iterable[Block],
    listen: Callable[[int], None],
) -> None:
    columns: dict[str, _Column] = {}

    def append(column: str, values: NDArray[Any]) -> None:
        if column not in columns:
            columns[column] = _Column(folder / f"{column}.npy")
        columns[column].append(values)

    runs: list[tuple[str, int]] = []
    lines: dict[str, int] = {}
    ids: list[NDArray[np.int64]] = []
    try:
        for block in blocks:
            targets = block.targets.astype(np.int64)
            if len(targets) and not 0 <= targets.min() <= targets.max() < len(labels):
                raise UserError(f"Labels run from {targets.min()} to {targets.max()}; allowed: 0 to {len(labels) - 1}.")
            append("inputs", block.inputs)
            append("targets", targets)
            ids.append(content_ids(block.inputs, targets))
            if block.coarse is not None:
                append("coarse", block.coarse.astype(np.int64))
            if block.owner is not None:
                ids[-1] = content_ids(ids[-1], np.broadcast_to(client_keys([block.owner]).numpy(), ids[-1].shape))
                runs.append((block.owner, len(targets)))
            if block.owner is not None and block.lines is not None:
                lines[block.owner] = block.lines
            listen(columns["targets"].count)
        if not columns or not columns["targets"].count:
            raise UserError("There are no samples.")
        owners = sorted({owner for owner, _ in runs})
        if owners:
            codes = {owner: code for code, owner in enumerate(owners)}
            append("owners", np.repeat([codes[owner] for owner, _ in runs], [count for _, count in runs]))
        whole = numbered(np.concatenate(ids))
        append("ids", whole)
    finally:
        for column in columns.values():
            column.close()
    if len({column.count for column in columns.values()}) != 1:
        raise UserError("Some samples have a client or a group of labels, others have none.")
    about = About(
        format=FORMAT,
        name=name,
        samples=len(whole),
        fingerprint=fingerprint_of(whole),
        labels=list(labels),
        owners=owners,
        lines=[lines[owner] for owner in owners if lines],
        files={name: column.describe() for name, column in columns.items()},
        raw=raw,
    )
    with (folder / ABOUT).open("w", encoding="utf-8") as file:
        json.dump(asdict(about), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


class _Column:
    """An npy file that grows by blocks: numpy leaves room in the header for the number of rows to grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._kind: tuple[tuple[int, ...], np.dtype[Any]] | None = None
        self._file = path.open("wb")

    def append(self, rows: NDArray[Any]) -> None:
        """Write rows ``[n, ...]``; all must be of one kind."""
        kind = (rows.shape[1:], rows.dtype)
        if self._kind is None:
            self._kind = kind
            self._write_header()
        if kind != self._kind:
            raise ValueError(f"{kind[1]} of shape {kind[0]} follows {self._kind[1]} of shape {self._kind[0]}")
        self._file.write(np.ascontiguousarray(rows).data)
        self.count += len(rows)

    def _write_header(self) -> None:
        assert self._kind is not None
        shape, dtype = self._kind
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (self.count, *shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)

    def close(self) -> None:
        """Write the number of rows, and all of it to the disk."""
        if self._kind is not None:
            self._file.seek(0)
            self._write_header()
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()

    def describe(self) -> dict[str, Any]:
        """Return what ``about.json`` says of the file."""
        assert self._kind is not None
        shape, dtype = self._kind
        return {"shape": [self.count, *shape], "dtype": str(dtype), "bytes": self.path.stat().st_size}
