"""Clients without labels: mixture weights from inputs alone, and how far these lie from all that was trained on.

After training one more pass sums, for each component m, the features phi of the inputs by responsibilities:

    N_m = sum_i q_i(m),   S_m = sum_i q_i(m) phi_i,   Q_m = sum_i q_i(m) phi_i^2

over everybody's training samples. They make p(phi | m), a Gaussian of independent features. A client without labels
fits its weights as one with labels does, with -log p(phi | m) / tau in place of the losses. Features are many and not
independent, so these likelihoods are overconfident: the temperature tau is chosen by the clients of the training, each
of which fits weights to inputs alone and says what it then loses on its labels. How far inputs lie from those of
training goes by the same sums of the inputs themselves. Only sums ever leave a client.

Shapes: T clients, M components, n samples, F features, D numbers of an input, G temperatures tried, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from fedem.core import em
from fedem.core.errors import UserError
from fedem.core.tree import Tree, tree_map
from fedem.data.federation import Federation
from fedem.data.samples import Samples
from fedem.engines import Cohort, Engine
from fedem.engines.base import Tally
from fedem.methods.base import Algorithm, Mixture, find_method, names_where
from fedem.methods.wrappers import Wrapped
from fedem.models.base import Model, num_components
from fedem.runs.config import Config
from fedem.runs.outputs import features_of
from fedem.runs.personalize import Personalizer, Predictors
from fedem.runs.rounds import State

TEMPERATURES = tuple(2.0**power for power in range(13))  # tau, from 1 to 4096
NOVEL = 0.01  # share of the samples seen in training below which a client is unlike all of them
SILENT = "The inputs say nothing about the components, so clients without labels get the mean weights."
UNLIKE = "unlike anything seen in training"
_ERRORS = 2.0  # standard errors by which weights from inputs must beat those that are common to all
_FLOOR = 0.01  # of a component's variance, as a share of that of all samples
_CONSTANT = 1e-12  # of a feature's variance beside its mean square: below, it is rounding
_LOWEST, _HIGHEST, _PER_DECADE = -4, 8, 64  # bins of log10 of distances, which are about 1 in training
_BINS = (_HIGHEST - _LOWEST) * _PER_DECADE
_SUMMED_BYTES = 1 << 26  # of clients' sums that are held at once


def check_unlabelled(config: Config) -> None:
    """Refuse methods without mixture weights, and settings by which labels decide more than these."""
    name = config.method.name
    if not find_method(name).algorithm.is_mixture:
        mixtures = names_where(lambda row: row.algorithm.is_mixture)
        raise UserError(f"Method {name} has no mixture weights to fit to a client without labels; allowed: {mixtures}.")
    if config.run.label_shares:
        why = "clients shift outputs by the shares of their labels, and one without labels has none"
        raise UserError(f"run.label_shares is true: {why}; allowed for clients without labels: false.")


def features_in_common(model: Model, components: Tree, inputs: Tensor) -> Tensor:
    """Return features that mean the same for all components, ``[n, ...] -> [n, F]``.

    That is what their heads get, where they have one body or none, else all components' features side by side.
    """
    alike = torch.zeros(num_components(components), dtype=model.dtype, device=inputs.device)
    return features_of(model, Mixture(components, alike), inputs)


def plain_inputs(model: Model, components: Tree, inputs: Tensor) -> Tensor:
    """Return inputs as numbers to measure distances by, ``[n, ...] -> [n, D]``; of characters, their features.

    A network's features are near those of training even for what it has never seen, such as noise.
    """
    prepared = model.prepare(inputs)
    return prepared.flatten(1) if prepared.is_floating_point() else features_in_common(model, components, inputs)


@dataclass(frozen=True, eq=False)
class Densities:
    """p(phi | m), in units in which the features of all samples have mean 0 and variance 1. All are float64."""

    centre: Tensor  # [F]
    scale: Tensor  # [F], one over the deviation; 0 of features that never vary, which so play no part
    means: Tensor  # [M, F]
    variances: Tensor  # [M, F]
    heard: Tensor  # [M] bool: a component that is responsible for less than one sample is none to choose

    @classmethod
    def of(cls, counts: Tensor, sums: Tensor, squares: Tensor) -> Densities:
        """Make them of N_m ``[M]``, S_m and Q_m ``[M, F]``.

        Each component has one sample more, from all components' common density: its mean and variance then exist.
        """
        total = counts.sum()
        centre, square = sums.sum(0) / total, squares.sum(0) / total
        spread = (square - centre.square()).clamp(min=0)
        scale = torch.where(spread > _CONSTANT * square, spread.rsqrt(), 0.0)
        firsts, seconds = (
            (each + common) / (counts[:, None] + 1) for each, common in ((sums, centre), (squares, square))
        )
        variances = (scale.square() * (seconds - firsts.square())).clamp(min=_FLOOR)
        heard = counts >= (total / len(counts)).clamp(max=1)
        return cls(centre, scale, scale * (firsts - centre), variances, heard)

    def to(self, device: torch.device) -> Densities:
        return Densities(*(leaf.to(device) for leaf in vars(self).values()))

    def _squares(self, features: Tensor) -> Tensor:
        """Return sum_f (phi_f - mean_mf)^2 / variance_mf, ``[M, n]``."""
        units = (features.double() - self.centre) * self.scale
        precisions = 1 / self.variances
        products = precisions @ units.square().mT - 2 * (precisions * self.means) @ units.mT
        return (products + (precisions * self.means.square()).sum(1, keepdim=True)).clamp(min=0)

    def losses(self, features: Tensor) -> Tensor:
        """Return -log p(phi | m) of features ``[n, F]`` up to a constant of each sample, ``[M, n]``; the least is 0."""
        found = (self._squares(features) + self.variances.log().sum(1, keepdim=True)) / 2
        found = found.masked_fill(~self.heard[:, None], math.inf)
        return found - found.amin(0)

    def distances(self, features: Tensor) -> Tensor:
        """Return the mean over f of (phi_f - mean_mf)^2 / variance_mf at the nearest component, ``[n]``."""
        squares = self._squares(features).masked_fill(~self.heard[:, None], math.inf)
        return squares.amin(0) / (self.scale > 0).sum().clamp(min=1)


@dataclass(frozen=True, eq=False)
class ByInputs(Wrapped):
    """A mixture's client that has inputs alone: it takes -log p(phi | m) / tau for the components' losses."""

    densities: Densities
    temperature: float = 1.0

    def score(self, shared: Tree, inputs: Tensor, targets: Tensor) -> Tree:
        features = features_in_common(self.model, shared, inputs)
        return {"losses": self.densities.losses(features).to(self.model.dtype)}

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        return self._adapted(shared, scores["losses"] / self.temperature, mask, max_iterations)

    def _adapted(self, shared: Tree, losses: Tensor, mask: Tensor, max_iterations: int | None) -> Tree | None:
        return self.base.adapt(shared, {"losses": losses}, mask, max_iterations)


@final
@dataclass(frozen=True, eq=False)
class _Trial(ByInputs):
    """The same by every temperature that is tried: v_t is ``log_weights`` ``[G, M]``."""

    def adapt(self, shared: Tree, scores: Tree, mask: Tensor, max_iterations: int | None) -> Tree | None:
        fits = [self._adapted(shared, scores["losses"] / tau, mask, max_iterations) for tau in TEMPERATURES]
        return {"log_weights": torch.stack([fit["log_weights"] for fit in fits if fit is not None])}


class Seen(NamedTuple):
    """What a client's inputs say of it."""

    novelty: float  # share of the samples seen in training that lie as far as its median one; NaN without samples
    temperature: float  # by which its weights were fitted; infinite where they are the mean of all
    note: str  # the same in words

    @property
    def is_novel(self) -> bool:
        """Whether the client is unlike anything seen in training."""
        return self.novelty < NOVEL


