"""Federated surrogate optimisation, with a server or over a graph; one client's f and g, tried before work starts.

Shapes: T clients, G groups, c clients stacked together, n samples of a client.
"""

from collections.abc import Callable
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map as pytree_map

from fedem.core.errors import UserError
from fedem.core.random import COMPONENTS, PERSONAL, derive
from fedem.core.tree import Tree, tree_index
from fedem.data.federation import Federation
from fedem.engines import Batching, Cohort, OneByOne, choose_engine
from fedem.engines.base import Positions, alike
from fedem.engines.stacked import Chunk
from fedem.methods.base import Batch
from fedem.methods.mixer import Mixer, Star
from fedem.methods.surrogate import Fixed, Surrogate
from fedem.runs.rounds import State, Training, cohort_size, mixer_seed
from fedem.solvers.schedules import Constant

_MOST_ROWS = 1 << 15  # samples judged at once
_FEW = 8  # samples: enough to see whether a model, or a round, can be run at all
WHOLE = (int, np.integer)  # types of whole numbers


class Outcome(NamedTuple):
    """The result of an optimisation."""

    state: State  # u of each group, [G, ...], one with a server; v_t of each client, [T, ...]
    history: tuple[float, ...]  # f = sum_t n_t / n f_t(u_t, v_t) at the start and after each round


def optimise(
    surrogate: Surrogate,
    federation: Federation,
    *,
    rounds: int,
    learning_rate: float,
    steps: int = 1,
    batch_size: int = 0,
    mixer: Mixer | None = None,
    seed: int = 0,
    clients_per_round: float = 1.0,
    listener: Callable[[int, float], None] | None = None,
) -> Outcome:
    """Minimise sum_t n_t / n f_t(u, v_t) over all clients' training samples.

    In a round each client builds its surrogate near (u, v_t), sets v_t to the minimiser, and takes ``steps`` steps in u
    with the surrogate's solver, over ``batch_size`` samples each (0 for all of the client's); then the u's are mixed.
    ``mixer`` says who averages with whom: None for a server, :class:`fedem.methods.Graph` for neighbours. ``seed`` is
    that of the initial u and v_t, of cohorts and of batches. ``clients_per_round`` is a share up to 1.0, or a number
    from 2. ``listener`` is called with the number of rounds done and f, as the history has them.
    """
    require_surrogate(surrogate)
    require("federation", federation, isinstance(federation, Federation), "a fedem.Federation")
    require_counts(rounds=rounds, steps=steps)
    mixers = "None for a server, or a mixer such as fedem.methods.Graph()"
    require("mixer", mixer, mixer is None or isinstance(mixer, Mixer), mixers)
    require("seed", seed, isinstance(seed, WHOLE), "a whole number")
    require("learning_rate", learning_rate, learning_rate > 0, "above 0")
    require("batch_size", batch_size, batch_size >= 0, "at least 0")
    require("clients_per_round", clients_per_round, isinstance(clients_per_round, int | float), "a number")
    mixer = Star() if mixer is None else mixer
    weighting = mixer.weighting if isinstance(mixer, Star) else "samples"
    require("mixer.weighting", weighting, weighting == "samples", "samples, as f counts clients")
    device, samples = torch.device("cpu"), federation.train
    inputs = samples.span(0, min(_FEW, len(samples))).inputs
    batching, schedule = Batching(batch_size, local_steps=steps), Constant(learning_rate)
    surrogate.model.probe(inputs)
    surrogate.check(inputs)
    mixer.check(federation.keys, mixer_seed(seed))
    engine = choose_engine("auto", 0, surrogate.model, device)
    cohort = cohort_size(clients_per_round, federation.num_clients)
    training = Training(surrogate, engine, batching, seed, mixer, schedule, federation, rounds, cohort, device)
    # A surrogate must not fail on the client with the fewest samples, nor on the one with the most.
    for position in sorted({int(samples.sizes.argmin()), int(samples.sizes.argmax())}):
        client = OneClient(surrogate, *samples.client(position), position)
        key = derive(federation.keys[position], PERSONAL, seed)
        client.try_out(*client.start(int(derive(seed, COMPONENTS)), key), key)
    state = training.init()
    history: list[float] = []
    while True:
        history.append(_objective(surrogate, training, state))
        if listener is not None:
            listener(state.round, history[-1])
        if state.round == rounds:
            return Outcome(state, tuple(history))
        state, _ = training.step(state)


def _objective(surrogate: Surrogate, training: Training, state: State) -> float:
    """f, everybody with its own u and v_t."""
    samples = training.federation.train
    served = training.mixer.read(state.shared, state.memory, torch.arange(samples.num_clients))
    cohort = Cohort(*served, state.personal, samples)
    total, alone = 0.0, isinstance(training.engine, OneByOne)
    with torch.no_grad():
        for some in alike(samples.sizes, 1 if alone else _MOST_ROWS):
            values = _objectives(surrogate, Chunk.of(cohort, some), alone)
            total += float(values.double() @ samples.sizes[some].double())
    return total / len(samples)


