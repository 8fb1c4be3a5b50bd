"""Everybody's predictor: what clients read, what they keep, and what they train for themselves alone.

Shapes: T clients, K starting points of an unseen client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedem.core.em import negative_log_likelihood
from fedem.core.errors import UserError
from fedem.core.random import FINE_TUNE, PERSONAL, derive
from fedem.core.tree import Tree, tree_bytes, tree_cat, tree_index, tree_map, tree_stack
from fedem.data.federation import Federation
from fedem.data.samples import Samples
from fedem.engines import Batching, Cohort, Engine, Work
from fedem.methods.base import Algorithm, Mixture
from fedem.methods.mixer import Learn, Mixer, Welcome
from fedem.methods.wrappers import FineTuned
from fedem.methods.wrappers.compression import split_residual
from fedem.runs.config import RunSettings
from fedem.runs.neighbours import Memory, Neighbours, remember
from fedem.runs.rounds import State, init_personal

_READ_BYTES = 1 << 26  # of trees that are read at once


class Predictors(NamedTuple):
    """What the predictors of some clients are made of."""

    shared: Tree  # [g, ...]
    reads: Tensor  # [T] int64: each client's row of `shared`
    personal: Tree  # [T, ...]
    memory: Memory | None = None  # of their training samples, where neighbours have a say

    @classmethod
    def apart(cls, shared: Tree, personal: Tree) -> Predictors:
        """Return the predictors of clients that each have a tree of their own, ``[T, ...]``."""
        return cls(shared, torch.arange(len(next(iter(shared.values())))), personal)

    @property
    def own(self) -> Tree:
        """What each client reads, ``[T, ...]``."""
        return tree_index(self.shared, self.reads.to(_device(self.shared)))

    def of(self, algorithm: Algorithm, position: int) -> Mixture:
        shared = tree_index(self.shared, int(self.reads[position]))
        return algorithm.predictor(shared, tree_index(self.personal, position))

    def neighbours(self, position: int) -> Neighbours | None:
        """Return a client's neighbours; None where they have no say."""
        return None if self.memory is None else self.memory.of(position)

    def cohort(self, samples: Samples) -> Cohort:
        """Return the clients' models, beside their ``samples``, as an engine sees them."""
        return Cohort(self.shared, self.reads, self.personal, samples)

    def settled(self, round_index: int) -> State:
        """Return them as a state that needs no data to be read (:class:`~fedem.methods.mixer.Settled`)."""
        return State(round_index, self.shared, self.personal, {"reads": self.reads})

    def log_weights(self, algorithm: Algorithm) -> Tensor:
        """Return everybody's log mixture weights, ``[T, M]``."""
        first, count = self.of(algorithm, 0).log_weights, len(self.reads)
        if len(first) == 1:
            return first.new_zeros(count, 1)
        one, is_common = tree_index(self.shared, int(self.reads[0])), bool((self.reads == self.reads[0]).all())

        def weights(row: Tensor, personal: Tree) -> Tensor:
            shared = one if is_common else tree_map(lambda leaf: leaf.index_select(0, row[None])[0], self.shared)
            return algorithm.predictor(shared, personal).log_weights

        together = count if is_common else max(1, _READ_BYTES // tree_bytes(one))
        return vmap(weights, chunk_size=together)(self.reads.to(first.device), self.personal)


@dataclass(frozen=True, eq=False)
class Personalizer:
    """Makes predictors from a federation's state: fine-tunes them if the run says so, and fits unseen clients."""

    algorithm: Algorithm
    mixer: Mixer
    engine: Engine
    batching: Batching
    learning_rate: float  # the schedule's first; of fine-tuning only where neither run nor method has a rate for it
    run: RunSettings

    @cached_property
    def _tuning(self) -> FineTuned:
        return FineTuned.of(self.algorithm)

    @property
    def tuning_rate(self) -> float:
        """The learning rate of fine-tuning: the run's, or else the method's own, or else that of the first round."""
        setting = self.algorithm.fine_tune_setting
        own_rate = float(getattr(self.algorithm, setting)) if setting else -1.0
        return float(self.run.fine_tune_rate) or (own_rate if own_rate >= 0 else self.learning_rate)

    @property
    def untuned(self) -> Personalizer:
        """The same without fine-tuning."""
        return replace(self, run=replace(self.run, fine_tune_epochs=0))

    def predictors(self, state: State, federation: Federation, took_part: Tensor | None = None) -> Predictors:
        """Return the predictors of a run's clients; ``took_part`` ``[T]`` says who has trained, None that all have.

        The others' v_t are as drawn at first. They fit them as unseen clients do, beside what they read.
        """
        everybody = torch.arange(federation.num_clients)
        served = self.mixer.read(state.shared, state.memory, everybody)
        found = Predictors(*served, split_residual(state.personal)[0])
        if self.algorithm.chooses_anew:
            took_part = torch.zeros_like(everybody, dtype=torch.bool)
        if found.personal and took_part is not None and len(new := everybody[~took_part]):
            start = found._replace(reads=found.reads[new])
            fitted = self._fit(start, federation.train.take(new), federation.keys[new], None).personal
            found = found._replace(personal=_put(found.personal, new.to(_device(found.shared)), fitted))
        epochs = self.run.fine_tune_epochs
        if epochs:
            found = self._fine_tuned(found, federation.train, federation.keys, epochs)
        return self.remembering(found, federation.train, federation.validation)

    def remembering(
        self, found: Predictors, train: Samples, validation: Samples | None = None, curve: Tensor | None = None
    ) -> Predictors:
        """Give clients the neighbours that the run wants them to have (:func:`~fedem.runs.neighbours.remember`)."""
        if not (number := self.run.neighbours):
            return found
        model, mixture_of = self.algorithm.model, partial(found.of, self.algorithm)
        return found._replace(memory=remember(model, mixture_of, train, validation, number, curve))

    def _train(
        self, algorithm: Algorithm, start: Predictors, samples: Samples, names: Tensor, epochs: int, rate: float
    ) -> tuple[Tensor, Tree, Tree]:
        """Train those who have samples; returns their positions ``[c]``, uploads and what they keep, ``[c, ...]``."""
        device, able = _device(start.shared), (samples.sizes > 0).nonzero().flatten()
        where = able.to(device)
        if not len(able):
            return where, {}, {}
        cohort = Cohort(start.shared, start.reads[able], tree_index(start.personal, where), samples.take(able))
        walk = replace(self.batching, local_epochs=epochs, local_steps=0)
        work = Work(walk, derive(names[able], FINE_TUNE, self.run.seed), rate)
        finished = list(self.engine.train_dealt(algorithm, cohort, work, names[able]))
        order = torch.cat([chunk.positions for chunk in finished]).argsort().to(device)
        _, uploads, personal = zip(*finished, strict=True)
        return where, tree_index(tree_cat(uploads), order), tree_index(tree_cat(personal), order)

    def _fine_tuned(self, start: Predictors, samples: Samples, keys: Tensor, epochs: int) -> Predictors:
        """Return each client's own tree, fine-tuned on its samples; those without samples keep theirs."""
        own = Predictors.apart(start.own, start.personal)
        where, shared, personal = self._train(self._tuning, own, samples, keys, epochs, self.tuning_rate)
        return own._replace(shared=_put(own.shared, where, shared), personal=_put(own.personal, where, personal))

    def personalize(
        self, state: State, samples: Samples, keys: Tensor, max_iterations: int | None = None, beside: int | None = None
    ) -> Predictors:
        """Fit unseen clients with these ``keys`` ``[T]`` on their ``samples``, if any; what others share stays fixed.

        ``max_iterations`` bounds updates of the mixture weights (0 for convergence, None for the method's setting).
        ``beside`` is the position of a client that took part: start from what it reads, and not from what is for all.
        """
        start = self.mixer.welcome(state.shared, state.memory)
        if start.refusal:
            raise UserError(start.refusal)
        if beside is not None:
            read = self.mixer.read(state.shared, state.memory, torch.tensor([beside]))
            start = Welcome(Predictors(*read, {}).own, start.fine_tune)
        device, count = _device(start.shared), len(next(iter(start.shared.values())))
        best = torch.zeros(samples.num_clients, dtype=torch.int64)
        fits = [self._fit(Predictors(start.shared, best + k, {}), samples, keys, max_iterations) for k in range(count)]
        if count > 1 and len(samples):
            best = torch.stack([self.losses(fit, samples) for fit in fits]).argmin(0)
        rows, position = best.to(device), torch.arange(samples.num_clients, device=device)
        personal = tree_map(lambda leaf: leaf[rows, position], tree_stack([fit.personal for fit in fits]))
        chosen = Predictors(start.shared, best, personal)
        if start.kept is not None and start.learn is not None:
            chosen = self._learnt(chosen, start.kept[rows], start.learn, samples, keys)
        epochs = self.run.fine_tune_epochs or (self.run.unseen_epochs if start.fine_tune else 0)
        return self._fine_tuned(chosen, samples, keys, epochs) if epochs else chosen

    def _learnt(self, start: Predictors, kept: Tensor, learn: Learn, samples: Samples, keys: Tensor) -> Predictors:
        """Let newcomers take part in rounds of their own, one pass each; those without samples stay."""
        found = Predictors.apart(start.own, start.personal)
        for _ in range(self.run.unseen_epochs if len(samples) else 0):
            where, uploads, personal = self._train(self.algorithm, found, samples, keys, 1, self.learning_rate)
            mine, here = learn(kept[where], uploads)
            kept = kept.index_copy(0, where, mine)
            found = Predictors.apart(_put(found.shared, where, here), _put(found.personal, where, personal))
        return found._replace(personal=start.personal)

    def _fit(self, start: Predictors, samples: Samples, keys: Tensor, max_iterations: int | None) -> Predictors:
        """Fit all clients' personal trees beside what each reads; what ``start`` has of them plays no part."""
        algorithm, device = self.algorithm, _device(start.shared)
        fitted = self.engine.fit(algorithm, Cohort(start.shared, start.reads, {}, samples), max_iterations)
        if fitted is not None:
            return start._replace(personal=fitted)
        personal = init_personal(algorithm, start.own, derive(keys, PERSONAL, self.run.seed).to(device), apart=True)
        first, epochs = start._replace(personal=personal), self.run.unseen_epochs
        where, _, trained = self._train(self.algorithm, first, samples, keys, epochs, self.learning_rate)
        return start._replace(personal=_put(personal, where, trained))

    def losses(self, found: Predictors, samples: Samples) -> Tensor:
        """Each client's summed negative log-likelihood, ``[T]``."""

        def loss(shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
            components, log_weights = self.algorithm.predictor(shared, personal)
            losses = self.algorithm.model.component_losses(components, inputs, targets)
            return {"loss": (mask * negative_log_likelihood(losses, log_weights)).sum(dtype=torch.float64)}

        return self.engine.tally(self.algorithm, loss, found.cohort(samples))["loss"]


def _device(tree: Tree) -> torch.device:
    return next(iter(tree.values())).device


def _put(old: Tree, where: Tensor, new: Tree) -> Tree:
    """Replace the rows at ``where`` of those leaves that ``new`` has too."""
    return old | {name: old[name].index_copy(0, where, leaf.to(old[name])) for name, leaf in new.items() if name in old}
