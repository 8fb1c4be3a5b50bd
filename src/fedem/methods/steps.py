"""What methods are made of: solver steps on a model, single and own models, means by mass.

Shapes: n samples of the client, B samples of a batch, K models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedem.core.em import uniform_log_weights
from fedem.core.errors import UserError
from fedem.core.random import derive
from fedem.core.tree import Tree, add_prefix, row_of, take_prefix, tree_floats, tree_map, tree_stack
from fedem.methods.base import Algorithm, Batch, Local, Mixture
from fedem.models.base import Model
from fedem.solvers import Solver

Penalty = Callable[[Tree], Tensor]  # trained leaves -> what is added to the batch's objective
Place = Callable[[Tree], Tree]  # trained leaves -> those where losses are taken, for a model trained as part of another


def trained_leaves(model: Model, parameters: Tree) -> Tree:
    """Return the leaves of ``parameters`` that are trained."""
    return {name: leaf for name, leaf in parameters.items() if name in model.trainable}


def batch_loss(model: Model, parameters: Tree, batch: Batch) -> tuple[Tensor, Tree]:
    """Return sum_i weights_i loss_i over a batch in training mode, and the buffers as the pass left them.

    However often a step passes over a batch, layers that draw draw the same: it is one objective.
    """
    mask = batch.masks[0] if batch.masks else None
    losses, changed = model.training_losses(parameters, batch.inputs, batch.targets, mask, batch.key)
    return (batch.weights * losses).sum(), changed


def train_step(
    model: Model,
    solver: Solver,
    parameters: Tree,
    solver_state: Tree,
    batch: Batch,
    learning_rate: Tensor,
    penalty: Penalty | None = None,
    place: Place | None = None,
) -> tuple[Tree, Tree]:
    """Take one step on :func:`batch_loss` plus ``penalty``; returns the parameters (buffers too) and the state."""
    buffers = {name: leaf for name, leaf in parameters.items() if name not in model.trainable}

    def objective(candidate: Tree) -> tuple[Tensor, Tree]:
        leaves = candidate if place is None else place(candidate)
        value, changed = batch_loss(model, leaves | buffers, batch)
        return value if penalty is None else value + penalty(candidate), changed

    leaves = trained_leaves(model, parameters)
    trained, solver_state, changed = solver.step(objective, leaves, solver_state, learning_rate)
    return buffers | changed | trained, solver_state


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
        problem = f"Method {method} reads gradients off the local steps, and {type(solver).__name__}'s don't show them"
        raise UserError(f"{problem}; allowed: solver sgd.")


def mean_loss(losses: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``losses`` ``[n]`` over the samples that are there."""
    return (losses * mask).sum() / mask.sum()


def distinct_models(model: Model, count: int, seed: int, common: frozenset[str] = frozenset()) -> Tree:
    """Draw ``count`` models independently, ``[count, ...]``: those that start equal never part.

    Of leaves that they have in ``common`` there is one row, the first one's.
    """
    trees = [model.init(int(derive(seed, index))) for index in range(count)]
    if count > 1 and all(torch.equal(trees[0][name], trees[1][name]) for name in model.trainable - common):
        remedy = "the function that builds the model must draw its parameters afresh each time"
        raise UserError(f"All components start equal and would stay so: {remedy}, from torch's global generator.")
    return {name: leaf[:1] if name in common else leaf for name, leaf in tree_stack(trees).items()}


NONE_SHARED = "none"  # the word for shared_layers where components have nothing in common


def common_leaves(model: Model, words: str) -> frozenset[str]:
    """Return the leaves that ``shared_layers`` names, which components share; refuse what leaves nothing apart."""
    if words == NONE_SHARED:
        return frozenset()
    found = model.leaves_called(words)
    if found >= model.trainable:
        said = f"method.shared_layers is {words!r}, which names all that the model trains, so components would be one"
        raise UserError(f"{said}; allowed: body, for all but the last layer, or other layers, or none.")
    return found


def mixture_of_one(parameters: Tree) -> Mixture:
    """Return one model as a predictor."""
    like = next(iter(tree_floats(parameters).values()))
    return Mixture(tree_map(lambda leaf: leaf.unsqueeze(0), parameters), uniform_log_weights(1, like))


