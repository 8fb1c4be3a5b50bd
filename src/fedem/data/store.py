"""Public data sets: raw files, read block by block and converted once to a canonical form that is mapped into memory.

Raw files are found in the data folder or downloaded. The canonical form is a folder: ``inputs.npy``, ``targets.npy``,
``ids.npy``, where the data set has them ``owners.npy`` and ``coarse.npy``, and ``about.json``. Images are uint8 and
have their channels first, characters are int8, targets int64. The folder is moved to its place when it is whole, so a
process that is killed leaves nothing half-made; and one process at a time prepares a data set, the others wait and then
find it.

Shapes: N samples, n of a block, C channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import shutil
import struct
import tarfile
import time
import tomllib
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray

from fedem.core.errors import UserError, counted, needed, reason
from fedem.core.files import locked, write_atomically, write_json
from fedem.core.memory import free_host_bytes
from fedem.core.random import client_keys
from fedem.core.schema import read_json
from fedem.data.archives import DAMAGED, DAMAGED_HEADER, read_arrays
from fedem.data.dataset import Dataset, Pooled
from fedem.data.partitions import PARTITIONS, Collection, Partition, content_ids, fingerprint, fingerprint_of, numbered
from fedem.data.samples import Pool

FORMAT = 2  # version of the canonical form
ABOUT = "about.json"
_PIECE = 1 << 24  # bytes that are read at a time
ROWS = 1 << 15  # samples of a block, where the source has no blocks of its own

_PUBLISHED = tomllib.loads(resources.files("fedem.data").joinpath("public.toml").read_text(encoding="utf-8"))
# What readers raise for a file that is damaged, or another than was hoped for.
_DAMAGED = (*DAMAGED, ArithmeticError, LookupError, pickle.UnpicklingError, struct.error, tarfile.TarError)

Files = dict[str, Callable[[], Any]]  # paths within a source, with slashes, and how each is opened: IO[bytes]
Progress = Callable[[str, int, int | None], None]  # what is going on, how much is done, and, where known, of how much


def _quiet(what: str, done: int, total: int | None) -> None: ...


class Block(NamedTuple):
    """Samples that follow each other in a raw file."""

    inputs: NDArray[np.generic]  # [n, ...]
    targets: NDArray[np.integer]  # [n]
    owner: str | None = None  # whose samples these are, in a data set that has clients of its own
    coarse: NDArray[np.integer] | None = None  # [n], groups of the labels, in a data set that has them
    lines: int | None = None  # of the owner's text, in a data set made from text


@contextmanager
def opened(path: Path) -> Iterator[Files]:
    """List the files of a folder, of a tar or zip archive, or the file itself. Nothing is unpacked to the disk."""
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file())
        yield {file.relative_to(path).as_posix(): partial(file.open, "rb") for file in found}
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            members = {member.name: member for member in tar.getmembers() if member.isreg()}
            yield {name: partial(tar.extractfile, members[name]) for name in sorted(members)}
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if not name.endswith("/"))
            yield {name: partial(archive.open, name) for name in names}
    else:
        yield {path.name: partial(path.open, "rb")}


def read_bytes(files: Files, name: str) -> bytes:
    """Read a whole file of a source."""
    allowed, content = free_host_bytes() // 2, bytearray()
    with files[name]() as file:
        # Asked for all at once, a file takes the memory that it might need, and not what it does.
        while piece := file.read(_PIECE):
            content += piece
            if len(content) > allowed:
                raise UserError(f"{name} asks for more than half of the memory that is free, {allowed:,} bytes.")
    return bytes(content)


def pick(files: Files, name: str, source: Path) -> str:
    """Return the path of the file called ``name``, compressed or not, in whatever folder."""
    for path in files:
        if path.removesuffix(".gz").rpartition("/")[2] == name:
            return path
    raise UserError(f"{source} has no {name}; allowed: the official files, all of them.")


def plain_images(path: Path, shape: tuple[int, int, int], *, owned: bool, coarse: bool = False) -> Iterator[Block]:
    """Read an npz of x (images of ``shape`` C, H, W), y, and client and coarse where asked for or there."""
    found, names = read_arrays(path, ("x", "y", "client", "coarse"), max_memory=0)
    for name, wanted in (("x", True), ("y", True), ("client", owned), ("coarse", coarse)):
        if wanted and name not in found:
            raise UserError(f"{path} has no array {name!r} (it has: {', '.join(names)}); this data set needs it.")
    inputs = _channels_first(path, found["x"], shape)
    for name, column in found.items():
        if len(column) != len(inputs):
            raise UserError(f"{path} has {len(inputs)} images but {len(column)} of {name!r}; allowed: as many of each.")
        if name in ("y", "coarse") and (column.ndim != 1 or column.dtype.kind not in "iu"):
            raise UserError(f"{path}: {name} is {column.dtype} of shape {column.shape}; allowed: integers, one each.")
    if "client" in found:
        owners, codes = np.unique(found["client"].astype(str), return_inverse=True)
        owned_rows = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
        spans = list(zip(owners.tolist(), owned_rows, strict=True))
    else:
        spans = [(None, np.arange(start, min(start + ROWS, len(inputs)))) for start in range(0, len(inputs), ROWS)]
    for owner, rows in spans:
        yield Block(inputs[rows], found["y"][rows], owner, found["coarse"][rows] if coarse else None)


def _channels_first(path: Path, images: NDArray[np.generic], shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """View ``[n, C, H, W]``, ``[n, H, W, C]`` or, with one channel, ``[n, H, W]`` as the first; refuse others."""
    channels, height, width = shape
    if images.dtype == np.uint8:
        pixels = images.view(np.uint8)
        if images.shape[1:] == (height, width) and channels == 1:
            return pixels[:, None]
        if images.shape[1:] in (shape, (height, width, channels)):
            return pixels if images.shape[1:] == shape else pixels.transpose(0, 3, 1, 2)
    allowed = f"uint8 images of {height} x {width} with {channels} channel{'s' if channels > 1 else ''}, first or last"
    raise UserError(f"{path}: x is {images.dtype} of shape {images.shape}; allowed: {allowed}.")


@dataclass(frozen=True)
class About:
    """What ``about.json`` says of a canonical data set."""

    format: int
    name: str  # of the data set and its variant
    samples: int  # N
    fingerprint: str  # a hash of all samples, whatever their order
    labels: list[str]  # names of the classes
    owners: list[str]  # names of the clients, sorted; empty when the data set has none
    lines: list[int]  # of each owner's text; empty when samples do not come from text
    files: dict[str, dict[str, Any]]  # shape, dtype and bytes of each array's file
    raw: dict[str, str]  # sha256 of each raw file or folder that the samples were read from

    @property
    def num_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())


def _is(kind: Any, value: Any) -> bool:
    """Whether a value that was read from JSON is of an annotated kind; numbers are counts."""
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is(get_args(kind)[0], item) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(get_args(kind)[1], item) for item in value.values())
    return kind is Any or (isinstance(value, kind) and (kind is str or (not isinstance(value, bool) and value >= 0)))


def read_about(place: Path) -> About:
    """Read what a canonical data set says of itself; raises OSError or ValueError when it is damaged."""
    content = read_json(place / ABOUT)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{ABOUT} is not of format {FORMAT}")
    kinds = get_type_hints(About)
    if wrong := [*(kinds.keys() ^ content.keys()), *(key for key in kinds if not _is(kinds[key], content.get(key)))]:
        raise ValueError(f"{ABOUT}: {min(wrong)!r} is missing, unknown or of a wrong kind")
    about = About(**content)
    wanted = {"inputs", "targets", "ids", *(("owners",) if about.owners else ())}
    fits = about.files.keys() - {"coarse"} == wanted and len(about.lines) in (0, len(about.owners)) and about.samples
    for entry in about.files.values():
        size, shape = entry.get("bytes", ""), entry.get("shape", "")
        fits = fits and _is(int, size) and _is(list[int], shape) and shape[:1] == [about.samples]
    if not fits:
        raise ValueError(f"{ABOUT} does not fit itself")
    return about


def open_canonical(place: Path) -> tuple[Collection, About]:
    """Map the arrays from their files; raises OSError or ValueError when they are damaged."""
    about, arrays = read_about(place), {}
    for name, entry in about.files.items():
        array, found = _mapped(place / f"{name}.npy")
        if found != entry:
            raise ValueError(f"{name}.npy has {found} instead of {entry}")
        arrays[name] = torch.from_numpy(array)
    targets, owners, names = arrays["targets"], arrays.get("owners"), tuple(about.owners)
    if not 0 <= int(targets.min()) <= int(targets.max()) < len(about.labels):
        raise ValueError(f"some samples have none of the {counted(len(about.labels), 'label')}")
    if owners is not None and not 0 <= int(owners.min()) <= int(owners.max()) < len(names):
        raise ValueError(f"some samples belong to none of the {counted(len(names), 'client')}")
    pool = Pool(arrays["inputs"], targets)
    return Collection(pool, arrays["ids"], about.fingerprint, owners, names, arrays.get("coarse")), about


def _mapped(path: Path) -> tuple[NDArray[Any], dict[str, Any]]:
    """Map an array from its file, and describe it as ``about.json`` does."""
    # Copied where it is written to: torch wants arrays that could be, and the file stays as it is.
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except OSError:
        raise
    except DAMAGED_HEADER as error:
        raise ValueError(f"{path.name} does not begin as an array of numpy's does ({type(error).__name__})") from None
    return array, {"shape": [*array.shape], "dtype": str(array.dtype), "bytes": path.stat().st_size}


def _write_canonical(place: Path, data: Public, raw: list[Path], progress: Progress) -> None:
    """Write a canonical data set beside its place and move it there; one that is there is replaced."""
    begun, old = (place.with_name(f".{place.name}.{ending}") for ending in ("tmp", "old"))
    for leftover in (begun, old):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    begun.mkdir()
    try:
        write_json(begun / ABOUT, asdict(_write_arrays(begun, data, raw, progress)))
        if place.exists():
            os.rename(place, old)
        os.rename(begun, place)
    finally:
        shutil.rmtree(begun, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write_arrays(folder: Path, data: Public, raw: list[Path], progress: Progress) -> About:
    """Write the samples' arrays and return what ``about.json`` is to say of them; one block of inputs is in memory."""
    hashes, num_labels = {path.name: digest_of(path) for path in raw}, len(data.labels)
    columns: dict[str, list[NDArray[np.int64]]] = {"targets": [], "ids": [], "coarse": []}
    runs: list[tuple[str, int]] = []  # owners of blocks, with their numbers of samples
    lines: dict[str, int] = {}
    kind: dict[str, Any] = {}
    count = 0
    with (folder / "inputs.npy").open("wb") as file:
        for block in data.blocks(raw[0]):
            targets = block.targets.astype(np.int64)
            if targets.shape != block.inputs.shape[:1]:
                found = f"{counted(len(block.inputs), 'input')} and targets of shape {list(targets.shape)}"
                raise UserError(f"{raw[0]} has {found}; allowed: one target for each input.")
            if len(targets) and not 0 <= targets.min() <= targets.max() < num_labels:
                labels = f"labels from {targets.min()} to {targets.max()}"
                raise UserError(f"{raw[0]} has {labels}; allowed: 0 to {num_labels - 1}.")
            own = {"shape": block.inputs.shape[1:], "descr": np.lib.format.dtype_to_descr(block.inputs.dtype)}
            if not kind:
                kind = own
                _write_header(file, 0, kind)
            if own != kind:
                raise ValueError(f"inputs of {own} follow {kind}")
            file.write(np.ascontiguousarray(block.inputs).data)
            columns["targets"].append(targets)
            ids = content_ids(block.inputs, targets)
            if block.coarse is not None:
                columns["coarse"].append(block.coarse.astype(np.int64))
            if block.owner is not None:
                ids = content_ids(ids, np.broadcast_to(client_keys([block.owner]).numpy(), ids.shape))
                runs.append((block.owner, len(targets)))
                if block.lines is not None:
                    lines[block.owner] = block.lines
            columns["ids"].append(ids)
            count += len(targets)
            progress("samples", count, None)
        if not count:
            raise UserError(f"{raw[0]} has no samples.")
        file.seek(0)
        _write_header(file, count, kind)
        file.flush()
        os.fsync(file.fileno())
    arrays = {name: np.concatenate(pieces) for name, pieces in columns.items() if pieces}
    arrays["ids"] = numbered(arrays["ids"])
    if owners := sorted({owner for owner, _ in runs}):
        codes = {owner: code for code, owner in enumerate(owners)}
        arrays["owners"] = np.repeat([codes[owner] for owner, _ in runs], [size for _, size in runs])
    if any(len(array) != count for array in arrays.values()):
        raise UserError(f"Some samples of {raw[0]} have a client or a group of labels, others have none.")
    for name, array in arrays.items():
        content = io.BytesIO()
        np.save(content, array)
        write_atomically(folder / f"{name}.npy", content.getvalue())
    files = {path.stem: _mapped(path)[1] for path in folder.glob("*.npy")}
    lengths, print_of_all = [lines[owner] for owner in owners if lines], fingerprint_of(arrays["ids"])
    return About(FORMAT, data.variant, count, print_of_all, [*data.labels], owners, lengths, files, hashes)


