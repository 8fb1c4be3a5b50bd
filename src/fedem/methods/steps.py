"""One solver step on one model: the piece that every gradient-trained method shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedem.core.em import uniform_log_weights
from fedem.core.errors import UserError
from fedem.core.random import derive
from fedem.core.tree import Tree, add_prefix, take_prefix, tree_floats, tree_map, tree_stack
from fedem.methods.base import Algorithm, Batch, Local, Mixture
from fedem.models.base import Model
from fedem.solvers import Solver

Penalty = Callable[[Tree], Tensor]
"""Trained leaves -> what is added to the batch's objective."""


def trained_leaves(model: Model, parameters: Tree) -> Tree:
    """Return the leaves of ``parameters`` that are trained."""
    return {name: leaf for name, leaf in parameters.items() if name in model.trainable}


def start_memory(model: Model, solver: Solver, parameters: Tree) -> Tree:
    """Return the solver's memory for the trained leaves of ``parameters``."""
    return solver.init(trained_leaves(model, parameters))


def batch_losses(model: Model, parameters: Tree, batch: Batch) -> tuple[Tensor, Tree]:
    """Return the loss of each sample of a batch in training mode, ``[B]``, and the buffers as the pass left them.

    However often a step passes over a batch, layers that draw draw the same: it is one objective.
    """
    return model.training_losses(parameters, batch.inputs, batch.targets, batch.mask, batch.key)


def train_step(
    model: Model,
    solver: Solver,
    parameters: Tree,
    memory: Tree,
    batch: Batch,
    weights: Tensor,
    learning_rate: Tensor,
    penalty: Penalty | None = None,
    place: Callable[[Tree], Tree] | None = None,
) -> tuple[Tree, Tree]:
    """Take one step on sum_i weights_i loss_i over the batch, plus ``penalty`` of the trained leaves.

    ``place`` says at which trained leaves the losses are taken, for a model that is trained as a part of another one.

    Returns:
        the parameters (buffers too) and the solver's memory
    """
    buffers = {name: leaf for name, leaf in parameters.items() if name not in model.trainable}

    def objective(candidate: Tree) -> tuple[Tensor, Tree]:
        leaves = candidate if place is None else place(candidate)
        losses, changed = batch_losses(model, leaves | buffers, batch)
        value = (weights * losses).sum()
        return value if penalty is None else value + penalty(candidate), changed

    trained, memory, changed = solver.step(objective, trained_leaves(model, parameters), memory, learning_rate)
    return buffers | changed | trained, memory


def square_distance(first: Tree, second: Tree) -> Tensor:
    """|first - second|^2 over the leaves of ``first``."""
    differences = [(leaf - second[name]).square().sum() for name, leaf in first.items()]
    return sum(differences[1:], differences[0])


def inner_product(first: Tree, second: Tree) -> Tensor:
    """<first, second> over the leaves of ``first``."""
    products = [(leaf * second[name]).sum() for name, leaf in first.items()]
    return sum(products[1:], products[0])


def require_gradient_steps(method: str, solver: Solver) -> None:
    """Refuse solvers whose steps are not the learning rate times (a sum of) gradients."""
    if not solver.follows_gradients:
        raise UserError(
            f"Method {method} reads gradients off the local steps, and {type(solver).__name__}'s don't tell them; "
            "allowed: solver sgd."
        )


