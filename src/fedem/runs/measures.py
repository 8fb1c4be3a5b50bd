"""Measures of a run: what the paper's theorems speak of, how well clients solve their problems, recovery of a truth.

The theorems bound how far a state is from a consensus stationary point of f(Theta, Pi) = sum_t n_t/n f_t(Theta, pi_t),
f_t = 1/n_t sum_i -log sum_m pi_tm exp(-loss_i(theta_m)): what FedEM minimises, and FedAvg with its mixture of one;
where FedEM has a sharpness s, -1/s log sum_m pi_tm exp(-s loss). Losses are those of evaluation, and weight decay is
not part of f. Where every client has models of its own (over a graph), Theta is their plain mean.

Shapes: T clients, C of a cohort, c of a chunk, G groups, M components, R true ones, n samples of a client, B of a
batch, d parameters.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedem.core.em import fit_log_weights, log_responsibilities, negative_log_likelihood, update_log_weights
from fedem.core.errors import UserError
from fedem.core.random import SOLVER, choose
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_cat, tree_double, tree_index, tree_map, tree_stack
from fedem.data.dataset import Truth
from fedem.data.federation import Federation
from fedem.data.samples import Pool
from fedem.engines import Batching, Cohort, Work
from fedem.engines.base import Positions, alike
from fedem.methods.base import Algorithm, Batch, Local, Trained, names_where
from fedem.methods.mixer import Mixer, Star, mean_of_groups
from fedem.methods.steps import inner_product, mean_loss, trained_leaves
from fedem.methods.wrappers import Wrapped
from fedem.methods.wrappers.defences import DefendedGraph, DefendedServer
from fedem.methods.wrappers.server_steps import ServerSteps
from fedem.models.base import Model
from fedem.runs.rounds import State, Training
from fedem.solvers import Newton
from fedem.solvers.optimizers import VectorObjective

_FITTED_ROWS = 1 << 16  # samples, with their padding, of clients fitted at once


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


class Dissimilarity(NamedTuple):
    """Bounded dissimilarity: sum_t n_t/n |grad f_t|^2 <= G^2 + beta^2 |grad f|^2 at all points that were measured."""

    constant: float
    """G"""
    slope: float
    """beta"""

    def record(self) -> dict[str, float]:
        """Name both figures, as a run's summary has them."""
        return {"dissimilarity_constant": self.constant, "dissimilarity_slope": self.slope}


def check_diagnosable(algorithm: Algorithm, mixer: Mixer, compressed: bool = False) -> None:
    """Refuse methods that minimise something else than f, and mixers that seek no consensus on its components."""
    problem, allowed = "", f"{names_where(lambda row: row.is_diagnosable)}, without label shares and local layers"
    if not algorithm.minimises_likelihood:
        problem = f"{type(algorithm).__name__} can't be diagnosed: it minimises another function than the theorems' f"
    elif isinstance(mixer, ServerSteps):
        run, allowed = f"A run whose server steps by {type(mixer.rule).__name__}", "server.name none"
        problem = f"{run} can't be diagnosed, as the theorems are of servers that take the mean"
    elif isinstance(mixer, DefendedServer | DefendedGraph):
        run, allowed = f"A run whose uploads are guarded by {type(mixer.rule).__name__}", "defence.name none"
        problem = f"{run} can't be diagnosed, as the theorems are of means of all uploads"
    elif not mixer.seeks_consensus:
        run = f"A run whose clients' models are mixed by {type(mixer).__name__}"
        problem = f"{run} can't be diagnosed, as they don't tend to one model, or one set of components, for all"
    elif isinstance(mixer, Star) and mixer.weighting != "samples":
        run, allowed = f"A run whose method.weighting is {mixer.weighting!r}", "samples"
        problem = f"{run} can't be diagnosed, as f counts clients by samples"
    elif compressed:
        problem, allowed = "A run with compressed messages can't be diagnosed", "[compression] off"
    elif algorithm.model.class_weights is not None:
        problem, allowed = "A run with weights of classes can't be diagnosed", 'loss.class_weights = "none"'
    if problem:
        raise UserError(f"{problem}; allowed: {allowed}.")


