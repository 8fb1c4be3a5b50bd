"""Readers of samples: tables, arrays, prepared data, the archives of public data sets; and of graphs of clients."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import shutil
import struct
import tarfile
import zipfile
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
from PIL import Image

from fedem.core.random import client_keys
from fedem.data import Cifar10, Cifar100, Emnist, Femnist, Public, Shakespeare
from fedem.data.dataset import Dataset
from fedem.data.files import FromFile
from fedem.data.images import CHARACTERS
from fedem.data.partitions import Natural
from fedem.data.store import Remote, check, prepare, record_of
from fedem.graphs import File
from fuzzing.harness import FolderReader, Reader
from fuzzing.mutations import (
    Draw,
    changed_tree,
    damaged_array,
    damaged_cells,
    damaged_json,
    flipped,
    pick,
    saved,
)

NAMES = ("ann", "bob", "cem", "dan")
COLUMNS: tuple[Callable[[], Any], ...] = (
    lambda: pandas.array([1, None] * 6, dtype="Int8"),
    lambda: pandas.date_range("2024-01-01", periods=12, tz="Asia/Tokyo"),
    lambda: pandas.timedelta_range("1h", periods=12),
    lambda: [[1, 2]] * 12,
    lambda: [{"a": 1}] * 12,
    lambda: [b"\xff"] * 12,
    lambda: [None] * 12,
    lambda: pandas.Categorical(["a", "b", None] * 4),
    lambda: np.array([2**64 - 1] * 12, dtype=np.uint64),
    lambda: [1e300, np.inf, -np.inf, np.nan] * 3,
    lambda: ["a\0b", "", " ", "NA"] * 3,
    lambda: [True, None] * 6,
    lambda: np.full(12, "x", dtype=object),
)  # fmt: skip


def insane_samples(dataset: Dataset) -> str:
    """Say what no federation may hold: numbers that are not finite, labels below zero, clients without a name."""
    federation = dataset.federation
    for part in (federation.train, federation.validation, federation.test):
        inputs, targets = part.inputs, part.targets
        if inputs.is_floating_point() and not bool(inputs.isfinite().all()):
            return "Inputs are not finite."
        if not bool(targets.isfinite().all()) or (
            not targets.is_floating_point() and len(targets) and targets.min() < 0
        ):
            return "Targets are not finite, or below zero."
    return "" if all(federation.names) and len(set(federation.names)) == len(federation.names) else "Names are not."


class SampleFile(Reader):
    """A file of samples, as ``fedem train FILE`` reads it."""

    named = ("column", "Client", "client")

    @abstractmethod
    def make(self, draw: Draw) -> tuple[str, bytes]:
        """Return a file's name and content."""

    def damage(self, draw: Draw) -> str:
        name, content = self.make(draw)
        self.path = self.folder / name
        self.path.write_bytes(flipped(content, draw) if content and draw.random() < 0.4 else content)
        return name

    def read(self) -> object:
        return FromFile(path=str(self.path)).make(0)

    def judge(self, found: object) -> str:
        assert isinstance(found, Dataset)
        return insane_samples(found)


class Csv(SampleFile):
    title = "tables: CSV, also packed"
    packers: ClassVar[dict[str, Callable[[bytes], bytes]]] = {
        "": bytes, ".gz": lambda text: gzip.compress(text, mtime=0), ".bz2": bz2.compress, ".xz": lzma.compress
    }  # fmt: skip

    def make(self, draw: Draw) -> tuple[str, bytes]:
        separator = pick(draw, (b",", b",", b";", b"\t", b"|"))
        rows = [[b"a", b"b", b"y", b"client"]]
        for row in range(pick(draw, (0, 1, 12, 12, 30, 30))):
            rows.append([f"{draw.normal():.3f}".encode(), (b"red", b"blue")[row % 2], str(row % 2).encode(), b"ann"])
        text = damaged_cells(b"\n".join(map(separator.join, rows)), draw, separator)
        ending = pick(draw, ("", "", "", *self.packers))
        return f"t.csv{ending}", self.packers[ending](text)


