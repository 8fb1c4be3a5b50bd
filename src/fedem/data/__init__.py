"""Data sets by name."""

from fedem.data.dataset import Dataset, DataSource, Truth
from fedem.data.files import FromFile
from fedem.data.images import Cifar10, Cifar100, Emnist, Femnist
from fedem.data.shakespeare import Shakespeare
from fedem.data.store import Public
from fedem.data.synthetic import Synthetic

PUBLIC: dict[str, type[Public]] = {kind.name: kind for kind in (Cifar10, Cifar100, Emnist, Femnist, Shakespeare)}
DATA: dict[str, type[DataSource]] = {"synthetic": Synthetic, "file": FromFile, **PUBLIC}

__all__ = ["DATA", "PUBLIC", "DataSource", "Dataset", "FromFile", "Public", "Synthetic", "Truth"]
