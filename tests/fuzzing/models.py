"""Readers of models: those that were exported, and the weights that a network starts from."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exports import make_personal, some_inputs
from safetensors.torch import save
from torch import nn

from fedem.export.folder import export_personal, load_exported
from fedem.models.images import Pretrainable
from fuzzing.harness import FolderReader, Reader
from fuzzing.mutations import Draw, damaged_tensors, flipped, pick


class Exported(FolderReader):
    title = "exported models: JSON, safetensors"
    touched = (".json", ".safetensors")

    def build(self, folder: Path) -> None:
        folder.rmdir()
        export_personal(*make_personal("mlp"), folder)

    def read(self) -> object:
        return load_exported(self.folder, device="cpu").predict(some_inputs("mlp", 3))

    def judge(self, found: Any) -> str:
        return "" if found.ndim == 2 and len(found) == 3 else f"Predictions are of shape {list(found.shape)}."


@dataclass(frozen=True)
class _Small(Pretrainable):
    """A network of a few numbers that may start from a file."""

    head = "head"

    def network(self, size: tuple[int, int], num_outputs: int) -> nn.Module:
        return nn.Sequential()

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        module = nn.Module()
        module.body = nn.Conv2d(1, 2, 3)
        module.norm = nn.BatchNorm2d(2)
        module.head = nn.Linear(2, num_outputs)
        self._load_body(module)
        return module


class _Stranger:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("escaped"),)


class Weights(Reader):
    title = "weights to start from: pth, safetensors"

    def __init__(self, folder: Path):
        super().__init__(folder)
        module = nn.ModuleDict({"body": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2), "head": nn.Linear(2, 3)})
        self.weights, self.number = module.state_dict(), 0

    def damage(self, draw: Draw) -> str:
        for path in self.folder.iterdir():
            path.unlink()
        # Files are read once while they have the same name and time.
        self.number += 1
        self.path = self.folder / f"w{self.number}{pick(draw, ('.pth', '.pt', '.safetensors'))}"
        weights: Any = dict(self.weights)
        name = pick(draw, sorted(weights))
        if draw.random() < 0.5:
            leaf = weights.pop(name)
            other = pick(draw, (None, leaf[None], leaf.double(), leaf.bool(), leaf.flatten()[:1], leaf * float("nan")))
            if other is not None:
                weights[pick(draw, (name, name, name.upper(), f"{name}.x"))] = other
        if self.path.suffix == ".safetensors":
            content = save({key: leaf.contiguous() for key, leaf in weights.items()})
            content = damaged_tensors(content, draw) if draw.random() < 0.6 else content
        else:
            if draw.random() < 0.3:
                other = pick(
                    draw, ("x", [1], {"a": 1}, _Stranger(), torch.zeros(2), {1: torch.zeros(2)}, nn.Linear(1, 1))
                )
                weights = pick(draw, (other, weights | {name: other}))
            file = io.BytesIO()
            torch.save(weights, file, _use_new_zipfile_serialization=draw.random() < 0.7)
            content = flipped(file.getvalue(), draw) if draw.random() < 0.5 else file.getvalue()
        self.path.write_bytes(content)
        return self.path.suffix

    def read(self) -> object:
        return _Small(weights=str(self.path)).build((1, 8, 8), 3)

    def judge(self, found: Any) -> str:
        shapes = {name: leaf.shape for name, leaf in found.state_dict().items()}
        return "" if shapes == {name: leaf.shape for name, leaf in self.weights.items()} else "It has other shapes."


READERS: tuple[type[Reader], ...] = (Exported, Weights)
