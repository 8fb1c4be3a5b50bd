"""The stacked LSTM that predicts the next character."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from fedem.errors import UserError
from fedem.models.base import ModelSpec


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
        """Refuse data whose characters, from ``lowest`` to ``highest``, are not all in the vocabulary."""
        if lowest < 0 or highest >= self.vocabulary:
            raise UserError(
                f"The inputs hold the numbers {lowest} to {highest}, but model.vocabulary is {self.vocabulary}; "
                f"allowed: 0 to {self.vocabulary - 1}, or a larger vocabulary."
            )

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        """Embedding, LSTM, dense layer on the last time step."""
        if len(input_shape) != 1 or input_shape[0] < 1:
            raise UserError(
                f"The inputs of LSTM have shape {list(input_shape)}; allowed: [window], at least 1 character a sample."
            )
        return CharacterLSTM(self.vocabulary, self.embedding, self.hidden, self.layers, num_outputs)
