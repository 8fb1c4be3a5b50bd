"""Balanced FedEM: every component is trained as FedAvg would train it on the samples that are its own.

FedEM's step on a component is on the sum of its responsibility-weighted losses, so it is the shorter the less the
component is responsible for: one that falls behind early loses responsibilities, and with them its steps. Here a client
divides a component's objective by its mixture weight pi_tm, the mean responsibility, and counts n_t pi_tm in the
component's average instead of n_t, as FedAvg counts samples. The sum over clients, sum_t n_t pi_tm (g_tm / pi_tm), is
FedEM's surrogate; for one gradient step from u the round is FedEM's with the component's learning rate divided by
sum_t n_t pi_tm / n.

The server learns the mixture weights of those who take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedem.algorithms.base import Batch, Local
from fedem.algorithms.fedem import FedEM
from fedem.algorithms.masses import mean_by_mass, times_mass
from fedem.tree import Tree, add_prefix, take_prefix

_LEAST = 1e-12  # of a mixture weight that steps are divided by: below, a component hardly moves at the client


@final
@dataclass(frozen=True, eq=False)
class BalancedFedEM(FedEM):
    """FedEM with steps on each component's mean loss, and means by responsibilities. M = 1 is FedAvg."""

    def counts(self, local: Local, batch: Batch) -> Tensor:
        """Responsibilities over their mean among the client's samples, or in the batch where that is larger.

        So a batch, in which a few samples may have all of a component's responsibilities, never counts for more than
        a mean over samples.
        """
        responsibilities = batch.samples["log_responsibilities"].exp()
        here = (responsibilities * batch.weights).sum(1)
        return responsibilities / torch.maximum(self._mass(local), here)[:, None]

    def _mass(self, local: Local) -> Tensor:
        """The client's mixture weights ``[M]``, as they are divided by."""
        return local.personal["log_weights"].exp().clamp(min=_LEAST)

    def finish(self, local: Local) -> tuple[Tree, Tree]:
        """Upload the mixture weights as well, by which the components count."""
        return add_prefix("model", local.shared) | {"mass": self._mass(local)}, local.personal

    def summand(self, upload: Tree) -> Tree:
        """Each component times its weight, and the weights."""
        return times_mass(take_prefix("model", upload), upload["mass"])

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        """The mean of each component over its own samples."""
        return mean_by_mass(shared, mean)
