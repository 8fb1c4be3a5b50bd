"""FedFOMO: each client moves its own model towards those of others that help it.

Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization, ICLR 2021.

Shapes: P candidates, n samples of the client, T clients, C clients of the cohort.
"""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from fedem.core.random import derive, uniform
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_cat, tree_index, tree_map
from fedem.methods.base import Batch, Local, Method, Mixture, Trained, register
from fedem.methods.mixer import Mixed, OwnGroups, Round, RoundPlan, Served, Start, Uploads, Welcome, check_pairs, gather
from fedem.methods.steps import SingleModel, mixture_of_one, trained_leaves


@final
@dataclass(frozen=True, eq=False)
class FedFOMO(SingleModel):
    """u: the client's own model, and after it those of P others. v_t: a key, which says what samples are held out.

    The weight of candidate m is max(0, (f(own) - f(m)) / |m - own|) on held-out samples, normalised over candidates.

    Attributes:
        held_out: share of a client's training samples on which models are compared and which are not trained on.
    """

    uploads_model: ClassVar[bool] = False

    held_out: float = field(default=0.2, metadata={"above": 0, "below": 1})

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        return {"key": key}

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Each model's loss on each sample, ``[1 + P, n]``."""
        return {"losses": self.model.component_losses(shared, inputs, targets)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """Move the own model towards the candidates that do better on the held-out samples; train it on the others."""
        words = derive(personal["key"], torch.arange(len(mask), device=mask.device)) & 0xFFFFFF
        held = mask & (words.to(torch.float32) / (1 << 24) < self.held_out)
        # With very few samples none or all may be held out; then all serve for both.
        held = torch.where(held.any() & (mask & ~held).any(), held, mask)
        used = mask & (~held | (held == mask).all())
        losses = (scores["losses"] * held).sum(1) / held.sum()
        candidates = trained_leaves(self.model, shared)
        own, others = tree_index(candidates, 0), tree_index(candidates, slice(1, None))
        squares = tree_map(lambda theirs, mine: (theirs - mine).square().flatten(1).sum(1), others, own)
        distances = torch.stack(list(squares.values())).sum(0).sqrt()
        gains = torch.where(distances > 0, (losses[0] - losses[1:]).clamp(min=0) / distances, 0)
        weights = gains / gains.sum().clamp(min=torch.finfo(gains.dtype).tiny)
        moved = tree_map(lambda mine, theirs: mine + torch.tensordot(weights, theirs - mine, 1), own, others)
        model = tree_index(shared, 0) | moved
        local = Local(model, personal, self.start(model), {"weights": weights})
        return local, {"used": used.to(self.model.dtype)}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        weights = batch.weights * batch.samples["used"]
        weights = weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
        return self.plain_step(local, batch._replace(weights=weights), learning_rate)

    def finish(self, local: Local) -> Trained:
        """Upload the own model and how much each candidate helped, ``[P]``; in u it stands in their places too."""
        count = 1 + len(local.context["weights"])
        everywhere = tree_map(lambda leaf: leaf.expand(count, *leaf.shape), local.shared)
        return Trained(add_prefix("model", local.shared) | local.context, local.personal, everywhere)

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        return take_prefix("model", mean)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return mixture_of_one(tree_index(shared, 0))

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        return {"key": torch.zeros((), dtype=torch.int64, device=scores["losses"].device)}


@final
@dataclass(frozen=True)
class Candidates(OwnGroups):
    """The server keeps everybody's model, and sends each client its own and those of a few others.

    One group per client. The memory: how much each client has gained from each other, ``[T, T]``.

    Attributes:
        num_candidates: P, models of others sent to a client in a round (all others when there are no more).
        exploration: share of rounds in which a client's candidates are chosen at random, and not for past gains.
    """

    num_candidates: int = field(default=5, metadata={"min": 1})
    exploration: float = field(default=0.3, metadata={"min": 0, "max": 1})

    def check(self, keys: Tensor, seed: int) -> None:
        check_pairs("Method fedfomo", len(keys))

    def init(self, start: Start) -> tuple[Tree, Tree]:
        gains = torch.zeros(len(start.keys), len(start.keys), dtype=torch.float64)
        return super().init(start)[0], {"gains": gains, "keys": start.keys}

    def _choose(self, memory: Tree, clients: Tensor, key: int) -> Tensor:
        """Return the candidates of each client, ``[C, P]``: those it gained most from, or others by chance."""
        gains, keys = memory["gains"][clients], memory["keys"]
        mine = derive(derive(key), keys[clients])
        greedy = uniform(mine, 1) >= self.exploration
        chance = uniform(derive(mine[:, None], keys), 1).squeeze(-1)
        # Chance decides alone, or among equal gains.
        rank = (torch.where(greedy, gains, 0) + 1e-9 * chance).scatter(1, clients[:, None], -torch.inf)
        return rank.topk(min(self.num_candidates, len(keys) - 1), dim=1).indices

    def read(self, shared: Tree, memory: Tree, clients: Tensor) -> Served:
        return Served(tree_map(lambda leaf: leaf[:, None], shared), clients)

    def plan(self, shared: Tree, memory: Tree, this: Round) -> RoundPlan:
        """Clients download their own model, and the candidates after it, ``[C, 1 + P, ...]``."""
        here = this.clients.to(memory["keys"].device)
        rows = torch.cat([here[:, None], self._choose(memory, here, this.key)], dim=1)
        return RoundPlan(Served(tree_index(shared, rows), torch.arange(len(here))))

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        trees, clients = gather(uploads), this.clients.to(memory["keys"].device)
        helped = torch.zeros(len(clients), len(memory["keys"]), dtype=torch.float64, device=clients.device)
        helped.scatter_(1, self._choose(memory, clients, this.key), trees["weights"].double())
        gains = memory["gains"].index_add(0, clients, helped)
        return Mixed(this.clients, trees, len(clients)), memory | {"gains": gains}

    def welcome(self, shared: Tree, memory: Tree) -> Welcome:
        count = min(self.num_candidates, len(memory["keys"]) - 1)
        best = tree_index(shared, memory["gains"].sum(0).topk(count).indices)
        mean = super().welcome(shared, memory)
        return mean._replace(shared=tree_map(lambda leaf: leaf[None], tree_cat([mean.shared, best])))


register(Method("fedfomo", FedFOMO, Candidates, title="FedFOMO",
                summary="own models that move towards others that help", paper="Zhang et al. 2021",
                personal="which samples are held out", sent="a model up, P and its own down",
                unseen="moves the mean model towards those that help, and fine-tunes", position=190))  # fmt: skip
