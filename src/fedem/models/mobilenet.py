"""MobileNet-v2 (Sandler et al. 2018); parameters are named and shaped as torchvision's, so its files load.

Shapes: n images, C channels, height H, width W, K outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedem.models.images import ImageNetImages, Pretrainable, draw_convolutions

# (expansion, channels, repetitions, stride of the first) of each stage: table 2 of the paper.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM, FEATURES = 32, 1280


def _convolution(channels: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """Widens by 1x1, filters each channel by 3x3, narrows by 1x1; the narrow ends are joined where they fit."""

    def __init__(self, channels: int, outputs: int, stride: int, expansion: int):
        super().__init__()
        wide = channels * expansion
        self.joined = stride == 1 and channels == outputs
        self.conv = nn.Sequential(
            *([_convolution(channels, wide, 1)] if expansion != 1 else []),
            _convolution(wide, wide, 3, stride, groups=wide),
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
        self.images = ImageNetImages()
        layers: list[nn.Module] = [_convolution(3, STEM, 3, stem_stride)]
        channels = STEM
        for expansion, outputs, repetitions, stride in STAGES:
            for position in range(repetitions):
                layers.append(InvertedResidual(channels, outputs, 1 if position else stride, expansion))
                channels = outputs
        self.features = nn.Sequential(*layers, _convolution(channels, FEATURES, 1))
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
