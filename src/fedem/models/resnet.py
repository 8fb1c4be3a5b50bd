"""Residual networks (He et al. 2016); parameters are named and shaped as torchvision's, so its files load.

Shapes: n images, C channels, height H, width W, K outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from fedem.models.images import ImageNetImages, Pretrainable, draw_convolutions

STEM = 64


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and what leads past them."""

    def __init__(self, channels: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = (
            nn.Identity()
            if stride == 1 and channels == outputs
            else nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C', H', W']``."""
        inner = self.relu(self.bn1(self.conv1(inputs)))
        outputs: Tensor = self.relu(self.bn2(self.conv2(inner)) + self.downsample(inputs))
        return outputs


class ResNet(nn.Module):
    """The network for images of one or three colours; ``depths`` are the numbers of blocks of its four stages."""

    def __init__(
        self, depths: tuple[int, int, int, int], num_outputs: int, stem_stride: int, small_images: bool, dropout: float
    ):
        super().__init__()
        self.images = ImageNetImages()
        self.conv1 = (
            nn.Conv2d(3, STEM, 3, 1, 1, bias=False)
            if small_images
            else nn.Conv2d(3, STEM, 7, stem_stride, 3, bias=False)
        )
        self.bn1 = nn.BatchNorm2d(STEM)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._stage(depths[0], STEM, STEM, 1)
        self.layer2 = self._stage(depths[1], STEM, 2 * STEM, 2)
        self.layer3 = self._stage(depths[2], 2 * STEM, 4 * STEM, 2)
        self.layer4 = self._stage(depths[3], 4 * STEM, 8 * STEM, 2)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(8 * STEM, num_outputs)
        draw_convolutions(self)

    @staticmethod
    def _stage(depth: int, channels: int, outputs: int, stride: int) -> nn.Sequential:
        later = [BasicBlock(outputs, outputs, 1) for _ in range(depth - 1)]
        return nn.Sequential(BasicBlock(channels, outputs, stride), *later)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, H, W]`` or ``[n, C, H, W]`` -> ``[n, K]``."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(self.images(inputs)))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        outputs: Tensor = self.fc(self.dropout(features.mean((2, 3))))
        return outputs


@dataclass(frozen=True)
class ResNetSpec(Pretrainable):
    """A residual network of basic blocks (He et al. 2016).

    Attributes:
        small_images: take a 3x3 stem of stride 1 without pooling, as is usual for CIFAR, in place of the 7x7 stem and
            its ``stem_stride``. Weights for the 7x7 stem do not fit it.
    """

    head: ClassVar[str] = "fc."
    depths: ClassVar[tuple[int, int, int, int]]

    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})
    small_images: bool = False

    @property
    def title(self) -> str:
        return super().title + (" with small_images, whose stem is 3x3" if self.small_images else "")

    def network(self, height: int, width: int, num_outputs: int) -> nn.Module:
        return ResNet(self.depths, num_outputs, self.stem_stride, self.small_images, self.dropout)


@dataclass(frozen=True)
class ResNet18(ResNetSpec):
    """Eighteen layers (He et al. 2016)."""

    depths: ClassVar[tuple[int, int, int, int]] = (2, 2, 2, 2)


@dataclass(frozen=True)
class ResNet34(ResNetSpec):
    """Thirty-four layers (He et al. 2016)."""

    depths: ClassVar[tuple[int, int, int, int]] = (3, 4, 6, 3)