@dataclass(frozen=True, eq=False)
class SingleModel(Algorithm):
    """Clients train one copy of one shared model, and nothing is personal, unless a subclass says otherwise.

    It declares that a client uploads that copy and the server averages; a subclass with another ``finish``,
    ``summand`` or ``update`` must declare what of this no longer holds.
    """

    uploads_model: ClassVar[bool] = True
    compressible: ClassVar[bool] = True

    def init_shared(self, seed: int) -> Tree:
        return self.model.init(seed)

    def begin(self, shared: Tree, personal: Tree, scores: Tree, mask: Tensor) -> tuple[Local, Tree]:
        return Local(shared, personal, self.start(shared), {}), {}

    def penalty(self, local: Local) -> Penalty | None:
        """Return what the surrogate adds to the loss as a function of the trained leaves; None for nothing."""
        return None

    def step(self, local: Local, batch: Batch, learning_rate: Tensor) -> Local:
        return self.plain_step(local, batch, learning_rate, self.penalty(local))

    def plain_step(
        self, local: Local, batch: Batch, rate: Tensor, penalty: Penalty | None = None, place: Place | None = None
    ) -> Local:
        """Take one solver step on the client's copy of u; arguments as in :func:`train_step`."""
        shared, state = local.shared, local.solver_state
        shared, state = train_step(self.model, self.solver, shared, state, batch, rate, penalty, place)
        return local._replace(shared=shared, solver_state=state)

    def holding_step(self, local: Local, batch: Batch, rate: Tensor, held: frozenset[str]) -> Local:
        """Take one solver step in which the leaves ``held`` stay as they are.

        The solver is shown zeros in their place, at the bottom of a bowl of their own, |held|^2 / 2. So it finds no
        slope and nothing to decay there and remembers nothing of them, and the others move as if these were constants,
        whatever the solver.
        """
        constants = {name: leaf for name, leaf in local.shared.items() if name in held}

        def restored(tree: Tree) -> Tree:
            return tree | {name: constants[name] for name in constants.keys() & tree.keys()}

        def bowl(candidate: Tree) -> Tensor:
            own = {name: leaf for name, leaf in candidate.items() if name in held}
            return inner_product(own, own) / 2

        zeros = tree_map(torch.zeros_like, trained_leaves(self.model, constants))
        stepped = self.plain_step(local._replace(shared=local.shared | zeros), batch, rate, bowl, restored)
        return stepped._replace(shared=stepped.shared | constants)

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return mixture_of_one(shared)

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        """Nothing to fit: an unseen client takes the shared model."""
        return {}


@dataclass(frozen=True, eq=False)
class OwnModel(SingleModel):
    """Beside the shared model clients have one of their own, v_t.

    Until a client has first trained, its own model is u, and that is what it starts from: u as it is by then.
    """

    steps_personal: ClassVar[bool] = True

    def init_personal(self, shared: Tree, key: Tensor) -> Tree:
        return add_prefix("own", shared) | {"trained": torch.zeros((), dtype=torch.bool, device=key.device)}

    def own_model(self, shared: Tree, personal: Tree) -> Tree:
        return tree_map(lambda v, u: torch.where(personal["trained"], v, u), take_prefix("own", personal), shared)

    def begin_both(self, shared: Tree, personal: Tree, context: Tree) -> Local:
        own = self.own_model(shared, personal)
        solver_state = add_prefix("shared", self.start(shared)) | add_prefix("own", self.start(own))
        return Local(shared, personal | add_prefix("own", own), solver_state, context)

    def step_both(
        self, local: Local, batch: Batch, rate: Tensor, penalty: Penalty | None = None, place: Place | None = None
    ) -> Local:
        """Step the shared model on the batch, and the own one with ``penalty`` or at another ``place``."""
        stepped = self.plain_step(local._replace(solver_state=take_prefix("shared", local.solver_state)), batch, rate)
        own, own_state = take_prefix("own", local.personal), take_prefix("own", local.solver_state)
        own, own_state = train_step(self.model, self.solver, own, own_state, batch, rate, penalty, place)
        solver_state = add_prefix("shared", stepped.solver_state) | add_prefix("own", own_state)
        return stepped._replace(personal=self.with_own(own, local.personal), solver_state=solver_state)

    def with_own(self, own: Tree, personal: Tree) -> Tree:
        return personal | add_prefix("own", own) | {"trained": torch.ones_like(personal["trained"])}

    def predictor(self, shared: Tree, personal: Tree) -> Mixture:
        return mixture_of_one(self.own_model(shared, personal))

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        """An unseen client trains its own model by the method's own steps, u fixed."""
        return None


def times_mass(models: Tree, mass: Tensor) -> Tree:
    """Return what a client adds to means in which it counts for each of K models by a mass of its own.

    That is each model ``[K, ...]`` times its mass, and the masses ``[K]``; :func:`mean_by_mass` divides their means.
    For leaves that all models have in common, ``[1, ...]``, it counts whole.
    """

    def weighed(leaf: Tensor) -> Tensor:
        if len(leaf) < len(mass):
            return leaf
        rows = row_of(mass, leaf)
        # Counters are not averaged.
        return rows.to(leaf.dtype) * leaf if leaf.is_floating_point() else torch.where(rows > 0, leaf, 0)

    return add_prefix("model", tree_map(weighed, models)) | {"mass": mass}


def mean_by_mass(shared: Tree, mean: Tree) -> Tree:
    """Divide the mean of :func:`times_mass` by its mass; a model that nobody counts for stays as it is."""
    mass = mean["mass"]

    def divided(old: Tensor, new: Tensor) -> Tensor:
        if len(old) < len(mass):
            return new
        rows = row_of(mass, old)
        quotient = new / rows.clamp(min=torch.finfo(mass.dtype).tiny).to(new.dtype) if new.is_floating_point() else new
        return torch.where(rows > 0, quotient, old)

    return tree_map(divided, shared, take_prefix("model", mean))
