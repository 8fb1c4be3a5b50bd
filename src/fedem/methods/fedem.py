"""FedEM: M shared component models, private mixture weights (Alg. 1 of the paper).

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS 2021.

Shapes: M components, n samples of the client, B of a batch.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.func import vmap

from fedem.core import em
from fedem.core.errors import UserError
from fedem.core.random import uniform
from fedem.core.tree import Tree, add_prefix, row_of, take_prefix, tree_to
from fedem.methods.base import AUTO, Batch, Local, Method, Mixture, Trained, register
from fedem.methods.mixer import Star
from fedem.methods.steps import (
    NONE_SHARED,
    common_leaves,
    distinct_models,
    mean_by_mass,
    times_mass,
    train_step,
    trained_leaves,
)
from fedem.methods.surrogate import Fixed, Surrogate
from fedem.models.base import num_components

_LEAST = 1e-12  # of a mixture weight that Balanced FedEM divides by: below, a component hardly moves at the client


@dataclass(frozen=True, eq=False)
class FedEM(Surrogate):
    """u: the M components. v_t: the log mixture weights. The surrogate is fixed by the responsibilities.

    Attributes:
        num_components: M, how many component models all clients share; 1 is FedAvg. "auto" finds it: in the first half
            of training components that are not worth keeping are removed, and one that carries much is split.
        initial_components: with "auto", how many components there are at first; more than are thought to be needed.
        least_gain: with "auto", by how many nats per validation sample a component must better the clients' loss to be
            kept. Without validation samples it must be worth its parameters, by BIC.
        shared_layers: layers that the components have in common, with commas between: "body" for all but the last one,
            which leaves M heads on one network; "50%" for the first half; or names of layers and parameters, in which *
            stands for anything. "none": components are whole models, as in the paper.
        own_speed: where layers are shared, what the gradients of the others are multiplied by. A component's own layers
            learn from its share of the samples, 1/M on average; so with M they keep pace with the shared ones.
        initial_weights: "random" draws each client's mixture weights uniformly from the simplex, as the paper does;
            "uniform" starts all at 1/M.
        sharpness: s, the power that likelihoods have in the responsibilities. 1 is the paper's; smaller ones let the
            components share samples, until near 0 each is trained on all of them; larger ones part them.
        unseen_prior: pseudo-count of samples, in equal shares certainly of each component, that a client unseen in
            training adds to its own when it fits its mixture weights; 0 takes the most likely weights.
        unseen_updates: updates of EM, from uniform weights, by which such a client fits them; 0 goes on until they
            converge. 1 is the paper's rule. A fixed number of updates takes no prior.
    """

    uploads_model: ClassVar[bool] = True
    compressible: ClassVar[bool] = True
    takes_label_shares: ClassVar[bool] = True
    minimises_likelihood: ClassVar[bool] = True
    is_mixture: ClassVar[bool] = True

    num_components: int | str = field(default=3, metadata={"min": 1, "choices": (AUTO,)})
    initial_components: int = field(default=8, metadata={"min": 1})
    least_gain: float = field(default=0.01, metadata={"min": 0})
    shared_layers: str = field(default=NONE_SHARED, metadata={"each": str.strip})
    own_speed: float = field(default=1.0, metadata={"above": 0, "came_later": True})
    initial_weights: str = field(default="random", metadata={"choices": ("random", "uniform")})
    sharpness: float = field(default=1.0, metadata={"above": 0})
    unseen_prior: float = field(default=1.0, metadata={"min": 0, "acts": "scores"})
    unseen_updates: int = field(default=0, metadata={"min": 0, "acts": "scores"})

    def suitable_rate(self, curvature: float) -> float:
        """Responsibilities below one make a component's loss bend less than a single model's."""
        return 2 / curvature

    @cached_property
    def common(self) -> frozenset[str]:
        """The leaves of the shared layers."""
        return common_leaves(self.model, self.shared_layers)

    @property
    def first_components(self) -> int:
        """How many components there are before the first round."""
        return self.initial_components if isinstance(self.num_components, str) else self.num_components

    def init_shared(self, seed: int) -> Tree:
        return distinct_models(self.model, self.first_components, seed, self.common)

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """Log mixture weights ``[M]``, for as many components as there are."""
        like, count = torch.empty(0, dtype=self.model.dtype, device=key.device), num_components(shared)
        if self.initial_weights == "uniform":
            return {"log_weights": em.uniform_log_weights(count, like)}
        # Normalised exponential draws are uniform on the simplex.
        exponentials = -uniform(key, count).log()
        return {"log_weights": (exponentials / exponentials.sum()).log().to(like)}

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        """Each component's loss on each sample, in evaluation mode, ``[M, n]``."""
        return {"losses": self.model.component_losses(shared, inputs, targets)}

    def objective(self, shared: Tree, personal: Tree, batch: Batch) -> Tensor:
        """-1/s log sum_m pi_m p_m^s, which is the mixture's negative log-likelihood where s = 1."""
        losses = self.model.component_losses(shared, batch.inputs, batch.targets)
        return (batch.weights * em.negative_log_likelihood(losses, personal["log_weights"], self.sharpness)).sum()

    def fix(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> Fixed:
        """E-step over all training samples (Eq. 4), ``[M, n]``."""
        log_posterior = em.log_responsibilities(scores["losses"], personal["log_weights"], self.sharpness)
        return Fixed({"log_responsibilities": log_posterior}, {})

    def minimise(self, shared: Tree, scores: Tree, fixed: Fixed, mask: Tensor) -> Tree:
        """The mean responsibilities (Eq. 5), whatever the components."""
        return {"log_weights": em.update_log_weights(fixed.columns["log_responsibilities"], mask)}

    def majorant(self, shared: Tree, personal: Tree, context: Tree, batch: Batch) -> Tensor:
        """sum_m q_m (loss_m + 1/s log(q_m / pi_m)): the objective and 1/s the divergence of q from the posterior."""
        log_posterior = batch.samples["log_responsibilities"]
        responsibilities = log_posterior.exp()
        losses = self.model.component_losses(shared, batch.inputs, batch.targets)
        terms = losses + (log_posterior - personal["log_weights"][:, None]) / self.sharpness
        # 0 log 0 is 0, whatever the weight.
        return (batch.weights * responsibilities * terms.masked_fill(responsibilities == 0, 0)).sum()

    def between(self, first: Tree, second: Tree, share: float) -> Tree:
        """On the simplex."""
        return {"log_weights": torch.lerp(first["log_weights"].exp(), second["log_weights"].exp(), share).log()}

    def start(self, parameters: Tree) -> Tree:
        """A solver's state for each component, ``[M, ...]``; one for all where they have leaves in common."""
        return super().start(parameters) if self.common else vmap(super().start)(parameters)

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """One solver step for each component on its responsibility-weighted loss (Eq. 6).

        In u the surrogate is a sum over components, so each has a solver of its own: a Hessian of one component and
        not of all, a step length that suits it. Losses are those of training mode, and buffers change.
        """
        responsibilities, speeds = batch.samples["log_responsibilities"].exp(), self.speeds(local, batch)
        if self.common:
            return self._joint_step(local, batch, learning_rate, responsibilities, speeds)

        def one(component: Tree, state: Tree, counts: Tensor) -> tuple[Tree, Tree]:
            weighted = batch._replace(weights=batch.weights * counts)
            return train_step(self.model, self.solver, component, state, weighted, learning_rate)

        step = self.model.over_components(one, (0, 0, 0))
        shared, solver_state = step(local.shared, local.solver_state, speeds[:, None] * responsibilities)
        return local._replace(shared=shared, solver_state=solver_state)

    def _joint_step(
        self, local: Local, batch: Batch, learning_rate: Tensor, responsibilities: Tensor, speeds: Tensor
    ) -> Local:
        """One solver step on the sum over components: what they have in common gets the gradient of all samples.

        Responsibilities sum to one, so that common leaves never starve, however few samples a component has.
        """
        leaves, mask = trained_leaves(self.model, local.shared), batch.masks[0] if batch.masks else None

        def quickened(leaf: Tensor) -> Tensor:
            """The same numbers, whose gradient is multiplied by its component's speed."""
            return leaf.detach() + row_of(speeds, leaf) * (leaf - leaf.detach())

        def objective(candidate: Tree) -> tuple[Tensor, Tree]:
            own = {name: quickened(leaf) for name, leaf in candidate.items() if name not in self.common}
            models = local.shared | candidate | own
            losses, changed = self.model.component_training_losses(models, *batch[:2], mask, batch.key)
            return (batch.weights * responsibilities * losses).sum(), changed

        trained, solver_state, changed = self.solver.step(objective, leaves, local.solver_state, learning_rate)
        return local._replace(shared=local.shared | changed | trained, solver_state=solver_state)

    def speeds(self, local: Local, batch: Batch) -> Tensor:
        """What the gradients of each component's own leaves are multiplied by, ``[M]``."""
        return torch.full_like(local.personal["log_weights"], self.own_speed)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return Mixture(shared, personal["log_weights"])

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        """Fit the mixture weights alone, from uniform; one update is the paper's rule for unseen clients.

        By likelihoods as they are, whatever the sharpness, since predictions are averaged so.
        """
        updates = self.unseen_updates if max_iterations is None else max_iterations
        return {"log_weights": em.fit_log_weights(scores["losses"], updates or None, self.unseen_prior, mask)}

    def check(self, inputs: Tensor) -> None:
        """Any model will do: the E-step is in evaluation mode, as in the paper, and the steps in training mode.

        Layers must be there to be shared, and statistics of a shared layer must be those of shared inputs.
        """
        if self.own_speed != 1:
            said = f"method.own_speed is {self.own_speed}"
            if not self.common:
                raise UserError(f"{said}, but components share no layers; allowed: 1, or method.shared_layers.")
            if not self.solver.follows_gradients:
                taken = f"{type(self.solver).__name__}'s steps are not as long as gradients are"
                raise UserError(f"{said}, by which gradients are multiplied, and {taken}; allowed: solver sgd.")
        if self.common <= self.model.trainable or self.model.not_stackable is not None:
            return
        shared, key = tree_to(self.init_shared(0), inputs.device), torch.tensor(0, device=inputs.device)
        run = self.model.each_component(shared, lambda one, some: self.model.training_outputs(one, some, None, key))
        try:
            run(inputs)
        except RuntimeError as error:
            said = f"method.shared_layers is {self.shared_layers!r}, but a layer with statistics among them"
            allowed = "allowed: body, or layers that begin with the first one"
            raise UserError(f"{said} comes after one that is not shared ({error}); {allowed}.") from error


@final
@dataclass(frozen=True, eq=False)
class BalancedFedEM(FedEM):
    """FedEM with steps on each component's mean loss, and means by responsibilities. M = 1 is FedAvg.

    FedEM's step on a component is the shorter the less the component is responsible for: one that falls behind early
    loses responsibilities, and with them its steps. Here a client divides a component's objective by its mixture weight
    pi_tm, the mean responsibility, and counts n_t pi_tm in the component's average instead of n_t, as FedAvg counts
    samples. The sum over clients, sum_t n_t pi_tm (g_tm / pi_tm), is FedEM's surrogate. The server learns the mixture
    weights of those who take part.
    """

    uploads_model: ClassVar[bool] = False

    def speeds(self, local: Local, batch: Batch) -> Tensor:
        """One over the mean responsibility among the client's samples, or in the batch where that is larger.

        So a batch with most of a component's responsibilities never counts for more than a mean over samples.
        """
        here = (batch.samples["log_responsibilities"].exp() * batch.weights).sum(1)
        return super().speeds(local, batch) / torch.maximum(self._mass(local), here)

    def _mass(self, local: Local) -> Tensor:
        """The client's mixture weights ``[M]``, as they are divided by."""
        return local.personal["log_weights"].exp().clamp(min=_LEAST)

    def finish(self, local: Local) -> Trained:
        return Trained(add_prefix("model", local.shared) | {"mass": self._mass(local)}, local.personal, local.shared)

    def summand(self, upload: Tree) -> Tree:
        return times_mass(take_prefix("model", upload), upload["mass"])

    def update(self, shared: Tree, mean: Tree, share: float) -> Tree:
        return mean_by_mass(shared, mean)

    def check(self, inputs: Tensor) -> None:
        """With shared layers, no one function is minimised: they step on all samples, the others on their own share."""
        if self.common and not self.solver.obeys_rate:
            said = f"method.shared_layers is {self.shared_layers!r}, but Balanced FedEM's steps then follow gradients"
            raise UserError(f"{said}, and {type(self.solver).__name__} takes its own; allowed: solvers sgd and adam.")
        super().check(inputs)


@final
@dataclass(frozen=True, eq=False)
class FedEMHeads(FedEM):
    """FedEM whose components share their body: M heads on one network, at little more than FedAvg's cost."""

    parts_model: ClassVar[bool] = True

    shared_layers: str = field(default="body", metadata={"each": str.strip})


register(
    Method("fedem", FedEM, Star, title="FedEM", summary="M shared components, private mixture weights",
           paper="Marfoq et al. 2021", personal="mixture weights", sent="M models", unseen="fits its mixture weights",
           position=10),
    Method("bfedem", BalancedFedEM, Star, title="Balanced FedEM",
           summary="FedEM whose components train at full speed, however few samples they are responsible for",
           personal="mixture weights, which the server sees", sent="M models, and M mixture weights up",
           unseen="fits its mixture weights", position=220),
    Method("fedem-heads", FedEMHeads, Star, title="FedEM heads",
           summary="FedEM whose components are M heads on one shared network", personal="mixture weights",
           sent="a model with M heads", unseen="fits its mixture weights", position=240),
)  # fmt: skip
