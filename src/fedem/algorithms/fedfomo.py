"""FedFOMO: each client moves its own model towards those of others that help it.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization, ICLR 2021.
The server's side, who is sent whose model, is :class:`fedem.mixing.candidates.Candidates`.

Shapes: P candidates, n samples of the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from fedem.algorithms.base import Batch, Local, Mixture
from fedem.algorithms.single import SingleModel
from fedem.algorithms.training import mixture_of_one, start_memory, train_step, trained_leaves
from fedem.randomness import derive
from fedem.tree import Tree, add_prefix, take_prefix, tree_map


@final
@dataclass(frozen=True, eq=False)
class FedFOMO(SingleModel):
    """u: the client's own model, and after it those of P others. v_t: a key, which says what samples are held out.

    The weight of candidate m is max(0, (f(own) - f(m)) / |m - own|) on held-out samples, normalised over candidates.

    Attributes:
        held_out: share of a client's training samples on which models are compared and which are not trained on.

    """

    held_out: float = field(default=0.2, metadata={"above": 0, "below": 1})

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """The source of the random choice of samples."""
        return {"key": key}

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Each model's loss on each sample, ``[1 + P, n]``."""
        return {"losses": self.model.component_losses(shared, inputs, targets)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """Move the own model towards the candidates that do better on the held-out samples; train it on the others."""
        held = mask & (_fraction(personal["key"], len(mask)) < self.held_out)
        # With very few samples none or all may be held out; then all serve for both.
        held = torch.where(held.any() & (mask & ~held).any(), held, mask)
        used = mask & (~held | (held == mask).all())
        losses = (scores["losses"] * held).sum(1) / held.sum()
        candidates = trained_leaves(self.model, shared)
        own = tree_map(lambda leaf: leaf[0], candidates)
        others = tree_map(lambda leaf: leaf[1:], candidates)
        squares = tree_map(lambda theirs, mine: (theirs - mine).square().flatten(1).sum(1), others, own)
        distances = torch.stack(list(squares.values())).sum(0).sqrt()
        gains = torch.where(distances > 0, (losses[0] - losses[1:]).clamp(min=0) / distances, 0)
        weights = gains / gains.sum().clamp(min=torch.finfo(gains.dtype).tiny)
        moved = tree_map(lambda mine, theirs: mine + torch.tensordot(weights, theirs - mine, 1), own, others)
        model = tree_map(lambda leaf: leaf[0], shared) | moved
        local = Local(model, personal, start_memory(self.model, self.solver, model), {"weights": weights})
        return local, {"used": used.to(self.model.dtype)}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """One solver step on the samples of the batch that are not held out."""
        weights = batch.weights * batch.samples["used"]
        weights = weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
        shared, memory = train_step(self.model, self.solver, local.shared, local.memory, batch, weights, learning_rate)
        return local._replace(shared=shared, memory=memory)

    def finish(self, local: Local) -> tuple[Tree, Tree]:
        """Upload the own model, and how much each candidate helped, ``[P]``."""
        return add_prefix("model", local.shared) | local.context, local.personal

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """The server keeps the models alone."""
        return take_prefix("model", mean)

    def keep(self, local: Local) -> tuple[Tree, Tree]:
        """The own model, fine-tuned; it stands in the candidates' places too, where nobody looks."""
        count = 1 + len(local.context["weights"])
        return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), local.shared), local.personal

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """The own model."""
        return mixture_of_one(tree_map(lambda leaf: leaf[0], shared))

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """An unseen client starts from the mean of all models, moves towards those that help it, and fine-tunes."""
        return {"key": torch.zeros((), dtype=torch.int64, device=scores["losses"].device)}


def _fraction(key: Tensor, count: int) -> Tensor:
    """A number in [0, 1) for each sample, ``[count]``."""
    words = derive(key, torch.arange(count, device=key.device))
    return (words & 0xFFFFFF).to(torch.float32) / (1 << 24)