def _write_header(file: IO[bytes], count: int, kind: dict[str, Any]) -> None:
    """Write how an npy file begins: numpy leaves room for any number of rows."""
    np.lib.format.write_array_header_1_0(file, {**kind, "fortran_order": False, "shape": (count, *kind["shape"])})


class Remote(NamedTuple):
    """A public file."""

    address: str
    checksum: str = ""  # the algorithm and the digits, such as "md5:0123..."; empty when none is known

    @property
    def file(self) -> str:
        return self.address.rpartition("/")[2]


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """Hash a file, or all files of a folder with their names: hexadecimal digits."""
    new = partial(hashlib.new, algorithm, usedforsecurity=False)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        lines = (f"{file.relative_to(path).as_posix()}\0{digest_of(file, algorithm)}\n" for file in files)
        return new("".join(lines).encode()).hexdigest()
    with path.open("rb") as content:
        return hashlib.file_digest(content, new).hexdigest()


def record_of(path: Path) -> Path:
    """Return where a file's first hash is written, as ``sha256sum --check`` reads it."""
    return path.with_name(f"{path.name}.sha256")


def check(path: Path, remote: Remote, record: Path | None = None) -> None:
    """Refuse a file that is not the one that is known, or not what it was at its first use, which is recorded."""
    record = record or record_of(path)
    checksum, known, mend = remote.checksum, f"as known for {remote.address}", f"Remove {path} to download it again"
    if not checksum and record.exists():
        words = record.read_text(encoding="utf-8", errors="replace").split(maxsplit=1)
        checksum = f"sha256:{words[0][:64] if words else 'nothing'}"
        known, mend = f"as at its first use, in {record}", f"If its owner has published another, remove {record}"
    algorithm, _, expected = (checksum or "sha256:").partition(":")
    found = digest_of(path, algorithm)
    if not checksum:
        with suppress(OSError):  # somebody else's folder: what can't be recorded can't be compared
            write_atomically(record, f"{found}  {record.stem}\n".encode())
    elif found != expected:
        said = f"{path} is damaged or another file: its {algorithm} is {found}; allowed: {expected}, {known}"
        raise UserError(f"{said}. {mend}, or name your own with --from.")


