"""Two small convolutional networks for handwritten characters."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from fedem.models.base import ModelSpec
from fedem.models.images import ScaledImages, image_shape
from fedem.models.pooling import max_pool


class PooledConv2d(nn.Conv2d):
    """A convolution, then the largest of every 2 x 2 pixels.

    Bias and ReLU commute with that, so they come after it, where they have a quarter of the numbers to deal with.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, C, H, W] -> [n, O, h // 2, w // 2]``."""
        pooled = max_pool(self._conv_forward(inputs, self.weight, None), (2, 2, 0, 1, False))
        return pooled if self.bias is None else pooled + self.bias[:, None, None]


@dataclass(frozen=True)
class CharacterModel(ModelSpec):
    """What both have in common: pixels, from 0 to 1, are standardised by the mean and deviation of a data set's.

    Attributes:
        pixel_mean: what is subtracted from each pixel.
        pixel_deviation: what the difference is divided by.

    """

    pixel_mean: float = 0.0
    pixel_deviation: float = field(default=1.0, metadata={"above": 0})


@dataclass(frozen=True)
class CNN(CharacterModel):
    """The paper's network for EMNIST and FEMNIST: that of Reddi et al. (2021), two 3x3 convolutions without padding.

    Attributes:
        dropout: rate after pooling.
        dense_dropout: rate after the dense layer.

    """

    dropout: float = field(default=0.25, metadata={"min": 0, "below": 1})
    dense_dropout: float = field(default=0.5, metadata={"min": 0, "below": 1})

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Convolve twice, pool once, then two dense layers."""
        channels, height, width = image_shape("CNN", input_shape, smallest=6)
        return nn.Sequential(
            ScaledImages(self.pixel_mean, self.pixel_deviation),
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            PooledConv2d(32, 64, 3),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(self.dense_dropout),
            nn.Linear(128, num_outputs),
        )


@dataclass(frozen=True)
class LeafCNN(CharacterModel):
    """The network of LEAF for FEMNIST (Caldas et al. 2018): 5x5 convolutions and a dense layer of 2048 units.

    Attributes:
        same_padding: pad so that convolutions keep the image's size, as LEAF does; the authors' code of FedEM has the
            same layers without padding (false).

    """

    same_padding: bool = True

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Convolve and pool, twice, then two dense layers."""
        channels, height, width = image_shape("LeafCNN", input_shape, smallest=4 if self.same_padding else 16)
        padding, lost = (2, 0) if self.same_padding else (0, 4)
        for _ in range(2):
            height, width = (height - lost) // 2, (width - lost) // 2
        return nn.Sequential(
            ScaledImages(self.pixel_mean, self.pixel_deviation),
            PooledConv2d(channels, 32, 5, padding=padding),
            nn.ReLU(),
            PooledConv2d(32, 64, 5, padding=padding),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * height * width, 2048),
            nn.ReLU(),
            nn.Linear(2048, num_outputs),
        )
