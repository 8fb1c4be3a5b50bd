"""FedBABU: the body is trained below a last layer that stays as it was drawn, until clients fine-tune.

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

from torch import Tensor

from fedem.core.tree import Tree
from fedem.methods.base import Batch, Local, Method, register
from fedem.methods.mixer import Star
from fedem.methods.steps import SingleModel


@final
@dataclass(frozen=True, eq=False)
class FedBABU(SingleModel):
    """One shared model whose last layer nobody trains, so that all bodies are trained for the same one.

    Before it predicts, a client fine-tunes all layers (``run.fine_tune_epochs``).
    """

    compressible: ClassVar[bool] = False
    parts_model: ClassVar[bool] = True

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        return self.holding_step(local, batch, learning_rate, self._head)

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        return self.plain_step(local, batch, learning_rate)

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """Take the mean; of heads, which are all the same, not even that: it would round."""
        return mean | {name: leaf for name, leaf in shared.items() if name in self._head}

    @cached_property
    def _head(self) -> frozenset[str]:
        return self.model.leaves_called("head")


register(Method("fedbabu", FedBABU, Star, title="FedBABU",
                summary="the body is trained below a last layer as it was drawn; then each client fine-tunes both",
                paper="Oh et al. 2022", unseen="fine-tunes the shared model", position=270))  # fmt: skip