def download(
    remote: Remote, folder: Path, progress: Progress = _quiet, attempts: int = 3, timeout: float = 30, pause: float = 1
) -> Path:
    """Download a file unless it is there; ``progress`` is called with its bytes so far and, if known, all of them."""
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
    try:
        for left in reversed(range(attempts)):
            try:
                bar = _Bar(partial(progress, remote.file))
                HTTPDownloader(bar, 1 << 18, timeout=timeout, headers=headers)(remote.address, part, None)
                break
            except RequestException as error:
                status = None if error.response is None else error.response.status_code
                if not left or (status is not None and status < 500):
                    why = f"HTTP {status}" if status else _cause(error)
                    remedy = f"Fetch {remote.file} by other means and put it at {path}, or name it with --from."
                    check_by = f" Its {remote.checksum.replace(':', ' is ')}." if remote.checksum else ""
                    raise UserError(f"{remote.address} can't be downloaded ({why}). {remedy}{check_by}") from None
                time.sleep(pause * (attempts - left - 1))
        check(part, remote, record_of(path))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _cause(error: BaseException) -> str:
    """Say what lies at the bottom of an error of the network: a refused connection, a time limit, ..."""
    return (str(error) or type(error).__name__) if error.__context__ is None else _cause(error.__context__)


class _Bar:
    """What pooch takes for a progress bar; it sets ``total`` when the answer begins, 0 where it is not known."""

    def __init__(self, listen: Callable[[int, int | None], None]) -> None:
        self._listen, self._done, self.total = listen, 0, 0

    def update(self, count: int) -> None:
        """Count bytes; pooch counts the last piece as a whole one, and then all of them again."""
        if not self._done:
            self._listen(0, self.total or None)
        self._done = min(self._done + count, self.total) if self.total else self._done + count
        self._listen(self._done, self.total or None)

    def reset(self) -> None: ...

    close = reset


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


def _writable_folder() -> Path:
    return data_folder() if _writable(data_folder()) else cache_folder()


@dataclass(frozen=True)
class Public(Pooled):
    """A public data set; what is published of it stands in public.toml, under its name.

    Attributes:
        folder: where its canonical form is, when that is not the usual place.
    """

    folder: str = ""
    name: ClassVar[str]
    title: ClassVar[str]
    links: ClassVar[tuple[Remote, ...]]  # its official files, all of which are needed
    patterns: ClassVar[tuple[str, ...]]  # what else its raw file or folder may be called
    labels: ClassVar[tuple[str, ...]]  # names of the classes
    hint: ClassVar[str] = ""  # what else may be read, for those who can't download
    images: ClassVar[tuple[int, int, int] | None] = None  # C, H, W: an npz of such images is read as well
    has_coarse: ClassVar[bool] = False  # whether its labels have groups

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for key, value in _PUBLISHED.get(vars(cls).get("name", ""), {}).items():
            found = [Remote(**link) for link in value] if key == "links" else value
            setattr(cls, key, tuple(found) if isinstance(found, list) else found)

    @abstractmethod
    def read(self, source: Path) -> Iterator[Block]:
        """Read an official file or folder block by block; the first error stops it."""

    def blocks(self, source: Path) -> Iterator[Block]:
        """Read an official file or folder, or a plain npz of images; errors of reading name the source."""
        try:
            if self.images is not None and source.suffix == ".npz":
                yield from plain_images(source, self.images, owned=self.usual == "natural", coarse=self.has_coarse)
            else:
                yield from self.read(source)
        except UserError:
            raise
        except _DAMAGED as error:
            raise UserError(f"{source} is damaged or of no known format ({reason(error)}).") from None

    @property
    def variant(self) -> str:
        """Name of the canonical form: settings that change the samples are part of it."""
        return self.name

    @property
    def command(self) -> str:
        return f"fedem data prepare {self.name}"

    def place(self) -> Path | None:
        usual = (folder / "canonical" / self.variant for folder in (data_folder(), cache_folder()))
        places = (Path(self.folder),) if self.folder else usual
        return next((place for place in places if (place / ABOUT).exists()), None)

    def opened(self) -> tuple[Collection, About]:
        if (place := self.place()) is None:
            where = f"in {self.folder} (data.folder)" if self.folder else f"in {data_folder()}"
            raise UserError(f"The data set {self.variant!r} is not prepared {where}; run: {self.command}")
        try:
            return open_canonical(place)
        except (OSError, ValueError) as error:
            raise UserError(f"{place} is damaged or outdated ({error}); run: {self.command} --again") from None

    def collect(self) -> Collection:
        """Return all samples; nothing is read that can be mapped from a file."""
        return self.opened()[0]

    def make(self, seed: int, partition: Partition | None = None, unseen: float = 0.0) -> Dataset:
        collection = self.collect()
        assignment = (PARTITIONS[self.usual]() if partition is None else partition).assign(collection, seed)
        owned, federation = fingerprint(assignment, collection), self._split(collection, assignment, seed)
        return Dataset(federation, partition_hash=owned, label_names=self.labels)