def diagnose(training: Training, before: State, after: State) -> Diagnosis:
    """Diagnose the state ``after`` a round that started from ``before``; costs about one round of all clients."""
    check_diagnosable(training.algorithm, training.mixer, training.codec is not None)
    samples, device = training.federation.train, training.device
    shares = samples.sizes.double().to(device) / len(samples)
    trained, mean = trained_leaves(training.algorithm.model, after.shared), mean_of_groups(after.shared)
    old, new = (_log_weights(training, state) for state in (before, after))
    # A single model is a mixture of one.
    components = mean if training.algorithm.is_mixture else tree_map(lambda leaf: leaf.unsqueeze(1), mean)
    cohort = Cohort(components, torch.zeros_like(samples.sizes), {"log_weights": new}, samples)
    # KL(new || old) of each client, from logarithms; a weight of zero adds nothing.
    divergences = torch.where(new == -math.inf, 0.0, new.exp() * (new - old)).sum(1)
    # All samples of a client at once, unless its model needs memory for each: then in the batches that it trains on.
    batch_size = training.batching.batch_size if training.algorithm.model.is_large else 0
    totals: Tree = {}
    members = training.team.share(samples.sizes)
    work = Work(Batching(batch_size), training.federation.keys[members], 0.0)
    for chunk in training.engine.train(_measuring(training.algorithm), cohort.take(members), work):
        for name, term in _weighted(chunk.uploads, shares[members[chunk.positions].to(device)]).items():
            totals[name] = totals[name] + term if name in totals else term
    (totals,) = training.team.total(totals)
    return Diagnosis(
        objective=float(totals["objective"]),
        gradient_norm2=_square_norm(take_prefix("gradient", totals)),
        # Neither can be negative; what is so has been rounded.
        improvement=max(0.0, float(totals["improvement"])),
        weights_kl=max(0.0, float(shares @ divergences)),
        consensus=_square_norm(tree_map(torch.sub, trained, mean)),
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
class _Measured(Wrapped):
    """A client that trains nothing: it uploads f_t, its gradient, and what an update of its weights would gain.

    Its u is components ``[M, ...]``, whatever the method's is.
    """

    sharpness: float

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        return {"losses": self.model.component_losses(shared, inputs, targets)}

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """E-step and the update of the weights, in double precision: gains are small differences."""
        losses, log_weights = scores["losses"].double(), personal["log_weights"].double().log_softmax(0)
        log_posterior = log_responsibilities(losses, log_weights, self.sharpness)
        now, then = (
            mean_loss(negative_log_likelihood(losses, weights, self.sharpness), mask)
            for weights in (log_weights, update_log_weights(log_posterior, mask))
        )
        zeros = tree_map(torch.zeros_like, trained_leaves(self.model, shared))
        context = {"objective": now, "improvement": now - then, "size": mask.sum()}
        return Local(shared, {}, zeros, context), {"responsibilities": log_posterior.exp().to(self.model.dtype)}

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """Add the batch's part of grad f_t = 1/n_t sum_i q_i(m) grad loss_i(theta_m), which is Fisher's identity."""
        share = (batch.weights > 0).sum(dtype=self.model.dtype) / local.context["size"]

        def objective(leaves: Tree) -> Tensor:
            losses = self.model.component_losses(local.shared | leaves, batch.inputs, batch.targets)
            return (share * batch.weights * batch.samples["responsibilities"] * losses).sum()

        gradients = grad(objective)(trained_leaves(self.model, local.shared))
        return local._replace(solver_state=tree_map(torch.add, local.solver_state, gradients))

    def finish(self, local: Local) -> Trained:
        gains = {name: local.context[name] for name in ("objective", "improvement")}
        return Trained(gains | add_prefix("gradient", local.solver_state), {}, {})


@lru_cache(maxsize=1)  # an engine records the functions that come back
def _measuring(algorithm: Algorithm) -> _Measured:
    sharpness = getattr(algorithm, "sharpness", 1.0)  # of a mixture of one, any will do
    return _Measured(algorithm.model, algorithm.solver, algorithm, sharpness)


def _log_weights(training: Training, state: State) -> Tensor:
    """Return the log mixture weights, ``[T, M]`` float64, each client's summing to one beyond single precision."""
    if not training.algorithm.is_mixture:
        return torch.zeros(training.federation.num_clients, 1, dtype=torch.float64, device=training.device)
    return state.personal["log_weights"].double().log_softmax(1)


def _weighted(uploads: Tree, shares: Tensor) -> Tree:
    """Add up some clients' uploads by their shares, ``[c, ...], [c] -> [...]`` float64, and their gradients' norms."""
    doubles = tree_map(torch.Tensor.double, uploads)
    square_norms = [leaf.flatten(1).square().sum(1) for leaf in take_prefix("gradient", doubles).values()]
    doubles["square_norm"] = torch.stack(square_norms).sum(0)
    return tree_map(lambda leaf: torch.tensordot(shares, leaf, dims=1), doubles)


def _square_norm(tree: Tree) -> float:
    return sum(float(leaf.double().square().sum()) for leaf in tree.values())


MOST_PARAMETERS = 2000
_MOST_CLIENTS = 20
_MOST_STEPS, _TOLERANCE = 100, 1e-13
_FLAT = 1e-14  # of the largest curvature: what is less may be rounding, and is no curvature at all
_MOST_NUMBERS = 1 << 26  # of all Hessians' backward passes at once


class Inexactness(NamedTuple):
    """How much of the way to its minimum each local problem had left after a round: the paper's alpha.

    In a round a client is to minimise, for each component, g(theta) = 1/n sum_i q_i loss_i(theta) + weight_decay/2
    |theta|^2, the q_i being the component's responsibilities (all one for a single model). Its solver is
    alpha-approximate when g(end) - g* <= alpha (g(start) - g*). The paper's theorem of black-box solvers asks for one
    alpha < 1 / (beta^2 kappa^4) in all rounds, kappa being the largest curvature of any g over the least, and beta of
    bounded dissimilarity with G = 0. Here the smallest alpha is measured, for convex models small enough for Newton's
    method, and the curvatures where clients start, where they end and at their minima. Elsewhere they may differ more.
    """

    clients: Tensor
    """``[C]`` positions in the federation"""
    alphas: Tensor
    """``[C, M]`` float64; NaN where a client had nothing to gain, so that there is no ratio"""
    curvatures: Tensor
    """``[C, 2]`` float64: the least and the largest eigenvalue of all Hessians of g"""

    @property
    def mean(self) -> float | None:
        """Over clients and components; None when nobody had anything to gain."""
        return float(self._known.mean()) if len(self._known) else None

    @property
    def max(self) -> float | None:
        """The alpha that holds for all clients and components."""
        return float(self._known.max()) if len(self._known) else None

    @property
    def condition(self) -> float:
        """Kappa, as far as it was seen; infinite where a g is not strongly convex."""
        least, largest = float(self.curvatures[:, 0].min()), float(self.curvatures[:, 1].max())
        return largest / least if least > _FLAT * largest else math.inf

    def record(self, beta2: float = 1.0) -> dict[str, float | None]:
        """Name the figures, with the bound for this ``beta2``, which is never below 1: alpha_max must be less."""
        condition = self.condition
        bound = 0.0 if math.isinf(condition) else 1 / (max(1.0, beta2) * condition**4)
        return {"alpha_mean": self.mean, "alpha_max": self.max, "alpha_bound": bound}

    @property
    def _known(self) -> Tensor:
        return self.alphas[~self.alphas.isnan()]


def summarise_alpha(history: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return alpha and its bound in the last round that was measured, and in how many rounds it was below the bound."""
    measured = [line for line in history if "alpha_bound" in line]
    if not measured:
        return {}
    met = sum(line["alpha_max"] is None or line["alpha_max"] < line["alpha_bound"] for line in measured)
    last = {name: measured[-1][name] for name in ("alpha_mean", "alpha_max", "alpha_bound")}
    return last | {"alpha_rounds": len(measured), "alpha_rounds_within_bound": met}


def check_measurable(algorithm: Algorithm, compressed: bool = False) -> None:
    """Refuse methods whose local problems are others, and models too large or too unsteady for an exact solution."""
    model, problem, unsteady = algorithm.model, "", unsteady_layer(algorithm.model)
    if not (algorithm.minimises_likelihood and algorithm.uploads_model):
        names = names_where(lambda row: row.algorithm.minimises_likelihood and row.algorithm.uploads_model)
        problem = f"for {type(algorithm).__name__}; allowed, since their clients minimise (responsibility-weighted) "
        problem += f"losses: {names}, without label shares"
    elif compressed:
        problem = "with compressed messages; allowed: [compression] off"
    elif model.class_weights is not None:
        problem = 'with weights of classes; allowed: loss.class_weights = "none"'
    elif model.num_parameters > MOST_PARAMETERS:
        most = f"at most {MOST_PARAMETERS}, as the exact solution needs a Hessian"
        problem = f"for a model of {model.num_parameters} trained numbers; allowed: {most}"
    elif unsteady is not None:
        why = f"with {unsteady}, whose clients train another function than they are judged by"
        problem = f"for a model {why}; allowed: layers that do the same in training and in evaluation"
    elif model.not_stackable is not None:
        problem = f"for this model ({model.not_stackable})"
    if problem:
        raise UserError(f"Alpha can't be measured {problem}.")


def unsteady_layer(model: Model) -> str | None:
    """Name a layer whose outputs in training depend on chance or on the other samples of a batch, if there is one."""
    with torch.random.fork_rng(devices=[]):
        for layer in model.build().modules():
            drops = isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0
            if drops or isinstance(layer, _BatchNorm) or (isinstance(layer, _DropoutNd) and layer.p > 0):
                return type(layer).__name__
    return None


def choose_clients(training: Training, round_index: int) -> Tensor:
    """Choose at most 20 clients of a round's cohort by their names, ``[C]`` positions in ascending order."""
    cohort = training.sample(round_index)
    return cohort[choose(training.federation.keys[cohort], _MOST_CLIENTS, SOLVER, training.seed, round_index)]


def measure_alpha(training: Training, state: State, clients: Tensor | None = None) -> Inexactness:
    """Let clients train for the round that follows ``state``, which is left as it is, and judge their solutions.

    ``clients`` are positions ``[C]``; those of :func:`choose_clients` when not given.
    """
    check_measurable(training.algorithm, training.codec is not None)
    clients = choose_clients(training, state.round) if clients is None else clients
    samples = training.federation.train.take(clients).to(training.device)
    this = training.round(state.round, clients)
    plan = training.mixer.plan(state.shared, state.memory, this)
    cohort = Cohort(*plan.downloads, tree_index(state.personal, clients.to(training.device)), samples)
    model, weight_decay = training.algorithm.model, training.algorithm.solver.weight_decay
    double = Model(model.build, model.loss, torch.float64)
    judge = replace(training.algorithm, model=double, solver=Newton(weight_decay))
    resolution = max(1e-10, 10 * torch.finfo(model.dtype).eps)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for chunk in training.train(cohort, training.federation.keys[clients], state.round, this.learning_rate, plan):
        for row, position in enumerate(chunk.positions.tolist()):
            whose = ((cohort.shared, int(cohort.reads[position])), (chunk.uploads, row), (cohort.personal, position))
            trees = [tree_double(tree_index(tree, index)) for tree, index in whose]
            found[position] = _alphas(judge, resolution, samples.client(position), *trees)
    rows = zip(*(found[position] for position in range(len(clients))), strict=True)
    return Inexactness(clients, *(torch.stack(row).cpu() for row in rows))


def _alphas(
    algorithm: Algorithm, resolution: float, data: Pool, shared: Tree, upload: Tree, personal: Tree
) -> tuple[Tensor, Tensor]:
    """Return (g(end) - g*) / (g(start) - g*) of each component of one client, ``[M]``; NaN where g(start) is g*.

    Components that have leaves in common are one problem, ``[1]``. And the least and the largest eigenvalue of the
    Hessians of g, ``[2]``, at both and at the minimum.
    The ``algorithm`` and its Newton solver are in double precision. Gains below the ``resolution``, relative to g, are
    lost in the rounding of those who train.
    """
    model, solver, (inputs, targets) = algorithm.model, algorithm.solver, data
    everything = torch.ones(len(targets), dtype=torch.bool, device=targets.device)
    _, fixed = algorithm.begin(shared, personal, algorithm.score(shared, inputs, targets), everything)
    # A single model is responsible for every sample.
    responsibilities = fixed["log_responsibilities"].exp() if fixed else everything.double()[None]
    ends = [algorithm.predictor(tree, personal).components for tree in (shared, upload)]  # before and after the round
    if algorithm.common:
        components, weights = tree_stack(ends), responsibilities.expand(2, *responsibilities.shape)
    else:
        components, weights = tree_cat(ends), responsibilities.repeat(2, 1)
    losses = model.component_losses if algorithm.common else model.losses

    def loss(component: Tree, weights: Tensor) -> Tensor:
        return (weights * losses(component, inputs, targets)).sum() / len(targets)

    def value(component: Tree, weights: Tensor) -> Tensor:
        trained = trained_leaves(model, component)
        return loss(component, weights) + solver.weight_decay / 2 * inner_product(trained, trained)

    def step(component: Tree, weights: Tensor) -> Tree:
        trained, rate = trained_leaves(model, component), torch.ones(())
        moved, _, _ = solver.step(lambda leaves: (loss(component | leaves, weights), {}), trained, {}, rate)
        return component | moved

    def curvature(component: Tree, weights: Tensor) -> Tensor:
        trained = trained_leaves(model, component)
        problem = VectorObjective(lambda own: (loss(component | own, weights), {}), trained, solver.weight_decay)
        return torch.linalg.eigvalsh(jacrev(grad(problem.value))(problem.start))

    size = sum(leaf[0].numel() for leaf in trained_leaves(model, components).values())
    together = max(1, _MOST_NUMBERS // (size * max(size, len(targets))))
    steps, curvatures = vmap(step, chunk_size=together), vmap(curvature, chunk_size=together)
    met = [curvatures(components, weights)]
    start = least = vmap(value)(components, weights)
    for _ in range(_MOST_STEPS):
        components = steps(components, weights)
        values = vmap(value)(components, weights)
        if not bool((values < least - _TOLERANCE * start.abs()).any()):
            break
        least = torch.minimum(least, values)
    first, last = start.chunk(2)
    # From both ends: where one lies so far out that its Hessian vanishes, the other still finds the minimum.
    least = torch.minimum(*least.chunk(2))
    gain = first - least
    met.append(curvatures(components, weights))
    ratios = torch.where(gain > resolution * first.abs().clamp(min=1), (last - least) / gain, torch.nan)
    return ratios, torch.stack(torch.stack(met).aminmax())


@dataclass(frozen=True, eq=False)
class Recovery:
    """How much of a known truth was recovered: components up to their order, and clusters.

    Learnt components are matched with true ones, each at most once, at the least total cosine distance: of the
    components or, where they are networks, of the columns of mixture weights.
    """

    matching: list[tuple[int, int]]
    """pairs (learnt, true)"""
    component_distances: list[float]
    """cosine distance of each pair; empty where learnt components are of another kind than the true ones"""
    weight_distance: float
    """cosine distance between the matrices of mixture weights, columns matched"""
    cluster_accuracy: float
    """share of clients whose largest weight lies on the component that is truly their largest"""


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """1 - cosine of the angle between rows, ``[M, d], [R, d] -> [M, R]``."""
    return 1 - torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T


def recover(components: Tensor, weights: Tensor, true_components: Tensor, true_weights: Tensor) -> Recovery:
    """Match and compare components, ``[M, d]`` and ``[R, d]``, and mixture weights, ``[T, M]`` and ``[T, R]``."""
    distances = cosine_distance(components.double().cpu(), true_components.double())
    matched = _matched(distances, weights, true_weights)
    return replace(matched, component_distances=[float(distances[pair]) for pair in matched.matching])


def recover_clusters(weights: Tensor, true_weights: Tensor) -> Recovery:
    """Match components by the clients that weigh them alike, and compare weights; nothing is said of components."""
    columns = (each.double().cpu().T for each in (weights, true_weights))
    return _matched(cosine_distance(*columns), weights, true_weights)


def _matched(distances: Tensor, weights: Tensor, true_weights: Tensor) -> Recovery:
    """Match learnt with true components at the least total of the ``distances`` ``[M, R]``, and compare weights."""
    from scipy.optimize import linear_sum_assignment

    learnt, true = (torch.from_numpy(index) for index in linear_sum_assignment(distances.numpy()))
    matched, reference = weights.double().cpu()[:, learnt], true_weights.double()[:, true]
    flat = cosine_distance(matched.reshape(1, -1), reference.reshape(1, -1))
    translation = torch.full((len(distances),), -1)  # an unmatched component is nobody's cluster
    translation[learnt] = true
    hits = translation[weights.cpu().argmax(1)] == true_weights.argmax(1)
    matching = list(zip(learnt.tolist(), true.tolist(), strict=True))
    return Recovery(matching, [], float(flat), float(hits.double().mean()))


def optimal_distance(truth: Truth, federation: Federation) -> float | None:
    """Cosine distance to the truth of the mixture weights that are most likely beside the true components.

    None unless clients are clusters. Then the truth is a corner of the simplex, where the likelihood's slope towards
    another component, the mean of p_other / p_own - 1, is zero in expectation: many clients' optimum is no corner.
    """
    reference = truth.weights_of(federation.names).double()
    if bool((reference.max(1).values < 1).any()):
        return None
    inputs, targets = federation.train.inputs.cpu(), federation.train.targets.cpu()
    each = torch.eye(reference.shape[1])
    known = [truth.predict(inputs, one.expand(len(inputs), -1)).gather(1, targets[:, None])[:, 0] for one in each]
    losses = -torch.stack(known).double().log()
    found, samples = torch.empty_like(reference), federation.train
    for members in alike(samples.sizes, _FITTED_ROWS):
        where = Positions.first(samples.sizes[members], losses.device)
        own = losses[:, samples.offsets[members][:, None] + where.positions].movedim(0, 1)
        found[members] = vmap(lambda each, mask: fit_log_weights(each, mask=mask))(own, where.mask)
    return float(cosine_distance(found.exp().reshape(1, -1), reference.reshape(1, -1)))
