"""The number of components found while training: those not worth keeping go, and one that carries much is split.

After some rounds the server looks. Every client fits its mixture weights to its training samples with all components,
and again without each one of them, by one pass over its losses; what that costs on its validation samples is the worth
of a component to it. Without validation samples it is the rise on the training samples, against half the logarithm of
their number for each of the component's own parameters (BIC). The least worthy component goes if it is worth too
little, its clients' weight to the others; of two that predict alike, the other takes it all. Where all are worth their
place, the one that carries the most loss is split, its copy given to the clients that fit it worst. If a component is
not worth its place some rounds later, the split was in vain, and no other follows; removals may.

The server sees sums over clients alone, of numbers that each has from its own samples; each decides by itself about its
weights. In the simulator all clients answer, whether they are in the cohort or not.

Shapes: T clients, M components, n samples of a client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedem.core.em import fit_leaving_out, log_responsibilities, negative_log_likelihood
from fedem.core.tree import Tree
from fedem.data.federation import Federation
from fedem.data.samples import Samples
from fedem.engines import Cohort, Engine
from fedem.methods.base import Algorithm
from fedem.methods.mixer import Mixer
from fedem.methods.wrappers import Wrapped
from fedem.methods.wrappers.compression import join_residual, split_residual
from fedem.runs.evaluate import Record
from fedem.runs.rounds import State

LOOK, COUNT = "components", "num_components"  # names in a line of metrics.jsonl
_FIRST, _BETWEEN, _LAST = 1 / 5, 1 / 40, 1 / 2  # shares of the rounds: before the first look, between two, at the last
_LEAST_BETWEEN = 3  # rounds
_TRIAL = 3  # looks' distance after which a split is judged
_ERRORS = 2.0  # standard errors within which a worth may be nothing
_TO_COPY = 0.9  # share of a split component's weight that goes to the copy, or with the other clients stays
_LEAST_WEIGHT = 1e-4  # of a client's refitted mixture weights: one that is zero never comes back


@dataclass(frozen=True)
class Search:
    """When the server looks, and how much a component must be worth to it."""

    rounds: int
    least_gain: float  # nats per validation sample

    @property
    def between(self) -> int:
        """Rounds between two looks."""
        return max(_LEAST_BETWEEN, round(_BETWEEN * self.rounds))

    def is_due(self, done: int, history: Sequence[Record]) -> bool:
        """Whether the server looks after ``done`` rounds, of which ``history`` has the records."""
        first, before = max(1, round(_FIRST * self.rounds)), looks(history)
        if done < first or done > _LAST * self.rounds or (done - first) % self.between:
            return False
        if not before:
            return True
        when, last = before[-1]
        return last["action"] != "split" or done >= when + _TRIAL * self.between

    def may_split(self, done: int, history: Sequence[Record]) -> bool:
        """Whether a split after ``done`` rounds can still be judged, and none before was in vain."""
        in_vain = any(look.get("in_vain") for _, look in looks(history))
        return not in_vain and done + _TRIAL * self.between <= _LAST * self.rounds


def looks(history: Sequence[Record]) -> list[tuple[int, Record]]:
    """Return what was found after which round, in the order of the rounds."""
    return [(line["round"], line[LOOK]) for line in history if line.get(LOOK)]


class Worth(NamedTuple):
    """What each component is worth to all clients, ``[M]`` float64, and what it must be."""

    rises: Tensor  # of the loss per sample without it
    errors: Tensor  # their standard errors, zero where none are taken into account
    least: Tensor  # below which a component is not worth its place
    by: str

    @property
    def is_wanting(self) -> Tensor:
        """Which components are not worth their place, ``[M]`` bool."""
        return self.rises < torch.maximum(self.least, _ERRORS * self.errors)


@final
@dataclass(frozen=True, eq=False)
class LeavingOut(Wrapped):
    """The mixture, whose clients fit their weights with all components, and without each: ``log_weights [1 + M, M]``.

    A component left out has a weight of zero. All fits are from the same scores of a client's samples.
    """

    is_mixture: ClassVar[bool] = True

    @classmethod
    def within(cls, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm with its innermost method so: what is around it may have a say in the scores."""
        if isinstance(algorithm, Wrapped):
            return replace(algorithm, base=cls.within(algorithm.base))
        return cls.of(algorithm)

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        return {"log_weights": fit_leaving_out(scores["losses"], mask)}