@dataclass(frozen=True, eq=False)
class Statistics:
    """What clients without labels must know of those that were trained on: sums over these, float64 on the CPU."""

    counts: Tensor  # [M], N_m
    sums: Tensor  # [M, F], S_m
    squares: Tensor  # [M, F], Q_m
    input_sums: Tensor  # [M, D], the same of the inputs as they are, by which distances are measured
    input_squares: Tensor  # [M, D]
    weights: Tensor  # [M], the mean mixture weights
    histogram: Tensor  # [B], numbers of samples by their distances
    gains: (
        Tensor  # [2, G], what clients lose less with weights from inputs than with mean weights, of training or these
    )
    gain_squares: Tensor  # [2, G], the squares of each client's gain
    num_clients: Tensor  # [] that have tried it

    @property
    def densities(self) -> Densities:
        return Densities.of(self.counts, self.sums, self.squares)

    @property
    def input_densities(self) -> Densities:
        return Densities.of(self.counts, self.input_sums, self.input_squares)

    @property
    def errors(self) -> Tensor:
        """The standard errors of the gains, ``[2, G]``; infinite for a single client."""
        spread = (self.gain_squares - self.gains.square() / self.num_clients).clamp(min=0)
        return (spread * self.num_clients / (self.num_clients - 1)).sqrt().nan_to_num(nan=math.inf)

    @property
    def temperature(self) -> float:
        """The one with the largest gain, of those that gain beyond chance; infinite where none does.

        A gain over the mean weights alone does not show that inputs say anything: other weights may be better for all
        clients alike. So the mean of the weights from inputs must be beaten as well.
        """
        holds = (self.gains > _ERRORS * self.errors).all(0)
        best = self.gains[0].masked_fill(~holds, -math.inf).argmax()
        return TEMPERATURES[int(best)] if bool(holds.any()) else math.inf

    @property
    def note(self) -> str:
        """How weights come about, in a sentence."""
        if math.isinf(tau := self.temperature):
            return SILENT
        gain = float(self.gains[0, TEMPERATURES.index(tau)] / self.histogram.sum())
        saved = f"the run's clients lose {gain:.3g} nats a sample less so than with the mean weights"
        return f"Mixture weights are fitted to inputs, at temperature {tau:g}: {saved}."

    def share_beyond(self, distance: float) -> float:
        """Return the share of the samples seen in training that lie at least as far, even within a bin."""
        if math.isnan(distance):
            return math.nan
        place = min(max((math.log10(max(distance, 1e-300)) - _LOWEST) * _PER_DECADE, 0.0), float(_BINS))
        whole = min(int(place), _BINS - 1)
        beyond = self.histogram[whole + 1 :].sum() + (whole + 1 - place) * self.histogram[whole]
        return float(beyond / self.histogram.sum())

    def seen(self, distance: float) -> Seen:
        """Say what inputs whose median lies at this ``distance`` say of a client."""
        share = self.share_beyond(distance)
        tail = (
            f" It is {UNLIKE}: of the samples there, {share:.2g} lie as far as its median one." if share < NOVEL else ""
        )
        return Seen(share, self.temperature, self.note + tail)

    def record(self) -> dict[str, float | bool | str]:
        """Return the figures of a run's summary."""
        tau = self.temperature
        known = {} if math.isinf(tau) else {"temperature": tau}
        return {"inputs_tell": not math.isinf(tau), **known, "note": self.note}

    def settled(self, round_index: int) -> State:
        """Return them as a state, which needs no data to be read."""
        return State(round_index, {}, {}, dict(vars(self)))

    @classmethod
    def from_state(cls, state: State) -> Statistics:
        found = cls(**{name: leaf.cpu() for name, leaf in state.memory.items()})
        components, grid = len(found.counts), (2, len(TEMPERATURES))
        shapes = {"counts": (components,), "weights": (components,), "histogram": (_BINS,), "num_clients": ()}
        shapes |= {"gains": grid, "gain_squares": grid}
        shapes |= {name: (components, *getattr(found, name).shape[-1:]) for name in ("sums", "input_sums")}
        shapes |= {"squares": shapes["sums"], "input_squares": shapes["input_sums"]}
        for name, shape in shapes.items():
            if getattr(found, name).shape != shape:
                raise ValueError(f"{name} has shape {list(getattr(found, name).shape)}; allowed: {list(shape)}")
        return found


