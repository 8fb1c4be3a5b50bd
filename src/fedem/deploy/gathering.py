"""What the server makes of answers: the same mixer and method as in the simulator, for those who answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

from fedem.deploy.node import Assessed
from fedem.deploy.plan import Plan
from fedem.errors import UserError
from fedem.evaluate import Scores
from fedem.federation import PARTS
from fedem.methods import METHODS
from fedem.mixing.base import Round
from fedem.mixing.star import Star
from fedem.randomness import COMPONENTS, MIXER, derive
from fedem.records import Record
from fedem.rounds import State, mixer_seed
from fedem.tree import Tree, tree_floats, tree_map, tree_repeat, tree_sorted, tree_to

if TYPE_CHECKING:
    from fedem.deploy.messages import Answer, Scored


def check_server(plan: Plan) -> None:
    """Refuse a method whose server does more than to average what everybody sends."""
    mixer, method = plan.parts.mixer, plan.config.name("method")
    if isinstance(mixer, Star):
        return
    names = ", ".join(name for name, row in METHODS.items() if row.mixer is Star)
    raise UserError(
        f"Method {method} needs {type(mixer).__name__} between its clients, and not a server that averages; allowed: "
        f"{names}, with graph.name none, run.local_layers none and compression.downloads none."
    )


def first_state(plan: Plan) -> State:
    """Draw the server's first state, the simulator's for the same seed."""
    algorithm, mixer, seed = plan.parts.algorithm, plan.parts.mixer, plan.config.run.seed
    shared = tree_sorted(algorithm.init_shared(int(derive(seed, COMPONENTS))))
    nobody = torch.zeros(0, dtype=torch.int64)
    groups, memory = mixer.init(shared, algorithm.model.trainable, nobody, mixer_seed(seed))
    return State(0, groups, {}, memory).to(plan.parts.device)


def advance(plan: Plan, state: State, answers: Sequence[Answer], connected: int, rate: float) -> State | None:
    """Take the server's step with some clients' answers; None when it leads to what is not finite.

    How many samples those have who were not asked, the server does not know: what share of all took part is counted by
    clients, of ``connected`` ones.
    """
    algorithm, mixer, device = plan.parts.algorithm, plan.parts.mixer, plan.parts.device
    sizes = torch.tensor([answer.num_samples for answer in answers])
    key = int(derive(plan.config.run.seed, MIXER, state.round))
    positions = torch.arange(len(answers))
    this = Round(positions, sizes, connected, rate, key, float(sizes.double().mean()), algorithm.model.trainable)

    def summands() -> Iterator[tuple[Tensor, Tree]]:
        for position, answer in enumerate(answers):
            upload = tree_repeat(tree_to(answer.upload, device), 1)
            yield positions[position : position + 1], vmap(algorithm.summand)(upload)

    mixed, memory = mixer.mix(state.shared, state.memory, this, summands())
    step = partial(algorithm.update, share=len(answers) / connected)
    shared = tree_map(lambda old, new: new.to(old.dtype), state.shared, vmap(step)(state.shared, mixed.means))
    if not all(bool(torch.isfinite(leaf).all()) for leaf in tree_floats(shared).values()):
        return None
    return State(state.round + 1, shared, {}, memory)


def averages(plan: Plan, scored: Sequence[Scored], least: int = 1) -> Record:
    """Average clients' scores, weighted by their numbers of training samples, where at ``least`` so many have them."""
    metric = plan.parts.model.loss.metric
    weights = torch.tensor([entry.num_samples for entry in scored], dtype=torch.float64)
    record: Record = {}
    for part in PARTS:
        sums = torch.tensor([entry.parts.get(part, Assessed(0, 0.0, 0.0)) for entry in scored], dtype=torch.float64)
        counts, losses, values = sums.T
        if int((counts > 0).sum()) >= least:
            scores = Scores(metric, weights, counts, losses / counts, values / counts)
            record |= {f"{part}_{metric}": scores.average, f"{part}_loss": scores.loss}
    return record
