"""CIFAR's and EMNIST's official formats: what was put in comes out, upright and with the right labels."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import RNG, ids_of, images, join, zipped
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedem.core.errors import UserError
from fedem.data import Cifar10, Cifar100, Emnist
from fedem.data.images import CHARACTERS, idx_blocks, unpickle
from fedem.data.store import prepare


def python_2_pickle(batch: dict[str, Any]) -> bytes:
    """Pickle bytes and lists of small numbers the way Python 2 did, as the official archives are."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def array(x: NDArray[np.uint8]) -> bytes:
        content = x.tobytes()
        shape = b"M" + struct.pack("<H", x.shape[0]) + b"M" + struct.pack("<H", x.shape[1]) + b"\x86"
        dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        return start + shape + dtype + b"\x89T" + struct.pack("<i", len(content)) + content + b"tb"

    items = b"".join(
        text(key.encode())
        + (array(value) if isinstance(value, np.ndarray) else b"](" + b"".join(b"K%c" % x for x in value) + b"e")
        for key, value in batch.items()
    )
    return b"\x80\x02}(" + items + b"u."


def tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def cifar10(path: Path) -> tuple[Path, NDArray[np.uint8], list[int]]:
    """An archive whose members stand in another order than they are to be read in."""
    pixels, labels = images(12, 3072), RNG.integers(0, 10, 12).tolist()
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    files = {
        f"cifar-10-batches-py/{name}": python_2_pickle(
            {"data": pixels[2 * k : 2 * k + 2], "labels": labels[2 * k : 2 * k + 2]}
        )
        for k, name in enumerate(names)
    }
    files["cifar-10-batches-py/batches.meta"] = b"never read"
    return tar(path, dict(reversed(files.items()))), pixels, labels


class TestCifar:
    def test_training_images_come_first_then_test_images(self, tmp_path: Path) -> None:
        path, pixels, labels = cifar10(tmp_path / "cifar-10-python.tar.gz")
        inputs, targets = join(list(Cifar10().read(path)))
        assert inputs.shape == (12, 3, 32, 32)
        assert np.array_equal(inputs.reshape(12, -1), pixels)
        assert targets.tolist() == labels

    def test_the_unpacked_folder_is_the_same(self, tmp_path: Path) -> None:
        path, *_ = cifar10(tmp_path / "cifar-10-python.tar.gz")
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
        assert ids_of(tmp_path, Cifar10, path) == ids_of(tmp_path, Cifar10, tmp_path / "cifar-10-batches-py")

    def test_fine_and_coarse_labels(self, tmp_path: Path) -> None:
        pixels = images(5, 3072)
        files = {
            "cifar-100-python/test": python_2_pickle(
                {"data": pixels[3:], "fine_labels": [99, 0], "coarse_labels": [13, 4]}
            ),
            "cifar-100-python/train": python_2_pickle(
                {"data": pixels[:3], "coarse_labels": [19, 0, 1], "fine_labels": [41, 4, 1]}
            ),
        }
        blocks = list(Cifar100().read(tar(tmp_path / "cifar-100-python.tar.gz", files)))
        inputs, targets = join(blocks)
        assert np.array_equal(inputs.reshape(5, -1), pixels)
        assert targets.tolist() == [41, 4, 1, 99, 0]
        assert [group for block in blocks for group in (block.coarse if block.coarse is not None else [])] == [
            *(19, 0, 1),
            *(13, 4),
        ]

    def test_there_are_a_hundred_names_in_order(self) -> None:
        assert len(set(Cifar100.labels)) == 100
        assert list(Cifar100.labels) == sorted(Cifar100.labels)

    @pytest.mark.parametrize("protocol", [3, 4])
    def test_newer_pickles_are_read_too(self, protocol: int) -> None:
        batch: dict[bytes, Any] = {b"data": images(2, 3072), b"labels": [1, 2]}
        found = unpickle(pickle.dumps(batch, protocol=protocol))
        assert np.array_equal(found[b"data"], batch[b"data"])

    def test_a_pickle_that_would_run_code_is_refused(self, tmp_path: Path) -> None:
        marker = tmp_path / "marker"
        files = {f"c/data_batch_{k}": pickle.dumps({b"data": _Touch(marker)}) for k in range(1, 6)} | {
            "c/test_batch": b""
        }
        with pytest.raises(UserError, match=r"UnpicklingError: it asks for .*, which is not data"):
            prepare(Cifar10(folder=str(tmp_path / "out")), tar(tmp_path / "evil.tar.gz", files))
        assert not marker.exists()

    def test_paths_that_lead_outside_are_never_written(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="has no data_batch_1"):
            list(Cifar10().read(tar(tmp_path / "bad.tar.gz", {"../escaped": b"x", "/tmp/escaped": b"x"})))
        assert [path.name for path in tmp_path.iterdir()] == ["bad.tar.gz"]


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


