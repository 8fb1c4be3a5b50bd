"""Small models: linear, perceptron, and an LSTM for text. Shapes: n samples, K outputs."""

import math
from dataclasses import dataclass, field

from torch import Tensor, nn

from fedem.core.errors import UserError
from fedem.models.base import ModelSpec


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
    layers: int = field(default=2, metadata={"min": 1, "max": 1000})
    dropout: float = field(default=0.0, metadata={"min": 0, "below": 1})

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(input_shape)
        for _ in range(self.layers):
            layers += [nn.Linear(width, self.hidden), nn.ReLU(), nn.Dropout(self.dropout)]
            width = self.hidden
        return nn.Sequential(*layers, nn.Linear(width, num_outputs))


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
        return self.head(states[:, -1])


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
    layers: int = field(default=2, metadata={"min": 1, "max": 1000})

    def check(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self.vocabulary:
            said = f"The inputs hold the numbers {lowest} to {highest}, but model.vocabulary is {self.vocabulary}"
            raise UserError(f"{said}; allowed: 0 to {self.vocabulary - 1}, or a larger vocabulary.")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        if len(input_shape) != 1 or input_shape[0] < 1:
            shape = list(input_shape)
            raise UserError(f"The inputs of LSTM have shape {shape}; allowed: [window], at least 1 character each.")
        return CharacterLSTM(self.vocabulary, self.embedding, self.hidden, self.layers, num_outputs)
