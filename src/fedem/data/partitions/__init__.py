"""How a collection's samples become clients', by name."""

from __future__ import annotations

from fedem.data.partitions.base import Partition, fingerprint
from fedem.data.partitions.dirichlet import Dirichlet, LabelGroups
from fedem.data.partitions.even import Shards, Uniform
from fedem.data.partitions.natural import Natural
from fedem.data.partitions.pachinko import Pachinko

__all__ = [
    "PARTITIONS",
    "Dirichlet",
    "LabelGroups",
    "Natural",
    "Pachinko",
    "Partition",
    "Shards",
    "Uniform",
    "fingerprint",
]

PARTITIONS: dict[str, type[Partition]] = {
    "natural": Natural,
    "dirichlet": Dirichlet,
    "label_groups": LabelGroups,
    "pachinko": Pachinko,
    "shards": Shards,
    "uniform": Uniform,
}
