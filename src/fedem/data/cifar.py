"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32 x 32 (Krizhevsky 2009), training images first, then test images.

They are read from the official "python version": pickles in a tar archive. Pickles can run code, so theirs are read by
an unpickler that knows arrays, bytes, numbers, lists and dictionaries alone.

Shapes: n images.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedem.data.store import Block, Public, Remote, opened, pick, read_bytes

_SHAPE = (3, 32, 32)
_TEN = "airplane automobile bird cat deer dog frog horse ship truck"
_HUNDRED = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_ALLOWED: dict[tuple[str, str], Any] = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype}
# numpy's modules were renamed; a pickle may name the old ones, and importing those would warn.
for _core in ("core", "_core"):
    _ALLOWED[f"numpy.{_core}.multiarray", "_reconstruct"] = np.empty(0).__reduce__()[0]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not data")
        return _ALLOWED[module, name]


def unpickle(content: bytes) -> dict[bytes, Any]:
    """Read a dictionary as Python 2 pickled it, with keys of bytes; nothing in it is run."""
    found = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, no dictionary")
    return found


@dataclass(frozen=True)
class Cifar10(Public):
    """CIFAR-10: ten classes."""

    name = "cifar10"
    title = "CIFAR-10, 32 x 32 colour images, 10 classes"
    usual = "dirichlet"
    remotes = (
        Remote("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"),
    )
    patterns = ("cifar-10-batches-py",)
    labels = tuple(_TEN.split())
    images = _SHAPE
    files: ClassVar[tuple[str, ...]] = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    keys: ClassVar[tuple[bytes, ...]] = (b"labels",)  # of labels and, where there are, of their groups

    def read(self, source: Path) -> Iterator[Block]:
        with opened(source) as files:
            for path in [pick(files, name, source) for name in self.files]:
                batch = unpickle(read_bytes(files, path))
                images = np.asarray(batch[b"data"])
                if images.dtype != np.uint8:
                    raise ValueError(f"{path} holds {images.dtype}, no bytes")
                labels, *groups = (np.array(batch[key], dtype=np.int64) for key in self.keys)
                yield Block(images.reshape(-1, *_SHAPE), labels, coarse=groups[0] if groups else None)


@dataclass(frozen=True)
class Cifar100(Cifar10):
    """CIFAR-100: a hundred classes in twenty groups of five."""

    name = "cifar100"
    title = "CIFAR-100, 32 x 32 colour images, 100 classes in 20 groups"
    usual = "pachinko"
    remotes = (
        Remote("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),
    )
    patterns = ("cifar-100-python",)
    labels = tuple(_HUNDRED.split())
    has_coarse = True
    files = ("train", "test")
    keys = (b"fine_labels", b"coarse_labels")
