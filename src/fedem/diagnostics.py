"""What the paper's convergence theorems speak of, measured: how far a state is from a consensus stationary point of f.

f(Theta, Pi) = sum_t n_t/n f_t(Theta, pi_t), f_t = 1/n_t sum_i -log sum_m pi_tm exp(-loss_i(theta_m)): what FedEM
minimises, and FedAvg with its mixture of one; where FedEM has a sharpness s, -1/s log sum_m pi_tm exp(-s loss). Losses
are those of evaluation, and weight decay is no part of f. Where every client has models of its own (over a graph),
Theta is their plain mean.

Shapes: T clients, c of a chunk, G groups, M components, n samples of a client, B of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import grad

from fedem.algorithms.base import Algorithm, Batch, Local, Mixture
from fedem.algorithms.fedavg import FedAvg
from fedem.algorithms.fedem import FedEM
from fedem.algorithms.training import mean_loss, trained_leaves
from fedem.engines import Batching, Cohort
from fedem.errors import UserError
from fedem.mixing.base import Mixer
from fedem.mixing.graph import Graph
from fedem.mixing.groups import mean_of_groups
from fedem.mixing.star import Star
from fedem.mixture import log_responsibilities, negative_log_likelihood, update_log_weights
from fedem.rounds import State, Training
from fedem.tree import Tree, add_prefix, take_prefix, tree_map


class Diagnosis(NamedTuple):
    """A state after a round, by the measures of the theorems."""

    objective: float
    """f"""
    gradient_norm2: float
    """|grad_Theta f|^2"""
    improvement: float
    """Delta_Pi f: by how much the next update of the mixture weights, Theta fixed, lowers f"""
    weights_kl: float
    """sum_t n_t/n KL(pi_t || pi_t before the round)"""
    consensus: float
    """sum_t |Theta_t - Theta|^2; 0 with a server"""
    dissimilarity: float
    """sum_t n_t/n |grad_Theta f_t|^2, which is |grad_Theta f|^2 where all clients agree, and more elsewhere"""

    def record(self) -> dict[str, float]:
        """Name the figures, as a round's record has them."""
        return self._asdict()


class Dissimilarity(NamedTuple):
    """Bounded dissimilarity: sum_t n_t/n |grad f_t|^2 <= G^2 + beta^2 |grad f|^2 at all points that were measured."""

    constant: float
    """G"""
    slope: float
    """beta"""

    def record(self) -> dict[str, float]:
        """Name both figures, as a run's summary has them."""
        return {"dissimilarity_constant": self.constant, "dissimilarity_slope": self.slope}


def check_diagnosable(algorithm: Algorithm, mixer: Mixer) -> None:
    """Refuse methods that minimise something else than f, and mixers that seek no consensus on its components."""
    if not isinstance(algorithm, FedEM | FedAvg):
        raise UserError(
            f"{type(algorithm).__name__} can't be diagnosed, as it minimises another function than the theorems' f; "
            "allowed: FedEM and those that train as FedAvg does."
        )
    if not isinstance(mixer, Star | Graph):
        raise UserError(
            f"A run whose clients' models are mixed by {type(mixer).__name__} can't be diagnosed; allowed: one model, "
            "or one set of components, for all, averaged by a server (Star) or over a graph (Graph)."
        )


def measure(training: Training, before: State, after: State) -> Diagnosis:
    """Diagnose the state ``after`` a round that started from ``before``; costs about one round of all clients.

    ``training`` is of a method and a mixer that :func:`check_diagnosable` lets pass.
    """
    check_diagnosable(training.algorithm, training.mixer)
    samples, device = training.federation.train, training.device
    shares = samples.sizes.double().to(device) / len(samples)
    own, mean = trained_leaves(training.algorithm.model, after.shared), mean_of_groups(after.shared)
    old, new = (_log_weights(training, state) for state in (before, after))
    cohort = Cohort(_components(training, mean), torch.zeros_like(samples.sizes), {"log_weights": new}, samples)
    # All samples of a client at once, unless its model needs memory for each: then in the batches that it trains on.
    batch_size = training.batching.batch_size if training.algorithm.model.is_large else 0
    totals: Tree = {}
    members = training.team.share(samples.sizes)
    keys, batching = training.federation.keys[members], Batching(batch_size)
    for chunk in training.engine.train(_measuring(training), cohort.take(members), batching, keys, 0.0):
        for name, part in _weighted(chunk.uploads, shares[members[chunk.positions].to(device)]).items():
            totals[name] = totals[name] + part if name in totals else part
    (totals,) = training.team.total(totals)
    return Diagnosis(
        objective=float(totals["objective"]),
        gradient_norm2=_square_norm(take_prefix("gradient", totals)),
        # Neither can be negative; what is so has been rounded.
        improvement=max(0.0, float(totals["improvement"])),
        weights_kl=max(0.0, float(shares @ _divergences(new, old))),
        consensus=_square_norm(tree_map(torch.sub, own, mean)),
        dissimilarity=float(totals["square_norm"]),
    )


