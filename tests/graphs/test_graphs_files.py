"""A user's own graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedem.core.errors import UserError
from fedem.core.random import client_keys
from fedem.graphs import File, check_mixing

NAMES = ["ann", "bob", "cy d", "eve"]
KEYS = client_keys(NAMES)
ADJACENCY = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]])
EDGES = [[0, 1], [0, 3], [1, 2]]


def test_all_formats_hold_the_same_graph(tmp_path: Path) -> None:
    (tmp_path / "names.csv").write_text('# who, knows whom\nann, bob\n\n"cy d",bob\neve,ann\nann,eve\n')
    np.savetxt(tmp_path / "matrix.csv", ADJACENCY, fmt="%d", delimiter=",")
    np.save(tmp_path / "matrix.npy", ADJACENCY.astype(bool))
    np.savez(tmp_path / "matrix.npz", links=ADJACENCY.astype(float))
    for path in sorted(tmp_path.iterdir()):
        (edges,) = File(path=str(path)).edges(KEYS, 0)
        assert edges.tolist() == EDGES, path


def test_a_square_of_three_is_no_list_of_weights(tmp_path: Path) -> None:
    path, keys = tmp_path / "matrix.csv", client_keys(NAMES[:3])
    for form in ("%d", "%.18e"):
        np.savetxt(path, ADJACENCY[:3, :3], fmt=form, delimiter=",")
        assert File(path=str(path)).edges(keys, 0)[0].tolist() == [[0, 1], [1, 2]]


def test_names_are_found_wherever_the_clients_stand(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("a b\nb\tc\n# the end\n  c d\n")
    keys, order = client_keys(list("abcd")), torch.tensor([2, 0, 3, 1])
    topology = File(path=str(path))
    matrix, permuted = topology.matrices(keys, 0)[0], topology.matrices(keys[order], 0)[0]
    check_mixing(matrix, np.array([[0, 1], [1, 2], [2, 3]]))
    assert torch.equal(matrix[order][:, order], permuted)


def test_a_folder_is_a_graph_a_round(tmp_path: Path) -> None:
    (tmp_path / "2.txt").write_text("b c\n")
    (tmp_path / "1.txt").write_text("a b\n")
    (tmp_path / ".hidden").write_text("?")
    keys = client_keys(list("abc"))
    topology = File(path=str(tmp_path), weights="metropolis")
    assert [edges.tolist() for edges in topology.edges(keys, 0)] == [[[0, 1]], [[1, 2]]]
    matrices = topology.matrices(keys, 0)
    assert matrices[:, 1, 1].tolist() == [0.5, 0.5]
    assert matrices[:, 2, 2].tolist() == [1, 0.5]
    assert torch.equal(topology.draw(matrices, 3, keys, 0), matrices[1])
    found = topology.consensus(matrices, keys)
    assert found.tau == 2
    assert 0 < found.p < 1
    with pytest.raises(UserError, match=r"2 components.*metropolis"):
        File(path=str(tmp_path)).matrices(keys, 0)
    (tmp_path / "2.txt").write_text("a b\n")
    with pytest.raises(UserError, match=r"2 components.*more edges"):
        topology.matrices(keys, 0)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("edges.csv", "ann,bob\nann,zoe\n", "line 2 names 'zoe'.*4 clients"),
        ("edges.csv", "ann,bob\nbob\n", "line 2 has 1 columns"),
        ("edges.txt", "# one\nann ann\n", "line 2 makes 'ann' its own neighbour"),
        (
            "edges.csv",
            "ann,bob,1\n",
            r"has 3 columns; .*two clients\. Weights can't be given: the rule graph\.weights",
        ),
        ("edges.csv", "0,1,0.5\n1,2,0.5\n", "line 1 has 3 columns.*Weights can't be given"),
        ("edges.csv", "0,1,1\n1,2,1\n", "line 1 has 3 columns.*Weights can't be given"),
        ("edges.csv", "0,1,0.5\n1,2,0.5\n0,2,1\n", "line 1 has 3 columns.*Weights can't be given"),
        ("edges.txt", "ann bob\nbob eve 2\n", "line 2 has 3 columns.*Weights can't be given"),
        ("edges.csv", "a,b,c,d\n", "4 columns that are not all numbers"),
        ("edges.csv", "# who\nfrom,to\nann,bob\n", r"line 2 names 'from' and 'to', .* a header; .* begin with #"),
        ("edges.txt", "from to\nfro too\n", "line 1 names 'from'; allowed: names"),
        ("edges.csv", "from,ann\nann,bob\n", "line 1 names 'from'; allowed: names"),
        ("matrix.csv", "0,1,0\n1,0,1\n0,1,0\n", r"\[3, 3\].*\[4, 4\]"),
        ("matrix.csv", "0,1,0\n1,0\n", "not a rectangle"),
        ("broken.npy", "nothing", "can't be read"),
        ("broken.npz", "nothing", "can't be read"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: str, match: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=match):
        File(path=str(path)).matrices(KEYS, 0)


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        ((0, 2), 1, r"not symmetric at \(0, 2\)"),
        ((1, 1), 1, r"a loop at \(1, 1\)"),
        ((0, 1), 0.5, r"0.5 at \(0, 1\)"),
        ((0, 1), np.nan, r"nan at \(0, 1\)"),
    ],
)
def test_matrices_that_are_refused(tmp_path: Path, place: tuple[int, int], value: float, match: str) -> None:
    matrix = ADJACENCY.astype(float)
    matrix[place] = value
    np.save(tmp_path / "matrix.npy", matrix)
    with pytest.raises(UserError, match=match):
        File(path=str(tmp_path / "matrix.npy")).matrices(KEYS, 0)


def test_places_where_nothing_is(tmp_path: Path) -> None:
    for path, match in (("", "''"), (str(tmp_path / "no"), "nothing is there"), (str(tmp_path), "without files")):
        with pytest.raises(UserError, match=match):
            File(path=path).edges(KEYS, 0)
    np.savez(tmp_path / "two.npz", a=ADJACENCY, b=ADJACENCY)
    with pytest.raises(UserError, match="2 arrays"):
        File(path=str(tmp_path / "two.npz")).edges(KEYS, 0)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="can't be read as text"):
        File(path=str(tmp_path / "bytes.txt")).edges(KEYS, 0)
