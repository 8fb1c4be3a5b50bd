"""Tables of named columns: read, checked, and encoded as inputs and targets."""

from __future__ import annotations

from fedem.data.tables.columns import Table
from fedem.data.tables.encoding import Encoding
from fedem.data.tables.readers import read_frame, read_table

__all__ = ["Encoding", "Table", "read_frame", "read_table"]
