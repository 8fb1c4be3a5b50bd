"""One solver step on one model: the piece that every gradient-trained method shares."""

from __future__ import annotations

from torch import Tensor

from fedem.algorithms.base import Batch
from fedem.models.base import Model
from fedem.solvers import Solver
from fedem.tree import Tree


def start_memory(model: Model, solver: Solver, parameters: Tree) -> Tree:
    """Return the solver's memory for the trained leaves of ``parameters``."""
    return solver.init({name: leaf for name, leaf in parameters.items() if name in model.trainable})


def train_step(
    model: Model, solver: Solver, parameters: Tree, memory: Tree, batch: Batch, weights: Tensor, learning_rate: Tensor
) -> tuple[Tree, Tree]:
    """Take one step on sum_i weights_i loss_i over the batch; returns the parameters (buffers too) and the memory."""
    buffers = {name: leaf for name, leaf in parameters.items() if name not in model.trainable}
    trained = {name: leaf for name, leaf in parameters.items() if name in model.trainable}

    def objective(candidate: Tree) -> tuple[Tensor, Tree]:
        losses, changed = model.training_losses(candidate | buffers, batch.inputs, batch.targets)
        return (weights * losses).sum(), changed

    trained, memory, changed = solver.step(objective, trained, memory, learning_rate)
    return buffers | changed | trained, memory