@dataclass(frozen=True, eq=False)
class Components:
    """Looks at a federation's components, and revises its state."""

    algorithm: Algorithm
    mixer: Mixer
    engine: Engine
    federation: Federation
    search: Search

    def revise(self, state: State, history: Sequence[Record]) -> tuple[State, Record]:
        """Remove a component or split one, if that is called for; returns the state, and what was done and why.

        ``history`` has the records of the rounds before. Components keep the numbers that they had at first.
        """
        before = looks(history)
        count = state.personal["log_weights"].shape[1]
        names: list[int] = before[-1][1]["kept"] if before else list(range(count))
        on_trial = bool(before) and before[-1][1]["action"] == "split"
        with torch.no_grad():
            fitted = self.fits(state)
            worth = self.worth(state, fitted) if count > 1 else None
            if worth is not None and bool(worth.is_wanting.any()):
                # Of those that are, the one that is missed least.
                out = int(worth.rises.masked_fill(~worth.is_wanting, math.inf).argmin())
                into = self._heir(fitted["log_weights"], out)
                known = self._known(worth, out) | {"component": names[out]}
                known |= {"action": "pruned"} if into is None else {"action": "merged", "into": names[into]}
                kept = [m for m in range(count) if m != out]
                state = self.without(state, fitted["log_weights"][:, 1 + out], kept)
                return state, known | {"kept": [names[m] for m in kept], "in_vain": on_trial}
            known = {} if worth is None else self._known(worth, int(worth.rises.argmin()))
            if not self.search.may_split(state.round, history):
                return state, known | {"action": "kept", "kept": names}
            state, which = self._split(state, fitted)
        new = 1 + max([name for _, look in before for name in look["kept"]] + names)
        known |= {"action": "split", "component": names[which], "into": new}
        return state, known | {"kept": [*names, new]}

    def fits(self, state: State) -> Tree:
        """Every client's v_t with all components, and without each: ``log_weights [T, 1 + M, M]``."""
        fitted = self.engine.fit(LeavingOut.within(self.algorithm), self._cohort(state, {}, self.federation.train))
        assert fitted is not None, "mixture weights are fitted from scores"
        return fitted

    def _cohort(self, state: State, personal: Tree, samples: Samples) -> Cohort:
        served = self.mixer.read(state.shared, state.memory, torch.arange(self.federation.num_clients))
        return Cohort(*served, personal, samples)

    def worth(self, state: State, fitted: Tree) -> Worth:
        """What the components are worth: by validation, or by the training samples where nobody has others."""
        validation, train = self.federation.validation, self.federation.train
        samples = validation if len(validation) else train
        count = fitted["log_weights"].shape[2]

        def losses(shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
            components, weights = self.algorithm.predictor(shared, personal)
            found = self.algorithm.model.component_losses(components, inputs, targets)
            sums = [(mask * negative_log_likelihood(found, row)).sum(dtype=torch.float64) for row in weights]
            return {str(index): total for index, total in enumerate(sums)}

        tallied = self.engine.tally(self.algorithm, losses, self._cohort(state, fitted, samples))
        sums = torch.stack([tallied[str(index)] for index in range(1 + count)])
        rises, sizes, total = sums[1:] - sums[0], samples.sizes.double(), len(samples)  # [M, T], [T]
        means = rises.sum(1) / total
        if not len(validation):
            bits = torch.full_like(means, self._own_numbers(state) / 2 * math.log(total) / total)
            return Worth(means, torch.zeros_like(means), bits, "bic")
        # Of a ratio of two sums over clients, whose samples are not independent of each other.
        squares = rises.square().sum(1) - 2 * means * (rises @ sizes) + means.square() * sizes.square().sum()
        errors = squares.clamp(min=0).sqrt() / total
        return Worth(means, errors, torch.full_like(means, self.search.least_gain), "validation")

    def _own_numbers(self, state: State) -> int:
        """How many numbers are trained of one component, without those that all have in common."""
        shapes, model = self.algorithm.model.leaf_shapes, self.algorithm.model
        return sum(math.prod(shapes[name]) for name in model.trainable - self.algorithm.common)

    def _known(self, worth: Worth, which: int) -> Record:
        named = {"rise": worth.rises, "error": worth.errors, "least": worth.least}
        return {"by": worth.by} | {name: float(values[which]) for name, values in named.items()}

    def _heir(self, log_weights: Tensor, out: int) -> int | None:
        """Which component gets most of the weight of one that goes, ``[T, 1 + M, M]``; None if there is none."""
        weights = log_weights.double().exp().cpu()
        sizes = self.federation.train.sizes.double()
        gains = ((weights[:, 1 + out] - weights[:, 0]) * sizes[:, None]).sum(0)
        lost, into = -float(gains[out]), int(gains.argmax())
        return into if float(gains[into]) > lost / 2 > 0 else None

    def without(self, state: State, log_weights: Tensor, kept: Sequence[int]) -> State:
        """Return the state with the ``kept`` components alone, and everybody's weights ``[T, M]`` for them."""
        rows = torch.tensor(kept, device=log_weights.device)
        weights = log_weights[:, rows].clamp(min=math.log(_LEAST_WEIGHT)).log_softmax(1)
        return self.taken(state, rows, weights)

    def taken(self, state: State, rows: Tensor, log_weights: Tensor) -> State:
        """Return the state with the components at ``rows`` and these weights ``[T, M]``; what is theirs goes along."""
        own = {name for name in self.algorithm.model.leaf_shapes if name not in self.algorithm.common}

        def taken(tree: Tree) -> Tree:
            # Groups or clients are first, then components; a mixer's or codec's memory has prefixes.
            return {name: leaf[:, rows] if name.rpartition("/")[2] in own else leaf for name, leaf in tree.items()}

        personal, residual = split_residual(state.personal)
        kept = join_residual(personal | {"log_weights": log_weights.to(personal["log_weights"])}, taken(residual))
        return replace(state, shared=taken(state.shared), memory=taken(state.memory), personal=kept)

    def _split(self, state: State, fitted: Tree) -> tuple[State, int]:
        """Copy the component that carries the most loss, for those whose samples it fits worse than on average.

        Clients know the mean loss of their share of the component, and the server sends that of all.
        """
        weights = fitted | {"log_weights": fitted["log_weights"][:, 0]}
        count = weights["log_weights"].shape[1]

        def carried(shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
            components, log_weights = self.algorithm.predictor(shared, personal)
            losses = self.algorithm.model.component_losses(components, inputs, targets)
            shares = (log_responsibilities(losses, log_weights).exp() * mask).double()
            parts = {"mass": shares.sum(1), "loss": (shares * losses.double()).sum(1)}
            return {f"{name}/{m}": values[m] for name, values in parts.items() for m in range(count)}

        found = self.engine.tally(self.algorithm, carried, self._cohort(state, weights, self.federation.train))
        masses, losses = (torch.stack([found[f"{name}/{m}"] for m in range(count)], 1) for name in ("mass", "loss"))
        which = int(losses.sum(0).argmax())
        mean = losses[:, which].sum() / masses[:, which].sum()
        is_worse = losses[:, which] > mean * masses[:, which]
        rows = torch.tensor([*range(count), which], device=state.personal["log_weights"].device)
        shares = torch.where(is_worse, _TO_COPY, 1 - _TO_COPY).to(rows.device)
        now = weights["log_weights"].clamp(min=math.log(_LEAST_WEIGHT)).double()
        divided = now[:, rows].clone()
        divided[:, which] += (1 - shares).log()
        divided[:, count] += shares.log()
        return self.taken(state, rows, divided.log_softmax(1)), which