class Npz(SampleFile):
    title = "tables: npz"

    def make(self, draw: Draw) -> tuple[str, bytes]:
        rows, file = pick(draw, (0, 1, 12, 12, 12, 12, 12, 12)), io.BytesIO()
        arrays = {"x": draw.normal(size=(rows, 2)), "y": np.arange(rows) % 2, "client": np.array(["a", "b"] * 6)[:rows]}
        how = pick(draw, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        with zipfile.ZipFile(file, "w", how) as archive:
            for name, array in arrays.items():
                member = damaged_array(array, draw) if draw.random() < 0.2 else saved(array)
                if draw.random() < 0.97:
                    archive.writestr(name if draw.random() < 0.1 else f"{name}.npy", member)
        return "t.npz", lying_sizes(file.getvalue(), draw) if draw.random() < 0.15 else file.getvalue()


class Parquet(SampleFile):
    title = "tables: Parquet"

    def make(self, draw: Draw) -> tuple[str, bytes]:
        rows, file = pick(draw, (0, 1, 12, 12)), io.BytesIO()
        columns: dict[str, Any] = {
            "a": draw.normal(size=12), "b": ["red", "blue"] * 6, "y": np.arange(12) % 2, "client": "ann"
        }  # fmt: skip
        for name in list(columns):
            if draw.random() < 0.15:
                columns[name] = pick(draw, COLUMNS)()
            elif draw.random() < 0.05:
                del columns[name]
        frame = pandas.DataFrame(columns).head(rows)
        compression = pick(draw, ("none", "snappy", "gzip"))
        pyarrow.parquet.write_table(pyarrow.Table.from_pandas(frame), file, compression=compression)
        return "t.parquet", file.getvalue()


# --- archives of public data sets


def lying_sizes(content: bytes, draw: Draw) -> bytes:
    """A zip archive whose directory has other sizes, such as those of a bomb."""
    changed = bytearray(content)
    if (entry := changed.find(b"PK\x01\x02")) >= 0:
        sizes = [pick(draw, (0, 1, 2**31, 2**32 - 1, int(draw.integers(2**32)))) for _ in range(2)]
        changed[entry + 20 : entry + 28] = struct.pack("<II", *sizes)
    return bytes(changed)


def zipped(files: dict[str, bytes], draw: Draw) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", pick(draw, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return lying_sizes(file.getvalue(), draw) if draw.random() < 0.1 else file.getvalue()


def tarred(files: dict[str, bytes], draw: Draw) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=pick(draw, ("w", "w:gz", "w:bz2", "w:xz"))) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            if draw.random() < 0.05:  # not a file at all, but something that leads elsewhere
                entry.type = pick(draw, (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"S"))
                entry.linkname, entry.size = pick(draw, ("/etc/hostname", "../escaped", name)), 0
                archive.addfile(entry)
                continue
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def _flip(name: str, content: bytes, draw: Draw) -> bytes:
    return flipped(content, draw)


class Official(Reader):
    """The official files of a public data set, as ``fedem data prepare NAME --from FILE`` reads them."""

    slowness = 3.0
    kind: ClassVar[Callable[..., Public]]
    pack: ClassVar[Callable[[dict[str, bytes], Draw], bytes]] = staticmethod(zipped)
    ending = ".zip"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.files = self.official()

    @abstractmethod
    def official(self) -> dict[str, bytes]:
        """Return valid files by their names in the archive."""

    @abstractmethod
    def damaged(self, name: str, content: bytes, draw: Draw) -> bytes:
        """Return a file that is damaged by the rules of its format."""

    def damage(self, draw: Draw) -> str:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        files, done = dict(self.files), "nothing"
        for _ in range(pick(draw, (0, 1, 1, 1, 2))):
            name = pick(draw, sorted(files))
            match int(draw.integers(8)):
                case 0:
                    done = f"{name} is gone"
                    del files[name]
                case 1:
                    other = pick(draw, (f"../{name}", f"{self.folder.parent}/escaped", f"a/../../{name}", name.upper()))
                    done, files[other] = f"{name} is {other}", files.pop(name)
                case _:
                    whole = name in self.files and files[name] == self.files[name]
                    done, files[name] = name, (self.damaged if whole else _flip)(name, files[name], draw)
            if not files:
                break
        if draw.random() < 0.15:  # unpacked
            self.source = self.folder / "source"
            self.source.mkdir()
            for name, content in files.items():
                if ".." not in name and not name.startswith("/"):
                    (self.source / name).parent.mkdir(parents=True, exist_ok=True)
                    (self.source / name).write_bytes(content)
            return f"{done}, in a folder"
        self.source = self.folder / f"source{self.ending}"
        content = type(self).pack(files, draw)
        self.source.write_bytes(flipped(content, draw) if draw.random() < 0.15 else content)
        return done

    def read(self) -> object:
        data = type(self).kind(folder=str(self.folder / "canonical"))
        prepare(data, self.source)
        return data.collect()

    def judge(self, found: Any) -> str:
        targets, labels = found.pool.targets, len(type(self).kind().labels)
        if not len(targets) == len(found.pool.inputs) == len(found.ids):
            return "There are more or fewer targets than inputs."
        return "" if 0 <= int(targets.min()) <= int(targets.max()) < labels else "There are labels without a name."