def estimate_dissimilarity(records: Iterable[Mapping[str, Any]]) -> Dissimilarity:
    """Return G and beta that hold at every diagnosed round among ``records``.

    beta^2 is the slope, not below zero, of the line that fits sum_t n_t/n |grad f_t|^2 against |grad f|^2 by least
    squares; G^2 is the most that any point lies above the line of that slope through the origin.
    """
    known = [line for line in records if line.get("dissimilarity") is not None]
    points = [(line["gradient_norm2"], line["dissimilarity"]) for line in known]
    if not points:
        raise UserError("No round was diagnosed, so there is no dissimilarity; set run.diagnose_every to 1 or more.")
    square, mean_square = torch.tensor(points, dtype=torch.float64).T
    centred = square - square.mean()
    spread = float(centred @ centred)
    slope = max(0.0, float(centred @ mean_square) / spread) if spread > 0 else 0.0
    constant = max(0.0, float((mean_square - slope * square).max()))
    return Dissimilarity(math.sqrt(constant), math.sqrt(slope))


@final
@dataclass(frozen=True, eq=False)
class _Measured(Algorithm):
    """A client that trains nothing: it uploads f_t, its gradient, and what an update of its weights would gain."""

    base: FedEM

    def init_shared(self, seed: int) -> Tree:
        """As the method does."""
        return self.base.init_shared(seed)

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """As the method does."""
        return self.base.score(shared, inputs, targets)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """E-step and the update of the weights, in double precision: gains are small differences."""
        losses, log_weights = scores["losses"].double(), personal["log_weights"].double().log_softmax(0)
        log_posterior = log_responsibilities(losses, log_weights, self.base.sharpness)
        now, then = (
            mean_loss(negative_log_likelihood(losses, weights, self.base.sharpness), mask)
            for weights in (log_weights, update_log_weights(log_posterior, mask))
        )
        zeros = tree_map(torch.zeros_like, trained_leaves(self.model, shared))
        context = {"objective": now, "improvement": now - then, "size": mask.sum()}
        return Local(shared, {}, zeros, context), {"responsibilities": log_posterior.exp().to(self.model.dtype)}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """Add the batch's part of grad f_t = 1/n_t sum_i q_i(m) grad loss_i(theta_m), which is Fisher's identity."""
        share = (batch.weights > 0).sum(dtype=self.model.dtype) / local.context["size"]

        def one(component: Tree, responsibilities: Tensor) -> Tree:
            weights = share * batch.weights * responsibilities

            def objective(leaves: Tree) -> Tensor:
                return (weights * self.model.losses(component | leaves, batch.inputs, batch.targets)).sum()

            gradient: Tree = grad(objective)(trained_leaves(self.model, component))
            return gradient

        parts = self.model.over_components(one, (0, 0))(local.shared, batch.samples["responsibilities"])
        return local._replace(memory=tree_map(torch.add, local.memory, parts))

    def finish(self, local: Local) -> tuple[Tree, Tree]:
        """f_t, the gain and the gradient; nothing is kept."""
        gains = {name: local.context[name] for name in ("objective", "improvement")}
        return gains | add_prefix("gradient", local.memory), {}

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """As the method does."""
        return self.base.predictor(shared, personal)


# Kept as long as a training lasts, since an engine records the functions that come back.
_KEPT: WeakKeyDictionary[Training, _Measured] = WeakKeyDictionary()


def _measuring(training: Training) -> _Measured:
    if training not in _KEPT:
        model, solver = training.algorithm.model, training.algorithm.solver
        base = training.algorithm if isinstance(training.algorithm, FedEM) else FedEM(model, solver, num_components=1)
        _KEPT[training] = _Measured(model, solver, base)
    return _KEPT[training]


def _components(training: Training, shared: Tree) -> Tree:
    """Return the components, ``[G, M, ...]``: a single model is a mixture of one."""
    return shared if isinstance(training.algorithm, FedEM) else tree_map(lambda leaf: leaf.unsqueeze(1), shared)


def _log_weights(training: Training, state: State) -> Tensor:
    """Return the log mixture weights, ``[T, M]`` float64, each client's summing to one beyond single precision."""
    if not isinstance(training.algorithm, FedEM):
        return torch.zeros(training.federation.num_clients, 1, dtype=torch.float64, device=training.device)
    return state.personal["log_weights"].double().log_softmax(1)


def _divergences(new: Tensor, old: Tensor) -> Tensor:
    """KL(new || old) of each client, from logarithms; a weight of zero adds nothing. ``[T, M], [T, M] -> [T]``."""
    return torch.where(new == -math.inf, 0.0, new.exp() * (new - old)).sum(1)


def _weighted(uploads: Tree, shares: Tensor) -> Tree:
    """Add up some clients' uploads by their shares, ``[c, ...], [c] -> [...]`` float64, and their gradients' norms."""
    doubles = tree_map(torch.Tensor.double, uploads)
    square_norms = [leaf.flatten(1).square().sum(1) for leaf in take_prefix("gradient", doubles).values()]
    doubles["square_norm"] = torch.stack(square_norms).sum(0)
    return tree_map(lambda leaf: torch.tensordot(shares, leaf, dims=1), doubles)


def _square_norm(tree: Tree) -> float:
    return sum(float(leaf.double().square().sum()) for leaf in tree.values())
