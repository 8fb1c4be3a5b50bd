"""Pachinko allocation, for labels of two levels.

Shapes: n samples, T clients, C coarse labels, F fine labels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedem.data.collection import Collection
from fedem.data.partitions.base import CONCENTRATION, Dealing, deal_counts, labels_of, log_gammas, normalized
from fedem.errors import UserError


@final
@dataclass(frozen=True)
class Pachinko(Dealing):
    """The paper's CIFAR-100 (after Li and McCallum 2006, Reddi et al. 2021): clients of the same size.

    A client draws shares of the coarse labels from a Dirichlet(``alpha``) and, for each of them, shares of its fine
    labels from a Dirichlet(``beta``). Its samples are drawn one by one: a coarse label, a fine label of it, an unused
    sample of that. A fine label leaves with its last unused sample, a coarse one with its last fine label; the shares
    of those that stay are normalised again.

    Attributes:
        samples_per_client: the same for all; 0 stands for as many as there are for everybody.
        alpha: concentration of a client's shares of the coarse labels; the smaller, the fewer it has.
        beta: concentration of its shares of a coarse label's fine labels; likewise.

    """

    samples_per_client: int = field(default=600, metadata={"min": 0})
    alpha: float = field(default=0.4, metadata=CONCENTRATION)
    beta: float = field(default=10.0, metadata=CONCENTRATION)

    @property
    def _needed(self) -> int:
        return max(self.min_samples, self.samples_per_client)

    def _deal(self, collection: Collection, rows: NDArray[np.int64], rng: Generator) -> NDArray[np.int64]:
        if collection.coarse is None:
            raise UserError(
                "These labels have no coarse labels above them, which the pachinko partition needs; "
                "allowed: another partition by labels, such as dirichlet."
            )
        fine = labels_of(collection, rows)
        coarse = np.unique(collection.coarse.numpy()[rows], return_inverse=True)[1]
        pairs, groups = np.unique(np.stack([coarse, fine]), axis=1, return_inverse=True)
        groups = groups.reshape(-1)  # some releases of numpy keep the dimension that was not searched
        size = self.samples_per_client or len(rows) // self.num_clients
        return deal_counts(groups, self._counts(pairs[0], np.bincount(groups), size, rng))

    def _counts(
        self, parents: NDArray[np.int64], unused: NDArray[np.int64], size: int, rng: Generator
    ) -> NDArray[np.int64]:
        """Draw how many samples of each fine label each client gets, ``size`` in all.

        Args:
            parents: ``[F]``, the coarse label of each fine one, ascending from 0.
            unused: ``[F]``, samples of each fine label.
            size: samples of each client.
            rng: where the draws come from.

        Returns:
            ``[F, T]``

        """
        unused = unused.copy()
        counts = np.zeros((len(parents), self.num_clients), dtype=np.int64)
        for own in counts.T:
            coarse = log_gammas(rng, self.alpha, int(parents[-1]) + 1)
            fine = log_gammas(rng, self.beta, len(parents))
            while missing := size - int(own.sum()):
                # Up to the one that takes a label's last sample, all draws have one distribution: draw them at once.
                there = np.flatnonzero(unused)
                draws = there[rng.choice(len(there), missing, p=_joint(coarse, fine[there], parents[there]))]
                taken = np.bincount(draws[: _valid(draws, unused)], minlength=len(parents))
                own += taken
                unused -= taken
        return counts


def _joint(coarse: NDArray[np.float64], fine: NDArray[np.float64], parents: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the probability of each fine label: logarithms ``[C]`` and ``[f]`` of those still there -> ``[f]``."""
    there, starts, members = np.unique(parents, return_index=True, return_counts=True)
    within = fine - np.repeat(np.logaddexp.reduceat(fine, starts), members)
    probabilities: NDArray[np.float64] = np.exp(within) * np.repeat(normalized(coarse[there]), members)
    return probabilities


def _valid(draws: NDArray[np.int64], unused: NDArray[np.int64]) -> int:
    """Count the draws up to the first that takes the last unused sample of a label."""
    counts = np.bincount(draws, minlength=len(unused))
    spent = np.flatnonzero((counts >= unused) & (unused > 0))
    return min((int(np.flatnonzero(draws == label)[unused[label] - 1]) + 1 for label in spent), default=len(draws))
