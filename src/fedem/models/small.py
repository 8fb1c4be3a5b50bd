"""Small models: linear, perceptron, two convolutional networks for handwritten characters, and an LSTM for text.

Shapes: n samples, C channels, height H, width W, K outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor, nn

from fedem.core.errors import UserError
from fedem.models.base import ModelSpec
from fedem.models.images import Images, image_shape
from fedem.models.layers import max_pool


@dataclass(frozen=True)
class Linear(ModelSpec):
    """An affine map; logistic or softmax regression, or least squares, depending on the loss.

    Attributes:
        bias: whether there is a constant beside the linear map.
    """

    bias: bool = True

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        layer = nn.Linear(math.prod(input_shape), num_outputs, bias=self.bias)
        return layer if len(input_shape) == 1 else nn.Sequential(nn.Flatten(), layer)


@dataclass(frozen=True)
class MLP(ModelSpec):
    """Hidden layers of rectified units; the defaults are the "2NN" of McMahan et al. (2017).

    Attributes:
        hidden: units of each hidden layer.
        layers: how many hidden layers there are.
        dropout: rate after each hidden layer.
    """

    hidden: int = field(default=200, metadata={"min": 1})
    layers: int = field(default=2, metadata={"min": 1})
    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for _ in range(self.layers):
            layers += [nn.Linear(width, self.hidden), nn.ReLU(), nn.Dropout(self.dropout)]
            width = self.hidden
        return nn.Sequential(*layers, nn.Linear(width, num_outputs))


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
    """A network for handwritten characters: pixels, from 0 to 1, are standardised by a data set's mean and deviation.

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
        channels, height, width = image_shape("CNN", input_shape, smallest=6)
        return nn.Sequential(
            Images((self.pixel_mean,), (self.pixel_deviation,)),
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
        channels, height, width = image_shape("LeafCNN", input_shape, smallest=4 if self.same_padding else 16)
        padding, lost = (2, 0) if self.same_padding else (0, 4)
        for _ in range(2):
            height, width = (height - lost) // 2, (width - lost) // 2
        return nn.Sequential(
            Images((self.pixel_mean,), (self.pixel_deviation,)),
            PooledConv2d(channels, 32, 5, padding=padding),
            nn.ReLU(),
            PooledConv2d(32, 64, 5, padding=padding),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * height * width, 2048),
            nn.ReLU(),
            nn.Linear(2048, num_outputs),
        )


class CharacterLSTM(nn.Module):
    """Embeds characters, runs an LSTM over the window, and maps its last state."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, num_outputs: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.recurrent = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, num_outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, window] -> [n, K]``."""
        states, _ = self.recurrent(self.embedding(inputs))
        outputs: Tensor = self.head(states[:, -1])
        return outputs


@dataclass(frozen=True)
class LSTM(ModelSpec):
    """The stacked LSTM for Shakespeare (McMahan et al. 2017, Caldas et al. 2018); inputs are numbers of characters.

    Attributes:
        vocabulary: how many different characters there may be: inputs lie in 0 to ``vocabulary`` - 1.
        embedding: numbers that a character becomes.
        hidden: units of each layer.
        layers: how many LSTM layers stand one above the other.
    """

    vocabulary: int = field(default=128, metadata={"min": 1})
    embedding: int = field(default=8, metadata={"min": 1})
    hidden: int = field(default=256, metadata={"min": 1})
    layers: int = field(default=2, metadata={"min": 1})

    def check(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self.vocabulary:
            said = f"The inputs hold the numbers {lowest} to {highest}, but model.vocabulary is {self.vocabulary}"
            raise UserError(f"{said}; allowed: 0 to {self.vocabulary - 1}, or a larger vocabulary.")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        if len(input_shape) != 1 or input_shape[0] < 1:
            allowed = "[window], at least 1 character each"
            raise UserError(f"The inputs of LSTM have shape {list(input_shape)}; allowed: {allowed}.")
        return CharacterLSTM(self.vocabulary, self.embedding, self.hidden, self.layers, num_outputs)
