"""What models of images share: the shapes they take, how pixels reach the first convolution, weights from a file.

Shapes: n images, C channels, height H, width W.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn, stack

from fedem.core.errors import UserError
from fedem.models.base import ModelSpec

INSTALLED = "imagenet"  # weights of an installed package, in place of a path
# Means and deviations of ImageNet's colours, which torchvision's weights expect.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def image_shape(
    model: str, input_shape: tuple[int, ...], smallest: int = 1, channels: tuple[int, ...] = ()
) -> tuple[int, int, int]:
    """Return (C, H, W) of inputs ``[H, W]`` or ``[C, H, W]``.

    Refuses other shapes, images below ``smallest`` x ``smallest`` and, where ``channels`` are given, other numbers.
    """
    shape = (1, *input_shape) if len(input_shape) == 2 else input_shape
    fits = len(shape) == 3 and min(shape[1:]) >= smallest and (shape[0] in channels if channels else shape[0] > 0)
    if not fits:
        some = f"{' or '.join(map(str, channels))} channels" if channels else "any number of channels"
        allowed = f"[height, width] or [channels, height, width], at least {smallest} x {smallest} pixels, {some}"
        raise UserError(f"The inputs of {model} have shape {list(input_shape)}; allowed: {allowed}.")
    return shape[0], shape[1], shape[2]


class Images(nn.Module):
    """Gives grey images their channel, and brings pixels to (pixel - mean) / deviation, each colour by its own two.

    Where these are several, a grey image is shown as one whose colours are equal, so that a stem for colours sees what
    it was trained on. They are Python's numbers: as buffers they would be part of the state that clients exchange.
    """

    def __init__(self, means: tuple[float, ...], deviations: tuple[float, ...]):
        super().__init__()
        self.means, self.deviations = means, deviations

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, H, W]`` or ``[n, C, H, W]`` -> ``[n, C, H, W]``, with C the number of means where they are several."""
        images = inputs.unsqueeze(1) if inputs.ndim == 3 else inputs
        if len(self.means) == 1:
            return (images - self.means[0]) / self.deviations[0]
        planes = images.unbind(1) if images.shape[1] > 1 else images.unbind(1) * len(self.means)
        pairs = zip(self.means, self.deviations, strict=True)
        return stack([(plane - mean) / deviation for plane, (mean, deviation) in zip(planes, pairs, strict=True)], 1)


def draw_convolutions(module: nn.Module) -> None:
    """Draw the weights of all convolutions as He et al. (2015) do, for the variance of what flows backwards."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


@dataclass(frozen=True)
class Pretrainable(ModelSpec):
    """A network for images whose last layer is its head, and whose other layers may start from a file.

    Grey images are shown to it in three equal colours, so one set of weights serves both.

    Attributes:
        weights: path of a state dict (.pth, .pt or .safetensors); none by default. The head is drawn afresh anyway, so
            that the components of a mixture differ in their heads alone, as in the authors' code.
        jitter: noise added to every other trained tensor, in units of that tensor's own standard deviation, so that
            components differ everywhere.
        stem_stride: of the first convolution; 1 keeps more of small images than the original 2.
        dropout: rate before the head.
    """

    head: ClassVar[str]  # what the names of the head's parameters begin with

    weights: str = ""
    jitter: float = field(default=0.0, metadata={"min": 0})
    stem_stride: int = field(default=2, metadata={"min": 1, "max": 2})
    dropout: float = field(default=0.2, metadata={"min": 0, "below": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jitter and not self.weights:
            name = type(self).__name__
            raise UserError(f"{name}.jitter is {self.jitter} but {name}.weights is empty; allowed without weights: 0.")

    @abstractmethod
    def network(self, height: int, width: int, num_outputs: int) -> nn.Module:
        """Return the freshly initialised network for images of three colours, of any size."""

    @property
    def title(self) -> str:
        """What messages call this network."""
        return type(self).__name__

    @property
    def file(self) -> Path:
        """Where the weights are."""
        return Path(self.weights)

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Draw the network afresh, then lay the file's weights over all but its head."""
        _, height, width = image_shape(self.title, input_shape, channels=(1, 3))
        module = self.network(height, width, num_outputs)
        if self.weights:
            load_body(module, read_weights(self.file), self.head, f"Weights {self.weights!r}", self.title)
            add_noise(module, self.jitter, self.head)
        return module


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Read a state dict; a file that has not changed is read once."""
    if path.suffix not in (".pth", ".pt", ".safetensors"):
        raise UserError(f"Weights {str(path)!r} have the ending {path.suffix!r}; allowed: .pth, .pt, .safetensors.")
    if not path.is_file():
        raise UserError(f"Weights {str(path)!r} aren't there; allowed: the path of a file.")
    return _read(path.resolve(), path.stat().st_mtime_ns)


# Two: a model and the one before it. Files are some tens of megabytes.
@lru_cache(maxsize=2)
def _read(path: Path, modified: int) -> Mapping[str, Tensor]:
    weights: object
    try:
        if path.suffix == ".safetensors":
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            unreadable: tuple[type[Exception], ...] = (SafetensorError, OSError)
            weights = load_file(path)
        else:
            # What torch raises for a file cut short, for one that is not an archive, for one that holds more than data.
            unreadable = (RuntimeError, EOFError, ValueError, KeyError, OSError, pickle.UnpicklingError)
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except unreadable as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"Weights {str(path)!r} can't be read: {reason}") from error
    if not isinstance(weights, Mapping) or not all(isinstance(leaf, Tensor) for leaf in weights.values()):
        raise UserError(f"Weights {str(path)!r} hold something else; allowed: a state dict, names and tensors alone.")
    return weights


def load_body(module: nn.Module, weights: Mapping[str, Tensor], head: str, source: str, title: str) -> None:
    """Copy weights into all of ``module`` but what begins with ``head``; refuse any that don't fit."""
    body = {name: leaf for name, leaf in module.state_dict().items() if not name.startswith(head)}
    for name, leaf in body.items():
        # Old files of torchvision have no counts of batches, and nothing reads them.
        if name not in weights and not name.endswith("num_batches_tracked"):
            raise UserError(f"{source} have no {name!r}, which {title} needs.")
        if name in weights and weights[name].shape != leaf.shape:
            shape, allowed = list(weights[name].shape), list(leaf.shape)
            raise UserError(f"{source} have shape {shape} for {name!r}; allowed for {title}: {allowed}.")
    surplus = [name for name in weights if name not in body and not name.startswith(head)]
    if surplus:
        raise UserError(f"{source} have {surplus[0]!r}, which {title} does not know.")
    for name in body.keys() & weights.keys():
        body[name].copy_(weights[name])


@torch.no_grad()
def add_noise(module: nn.Module, jitter: float, head: str) -> None:
    """Move each trained tensor but the head's by Gaussian noise of ``jitter`` times the tensor's own deviation."""
    for name, leaf in module.named_parameters():
        if jitter and not name.startswith(head):
            leaf.add_(jitter * leaf.std(correction=0) * torch.randn_like(leaf))
