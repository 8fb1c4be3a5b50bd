"""Graphs by name, one class each: laid out, drawn, or read from a user's own files.

Shapes: T clients, E edges.
"""

import csv
import math
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.random import client_keys, derive
from fedem.graphs.base import Topology, edge_numbers
from fedem.graphs.weights import Edges, canonical, num_components

_GRAPH = 201  # a purpose, beside those of fedem.core.random
_DRAWS = 100  # of a random graph, until it is connected


class Laid(Topology):
    """A graph over the clients in the order of their keys, the same in all rounds."""

    def edges(self, keys: Tensor, seed: int) -> list[Edges]:
        in_order, order = keys.cpu().sort(stable=True)
        return [canonical(order.numpy()[self._pairs(in_order, seed)])]

    @abstractmethod
    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        """Return pairs ``[E, 2]`` of places in ``keys``, which ascend."""


@dataclass(frozen=True)
class ErdosRenyi(Laid):
    """Each pair of clients is an edge with ``probability``, each by itself; one that falls apart is drawn anew.

    Attributes:
        probability: of an edge; also the share of all pairs that are edges, on average.
    """

    remedy: ClassVar[str] = "a graph.probability larger than {probability}, or another run.seed"
    probability: float = field(default=0.5, metadata={"above": 0, "max": 1})

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        pairs = np.column_stack(np.triu_indices(len(keys), 1))
        best, least = pairs[:0], len(keys) + 1
        for again in range(_DRAWS):
            drawn = pairs[edge_numbers(pairs, keys, seed, _GRAPH, *([again] if again else [])) < self.probability]
            if (components := num_components(len(keys), drawn)) < least:
                best, least = drawn, components
            if least <= 1:
                break
        return best


class Complete(Laid):
    """Everybody is everybody's neighbour."""

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        return np.column_stack(np.triu_indices(len(keys), 1))


class Ring(Laid):
    """Two neighbours each."""

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        return _circle(np.arange(len(keys)), True)


class StarGraph(Laid):
    """One client, the first by key, is everybody's neighbour. It is not a server: it trains like the others."""

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        others = np.arange(1, len(keys))
        return np.column_stack([np.zeros_like(others), others])


@dataclass(frozen=True)
class Grid(Laid):
    """Rows and columns, as near to a square as the number of clients allows; on a ``torus`` opposite sides meet.

    Attributes:
        torus: whether the last of a row or column is a neighbour of the first.
    """

    torus: bool = True

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        count = len(keys)
        num_rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
        if num_rows == 1 and count > 3:
            allowed = f"numbers that are rows times columns, {count - 1} and {count + 1} for example"
            raise UserError(f"There are {count} clients; allowed for a grid: {allowed}. A ring takes any number.")
        places = np.arange(count).reshape(num_rows, -1)
        return np.concatenate([_circle(places.T, self.torus), _circle(places, self.torus)])


@dataclass(frozen=True)
class SmallWorld(Laid):
    """A ring where everybody has the same number of neighbours, and then ends of edges are moved at random.

    Watts, Strogatz: Collective dynamics of 'small-world' networks, Nature 1998.

    Attributes:
        neighbours: of each client on the ring, half of them on either side: an even number, below that of the clients.
        rewiring: probability that one end of an edge moves to a client drawn at random.
    """

    remedy: ClassVar[str] = "graph.neighbours above {neighbours}, graph.rewiring below {rewiring}, or another run.seed"
    neighbours: int = field(default=4, metadata={"min": 2})
    rewiring: float = field(default=0.1, metadata={"min": 0, "max": 1})

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        from networkx import watts_strogatz_graph

        if self.neighbours % 2 or self.neighbours >= len(keys):
            allowed = f"an even number below that of the clients ({len(keys)})"
            raise UserError(f"SmallWorld.neighbours is {self.neighbours}; allowed: {allowed}.")
        seed = int(derive(seed, _GRAPH)) % 2**32
        return np.array(watts_strogatz_graph(len(keys), self.neighbours, self.rewiring, seed=seed).edges, np.int64)


@dataclass(frozen=True)
class Regular(Laid):
    """All clients have the same number of neighbours; drawn at random among such graphs, nearly uniformly.

    Attributes:
        degree: neighbours of each client, fewer than there are clients; one of the two numbers must be even.
    """

    remedy: ClassVar[str] = "a graph.degree larger than {degree}, or another run.seed"
    degree: int = field(default=4, metadata={"min": 1})

    def _pairs(self, keys: Tensor, seed: int) -> NDArray[np.int64]:
        from networkx import random_regular_graph

        if self.degree >= len(keys) or self.degree * len(keys) % 2:
            allowed = f"below the number of clients ({len(keys)}), and one of the two even"
            raise UserError(f"Regular.degree is {self.degree}; allowed: {allowed}.")
        seed = int(derive(seed, _GRAPH)) % 2**32
        return np.array(random_regular_graph(self.degree, len(keys), seed=seed).edges, np.int64)


def _circle(places: NDArray[np.int64], closed: bool) -> NDArray[np.int64]:
    """Pair each place with the next one along the first dimension, the last with the first where it is ``closed``."""
    pairs = np.stack([places, np.roll(places, -1, axis=0)], axis=-1)[: None if closed else -1].reshape(-1, 2)
    return pairs[pairs[:, 0] != pairs[:, 1]]  # a circle of one has no edge


