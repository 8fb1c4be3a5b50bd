"""Public data sets of images: CIFAR-10 and CIFAR-100, EMNIST by class and FEMNIST by writer.

CIFAR (Krizhevsky 2009), 60,000 colour images of 32 x 32, is read from the official "python version", training images
first, then test images: pickles in a tar archive. Pickles can run code, so theirs are read by an unpickler that knows
arrays, bytes, numbers, lists and dictionaries alone.

EMNIST (Cohen and others 2017), 814,255 digits and letters of 28 x 28, is read from the official files in MNIST's idx
format, likewise. Those store an image column by column; here it stands upright, white on black.

FEMNIST (Caldas and others 2018, LEAF) are the characters of NIST's Special Database 19 by writer, black on white, from

- LEAF's json files, as its scripts write them (they are published nowhere): a folder of ``all_data_*.json``, or one
  with ``train`` and ``test`` folders, whose samples are put together again. Pixels become bytes by rounding 255 x.
- NIST's ``by_class`` and ``by_write``, as zip archives or folders beside each other: the first knows classes (their
  folders are hexadecimal ASCII codes), the second writers, and the same image has the same bytes in both. Where images
  of several classes are the same to the byte, the first class by path counts.
- A tree of images WRITER/CLASS/NAME.png, the class again as a hexadecimal ASCII code.

Images are turned to grey and, where they are larger (NIST's are 128 x 128), resized by Pillow's Lanczos filter, as LEAF
does, but always in one step. That LEAF's scripts repeat the first image of nearly every writer is not reproduced.
"""

import gzip
import hashlib
import io
import json
import math
import pickle
import string
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.random import derive
from fedem.data.federation import PARTS, Federation
from fedem.data.partitions import Assignment, Collection
from fedem.data.samples import Samples
from fedem.data.store import ROWS, Block, Files, Public, opened, pick, read_bytes

SHAPE, COLOUR = (1, 28, 28), (3, 32, 32)  # of characters, and of CIFAR
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase  # what each of the 62 labels stands for
_TURNS = 104  # the purpose of random numbers, beside those of fedem.core.random and fedem.data.partitions
_LARGEST = 1 << 20  # bytes of an entry of an idx file, pixels of an image: NIST's have 16,384
_BYTES = 8  # idx's code for entries of one byte
_NIST = ("by_class", "by_write")
_LEAF = (("all_data",), ("",), ("train", "test"))  # folders of json files, the first that are there count
_ALLOWED: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
# numpy's modules were renamed; a pickle may name the old ones, and importing those would warn.
for _core in ("core", "_core"):
    _ALLOWED[f"numpy.{_core}.multiarray", "_reconstruct"] = np.empty(0).__reduce__()[0]


def idx_blocks(file: IO[bytes] | gzip.GzipFile, rows: int = ROWS) -> Iterator[NDArray[np.uint8]]:
    """Read an idx file of bytes, ``rows`` entries of its first axis at a time."""
    zeros, kind, axes = struct.unpack(">HBB", _exactly(file, 4))
    if zeros or kind != _BYTES or not axes:
        raise ValueError("it is not an idx file of bytes")
    count, *shape = struct.unpack(f">{axes}I", _exactly(file, 4 * axes))
    if math.prod(shape) > _LARGEST:
        raise ValueError(f"it says that its entries have shape {shape}; allowed: up to {_LARGEST:,} bytes each")
    for start in range(0, count, rows):
        size = min(rows, count - start)
        yield np.frombuffer(_exactly(file, size * math.prod(shape)), np.uint8).reshape(size, *shape)
    if file.read(1):  # reading the end also checks a compressed file's checksum
        raise ValueError("it goes on behind its last entry")


def _exactly(file: IO[bytes] | gzip.GzipFile, count: int) -> bytes:
    if len(content := file.read(count)) != count:
        raise EOFError("it ends too early")
    return content


@dataclass(frozen=True)
class Images(Public):
    """A public data set of square images.

    Attributes:
        rotations: in how many ways clients hold their images: each turns all of its own by 0, 90, ... degrees, one of
            the first so many multiples of 90, drawn by its name and the seed. 1 turns none.
    """

    rotations: int = field(default=1, metadata={"min": 1, "max": 4})

    def _split(self, collection: Collection, assignment: Assignment, seed: int) -> Federation:
        federation = super()._split(collection, assignment, seed)
        if self.rotations == 1:
            return federation
        turns = derive(federation.keys, _TURNS, seed).remainder(self.rotations)
        train, validation, test = (_turned(federation.part(part), turns) for part in PARTS)
        # The samples are not the pool's any more, so what they are goes by their content.
        return replace(federation, train=train, validation=validation, test=test, ids=None)


def _turned(samples: Samples, turns: Tensor) -> Samples:
    """Return samples whose images are turned counter-clockwise, a quarter so many times for each client, ``[T]``."""
    own = samples.gathered()
    owners = torch.repeat_interleave(turns, own.sizes)
    images = own.pool.inputs.clone()
    for turn in range(1, 4):
        images[owners == turn] = own.pool.inputs[owners == turn].rot90(turn, (2, 3))
    return replace(own, pool=own.pool._replace(inputs=images))


class Emnist(Images):
    """EMNIST by class, all of it; a part of it is chosen when it is partitioned."""

    name = "emnist"
    labels = tuple(CHARACTERS)

    def read(self, source: Path) -> Iterator[Block]:
        with opened(source) as files, ExitStack() as stack:
            for part in ("train", "test"):
                streams = []
                for what in ("images-idx3", "labels-idx1"):
                    name = pick(files, f"emnist-byclass-{part}-{what}-ubyte", source)
                    file = stack.enter_context(files[name]())
                    plain = stack.enter_context(gzip.GzipFile(fileobj=file)) if name.endswith(".gz") else file
                    streams.append(idx_blocks(plain))
                for images, labels in zip(*streams, strict=True):
                    if images.shape[1:] != SHAPE[1:] or len(images) != len(labels):
                        raise ValueError(f"{part} holds images {images.shape} and labels {labels.shape}")
                    yield Block(images.transpose(0, 2, 1)[:, None], labels)