def gather(personalizer: Personalizer, state: State, federation: Federation, took_part: Tensor) -> Statistics:
    """Let the clients of a run sum up their inputs, and try temperatures; ``took_part`` ``[T]`` says who has trained.

    All see them through the components that a client unseen in training gets. Temperatures and distances go by the
    validation samples, or by those for training where there are no others: these were fitted.
    """
    alone = _alone(personalizer)
    algorithm, engine = alone.algorithm, alone.engine
    personal = alone.predictors(state, federation, took_part).personal
    components = _components(alone, state)
    reads, device = torch.zeros(federation.num_clients, dtype=torch.int64), personal["log_weights"].device
    trained = Cohort(components, reads, personal, federation.train)
    found = _total(engine, algorithm, _sums(algorithm), trained)
    weights = personal["log_weights"].double().exp().mean(0).cpu()
    densities = Densities.of(found["counts"], found["sums"], found["squares"]).to(device)
    nearness = Densities.of(found["counts"], found["input_sums"], found["input_squares"]).to(device)
    asked = federation.validation if len(federation.validation) else federation.train
    able = (asked.sizes > 0).nonzero().flatten()
    there = Cohort(components, reads, personal, asked).take(able)
    histogram = _total(engine, algorithm, _distances(algorithm, nearness), there)["histogram"]
    trial = _Trial(algorithm.model, algorithm.solver, algorithm, densities)
    fitted = engine.fit(trial, there._replace(personal={}))
    assert fitted is not None  # a mixture's weights can be had from scores
    common = fitted["log_weights"].double().exp().mean(0).log().to(algorithm.model.dtype)  # [G, M]
    mean = weights.log().to(common)
    judged = engine.tally(algorithm, _losses(algorithm, common, mean), there._replace(personal=fitted))
    gains = judged["others"] - judged["fitted"][:, None]  # [T, 2, G]
    tried = torch.tensor(len(able), dtype=torch.float64)
    return Statistics(**found, weights=weights, histogram=histogram, gains=gains.sum(0),
                      gain_squares=gains.square().sum(0), num_clients=tried)  # fmt: skip


