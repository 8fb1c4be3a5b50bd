"""A method of your own.

A method is given by the objective of one client and a surrogate of it. Rounds, stacking and averaging are done for you.
The method here is a regression that all clients share, with an **offset for each client**, like scales that were not
zeroed. The model u is shared and the offset v_t is private. Client t minimises

    f_t(u, v_t) = 1/2 mean of (y - u(x) - v_t)^2

The surrogate is f_t itself. The offset that minimises it is the mean residual v, and f_t(u, v0) - f_t(u, v) is
(v0 - v)^2 / 2 for every u. So it is a partial first-order surrogate. `check` looks for violations
before `optimise` trains.

The script prints the verdict, the objective before and after, and how well the slope and the offsets are found. Clients
with large offsets have small inputs, so one line through all samples, without offsets, has another slope.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import fedem
from fedem.models import Linear, SquaredError
from fedem.solvers import SGD
from fedem.surrogates import Batch, Fixed, Surrogate, Tree, check, optimise, uniform

NOISE, SLOPE = 0.1, 1.5


@dataclass(frozen=True, eq=False)
class PersonalOffset(Surrogate):
    """u: one regression. v_t: the offset that is added to its outputs for client t."""

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """No offset."""
        return {"offset": torch.zeros((), dtype=self.model.dtype)}

    def draw_personal(self, shared: Tree, key: Tensor) -> Tree:
        """A random offset, for ``check`` to try."""
        return {"offset": 2 * uniform(key, 1)[0] - 1}

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """The residuals of u, ``[n]``."""
        return {"residuals": targets - self.model.outputs(shared, inputs).squeeze(-1)}

    def objective(self, shared: Tree, personal: Tree, batch: Batch) -> Tensor:
        """f_t."""
        residuals = self.score(shared, batch.inputs, batch.targets)["residuals"]
        return (batch.weights * (residuals - personal["offset"]).square()).sum() / 2

    def fix(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> Fixed:
        """Nothing: the surrogate does not depend on the point near which it is built."""
        return Fixed({}, {})

    def minimise(self, shared: Tree, scores: Tree, fixed: Fixed, mask: Tensor) -> Tree:
        """The mean residual."""
        return {"offset": (mask * scores["residuals"]).sum() / mask.sum()}

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        """f_t itself."""
        return self.objective(shared, personal, batch)


rng = np.random.default_rng(0)
true_offsets = rng.normal(size=20)
clients = []
for true_offset in true_offsets:
    inputs = rng.normal(size=(50, 1)) - true_offset
    clients.append((inputs, SLOPE * inputs[:, 0] + true_offset + NOISE * rng.normal(size=50)))
federation = fedem.Federation.from_clients(clients, validation=0, test=0)

surrogate = PersonalOffset(fedem.Model(lambda: Linear(bias=False).build((1,), 1), SquaredError(), torch.float64), SGD())
verdict = check(surrogate, federation)
verdict.raise_for_failure()
print(verdict)

outcome = optimise(surrogate, federation, rounds=60, learning_rate=0.5)
print(
    f"objective {outcome.history[0]:.4f} before, {outcome.history[-1]:.4f} after; the noise alone is {NOISE**2 / 2:.4f}"
)
one_line = np.polyfit(federation.train.inputs[:, 0], federation.train.targets, 1)[0]
slope = float(outcome.state.shared["weight"])
print(f"slope {slope:.3f}, of one line {one_line:.3f}; the true one is {SLOPE}")
print(f"offsets are off by {np.abs(outcome.state.personal['offset'].numpy() - true_offsets).max():.3f} at most")
