"""Trees of tensors as safetensors files, written one leaf after the other.

The library that reads them builds a whole file in memory to write it, which takes longer than the disk does. The format
is the size of a header (8 bytes, the least first), the header as JSON, and the numbers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedem.core.errors import UserError
from fedem.core.files import file_digest, replacing
from fedem.core.tree import Tree

_KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip


def write_tensors(path: Path, tree: Tree, facts: Mapping[str, str] | None = None, *, private: bool = False) -> str:
    """Write a tree, from any device, and ``facts`` beside it, whole or not at all; returns the file's hash.

    A ``private`` file is never readable by others.
    """
    # Large numbers first: so all begin at multiples of their size.
    leaves = sorted(tree.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(facts)} if facts else {}
    end = 0
    for name, leaf in leaves:
        if leaf.dtype not in _KINDS:
            raise UserError(
                f"{name!r} has numbers of type {leaf.dtype}; allowed in a file: {', '.join(map(str, _KINDS))}."
            )
        start, end = end, end + leaf.numel() * leaf.element_size()
        header[name] = {"dtype": _KINDS[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path, private=private) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, leaf in leaves:
            file.write(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        return file_digest(file)
