"""The paper's synthetic mixture: linear components, Bernoulli labels, Dirichlet mixture weights (appendix, data sets).

Shapes: T clients, N samples of all clients, M components, d features.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from fedem.core.errors import UserError
from fedem.data.dataset import Dataset, DataSource, Truth
from fedem.data.federation import Federation
from fedem.data.partitions import Natural, Partition
from fedem.data.samples import Pool, Samples

_ROWS = 1024


@dataclass(frozen=True)
class Synthetic(DataSource):
    """The synthetic mixture; the defaults are the paper's.

    1. Mixture weights pi_t ~ Dirichlet(``dirichlet``), or one-hot and uniform over components when ``clustered``.
    2. Components theta_m ~ U([-1, 1]^d).
    3. Client sizes n_t = min(``min_samples`` + m_t, ``max_samples``), m_t log-normal(``size_mean``, ``size_sigma``).
    4. Inputs x ~ U([-1, 1]^d), noise e ~ N(0, ``noise_scale``^2).
    5. Component z ~ pi_t, label y ~ Bernoulli(sigmoid(<x, theta_z> + e)).

    With an ``input_shift`` s, x moves by s / sqrt(3) times mu_z, where the mu_m lie at distance 1 from each other, in
    directions drawn at random: 1 / sqrt(3) is the standard deviation of x in any direction.

    The n_t samples are for training. ``num_test`` samples a client for testing and ``num_validation`` for validation
    are drawn besides, from streams of their own: changing their number leaves the training samples as they are.

    Attributes:
        num_clients: T, clients that are made.
        num_components: M of the truth; a method's own number may be another.
        dimension: d, features of a sample.
        dirichlet: concentration of the mixture weights; the smaller, the more a client has of one component alone.
        clustered: each client has one component alone, drawn uniformly.
        size_mean: mean of the logarithm of m_t, what a client has beyond ``min_samples``.
        size_sigma: standard deviation of that logarithm; 0 makes clients of one size.
        min_samples: training samples that each client has at least.
        max_samples: training samples that each client has at most.
        noise_scale: standard deviation of the noise added to the logits; 0 leaves it out.
        input_shift: distance between the components' mean inputs, in standard deviations; 0, as in the paper: inputs
            say nothing about the component.
        num_validation: validation samples of each client.
        num_test: test samples of each client.
    """

    num_clients: int = field(default=300, metadata={"min": 1})
    num_components: int = field(default=3, metadata={"min": 1})
    dimension: int = field(default=150, metadata={"min": 1})
    dirichlet: float = field(default=0.4, metadata={"above": 0})
    clustered: bool = False
    size_mean: float = 4.0
    size_sigma: float = field(default=2.0, metadata={"min": 0})
    min_samples: int = field(default=50, metadata={"min": 0})
    max_samples: int = field(default=1000, metadata={"min": 1})
    noise_scale: float = field(default=1.0, metadata={"min": 0})
    input_shift: float = field(default=0.0, metadata={"min": 0})
    num_validation: int = field(default=100, metadata={"min": 0})
    num_test: int = field(default=5000, metadata={"min": 0})

    def make(self, seed: int, partition: Partition | None = None, unseen: float = 0.0) -> Dataset:
        if partition not in (None, Natural()):
            raise UserError(f"Synthetic data come with their clients; allowed: partition natural, not {partition}.")
        if seed < 0:
            raise UserError(f"The seed is {seed}; allowed: at least 0.")
        if self.max_samples < self.min_samples:
            least = f"at least data.min_samples ({self.min_samples})"
            raise UserError(f"data.max_samples is {self.max_samples}; allowed: {least}.")
        if self.input_shift and self.dimension < self.num_components:
            least = f"at least data.num_components ({self.num_components}), a direction for each"
            raise UserError(f"data.dimension is {self.dimension}; allowed with data.input_shift: {least}.")
        parameters, sizes, *streams, shifts = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(6))
        names = tuple(map(str, range(self.num_clients)))
        if self.clustered:
            weights = np.eye(self.num_components)[parameters.integers(self.num_components, size=self.num_clients)]
        else:
            weights = parameters.dirichlet([self.dirichlet] * self.num_components, self.num_clients)
        components = parameters.uniform(-1, 1, (self.num_components, self.dimension)).astype(np.float32)
        # log-normal draws can overflow an int64; n_t is capped anyway.
        extra = np.minimum(sizes.lognormal(self.size_mean, self.size_sigma, self.num_clients), self.max_samples)
        counts = np.clip(self.min_samples + extra.astype(np.int64), 1, self.max_samples)
        sizes_of_parts = (counts, np.full_like(counts, self.num_validation), np.full_like(counts, self.num_test))
        parts = zip(streams, sizes_of_parts, strict=True)
        means = self._input_means(shifts) if self.input_shift else None
        train, validation, test = (self._samples(stream, components, weights, part, means) for stream, part in parts)
        moved = None if means is None else torch.from_numpy(means)
        truth = Truth(names, torch.from_numpy(components), torch.from_numpy(weights).float(), self.noise_scale, moved)
        return Dataset(Federation(names, train, validation, test).check(), truth)

    def _input_means(self, rng: Generator) -> NDArray[np.float32]:
        """Draw the components' mean inputs ``[M, d]``, all at the same distance from each other, their mean being 0."""
        directions = np.linalg.qr(rng.standard_normal((self.dimension, self.num_components)))[0].T / np.sqrt(2)
        return (self.input_shift / np.sqrt(3) * (directions - directions.mean(0))).astype(np.float32)

    def _samples(
        self,
        rng: Generator,
        components: NDArray[np.float32],
        weights: NDArray[np.float64],
        counts: NDArray[np.int64],
        means: NDArray[np.float32] | None = None,
    ) -> Samples:
        offsets = np.concatenate([[0], np.cumsum(counts)])
        total, owner = int(offsets[-1]), np.repeat(np.arange(self.num_clients), counts)
        inputs = rng.random((total, self.dimension), dtype=np.float32)
        inputs *= 2
        inputs -= 1
        draws, cumulative, logits = rng.random(total), np.cumsum(weights, axis=1)[:, :-1], np.empty(total, np.float32)
        # Some rows at a time stay in the cache, and BLAS does not share them among threads that wait for each other.
        for start in range(0, total, _ROWS):
            some = slice(start, start + _ROWS)
            # z ~ pi_t by inversion: the number of cumulative weights below a uniform draw.
            component = (draws[some, None] >= cumulative[owner[some]]).sum(axis=1)
            if means is not None:
                inputs[some] += means[component]
            logits[some] = np.take_along_axis(inputs[some] @ components.T, component[:, None], axis=1)[:, 0]
        logits += self.noise_scale * rng.standard_normal(total, dtype=np.float32)
        probabilities = (1 + np.tanh(logits / 2)) / 2  # the sigmoid, which can't overflow so
        labels = (rng.random(total) < probabilities).astype(np.int64)
        return Samples(Pool(torch.from_numpy(inputs), torch.from_numpy(labels)), torch.from_numpy(offsets))