def _idx(array: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def _damaged_idx(content: bytes, draw: Draw) -> bytes:
    changed = bytearray(content)
    match int(draw.integers(3)):
        case 0:
            return flipped(content, draw)
        case 1:  # a number of the header
            place = int(draw.integers(1, 1 + content[3])) * 4
            changed[place : place + 4] = struct.pack(">I", pick(draw, (0, 1, 3, 5, 29, 2**16, 2**31, 2**32 - 1)))
        case _:
            changed[pick(draw, (2, 3))] = pick(draw, (0, 1, 2, 4, 9, 13, 255))
    return bytes(changed)


class EmnistFiles(Official):
    title = "EMNIST: zip, gzip, idx"
    kind = Emnist

    def official(self) -> dict[str, bytes]:
        random, files = np.random.default_rng(0), {}
        for part, labels in (("train", [0, 61, 10, 36]), ("test", [9, 35, 5])):
            images = random.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
            for what, array in (("images-idx3", images), ("labels-idx1", np.array(labels, dtype=np.uint8))):
                files[f"gzip/emnist-byclass-{part}-{what}-ubyte.gz"] = gzip.compress(_idx(array), mtime=0)
        return files

    def damaged(self, name: str, content: bytes, draw: Draw) -> bytes:
        if draw.random() < 0.3:
            return flipped(content, draw)
        plain = gzip.decompress(content)
        if draw.random() < 0.1:  # far more than it looks
            plain += bytes(1 << 24)
        return gzip.compress(_damaged_idx(plain, draw), mtime=0)


class _Stranger:
    """What a pickle must not make."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("escaped"),)


class CifarFiles(Official):
    title = "CIFAR-10, CIFAR-100: tar, pickle"
    kind = Cifar10
    pack = staticmethod(tarred)
    ending = ".tar"
    names: ClassVar[tuple[str, ...]] = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    keys: ClassVar[tuple[bytes, ...]] = (b"labels",)
    others: ClassVar[tuple[Any, ...]] = (
        None, -1, 10**30, 1e308, "x", b"x", [], [[1], 2], {}, {b"x": 1}, (1, 2), np.zeros(3), np.zeros((2, 3072)),
        np.array([1, 2]), np.array(["a", "b"]), np.zeros((2, 3071), dtype=np.uint8), np.array([None, 1]),
        np.zeros(2, dtype="<M8[s]"), np.zeros((2, 3072), dtype=[("a", "u1")]), [1.5, 2.5], [2**70, 1], ["1", "2"],
    )  # fmt: skip

    def official(self) -> dict[str, bytes]:
        random = np.random.default_rng(0)
        batches = {
            name: {b"data": random.integers(0, 256, (2, 3072), dtype=np.uint8), **{key: [k, 1] for key in self.keys}}
            for k, name in enumerate(self.names)
        }
        self.batches = {f"cifar/{name}": batch for name, batch in batches.items()}
        return {name: pickle.dumps(batch, protocol=3) for name, batch in self.batches.items()}

    def damaged(self, name: str, content: bytes, draw: Draw) -> bytes:
        if draw.random() < 0.5:
            return flipped(content, draw)
        batch: Any = dict(self.batches[name])
        match int(draw.integers(6)):
            case 0:
                batch[pick(draw, sorted(batch))] = _Stranger()
            case 1:
                del batch[pick(draw, sorted(batch))]
            case 2:
                batch = pick(draw, self.others)
            case _:
                batch[pick(draw, sorted(batch))] = pick(draw, self.others)
        return pickle.dumps(batch, protocol=pick(draw, (2, 3, 3, 4)))


class FemnistFiles(Official):
    title = "FEMNIST: zip, JSON, PNG"
    kind = Femnist

    def official(self) -> dict[str, bytes]:
        random, data = np.random.default_rng(0), {}
        for user, labels in (("f01", [0, 10]), ("f02", [61])):
            pixels = random.integers(0, 256, (len(labels), 784)) / 255
            data[user] = {"x": pixels.round(3).tolist(), "y": labels}
        leaf = {"users": list(data), "num_samples": [len(entry["y"]) for entry in data.values()], "user_data": data}
        self.leaf = {"data/all_data_0.json": json.dumps(leaf).encode()}
        self.tree = {}
        for number, (writer, label) in enumerate((("f01", 0), ("f01", 10), ("f02", 61))):
            file = io.BytesIO()
            image = random.integers(0, 256, (28, 28) if number else (40, 40), dtype=np.uint8)
            Image.fromarray(image).save(file, "png")
            self.tree[f"{writer}/{ord(CHARACTERS[label]):02x}/{number}.png"] = file.getvalue()
        return self.leaf

    def damage(self, draw: Draw) -> str:
        self.files = pick(draw, (self.leaf, self.tree))
        return super().damage(draw)

    def damaged(self, name: str, content: bytes, draw: Draw) -> bytes:
        if name.lower().endswith(".json"):
            return damaged_json(content, draw)
        changed = bytearray(content)
        if draw.random() < 0.3:  # the size that the header has
            place = pick(draw, (16, 20))
            changed[place : place + 4] = struct.pack(">I", pick(draw, (0, 1, 2**16, 2**31, 2**32 - 1)))
        return flipped(bytes(changed), draw)


_PLAY = """



1604

THE SMALL PLAY

by William Shakespeare


  ANN. Good morrow to you, cousin, and to all who are here with us.
    It is a fine day, and the sun is high.
    So let us go.
    And not come back again.
  BOB. I will not go before I have had my supper, as I said before.
    For I am hungry.
    And thirsty too.
    And tired of this play.
"""


class ShakespeareFiles(Official):
    title = "Shakespeare: zip, gzip, text"
    slowness = 6.0
    kind = staticmethod(lambda **options: Shakespeare(window=10, **options))

    def official(self) -> dict[str, bytes]:
        return {"100.txt": _PLAY.encode()}

    def damaged(self, name: str, content: bytes, draw: Draw) -> bytes:
        lines = content.split(b"\n")
        for _ in range(int(draw.integers(0, 5))):
            place = int(draw.integers(len(lines)))
            lines[place] = pick(draw, (b"", lines[place].strip(), b"  " + lines[place], flipped(lines[place], draw)))
        text = b"\n".join(lines)
        return gzip.compress(text) if draw.random() < 0.2 else pick(draw, (text, flipped(text, draw)))

    def damage(self, draw: Draw) -> str:
        packed = {"100.txt.gz": gzip.compress(_PLAY.encode() + bytes(pick(draw, (0, 0, 1 << 24))), mtime=0)}
        self.files = pick(draw, (self.official(), packed, self.official() | {"x.txt": b"x"}))
        return super().damage(draw)


class Prepared(FolderReader):
    title = "prepared data: JSON, npy"

    def build(self, folder: Path) -> None:
        random = np.random.default_rng(0)
        source = folder.parent / "inside.npz"
        fine, owners = np.array([0, 1, 99, 3, 4, 5, 6, 7, 8]), ["ann", "bob", "cem"] * 3
        pixels = random.integers(0, 256, (9, 3, 32, 32), dtype=np.uint8)
        np.savez(source, x=pixels, y=fine, coarse=fine % 20, client=owners)
        prepare(Cifar100(folder=str(folder)), source)
        source.unlink()
        (folder.parent / ".cifar100.lock").unlink(missing_ok=True)

    def damaged(self, name: str, content: bytes, draw: Draw) -> bytes:
        if name.endswith(".npy"):
            return damaged_array(np.load(io.BytesIO(content)), draw)
        return super().damaged(name, content, draw)

    def read(self) -> object:
        return Cifar100(folder=str(self.folder)).make(0, Natural())

    def judge(self, found: object) -> str:
        assert isinstance(found, Dataset)
        federation = found.federation
        for part in (federation.train, federation.validation, federation.test):
            if part.inputs.shape[1:] != (3, 32, 32) or part.inputs.dtype.is_floating_point:
                return f"Images are {part.inputs.dtype} of shape {list(part.inputs.shape)}."
            if len(part.targets) and not 0 <= int(part.targets.min()) <= int(part.targets.max()) < 100:
                return "There are labels without a name."
        return insane_samples(found)


class FirstUse(Reader):
    title = "hashes of downloads at first use"
    content: ClassVar[bytes] = b"what was downloaded"

    def damage(self, draw: Draw) -> str:
        self.path = self.folder / "raw.zip"
        self.path.write_bytes(self.content)
        record_of(self.path).unlink(missing_ok=True)
        check(self.path, Remote("https://example.org/raw.zip"))
        what = pick(draw, (self.path, record_of(self.path)))
        self.before = what.read_bytes()
        what.write_bytes(flipped(self.before, draw))
        self.is_same = self.path.read_bytes() == self.content
        return what.name

    def read(self) -> object:
        return check(self.path, Remote("https://example.org/raw.zip"))

    def judge(self, found: object) -> str:
        return "" if self.is_same else "Another file was taken for the one of the first use."


# --- graphs


class Graphs(Reader):
    title = "graphs: text, CSV, npy, npz"

    def damage(self, draw: Draw) -> str:
        for path in self.folder.iterdir():
            path.unlink()
        ring = np.roll(np.eye(4, dtype=np.int64), 1, 0)
        matrix = pick(draw, (ring + ring.T, (ring + ring.T).astype(bool), (ring + ring.T).astype(float)))
        name = pick(draw, ("g.txt", "g.csv", "m.csv", "g.npy", "g.npz"))
        match name:
            case "g.npy":
                content = damaged_array(matrix, draw)
            case "g.npz":
                file = io.BytesIO()
                with zipfile.ZipFile(file, "w", pick(draw, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
                    for number in range(pick(draw, (1, 1, 1, 0, 2))):
                        archive.writestr(f"arr_{number}.npy", pick(draw, (saved(matrix), damaged_array(matrix, draw))))
                content = pick(
                    draw, (file.getvalue(), flipped(file.getvalue(), draw), lying_sizes(file.getvalue(), draw))
                )
            case "m.csv":
                content = damaged_cells("\n".join(",".join(map(str, row)) for row in matrix.tolist()).encode(), draw)
            case _:
                mark = "," if name == "g.csv" else " "
                lines = [f"{NAMES[k]}{mark}{NAMES[(k + 1) % 4]}" for k in range(4)]
                lines = changed_tree(lines, draw, ("", "# x", "ann", "ann ann", "ann,bob,1", "x" * 5000, '"', "\0"))
                text = "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)
                content = damaged_cells(text.encode("utf-8", "surrogatepass"), draw, mark.encode())
        (self.folder / name).write_bytes(content)
        self.path = pick(draw, (self.folder / name, self.folder / name, self.folder))
        return name

    def read(self) -> object:
        return File(path=str(self.path)).edges(client_keys(NAMES), 0)

    def judge(self, found: Any) -> str:
        for edges in found:
            if len(edges) and not (edges.min() >= 0 and edges.max() < 4 and (edges[:, 0] < edges[:, 1]).all()):
                return f"Edges are {edges.tolist()}."
            if len(np.unique(edges, axis=0)) != len(edges):
                return "An edge is there twice."
        return ""


READERS: tuple[type[Reader], ...] = (
    Csv, Npz, Parquet, Prepared, EmnistFiles, CifarFiles, FemnistFiles, ShakespeareFiles, FirstUse, Graphs,
)  # fmt: skip