def fit(
    personalizer: Personalizer,
    statistics: Statistics,
    state: State,
    samples: Samples,
    keys: Tensor,
    max_iterations: int | None = None,
) -> tuple[Predictors, list[Seen]]:
    """Fit unseen clients with these ``keys`` ``[T]`` by the inputs of their ``samples``; targets play no part."""
    alone = _alone(personalizer)
    model, device = alone.algorithm.model, next(iter(state.shared.values())).device
    densities, tau = statistics.densities.to(device), statistics.temperature
    by_inputs = ByInputs(model, alone.algorithm.solver, alone.algorithm, densities, min(tau, TEMPERATURES[-1]))
    found = replace(alone, algorithm=by_inputs).personalize(state, samples, keys, max_iterations)
    unknown = torch.tensor(math.isinf(tau)) | (samples.sizes == 0)
    mean = statistics.weights.log().to(found.personal["log_weights"])
    weights = torch.where(unknown.to(device)[:, None], mean, found.personal["log_weights"])
    components = tree_map(lambda leaf: leaf[0], found.shared)
    nearness = statistics.input_densities.to(device)
    medians = [_median(model, nearness, components, samples, t) for t in range(samples.num_clients)]
    return found._replace(personal={"log_weights": weights}), [statistics.seen(median) for median in medians]


