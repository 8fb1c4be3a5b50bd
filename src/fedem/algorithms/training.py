"""One solver step on one model: the piece that every gradient-trained method shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedem.algorithms.base import Batch, Mixture
from fedem.errors import UserError
from fedem.mixture import uniform_log_weights
from fedem.models.base import Model
from fedem.randomness import derive
from fedem.solvers import Solver
from fedem.tree import Tree, tree_floats, tree_map, tree_stack

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
