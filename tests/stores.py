"""A place for data sets, and an archive to fill it from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import images

X = images(9, 28, 28)
Y = np.array([0, 1, 61, 3, 4, 5, 6, 7, 8])
CLIENTS = np.array(["ann", "bob", "ann", "ann", "bob", "cem", "cem", "ann", "bob"])


def make_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder where alone data sets are looked for."""
    monkeypatch.setenv("FEDEM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def write_source(home: Path) -> Path:
    return npz(home / "samples.npz", x=X, y=Y, client=CLIENTS)


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
