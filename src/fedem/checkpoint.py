"""State <-> files: tensors as safetensors, the rest as JSON, never pickle.

A checkpoint is a manifest (JSON) that names the tensor files it consists of. Every file is written beside its place and
moved there at once, the manifest last; so a reader, or a run killed at any moment, sees either the old checkpoint or
the new one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedem.errors import UserError
from fedem.rounds import State
from fedem.tree import add_prefix, take_prefix, tree_sorted

MANIFEST = "checkpoint.json"
_TREES = ("shared", "personal", "memory")


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file so that it is there whole or not at all, even after a crash of the machine.

    A ``private`` one is never readable by others, not for a moment.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    if private:
        temporary.unlink(missing_ok=True)  # one that a killed process left keeps the mode that it has
    with open(temporary, "wb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The move itself must reach the disk before anything that relies on it is done.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed run had begun to write."""
    for path in folder.glob(".*.tmp"):
        path.unlink()


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_atomically(path, (json.dumps(plain(content), indent=2, allow_nan=False) + "\n").encode())


def plain(content: Any) -> Any:
    """Replace NaN and infinities, which JSON does not know, by null."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: plain(value) for key, value in content.items()}
    return [plain(value) for value in content] if isinstance(content, list | tuple) else content


def save_checkpoint(folder: Path, states: Mapping[str, State], facts: Mapping[str, Any]) -> None:
    """Write ``states`` (by role, such as "last" and "best") and ``facts`` (JSON), then drop what is no longer named.

    A state is written once; roles that have the same one share its file.
    """
    from safetensors.torch import save

    folder.mkdir(exist_ok=True)
    manifest: dict[str, Any] = {"facts": dict(facts), "states": {}}
    # A file that no manifest names was left by a killed run and is written again.
    kept = _named_files(folder)
    for role, state in states.items():
        # Round by round a state has one value; whatever else has a prefix to its role.
        prefix = role.rpartition("-")[0] or "round"
        path = folder / f"{prefix}-{state.round:06d}.safetensors"
        if path.name not in kept:
            tree = {key: leaf for name in _TREES for key, leaf in add_prefix(name, getattr(state, name)).items()}
            tensors = {name: leaf.contiguous().cpu() for name, leaf in tree.items()}
            write_atomically(path, save(tensors, metadata={"round": str(state.round)}))
            kept.add(path.name)
        manifest["states"][role] = {"round": state.round, "file": path.name}
    write_json(folder / MANIFEST, manifest)
    named = _named_files(folder)
    for path in folder.glob("*-*.safetensors"):
        if path.name not in named:
            path.unlink()
    remove_leftovers(folder)


def _named_files(folder: Path) -> set[str]:
    """Return the tensor files that the present manifest names."""
    path = folder / MANIFEST
    if not path.exists():
        return set()
    return {entry["file"] for entry in json.loads(path.read_text(encoding="utf-8"))["states"].values()}


def load_checkpoint(folder: Path) -> tuple[dict[str, State], dict[str, Any]]:
    """Read the states by role, and the facts."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    manifest_path = folder / MANIFEST
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        states: dict[str, State] = {}
        for role, entry in manifest["states"].items():
            tensors: dict[str, Tensor] = load_file(folder / entry["file"])
            states[role] = State(entry["round"], *(tree_sorted(take_prefix(name, tensors)) for name in _TREES))
        return states, manifest["facts"]
    except FileNotFoundError as error:
        raise UserError(f"There is no checkpoint in {folder} (missing: {error.filename}).") from None
    except (OSError, KeyError, TypeError, json.JSONDecodeError, SafetensorError) as error:
        raise UserError(f"The checkpoint in {folder} can't be read ({type(error).__name__}: {error}).") from None


def same_states(first: State, second: State) -> bool:
    """Whether two states are equal to the last bit."""
    pairs = [(getattr(first, name), getattr(second, name)) for name in _TREES]
    return first.round == second.round and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )
