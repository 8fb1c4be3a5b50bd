"""Files of tensors, read back by the library whose format it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.files import file_digest
from fedem.core.tensors import _KINDS, write_tensors
from fedem.core.tree import Tree

SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def leaves(draw: st.DrawFn) -> Tensor:
    """Any bytes as numbers of any kind, also seen through a view that is not contiguous."""
    dtype, shape = draw(st.sampled_from(list(_KINDS))), draw(SHAPES)
    if dtype == torch.bool:
        return torch.arange(torch.Size(shape).numel()).reshape(shape) % 2 == 1
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    leaf = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    return leaf.movedim(0, -1) if shape else leaf


def _bytes(leaf: Tensor) -> Tensor:
    return leaf.contiguous().flatten().view(torch.uint8)  # in which NaN is itself


@given(tree=st.dictionaries(st.text(max_size=5), leaves(), max_size=6), facts=st.dictionaries(st.text(), st.text()))
def test_what_is_written_is_read(tree: Tree, facts: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    tree.pop("__metadata__", None)
    path = tmp_path_factory.mktemp("tensors") / "it.safetensors"
    found = write_tensors(path, tree, facts)
    with path.open("rb") as file:
        assert found == file_digest(file)
    read = load_file(path)
    assert read.keys() == tree.keys()
    for name, leaf in tree.items():
        assert (read[name].dtype, read[name].shape) == (leaf.dtype, leaf.shape)
        assert torch.equal(_bytes(read[name]), _bytes(leaf))
    with safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == facts


def test_a_private_file_replaces_another_whole(tmp_path: Path) -> None:
    path = tmp_path / "it.safetensors"
    path.write_bytes(b"before")
    same = torch.arange(3.0)
    write_tensors(path, {"a": same, "b": same, "c": same[:1].expand(4)}, private=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert {name: leaf.tolist() for name, leaf in load_file(path).items()} == {
        "a": [0, 1, 2],
        "b": [0, 1, 2],
        "c": [0, 0, 0, 0],
    }
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_numbers_that_a_file_can_not_have_are_named(tmp_path: Path) -> None:
    path = tmp_path / "it.safetensors"
    with pytest.raises(
        UserError, match=r"'phase' has numbers of type torch\.complex64; allowed in a file: torch\.float64,"
    ):
        write_tensors(path, {"phase": torch.zeros(2, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())