def _objectives(surrogate: Surrogate, chunk: Chunk, alone: bool) -> Tensor:
    """f_t of each client of a chunk, ``[c]``; a client that stands ``alone`` is not stacked."""
    if alone:
        group = chunk.shared if chunk.shared_dim is None else tree_index(chunk.shared, 0)
        position = int(chunk.members[0])
        own = OneClient(surrogate, *chunk.samples.client(position), position)
        return own.objective(group, tree_index(chunk.personal, 0))[None]
    where = Positions.first(chunk.sizes, chunk.starts.device)
    weights = where.mask.to(surrogate.model.dtype) / where.mask.sum(1, keepdim=True)
    batch = Batch(*chunk.read(where), weights, {}, torch.zeros_like(chunk.starts), (where.mask,))
    return vmap(surrogate.objective, in_dims=(chunk.shared_dim, 0, 0))(chunk.shared, chunk.personal, batch)


class OneClient:
    """A client's f and g as functions of (u, v), on samples ``[n, ...]`` and ``[n]``; errors name the function.

    Where the client is ``doubled``, it stands beside itself as an engine stacks clients, in a first dimension of two.
    """

    def __init__(self, surrogate: Surrogate, inputs: Tensor, targets: Tensor, position: int = 0, doubled: bool = False):
        self._surrogate, self._samples, self._position, self._doubled = surrogate, (inputs, targets), position, doubled
        self._kind = type(surrogate).__name__
        self._mask = torch.ones(len(targets), dtype=torch.bool)
        weights = torch.full((len(targets),), 1 / len(targets), dtype=surrogate.model.dtype)
        self._batch = Batch(inputs, targets, weights, {}, torch.zeros((), dtype=torch.int64))
        if doubled:
            self._samples, self._mask, self._batch = _twice((self._samples, self._mask, self._batch))

    def call(self, function: str, *arguments: Any) -> Any:
        try:
            method = getattr(self._surrogate, function)
            return (vmap(method) if self._doubled else method)(*arguments)
        except Exception as error:  # a user's function may raise anything
            complaint = f"failed on client {self._position}: {_reason(error, arguments)}"
            if self._doubled:
                reason, _, _ = _reason(error, arguments).partition(". ")  # torch goes on to ask for a report
                allowed = "pure functions of tensors that don't branch on values (torch.where does what an if would)"
                complaint = f"can't be stacked over clients ({reason}); allowed: {allowed}"
            raise UserError(f"{self._kind}.{function} {complaint}.") from error

    def _refusal(self, function: str, found: str, allowed: str) -> UserError:
        return UserError(f"{self._kind}.{function} returns {found}; allowed: {allowed}.")

    def tree(self, function: str, *arguments: Any) -> Tree:
        return self._tree(function, self.call(function, *arguments))

    def _tree(self, function: str, value: Any) -> Tree:
        if not is_tree(value):
            raise self._refusal(function, _described(value), "a dictionary from names to tensors")
        return value

    def _number(self, function: str, *arguments: Any) -> Tensor:
        value = self.call(function, *arguments)
        if not isinstance(value, Tensor) or value.shape != self._mask.shape[:-1] or not value.is_floating_point():
            raise self._refusal(function, _described(value), "one number, a floating tensor of shape []")
        return value

    def _scores(self, shared: Tree, personal: Tree) -> Tree:
        scores = self.tree("score", shared, *self._samples)
        return scores | self.tree("survey", shared, personal, *self._samples, self._mask)

    def fix(self, shared: Tree, personal: Tree) -> Fixed:
        fixed = self.call("fix", shared, personal, self._scores(shared, personal), self._mask)
        if not isinstance(fixed, Fixed):
            raise self._refusal("fix", _described(fixed), "fedem.surrogates.Fixed(columns, context)")
        for tree in fixed:
            self._tree("fix", tree)
        return fixed

    def minimise(self, shared: Tree, personal: Tree, fixed: Fixed) -> Tree:
        """Return the minimiser of g(u, .); ``personal`` is where g was built."""
        return self.tree("minimise", shared, self._scores(shared, personal), fixed, self._mask)

    def objective(self, shared: Tree, personal: Tree) -> Tensor:
        return self._number("objective", shared, personal, self._batch)

    def majorant(self, shared: Tree, personal: Tree, fixed: Fixed) -> Tensor:
        return self._number("majorant", shared, personal, fixed.context, self._batch._replace(samples=fixed.columns))

    def start(self, seed: int, key: Tensor) -> tuple[Tree, Tree]:
        """Draw u and v as training does; refuse trees that don't fit together."""
        shared = self.tree("init_shared", seed)
        missing = sorted(self._surrogate.model.trainable - shared.keys())
        if missing:
            raise self._refusal("init_shared", f"no leaf {missing[0]!r}", "trees with all that the model trains")
        personal, drawn = self.tree("init_personal", shared, key), self.tree("draw_personal", shared, key)
        found, shapes = ({name: list(leaf.shape) for name, leaf in tree.items()} for tree in (drawn, personal))
        if found != shapes:
            raise self._refusal("draw_personal", f"leaves {found}", f"those of init_personal, {shapes}")
        return shared, personal

    def try_out(self, shared: Tree, personal: Tree, key: Tensor) -> None:
        """Refuse functions that fail at (u, v), whose results don't fit together, or that can't be stacked."""
        fixed, size = self.fix(shared, personal), len(self._mask)
        for leaf, column in fixed.columns.items():
            if column.ndim == 0 or column.shape[-1] != size:
                found = f"columns {leaf!r} of shape {list(column.shape)} for {size} samples"
                raise self._refusal("fix", found, f"[..., {size}], the samples last")
        kinds, found_kinds = describe(personal), describe(self.minimise(shared, personal, fixed))
        if found_kinds != kinds:
            raise self._refusal("minimise", f"leaves {found_kinds}", f"those of init_personal, {kinds}")
        self.objective(shared, personal)
        self.majorant(shared, personal, fixed)
        # Some solvers only deal out others.
        solver, _ = next(iter(self._surrogate.solver.among(key[None])))
        surrogate, (inputs, targets) = self._surrogate.with_solver(solver), (tensor[:_FEW] for tensor in self._samples)
        rate = torch.zeros((), dtype=surrogate.model.dtype)
        OneClient(surrogate, inputs, targets, self._position)._round(shared, personal, key, rate)
        if surrogate.model.not_stackable is None:
            twice = OneClient(surrogate, inputs, targets, self._position, doubled=True)
            twice._round(*_twice((shared, personal, key, rate)))

    def _round(self, shared: Tree, personal: Tree, key: Tensor, rate: Tensor) -> None:
        """Call what an engine calls in a round, and what is called before and after it."""
        self.call("init_personal", shared, key)
        fixed = self.fix(shared, personal)
        self.majorant(shared, self.minimise(shared, personal, fixed), fixed)
        self.objective(shared, personal)
        local, columns = self.call("begin", shared, personal, self._scores(shared, personal), self._mask)
        self.call("step", local, self._batch._replace(samples=columns), rate)