def mean_loss(losses: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``losses`` ``[n]`` over the samples that are there."""
    return (losses * mask).sum() / mask.sum()


def step_towards(old: Tree, new: Tree, rate: float) -> Tree:
    """(1 - rate) old + rate new; counters are the new ones."""
    return tree_map(lambda a, b: a + rate * (b - a) if b.is_floating_point() else b, old, new)


def distinct_models(model: Model, count: int, seed: int) -> Tree:
    """Draw ``count`` models independently, ``[count, ...]``: those that start equal never part."""
    trees = [model.init(int(derive(seed, index))) for index in range(count)]
    if count > 1 and all(torch.equal(trees[0][name], trees[1][name]) for name in model.trainable):
        raise UserError(
            "All components start equal and would stay so: the function that builds the model must draw its "
            "parameters afresh each time, from torch's global generator."
        )
    return tree_stack(trees)


def mixture_of_one(parameters: Tree) -> Mixture:
    """Return one model as a predictor."""
    like = next(iter(tree_floats(parameters).values()))
    return Mixture(tree_map(lambda leaf: leaf.unsqueeze(0), parameters), uniform_log_weights(1, like))


# Methods whose clients train one copy of one shared model; what they do besides is theirs to say.


@dataclass(frozen=True, eq=False)
class SingleModel(Algorithm):
    """u is one model and nothing is personal, unless a subclass says otherwise."""

    def init_shared(self, seed: int) -> Tree:
        """Draw one model."""
        return self.model.init(seed)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        """The surrogate is the loss itself."""
        return Local(shared, personal, start_memory(self.model, self.solver, shared), {}), {}

    def penalty(self, local: Local) -> Penalty | None:
        """Return what the surrogate adds to the loss as a function of the trained leaves; None for nothing."""
        return None

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        """One solver step on the batch's mean loss and the penalty."""
        model, solver, penalty = self.model, self.solver, self.penalty(local)
        shared, memory = train_step(
            model, solver, local.shared, local.memory, batch, batch.weights, learning_rate, penalty
        )
        return local._replace(shared=shared, memory=memory)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """The shared model alone."""
        return mixture_of_one(shared)

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """Nothing to fit: an unseen client takes the shared model."""
        return {}


# Methods whose clients have a model of their own, v_t, beside the shared one.


@dataclass(frozen=True, eq=False)
class OwnModel(SingleModel):
    """Until a client has first trained, its own model is u, and that is what it starts from: u as it is by then."""

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        """A place for the model, which nobody has trained."""
        return add_prefix("own", shared) | {"trained": torch.zeros((), dtype=torch.bool, device=key.device)}

    def own(self, shared: Tree, personal: Tree) -> Tree:
        """Return the client's own model."""
        return tree_map(lambda v, u: torch.where(personal["trained"], v, u), take_prefix("own", personal), shared)

    def begun(self, shared: Tree, personal: Tree) -> tuple[Tree, Tree]:
        """Return the own model that a round starts from, and v_t with it."""
        own = self.own(shared, personal)
        return own, personal | add_prefix("own", own)

    def trained(self, own: Tree, personal: Tree) -> Tree:
        """Return v_t with the own model after a step."""
        return personal | add_prefix("own", own) | {"trained": torch.ones_like(personal["trained"])}

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        """The own model."""
        return mixture_of_one(self.own(shared, personal))

    def adapt(self, shared: Tree, scores: Tree, max_iterations: int | None) -> Tree | None:
        """An unseen client trains its own model by the method's own steps, u fixed."""
        return None


# Means in which every client counts for each of several models by a mass of its own.
#
# Clients upload models ``[K, ...]`` (or one of them) and masses ``[K]``; both are averaged, and the server divides.


def times_mass(models: Tree, mass: Tensor) -> Tree:
    """Return what a client adds to the means: each model times its mass, and the masses ``[K]``."""

    def weighed(leaf: Tensor) -> Tensor:
        rows = _rows(mass, leaf)
        # Counters are not averaged.
        return rows.to(leaf.dtype) * leaf if leaf.is_floating_point() else torch.where(rows > 0, leaf, 0)

    return add_prefix("model", tree_map(weighed, models)) | {"mass": mass}


def mean_by_mass(shared: Tree, mean: Tree) -> Tree:
    """Divide the mean of :func:`times_mass` by its mass; a model that nobody counts for stays as it is."""
    mass = mean["mass"]

    def divided(old: Tensor, new: Tensor) -> Tensor:
        rows = _rows(mass, old)
        if not old.is_floating_point():
            return torch.where(rows > 0, new, old)
        return torch.where(rows > 0, new / rows.clamp(min=torch.finfo(mass.dtype).tiny).to(new.dtype), old)

    return tree_map(divided, shared, take_prefix("model", mean))


def _rows(mass: Tensor, like: Tensor) -> Tensor:
    """Give ``[K]`` values as many dimensions as ``like`` ``[K, ...]`` has."""
    return mass.reshape(-1, *(1,) * (like.ndim - 1))
