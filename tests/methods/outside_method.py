"""A whole method in one file outside of the package: its clients' side, its server's side and its row.

Clients predict with a blend of the shared model and one of their own, and a server that
moves only part of the way towards the mean counts its rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from fedem.methods import (
    Batch,
    Local,
    Method,
    Mixed,
    Mixture,
    OneGroup,
    OwnModel,
    Round,
    Start,
    Tree,
    Uploads,
    by_samples,
    mixture_of_one,
    register,
    weighted_means,
)


@final
@dataclass(frozen=True, eq=False)
class Blending(OwnModel):
    """Clients predict with the mean of the shared model and one of their own.

    Attributes:
        trust: the weight of the own model.

    """

    trust: float = field(default=0.5, metadata={"min": 0, "max": 1})

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        return self.begin_both(shared, personal, {}), {}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        return self.step_both(local, batch, learning_rate)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        own = self.own_model(shared, personal)
        return mixture_of_one({name: torch.lerp(leaf, own[name], self.trust) for name, leaf in shared.items()})


@final
@dataclass(frozen=True)
class Cautious(OneGroup):
    """A server that moves part of the way towards the mean. The memory counts the rounds.

    Attributes:
        caution: the part of the way that it does not go.

    """

    caution: float = field(default=0.25, metadata={"min": 0, "below": 1})

    def init(self, start: Start) -> tuple[Tree, Tree]:
        groups, _ = super().init(start)
        return groups, {"rounds": torch.zeros((), dtype=torch.int64)}

    def mix(self, shared: Tree, memory: Tree, this: Round, uploads: Uploads) -> tuple[Mixed, Tree]:
        means = weighted_means(by_samples(this), uploads)
        moved = {name: torch.lerp(leaf, shared[name], self.caution) for name, leaf in means.items()}
        return Mixed(torch.zeros(1, dtype=torch.int64), moved, len(this.clients)), {"rounds": memory["rounds"] + 1}


register(
    Method(
        "blending",
        Blending,
        Cautious,
        title="Blending",
        summary="a mean of the shared model and an own one",
        personal="a model",
        unseen="trains its own model",
        aliases=("blend",),
    )
)