def is_tree(value: object) -> bool:
    """Whether this is a dictionary from names to tensors."""
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(leaf, Tensor) for k, leaf in value.items())


def describe(tree: Tree) -> dict[str, str]:
    """Say of what kind each leaf is."""
    return {name: f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for name, leaf in tree.items()}


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor, {describe({'': value})['']}"
    if isinstance(value, dict):
        return f"a dictionary with { ({name: type(leaf).__name__ for name, leaf in value.items()}) }"
    return f"a value of type {type(value).__name__}"


def _twice(value: Any) -> Any:
    return pytree_map(lambda leaf: torch.stack([leaf, leaf]), value)


def _reason(error: Exception, arguments: tuple[Any, ...]) -> str:
    if isinstance(error, KeyError):
        return f"it asks for {error}, and its arguments have the leaves {', '.join(_leaves(arguments)) or 'none'}"
    first = next(iter(str(error).splitlines()), "").rstrip(". ")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _leaves(value: object) -> list[str]:
    """Name the leaves of all trees in tuples of tuples."""
    if isinstance(value, dict):
        return list(map(str, value))
    return [name for part in value for name in _leaves(part)] if isinstance(value, tuple) else []


def require_surrogate(surrogate: object) -> None:
    """Refuse what is not a surrogate."""
    if not isinstance(surrogate, Surrogate):
        allowed = "an instance of a class derived from fedem.surrogates.Surrogate, such as fedem.methods.fedem.FedEM"
        raise UserError(f"The surrogate is a {type(surrogate).__name__}; allowed: {allowed}.")
    try:
        surrogate.with_solver(surrogate.solver)
    except Exception as error:  # whatever a constructor of a user's own raises
        problem = f"{type(surrogate).__name__} can't be made again from its fields ({error})"
        raise UserError(f"{problem}; allowed: a frozen dataclass, without a constructor of its own.") from error


def require(name: str, value: object, holds: bool, allowed: str) -> None:
    """Refuse a ``value`` of which something does not hold."""
    if not holds:
        raise UserError(f"{name} is {shorten(repr(value), 80)}; allowed: {allowed}.")


def require_counts(**values: object) -> None:
    """Refuse what is not a number of things."""
    for name, value in values.items():
        require(name, value, isinstance(value, WHOLE) and bool(value >= 1), "a whole number, at least 1")