# --- EMNIST


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def emnist(folder: Path) -> tuple[dict[str, bytes], NDArray[np.uint8], list[int]]:
    """The four files, of images that are stored column by column."""
    upright, labels = images(7, 28, 28), [0, 61, 10, 36, 9, 35, 5]
    files = {}
    for part, rows in (("train", slice(0, 4)), ("test", slice(4, 7))):
        stored = np.ascontiguousarray(upright[rows].swapaxes(1, 2))
        files[f"emnist-byclass-{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(stored))
        files[f"emnist-byclass-{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx(np.array(labels[rows], np.uint8)))
    return files, upright, labels


class TestEmnist:
    def test_images_stand_upright(self, tmp_path: Path) -> None:
        files, upright, labels = emnist(tmp_path)
        other = {"gzip/emnist-letters-train-images-idx3-ubyte.gz": b"not for us"}
        path = zipped(tmp_path / "gzip.zip", other | {f"gzip/{name}": content for name, content in files.items()})
        inputs, targets = join(list(Emnist().read(path)))
        assert inputs.shape == (7, 1, 28, 28)
        assert np.array_equal(inputs[:, 0], upright)
        assert targets.tolist() == labels

    @pytest.mark.parametrize("compressed", [True, False])
    def test_a_folder_of_its_files_is_the_same(self, tmp_path: Path, compressed: bool) -> None:
        files, *_ = emnist(tmp_path)
        path = zipped(tmp_path / "gzip.zip", files)
        (tmp_path / "folder").mkdir()
        for name, content in files.items():
            target = tmp_path / "folder" / (name if compressed else name.removesuffix(".gz"))
            target.write_bytes(content if compressed else gzip.decompress(content))
        assert ids_of(tmp_path, Emnist, path) == ids_of(tmp_path, Emnist, tmp_path / "folder")

    def test_labels_are_digits_capitals_and_small_letters(self) -> None:
        assert [CHARACTERS[label] for label in (0, 9, 10, 35, 36, 61)] == list("09AZaz")

    @given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 5))
    def test_idx_files_are_read_in_blocks(self, count: int, width: int, rows: int) -> None:
        array = images(count, width, 3)
        blocks = list(idx_blocks(io.BytesIO(idx(array)), rows))
        assert all(len(block) <= rows for block in blocks)
        assert np.array_equal(np.concatenate([array[:0], *blocks]), array)

    @pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: c + b"x", lambda c: b"x" + c, lambda c: c[:3]])
    def test_damaged_idx_files_are_refused(self, damage: Callable[[bytes], bytes]) -> None:
        with pytest.raises((EOFError, ValueError)):
            list(idx_blocks(io.BytesIO(damage(idx(images(5, 2, 3)))), 2))

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        files = {name: content for name, content in emnist(tmp_path)[0].items() if "test-labels" not in name}
        with pytest.raises(UserError, match="has no emnist-byclass-test-labels-idx1-ubyte"):
            list(Emnist().read(zipped(tmp_path / "gzip.zip", files)))
