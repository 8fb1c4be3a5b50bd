"""Data sets by name."""

from __future__ import annotations

from fedem.data.base import Dataset, DataSource, Truth
from fedem.data.files import FromFile
from fedem.data.synthetic import Synthetic

DATA: dict[str, type[DataSource]] = {"synthetic": Synthetic, "file": FromFile}

__all__ = ["DATA", "DataSource", "Dataset", "FromFile", "Synthetic", "Truth"]