@dataclass(frozen=True)
class File(Topology):
    """The graph in a file; or the graphs in a folder's files, one per round, in turn, in the order of their names.

    A file is a list of edges, two names of clients per line, with commas between them in a .csv file, else white space;
    lines that begin with # are comments. An edge counts once however often and either way round it is listed. Or it is
    an adjacency matrix of zeros and ones, whose rows are in the order of the federation's clients: .npy, .npz with one
    array, or .csv with more than two columns. A client that is its own neighbour is refused, and so are edges with
    weights: the rule ``weights`` sets them.

    Attributes:
        path: where the file or folder is.
    """

    remedy: ClassVar[str] = "more edges in {path}"
    path: str = ""

    def edges(self, keys: Tensor, seed: int) -> list[Edges]:
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
    if path.suffix in (".npy", ".npz"):
        return _from_matrix(path, _load(path), len(positions))
    try:
        content = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read as text ({error}); allowed: text, .npy and .npz files.") from None
    lines: dict[int, list[str]] = {}  # the words of each line, by its number
    for number, line in enumerate(content, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                words = next(csv.reader([line], skipinitialspace=True)) if path.suffix == ".csv" else line.split()
            except csv.Error as error:
                raise UserError(f"{path}, line {number} can't be read as CSV: {error}.") from None
            lines[number] = [word.strip() for word in words]
    rows = list(lines.values())
    if path.suffix == ".csv" and rows and len(rows[0]) > 2 and not _has_weights(rows):
        if len({len(words) for words in rows}) > 1:
            raise UserError(f"{path} has lines of different lengths and is not a rectangle; allowed: a square matrix.")
        try:
            matrix = np.array([[float(word) for word in words] for words in rows])
        except ValueError:
            said = f"{path} has {len(rows[0])} columns that are not all numbers"
            raise UserError(f"{said}; allowed: two names of clients a line, or a square of zeros and ones.") from None
        return _from_matrix(path, matrix, len(positions))
    ends = [[positions.get(key) for key in client_keys(words).tolist()] for words in rows]
    if ends[:1] == [[None, None]] and len(ends) > 1 and len(ends[1]) == 2 and None not in ends[1]:
        named = f"{rows[0][0]!r} and {rows[0][1]!r}, who are not clients, before lines that do name clients"
        allowed = "names of clients, and comments that begin with #"
        raise UserError(f"{path}, line {min(lines)} names {named}. It looks like a header; allowed: {allowed}.")
    for (number, words), pair in zip(lines.items(), ends, strict=True):
        where = f"{path}, line {number}"
        if len(words) != 2:
            hint = " Weights can't be given: the rule graph.weights sets them." if len(words) == 3 else ""
            raise UserError(f"{where} has {len(words)} columns; allowed: the names of two clients.{hint}")
        if None in pair:
            named, allowed = words[pair.index(None)], f"names of the federation's {len(positions)} clients"
            raise UserError(f"{where} names {named!r}; allowed: {allowed}.")
        if pair[0] == pair[1]:
            raise UserError(f"{where} makes {words[0]!r} its own neighbour; allowed: two different clients.")
    return canonical(np.array(ends, dtype=np.int64))


def _has_weights(rows: list[list[str]]) -> bool:
    """Whether rows have three columns and are not a square of zeros and ones: a pair and its weight, it seems."""
    if any(len(words) != 3 for words in rows):
        return False
    try:
        return len(rows) != 3 or any(float(word) not in (0, 1) for words in rows for word in words)
    except ValueError:
        return True


def _load(path: Path) -> NDArray[np.generic]:
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            arrays = [content] if isinstance(content, np.ndarray) else list(content.values())
    except Exception as error:  # a damaged archive raises whatever its format does
        raise UserError(f"{path} can't be read ({error}); allowed: an array as numpy saves it.") from None
    if len(arrays) != 1:
        raise UserError(f"{path} holds {len(arrays)} arrays; allowed: one, the adjacency matrix.")
    return arrays[0]


def _from_matrix(path: Path, matrix: NDArray[np.generic], count: int) -> Edges:
    if (shape := [*matrix.shape]) != [count, count]:
        raise UserError(f"{path} holds a matrix of shape {shape}; allowed: {[count, count]}, a row for each client.")
    if matrix.dtype.kind not in "biuf":
        raise UserError(f"{path} holds values of type {matrix.dtype}; allowed: 0 and 1, the weights are found.")
    linked = matrix == 1
    if not bool((linked | (matrix == 0)).all()):
        i, j = np.argwhere(~linked & (matrix != 0))[0]
        raise UserError(f"{path} holds {matrix[i, j]} at ({i}, {j}); allowed: 0 and 1, the weights are found.")
    for wrong, what in ((linked != linked.T, "is not symmetric"), (linked & np.eye(count, dtype=bool), "has a loop")):
        if wrong.any():
            i, j = np.argwhere(wrong)[0]
            raise UserError(f"{path} {what} at ({i}, {j}); allowed: a symmetric matrix with zeros on its diagonal.")
    return np.argwhere(np.triu(linked))