def prepared(kind: type[Public]) -> list[Path]:
    """Return the canonical folders of a data set in the usual places, one for each of its variants."""
    found: dict[str, Path] = {}
    for folder in (data_folder(), cache_folder()):
        for pattern in (kind.name, f"{kind.name}-*"):
            for about in sorted((folder / "canonical").glob(f"{pattern}/{ABOUT}")):
                found.setdefault(about.parent.name, about.parent)
    return list(found.values())


def prepare(data: Public, source: Path | None = None, again: bool = False, progress: Progress = _quiet) -> Path:
    """Convert ``source``, or the official files, found or downloaded, to the canonical form; returns its folder."""
    if source is not None and not source.exists():
        raise UserError(f"There is no file or folder {source}.")
    if (there := data.place()) and not again:
        if source is not None:
            raise UserError(f"{data.variant!r} is prepared already, in {there}; to read {source} instead, say --again.")
        return there
    place = there or (Path(data.folder) if data.folder else _writable_folder() / "canonical" / data.variant)
    if not _writable(place.parent):
        raise UserError(f"{place} can't be written: {place.parent} is not a folder we may write to.")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.parent / f".{data.name}.lock", wait=True):
            if again or not (place / ABOUT).exists():
                _write_canonical(place, data, _raw_files(data, source, progress), progress)
    except OSError as error:
        raise UserError(f"{place} can't be written: {error.strerror or error}.") from None
    return place


def _raw_files(data: Public, source: Path | None, progress: Progress) -> list[Path]:
    official = {remote.file: remote for remote in data.links}
    if source is not None:
        beside = [source.parent / name for name in official if (source.parent / name).exists()]
        return beside if source.name in official else [source]
    folders = [folder for base in (data_folder(), cache_folder()) for folder in (base, base / data.name)]
    for folder in folders:
        found = {folder / name: remote for name, remote in official.items()}
        if all(path.exists() for path in found):
            for path, remote in found.items():
                check(path, remote)
            return list(found)
    matches = (path for folder in folders for pattern in data.patterns for path in sorted(folder.glob(pattern)))
    if match := next(matches, None):
        return [match]
    folder = _writable_folder()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return [download(remote, folder, progress) for remote in data.links]
    except UserError as error:
        raise UserError(f"{error} {data.hint}".strip()) from None
