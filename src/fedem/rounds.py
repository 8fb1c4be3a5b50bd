"""Rounds: who takes part, and one step of the whole federation's state.

Shapes: T clients, G groups, C clients of the cohort.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedem.algorithms.base import Algorithm
from fedem.engines import Batching, Cohort, Engine
from fedem.errors import UserError
from fedem.federation import Federation
from fedem.mixing.base import Mixer
from fedem.randomness import COHORT, COMPONENTS, PERSONAL, SHUFFLE, choose, derive
from fedem.samples import Samples
from fedem.schedules import Schedule
from fedem.tree import Tree, tree_bytes, tree_cat, tree_index, tree_map, tree_to


@dataclass(frozen=True, eq=False)
class State:
    """All that a federation has learnt. Stepping makes a new one."""

    round: int
    """rounds done"""
    shared: Tree
    """``[G, ...]``"""
    personal: Tree
    """``[T, ...]``"""

    def to(self, device: torch.device) -> State:
        """Move to ``device``."""
        return replace(self, shared=tree_to(self.shared, device), personal=tree_to(self.personal, device))


class RoundLog(NamedTuple):
    """What a round cost."""

    cohort: Tensor
    learning_rate: float
    seconds: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, eq=False)
class Training:
    """Everything that stays the same from round to round."""

    algorithm: Algorithm
    mixer: Mixer
    engine: Engine
    batching: Batching
    schedule: Schedule
    federation: Federation
    num_rounds: int
    cohort_size: int
    seed: int
    device: torch.device

    @cached_property
    def _samples(self) -> Samples:
        """The training samples: on the device whole when they fit beside the models; else each cohort is sent there."""
        samples = self.federation.train
        if self.device.type == "cuda" and samples.num_bytes > torch.cuda.mem_get_info(self.device)[0] // 2:
            return samples
        return samples.to(self.device)

    def init(self) -> State:
        """Draw the initial state. All groups start from the same shared tree."""
        shared = self.algorithm.init_shared(int(derive(self.seed, COMPONENTS)))
        groups = self.mixer.num_groups(self.federation.num_clients)
        keys = derive(self.federation.keys, PERSONAL, self.seed)
        personal: Tree = {}
        if self.algorithm.init_personal(shared, keys[0]):
            personal = vmap(self.algorithm.init_personal, in_dims=(None, 0))(shared, keys)
        stacked = tree_map(lambda leaf: leaf[None].repeat(groups, *(1,) * leaf.ndim), shared)
        return State(0, stacked, personal).to(self.device)

    def sample(self, round_index: int) -> Tensor:
        """Choose the clients of a round uniformly without replacement, ``[C]`` positions in ascending order."""
        return choose(self.federation.keys, self.cohort_size, COHORT, self.seed, round_index)

    def step(self, state: State) -> tuple[State, RoundLog]:
        """Run one round: the cohort trains, the mixer mixes. Clients that are not sampled keep their personal tree."""
        started = time.perf_counter()
        clients = self.sample(state.round)
        samples = self._samples.take(clients).to(self.device)
        where = clients.to(self.device)
        cohort = Cohort(state.shared, self.mixer.reads(clients), tree_index(state.personal, where), samples)
        rate = self.schedule.rate(state.round, self.num_rounds)
        keys = derive(self.federation.keys[clients], SHUFFLE, self.seed, state.round)
        finished: list[tuple[Tensor, Tree]] = []
        upload_bytes = 0

        def uploads() -> Iterator[tuple[Tensor, Tree]]:
            nonlocal upload_bytes
            for chunk in self.engine.train(self.algorithm, cohort, self.batching, keys, rate):
                upload_bytes = tree_bytes(chunk.uploads) // len(chunk.positions)
                finished.append((clients[chunk.positions], chunk.personal))
                yield chunk.positions, chunk.uploads

        shared = self.mixer.plan(clients, samples.sizes).apply(state.shared, uploads())
        personal = state.personal
        if personal:
            done = torch.cat([positions for positions, _ in finished]).to(self.device)
            news = tree_cat([tree for _, tree in finished])
            personal = tree_map(lambda old, new: old.index_copy(0, done, new), personal, news)
        state = State(state.round + 1, shared, personal)
        _check_finite(state, rate)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - started
        messages, download_bytes = self.mixer.num_messages(clients), tree_bytes(tree_index(shared, 0))
        return state, RoundLog(clients, rate, seconds, messages * upload_bytes, messages * download_bytes)


def _check_finite(state: State, rate: float) -> None:
    for name, leaf in state.shared.items():
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise UserError(
                f"Training diverged in round {state.round}: {name!r} is no longer finite at learning rate {rate:g}; "
                "a smaller schedule.learning_rate is needed."
            )


def cohort_size(clients_per_round: float, num_clients: int) -> int:
    """Turn a share of the clients (up to 1.0) or a count (a whole number above 1) into a count.

    >>> cohort_size(0.2, 300), cohort_size(1.0, 300), cohort_size(50, 300)
    (60, 300, 50)
    """
    if 0 < clients_per_round <= 1:
        return max(1, round(clients_per_round * num_clients))
    if clients_per_round != int(clients_per_round) or not 1 < clients_per_round <= num_clients:
        raise UserError(
            f"clients_per_round is {clients_per_round:g}; allowed: a share above 0 and up to 1, or a whole number of "
            f"clients from 2 to {num_clients}."
        )
    return int(clients_per_round)
