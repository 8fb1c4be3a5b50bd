"""A user's own graph, from a file or from a folder of files.

Shapes: T clients, E edges.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedem.errors import UserError
from fedem.graphs.base import Topology
from fedem.graphs.weights import Edges, canonical
from fedem.randomness import client_keys

_ARRAYS = (".npy", ".npz")
_Line = tuple[int, list[str]]
"""a line's number, from 1, and its words"""


@final
@dataclass(frozen=True)
class File(Topology):
    """The graph in a file; or the graphs in a folder's files, one a round, in the order of their names, over and over.

    A file is a list of edges, two names of clients a line, separated by commas in a .csv file and else by white space;
    lines that begin with # are comments. An edge counts once however often and either way round it is listed. Or it is
    an adjacency matrix of zeros and ones, whose rows are in the order of the federation's clients: .npy, .npz with one
    array, or .csv with more than two columns. A client that is its own neighbour is refused, and so are edges with
    weights: the rule ``weights`` sets them.

    Attributes:
        path: where the file or folder is.

    """

    path: str = ""

    @property
    def remedy(self) -> str:
        """Other files."""
        return f"more edges in {self.path}"

    def edges(self, keys: Tensor, seed: int) -> list[Edges]:
        """Read the graphs."""
        path = Path(self.path)
        if not self.path or not path.exists():
            raise UserError(f"File.path is {self.path!r}, and nothing is there; allowed: a file or a folder of files.")
        paths = [path]
        if path.is_dir():
            paths = sorted(item for item in path.iterdir() if item.is_file() and not item.name.startswith("."))
        if not paths:
            raise UserError(f"File.path is {self.path!r}, a folder without files; allowed: one file or more.")
        positions = {key: position for position, key in enumerate(keys.tolist())}
        return [_read(item, positions) for item in paths]


def _read(path: Path, positions: dict[int, int]) -> Edges:
    """Read the edges of one file; ``positions`` by key."""
    if path.suffix in _ARRAYS:
        return _from_matrix(path, _load(path), len(positions))
    lines = list(_lines(path))
    if path.suffix == ".csv" and lines and len(lines[0][1]) > 2 and not _has_weights(lines):
        if len({len(words) for _, words in lines}) > 1:
            raise UserError(f"{path} has lines of different lengths and is not a rectangle; allowed: a square matrix.")
        try:
            matrix = np.array([[float(word) for word in words] for _, words in lines])
        except ValueError:
            raise UserError(
                f"{path} has {len(lines[0][1])} columns that are not all numbers; allowed: two names of clients a "
                "line, or a square of zeros and ones."
            ) from None
        return _from_matrix(path, matrix, len(positions))
    _refuse_header(path, lines, positions)
    pairs = [_pair(f"{path}, line {number}", words, positions) for number, words in lines]
    return canonical(np.array(pairs, dtype=np.int64))


def _lines(path: Path) -> Iterator[_Line]:
    """Yield the lines that hold anything."""
    try:
        content = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read as text ({error}); allowed: text, .npy and .npz files.") from None
    for number, line in enumerate(content, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            words = next(csv.reader([line], skipinitialspace=True)) if path.suffix == ".csv" else line.split()
            yield number, [word.strip() for word in words]


def _has_weights(lines: list[_Line]) -> bool:
    """Whether lines have three columns and are no square of zeros and ones: a pair and its weight, it seems."""
    if any(len(words) != 3 for _, words in lines):
        return False
    try:
        return len(lines) != 3 or any(float(word) not in (0, 1) for _, words in lines for word in words)
    except ValueError:
        return True


def _refuse_header(path: Path, lines: list[_Line], positions: dict[int, int]) -> None:
    """Refuse a first line that names nobody, where the next one names two clients."""
    if len(lines) < 2 or not len(lines[0][1]) == len(lines[1][1]) == 2:
        return
    (number, words), (_, after) = lines[:2]
    unknown = not any(key in positions for key in client_keys(words).tolist())
    if unknown and all(key in positions for key in client_keys(after).tolist()):
        raise UserError(
            f"{path}, line {number} names {words[0]!r} and {words[1]!r}, who are no clients, before lines that do name "
            "clients. It looks like a header; allowed: names of clients, and comments that begin with #."
        )


def _pair(where: str, words: list[str], positions: dict[int, int]) -> tuple[int, int]:
    """Look up the two clients of a line."""
    if len(words) != 2:
        hint = " Weights can't be given: the rule graph.weights sets them." if len(words) == 3 else ""
        raise UserError(f"{where} has {len(words)} columns; allowed: the names of two clients.{hint}")
    keys = client_keys(words).tolist()
    for word, key in zip(words, keys, strict=True):
        if key not in positions:
            raise UserError(f"{where} names {word!r}; allowed: names of the federation's {len(positions)} clients.")
    if keys[0] == keys[1]:
        raise UserError(f"{where} makes {words[0]!r} its own neighbour; allowed: two different clients.")
    return positions[keys[0]], positions[keys[1]]


def _load(path: Path) -> NDArray[np.generic]:
    """Read the one array of a file."""
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return content
        with content:
            names = list(content)
            if len(names) != 1:
                raise UserError(f"{path} holds {len(names)} arrays; allowed: one, the adjacency matrix.")
            array: NDArray[np.generic] = content[names[0]]
            return array
    except UserError:
        raise
    except Exception as error:  # a damaged archive raises whatever its format does
        raise UserError(f"{path} can't be read ({error}); allowed: an array as numpy saves it.") from None


def _from_matrix(path: Path, matrix: NDArray[np.generic], count: int) -> Edges:
    """Check an adjacency matrix and list its edges."""
    if matrix.shape != (count, count):
        raise UserError(
            f"{path} holds a matrix of shape {list(matrix.shape)}; allowed: {[count, count]}, a row for each client."
        )
    linked = matrix == 1
    if not bool((linked | (matrix == 0)).all()):
        i, j = np.argwhere(~linked & (matrix != 0))[0]
        raise UserError(f"{path} holds {matrix[i, j]} at ({i}, {j}); allowed: 0 and 1, the weights are found.")
    for wrong, what in ((linked != linked.T, "is not symmetric"), (linked & np.eye(count, dtype=bool), "has a loop")):
        if wrong.any():
            i, j = np.argwhere(wrong)[0]
            raise UserError(f"{path} {what} at ({i}, {j}); allowed: a symmetric matrix with zeros on its diagonal.")
    return np.argwhere(np.triu(linked))
