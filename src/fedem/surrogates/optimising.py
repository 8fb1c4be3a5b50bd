"""Federated surrogate optimisation, with a server or over a graph.

Shapes: T clients, G groups, c clients stacked together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedem.algorithms.base import Batch
from fedem.algorithms.surrogate import Surrogate
from fedem.engines import Batching, Cohort, OneByOne, choose_engine
from fedem.engines.batches import blocks
from fedem.engines.chunks import Chunk, similar
from fedem.federation import Federation
from fedem.mixing.base import Mixer
from fedem.mixing.star import Star
from fedem.randomness import COMPONENTS, PERSONAL, derive
from fedem.rounds import State, Training, cohort_size, mixer_seed
from fedem.schedules import Constant
from fedem.surrogates.arguments import require, require_count, require_seed, require_surrogate
from fedem.surrogates.client import OneClient
from fedem.tree import tree_index

_PROBED = 8
_MOST_ROWS = 1 << 15  # samples judged at once


class Outcome(NamedTuple):
    """What an optimisation came to."""

    state: State
    """u of each group, ``[G, ...]``, one with a server; v_t of each client, ``[T, ...]``"""
    history: tuple[float, ...]
    """f = sum_t n_t / n f_t(u_t, v_t) at the start and after each round"""


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
    with the surrogate's solver; then the u's are mixed.

    Args:
        surrogate: f_t and its surrogate.
        federation: the clients; samples other than those for training are not used.
        rounds: K, at least 1.
        learning_rate: of the solver, the same in every round.
        steps: J, of the solver in a round.
        batch_size: samples a step; 0 for all of a client's.
        mixer: who averages with whom; None for a server, :class:`fedem.mixing.graph.Graph` for neighbours.
        seed: of the initial u and v_t, of cohorts and of batches.
        clients_per_round: a share up to 1.0, or a number from 2.
        listener: called with the number of rounds done and f, as the history has them.

    """
    require_surrogate(surrogate)
    require("federation", federation, isinstance(federation, Federation), "a fedem.Federation")
    require_count("rounds", rounds)
    require_count("steps", steps)
    mixers = "None for a server, or a mixer such as fedem.mixing.graph.Graph()"
    require("mixer", mixer, mixer is None or isinstance(mixer, Mixer), mixers)
    require_seed(seed)
    require("clients_per_round", clients_per_round, isinstance(clients_per_round, int | float), "a number")
    mixer = Star() if mixer is None else mixer
    device, inputs = torch.device("cpu"), federation.train.span(0, min(_PROBED, len(federation.train))).inputs
    batching, schedule = Batching(batch_size, local_steps=steps), Constant(learning_rate)
    surrogate.model.probe(inputs)
    surrogate.check(inputs)
    mixer.check(federation.keys, mixer_seed(seed))
    engine, _ = choose_engine("auto", 0, surrogate.model, device)
    cohort = cohort_size(clients_per_round, federation.num_clients)
    training = Training(surrogate, mixer, engine, batching, schedule, federation, rounds, cohort, seed, device)
    _try_out(training)
    state = training.init()
    history: list[float] = []
    while True:
        history.append(_objective(training, state))
        if listener is not None:
            listener(state.round, history[-1])
        if state.round == rounds:
            return Outcome(state, tuple(history))
        state, _ = training.step(state)


def _try_out(training: Training) -> None:
    """Refuse a surrogate that fails on the client with the fewest samples, or on the one with the most."""
    surrogate, samples, seed = training.algorithm, training.federation.train, training.seed
    assert isinstance(surrogate, Surrogate)
    for position in sorted({int(samples.sizes.argmin()), int(samples.sizes.argmax())}):
        client = OneClient(surrogate, *samples.client(position), position)
        key = derive(training.federation.keys[position], PERSONAL, seed)
        client.try_out(*client.start(int(derive(seed, COMPONENTS)), key), key)


def _objective(training: Training, state: State) -> float:
    """f, everybody with its own u and v_t."""
    samples, surrogate = training.federation.train, training.algorithm
    assert isinstance(surrogate, Surrogate)
    served = training.mixer.own(state.shared, state.memory, torch.arange(samples.num_clients))
    cohort = Cohort(*served, state.personal, samples)
    order = torch.argsort(samples.sizes, descending=True, stable=True)
    total, alone = 0.0, isinstance(training.engine, OneByOne)
    with torch.no_grad():
        for part in similar(samples.sizes[order].tolist()):
            members = order[part]
            together = 1 if alone else max(1, _MOST_ROWS // int(samples.sizes[members[0]]))
            for some in members.split(together):
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
    ((_, where),) = blocks(chunk.sizes, int(chunk.sizes.max()), chunk.starts.device)
    weights = where.mask.to(surrogate.model.dtype) / where.mask.sum(1, keepdim=True)
    batch = Batch(*chunk.read(where), weights, {}, torch.zeros_like(chunk.starts), (where.mask,))
    values: Tensor = vmap(surrogate.objective, in_dims=(chunk.shared_dim, 0, 0))(chunk.shared, chunk.personal, batch)
    return values
