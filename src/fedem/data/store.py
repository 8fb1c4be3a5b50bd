"""Public data sets: where their files are, and how they come there.

Raw files are found in the data folder or downloaded, and converted once to the canonical form. It is moved to its place
when it is whole, so a run that is killed leaves nothing half-made; and one process at a time prepares a data set, the
others wait and then find it.
"""

from __future__ import annotations

import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from fedem.data.base import Dataset, Pooled
from fedem.data.blocks import Block
from fedem.data.canonical import ABOUT, About, open_canonical, write_canonical
from fedem.data.collection import Collection
from fedem.data.download import Remote, check, digest_of, download
from fedem.data.partitions import Partition
from fedem.errors import UserError

# What readers raise for a file that is damaged, or another than was hoped for.
_DAMAGED = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, IndexError),
    RuntimeError,  # zipfile's, for a password or a compression that it does not know
    *(pickle.UnpicklingError, struct.error, tarfile.TarError, zipfile.BadZipFile, zlib.error),
)

Progress = Callable[[str, int, int | None], None]
"""told what is going on, how much is done, and of how much where that is known"""


def cache_folder() -> Path:
    """Return the user's cache: $XDG_CACHE_HOME/fedem or ~/.cache/fedem."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedem"


def data_folder() -> Path:
    """Return where data sets are: $FEDEM_DATA or the user's cache."""
    return Path(os.environ["FEDEM_DATA"]) if os.environ.get("FEDEM_DATA") else cache_folder()


def _writable(folder: Path) -> bool:
    """Whether the folder may be written or made. A folder that nobody may write to is left alone even by root."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK) and bool(there.stat().st_mode & 0o222)


def writable_folder() -> Path:
    """Return the data folder if it can be written, else the user's cache."""
    return data_folder() if _writable(data_folder()) else cache_folder()


@dataclass(frozen=True)
class Public(Pooled):
    """A public data set.

    Attributes:
        folder: where its canonical form is, when that is not the usual place.

    """

    folder: str = ""

    name: ClassVar[str]
    title: ClassVar[str]
    remotes: ClassVar[tuple[Remote, ...]]
    """its official files, all of which are needed"""
    patterns: ClassVar[tuple[str, ...]]
    """what else its raw file or folder may be called"""
    labels: ClassVar[tuple[str, ...]]
    """names of the classes"""
    hint: ClassVar[str] = ""
    """what else may be read, for those who can't download"""

    @abstractmethod
    def read(self, source: Path) -> Iterator[Block]:
        """Read an official file or folder, or a plain one, block by block; the first error stops it."""

    @property
    def variant(self) -> str:
        """Name of the canonical form: settings that change the samples are part of it."""
        return self.name

    @property
    def command(self) -> str:
        """What prepares it."""
        return f"fedem data prepare {self.name}"

    def place(self) -> Path | None:
        """Return the folder of the canonical form; None when there is none."""
        usual = (folder / "canonical" / self.variant for folder in (data_folder(), cache_folder()))
        places = (Path(self.folder),) if self.folder else usual
        return next((place for place in places if (place / ABOUT).exists()), None)

    def opened(self) -> tuple[Collection, About]:
        """Map the canonical form's arrays from their files."""
        place = self.place()
        if place is None:
            where = f"in {self.folder} (data.folder)" if self.folder else f"in {data_folder()}"
            raise UserError(f"The data set {self.variant!r} is not prepared {where}; run: {self.command}")
        try:
            return open_canonical(place)
        except (OSError, ValueError) as error:
            raise UserError(f"{place} is damaged or outdated ({error}); run: {self.command} --again") from None

    def collect(self) -> Collection:
        """Open the canonical form."""
        return self.opened()[0]

    def make(self, seed: int, partition: Partition | None = None, unseen: float = 0.0) -> Dataset:
        """Collect, deal and split; classes have names."""
        return super().make(seed, partition, unseen)._replace(label_names=self.labels)


def prepared(kind: type[Public]) -> list[Path]:
    """Return the canonical folders of a data set in the usual places, one for each of its variants."""
    found: dict[str, Path] = {}
    for folder in (data_folder(), cache_folder()):
        for pattern in (kind.name, f"{kind.name}-*"):
            for about in sorted((folder / "canonical").glob(f"{pattern}/{ABOUT}")):
                found.setdefault(about.parent.name, about.parent)
    return list(found.values())


def prepare(
    data: Public, source: Path | None = None, again: bool = False, progress: Progress = lambda what, done, total: None
) -> Path:
    """Convert a data set to its canonical form and return its folder.

    Args:
        data: which, and with which settings.
        source: the file or folder to read; None for the official one, found in the data folder or downloaded.
        again: whether to do it again where it is done already.
        progress: told of bytes that are downloaded and samples that are converted.

    """
    if source is not None and not source.exists():
        raise UserError(f"There is no file or folder {source}.")
    if (there := data.place()) and not again:
        if source is not None:
            raise UserError(f"{data.variant!r} is prepared already, in {there}; to read {source} instead, say --again.")
        return there
    place = there or (Path(data.folder) if data.folder else writable_folder() / "canonical" / data.variant)
    if not _writable(place.parent):
        raise UserError(f"{place} can't be written: {place.parent} is no folder we may write to.")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.parent / f".{data.name}.lock"):
            if again or not (place / ABOUT).exists():
                raw = _raw_files(data, source) or _downloaded(data, progress)
                _convert(data, raw, place, progress)
    except OSError as error:
        raise UserError(f"{place} can't be written: {error.strerror or error}.") from None
    return place


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process prepares the data set; a process that is killed lets go of it."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _raw_files(data: Public, source: Path | None) -> list[Path]:
    """Return the raw files: those named, or those found; none when they must be downloaded."""
    official = {remote.file: remote for remote in data.remotes}
    if source is not None:
        beside = [source.parent / name for name in official if (source.parent / name).exists()]
        return beside if source.name in official else [source]
    folders = [folder for base in (data_folder(), cache_folder()) for folder in (base, base / data.name)]
    for folder in folders:
        found = [folder / name for name in official]
        if all(path.exists() for path in found):
            for path in found:
                check(path, official[path.name])
            return found
    matches = (path for folder in folders for pattern in data.patterns for path in sorted(folder.glob(pattern)))
    return [path for path in [next(matches, None)] if path is not None]


def _downloaded(data: Public, progress: Progress) -> list[Path]:
    """Download the official files; where that fails, say where to put them."""
    folder = writable_folder()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return [download(remote, folder, partial(progress, remote.file)) for remote in data.remotes]
    except UserError as error:
        raise UserError(f"{error} {data.hint}".strip()) from None


def _convert(data: Public, raw: list[Path], place: Path, progress: Progress) -> None:
    hashes = {path.name: digest_of(path) for path in raw}
    blocks = _reading(raw[0], data.read(raw[0]))
    write_canonical(place, data.variant, data.labels, hashes, blocks, lambda done: progress("samples", done, None))


def _reading(source: Path, blocks: Iterator[Block]) -> Iterator[Block]:
    """Turn what goes wrong with reading, and not with writing, into an error that names the source."""
    try:
        yield from blocks
    except UserError:
        raise
    except _DAMAGED as error:
        raise UserError(f"{source} is damaged or of no known format ({type(error).__name__}: {error}).") from None