def _leaf_blocks(content: dict[str, Any]) -> Iterator[Block]:
    for user, count in zip(content["users"], content["num_samples"], strict=True):
        data = content["user_data"][user]
        pixels = np.asarray(data["x"], dtype=np.float64)
        labels = np.asarray(data["y"])
        if pixels.shape != (count, 784) or labels.shape != (count,) or (count and labels.dtype.kind != "i"):
            raise ValueError(f"user {user!r} has x {pixels.shape} and y {labels.shape} for {count} samples")
        if not ((pixels >= 0) & (pixels <= 1)).all():
            raise ValueError(f"user {user!r} has pixels outside [0, 1]")
        if count:
            yield Block(np.rint(pixels * 255).astype(np.uint8).reshape(count, *SHAPE), labels, str(user))


def _label(code: str, path: str) -> int:
    try:
        return CHARACTERS.index(chr(int(code, 16)))
    except ValueError:
        raise ValueError(f"{path}: {code!r} is not a hexadecimal code of a digit or letter") from None


def _image(content: bytes) -> NDArray[np.uint8]:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        if (pixels := image.width * image.height) > _LARGEST:  # which the header says, before they are unpacked
            raise ValueError(f"an image has {pixels:,} pixels; allowed: up to {_LARGEST:,}")
        grey = image.convert("L")
    if grey.size != SHAPE[1:]:
        grey = grey.resize(SHAPE[1:], Image.Resampling.LANCZOS)
    return np.asarray(grey, dtype=np.uint8)[None]


def _images(files: Files) -> dict[str, PurePosixPath]:
    return {name: path for name in files if len((path := PurePosixPath(name)).parts) >= 3 and path.suffix == ".png"}


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _tree_blocks(files: Files, classes: dict[bytes, int] | None) -> Iterator[Block]:
    """Yield the images of each writer; the label is in the path, or known by the image's content."""
    found = sorted((path.parts[-3], name, path) for name, path in _images(files).items())
    for writer, group in groupby(found, key=lambda entry: entry[0]):
        images, labels = [], []
        for _, name, path in group:
            content = read_bytes(files, name)
            label = _label(path.parts[-2], name) if classes is None else classes.get(_hash(content))
            if label is None:
                raise ValueError(f"{name} of by_write is not in by_class")
            labels.append(label)
            images.append(_image(content))
        yield Block(np.stack(images), np.array(labels), writer)


class Femnist(Images):
    """FEMNIST, all writers; a part of them is chosen when it is partitioned."""

    name = "femnist"
    labels = tuple(CHARACTERS)

    def read(self, source: Path) -> Iterator[Block]:
        folder = source if source.is_dir() else source.parent
        pair = [next(filter(Path.exists, (folder / f"{name}.zip", folder / name)), None) for name in _NIST]
        if (source.is_dir() or source.stem in _NIST) and all(pair):
            with ExitStack() as stack:
                by_class, by_write = (stack.enter_context(opened(path)) for path in pair if path is not None)
                labels: dict[bytes, int] = {}  # by the hash of an image
                for name, path in _images(by_class).items():
                    if path.parent.name.startswith("hsf_"):  # the folders train_* repeat images of these
                        labels.setdefault(_hash(read_bytes(by_class, name)), _label(path.parts[-3], name))
                yield from _tree_blocks(by_write, labels)
            return
        with opened(source) as files:
            # LEAF leaves several stages of its work beside each other, each with every sample.
            by_folder = {name: PurePosixPath(name).parent.name for name in files if name.endswith(".json")}
            stages = [[name for name in by_folder if by_folder[name] in folders] for folders in _LEAF]
            if any(stages):
                for name in next(filter(None, stages)):
                    yield from _leaf_blocks(json.loads(read_bytes(files, name)))
            elif _images(files):
                yield from _tree_blocks(files, None)
            else:
                known = "LEAF's json files, NIST's by_class and by_write, and images by writer"
                raise UserError(f"{source} holds none of {known}.")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data")
        return _ALLOWED[module, name]


def unpickle(content: bytes) -> dict[bytes, Any]:
    """Read a dictionary as Python 2 pickled it, with keys of bytes; nothing in it is run."""
    try:
        found = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a pickle is a program: a damaged one raises whatever its steps do
        raise pickle.UnpicklingError(f"it can't be read, {type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, no dictionary")
    return found


class Cifar10(Images):
    """CIFAR-10: ten classes."""

    name = "cifar10"
    files: ClassVar[tuple[str, ...]] = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    keys: ClassVar[tuple[bytes, ...]] = (b"labels",)  # of labels and, where there are, of their groups

    def read(self, source: Path) -> Iterator[Block]:
        with opened(source) as files:
            for path in [pick(files, name, source) for name in self.files]:
                batch = unpickle(read_bytes(files, path))
                if (images := np.asarray(batch[b"data"])).dtype != np.uint8:
                    raise ValueError(f"{path} holds {images.dtype}, no bytes")
                labels, *groups = (np.array(batch[key], dtype=np.int64) for key in self.keys)
                yield Block(images.reshape(-1, *COLOUR), labels, coarse=groups[0] if groups else None)


class Cifar100(Cifar10):
    """CIFAR-100: a hundred classes in twenty groups of five."""

    name = "cifar100"
    files = ("train", "test")
    keys = (b"fine_labels", b"coarse_labels")
