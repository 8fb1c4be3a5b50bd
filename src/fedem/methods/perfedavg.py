"""Per-FedAvg: a shared start from which a little fine-tuning fits each client (MAML).

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach, NeurIPS 2020 (first-order and Hessian-free versions).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.errors import UserError
from fedem.core.precision import model_gradient, with_all_digits
from fedem.core.tree import Tree, tree_map
from fedem.methods.base import Batch, Local, Method, register
from fedem.methods.mixer import Star
from fedem.methods.steps import Penalty, SingleModel, batch_loss, inner_product, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class PerFedAvg(SingleModel):
    """A client descends F_t(w) = f_t(w - inner_rate grad f_t(w)). Before it predicts, it fine-tunes at the inner rate.

    Attributes:
        inner_rate: alpha of the inner step, in training and in fine-tuning; 0 is FedAvg, -1 takes the schedule's rate.
        hessian_free: estimate the Hessian's part of the gradient by a difference of gradients; false leaves it out
            (first order).
        difference: delta, the half-width of that difference.
        independent: take the inner and the outer gradient over different halves of a batch, as the paper asks; false
            takes the whole batch for both.
    """

    fine_tune_setting: ClassVar[str] = "inner_rate"

    inner_rate: float = field(default=0.05, metadata={"min": -1})
    hessian_free: bool = False
    difference: float = field(default=0.01, metadata={"above": 0})
    independent: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hessian_free and self.model.precision == "bfloat16":
            problem = "method.hessian_free takes small differences of gradients, which are lost in bfloat16"
            raise UserError(f"{problem}; allowed with it: run.precision tf32 or float32.")

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        inner, outer = _halves(batch) if self.independent else (batch, batch)
        start = trained_leaves(self.model, local.shared)
        alpha = self.inner_rate if self.inner_rate >= 0 else learning_rate

        def gradient(leaves: Tree, half: Batch) -> Tree:
            return model_gradient(lambda candidate: batch_loss(self.model, local.shared | candidate, half)[0])(leaves)

        first = gradient(start, inner)

        def adapted(candidate: Tree) -> Tree:
            # The inner gradient is a constant here: the Hessian's part is left out, or added below.
            return tree_map(lambda w, g: w - alpha * g, candidate, first)

        correction: Penalty | None = None
        if self.hessian_free:
            second = gradient(adapted(start), outer)
            scale = alpha / (2 * self.difference)
            with with_all_digits():
                ahead = gradient(tree_map(lambda w, g: w + self.difference * g, start, second), inner)
                behind = gradient(tree_map(lambda w, g: w - self.difference * g, start, second), inner)
            # A linear term whose gradient is -alpha times the Hessian times the outer gradient.
            correction = partial(inner_product, tree_map(lambda a, b: -scale * (a - b), ahead, behind))
        return self.plain_step(local, outer, learning_rate, correction, adapted)

    def tune(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """A plain step, as the inner one is."""
        return self.plain_step(local, batch, learning_rate)


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    """Return a batch with the weights of its two halves, each summing to one; a single sample serves for both."""
    even = torch.arange(len(batch.weights), device=batch.weights.device) % 2 == 0
    first, second = batch.weights * even, batch.weights * ~even
    second = torch.where(second.sum() > 0, second, first)
    return batch._replace(weights=first / first.sum()), batch._replace(weights=second / second.sum())


register(Method("perfedavg", PerFedAvg, Star, title="Per-FedAvg",
                summary="a start from which an epoch of fine-tuning fits each client", paper="Fallah et al. 2020",
                unseen="fine-tunes the shared model", position=180))  # fmt: skip