def with_mean_weights(found: Predictors, statistics: Statistics) -> Predictors:
    """Return the same clients with the mean mixture weights of the training."""
    log_weights = found.personal["log_weights"]
    return found._replace(personal={"log_weights": statistics.weights.log().to(log_weights).expand_as(log_weights)})


def _alone(personalizer: Personalizer) -> Personalizer:
    """Return it without what clients do by labels to predict better."""
    return replace(personalizer, run=replace(personalizer.run, fine_tune_epochs=0, neighbours=0))


def _components(personalizer: Personalizer, state: State) -> Tree:
    """Return the components that a client unseen in training gets, ``[1, M, ...]``."""
    start = personalizer.mixer.welcome(state.shared, state.memory)
    if start.refusal:
        raise UserError(start.refusal)
    return start.shared


def _median(model: Model, densities: Densities, components: Tree, samples: Samples, position: int) -> float:
    """Return the median distance of a client's samples; NaN where it has none."""
    inputs = samples.client(position).inputs.to(densities.centre.device)
    if not len(inputs):
        return math.nan
    return float(densities.distances(plain_inputs(model, components, inputs)).median())


def _total(engine: Engine, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Tree:
    """Sum ``function`` over all clients, some at a time, since sums of features may be large."""
    found: Tree = {}
    for some in _few(engine, algorithm, function, cohort):
        for name, leaf in some.items():
            found[name] = found.get(name, 0) + leaf.sum(0)
    return found


def _few(engine: Engine, algorithm: Algorithm, function: Tally, cohort: Cohort) -> Iterator[Tree]:
    one = engine.tally(algorithm, function, cohort.take(torch.arange(1)))
    yield one
    most = max(1, _SUMMED_BYTES // sum(8 * leaf.numel() for leaf in one.values()))
    for members in torch.arange(1, len(cohort.reads)).split(most):
        if len(members):
            yield engine.tally(algorithm, function, cohort.take(members))


def _sums(algorithm: Algorithm) -> Tally:
    """A client's N_m, S_m and Q_m, by the responsibilities of its own predictor."""

    def sums(shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        losses = algorithm.model.component_losses(shared, inputs, targets)
        shares = em.log_responsibilities(losses, personal["log_weights"]).double().exp() * mask
        found = {"counts": shares.sum(1)}
        for prefix, space in (("", features_in_common), ("input_", plain_inputs)):
            numbers = space(algorithm.model, shared, inputs).double()
            found |= {f"{prefix}sums": shares @ numbers, f"{prefix}squares": shares @ numbers.square()}
        return found

    return sums


def _distances(algorithm: Algorithm, densities: Densities) -> Tally:
    """A client's numbers of samples by their distances, ``[B]``; those beyond all bins are in the first or the last."""

    def histogram(shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        distances = densities.distances(plain_inputs(algorithm.model, shared, inputs))
        places = ((distances.clamp(min=1e-300).log10() - _LOWEST) * _PER_DECADE).floor().clamp(0, _BINS - 1).long()
        nothing = torch.zeros(_BINS, dtype=torch.float64, device=inputs.device)
        return {"histogram": nothing.scatter_add(0, places, mask.double())}

    return histogram


def _losses(algorithm: Algorithm, common: Tensor, mean: Tensor) -> Tally:
    """What a client loses with own ``log_weights`` ``[G, M]``, with ``common`` ones, and with the ``mean`` ``[M]``."""

    def losses(shared: Tree, personal: Tree, inputs: Tensor, targets: Tensor, mask: Tensor) -> Tree:
        found = algorithm.model.component_losses(shared, inputs, targets)

        def lost(log_weights: Tensor) -> Tensor:
            return (mask * em.negative_log_likelihood(found, log_weights)).sum(dtype=torch.float64)

        fitted, others = (torch.stack([lost(row) for row in rows]) for rows in (personal["log_weights"], common))
        return {"fitted": fitted, "others": torch.stack([lost(mean).expand_as(others), others])}

    return losses
