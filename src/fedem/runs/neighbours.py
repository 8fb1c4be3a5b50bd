"""Nearest neighbours beside a model: what a client remembers of its own training samples, and how much that counts.

kNN-Per (Marfoq, Neglia, Vidal and Kameni, "Personalized Federated Learning through Local Memorization", ICML 2022). A
client predicts

    p(y|x) = lambda_t p_knn(y|x) + (1 - lambda_t) p_model(y|x),
    p_knn(y|x) proportional to sum_i 1{y = y_i} exp(-d(phi(x), phi(x_i)) / s_t)

over the k of its own training samples that are nearest in the features phi of its model (:func:`features_of`). s_t is
the mean distance of a training sample to the nearest other one, so that no unit of the features matters. For numbers
p_knn is the weighted mean of the neighbours' targets. Nothing is trained: lambda_t is chosen by validation.

Shapes: n samples to predict, m remembered ones, F features, K classes or target dimensions, L values of lambda_t tried,
T clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedem.data.samples import Samples
from fedem.methods.base import Mixture
from fedem.models.base import Model
from fedem.runs.outputs import ClientOutputs, client_outputs, outputs_of_one
from fedem.runs.rounds import State

# Of the neighbours, lambda_t: what is tried. The model keeps a say, or a class of no neighbour would be impossible.
WEIGHTS = torch.arange(10, dtype=torch.float64) / 10
_ENTRIES = 1 << 22  # numbers of a table of distances, or of the neighbours' targets, at most
# Samples that everybody's mean curve counts for beside a client's own validation samples. Chosen by cross-validation
# within the validation parts of three data sets (docs/methods.md says how).
_PSEUDO_SAMPLES = 50.0


class Nearest(NamedTuple):
    """The remembered samples that are nearest to each of n samples, k of them, the nearest first."""

    distances: Tensor  # [n, k] float64
    positions: Tensor  # [n, k] int64, among the remembered ones


def nearest(
    features: Tensor, remembered: Tensor, number: int, own: Tensor | None = None, entries: int = _ENTRIES
) -> Nearest:
    """Find the ``number`` rows of ``remembered`` ``[m, F]``, or all if they are fewer, nearest to each of ``features``.

    ``own`` ``[n]``: each sample's own place among the remembered ones, which is not its neighbour; None where they are
    others. A table of distances has ``entries`` at most.
    """
    number, found = min(number, len(remembered) - (own is not None)), []
    # By products, which are several times faster. They lose half of all digits where distances are small beside the
    # features, so these are centred, and have twice the digits that most models compute with.
    centre = remembered.double().mean(0)
    others = remembered.double() - centre
    squares = others.square().sum(1)
    for rows in torch.arange(len(features), device=features.device).split(max(1, entries // max(1, len(remembered)))):
        mine = features[rows].double() - centre
        table = torch.addmm(squares, mine, others.T, alpha=-2)
        if own is not None:
            table.scatter_(1, own[rows, None], torch.inf)
        least, positions = table.topk(number, largest=False)
        distances = (least + mine.square().sum(1, keepdim=True)).clamp(min=0).sqrt()
        found.append(Nearest(distances, positions))
    return Nearest(*(torch.cat(columns) for columns in zip(*found, strict=True)))


@dataclass(frozen=True, eq=False)
class Neighbours:
    """What one client remembers, and how much its neighbours count beside its model."""

    features: Tensor  # [m, F], of its training samples
    targets: Tensor  # [m], or [m, D]
    scale: float  # s_t
    weight: float  # lambda_t
    number: int  # k

    def vote(
        self, model: Model, features: Tensor, width: int, own: Tensor | None = None, entries: int = _ENTRIES
    ) -> Tensor:
        """Return p_knn, or the neighbours' mean, of samples with ``features`` ``[n, F]``; ``[n, width]``.

        ``own`` is as in :func:`nearest`; somebody else must be left.
        """
        votes, pieces = model.loss.certain(self.targets, width).to(features.dtype), []
        most = max(1, entries // (self.number * width))
        for rows in torch.arange(len(features), device=features.device).split(most):
            mine = None if own is None else own[rows]
            distances, positions = nearest(features[rows], self.features, self.number, mine, entries)
            shares = torch.softmax(-distances / self.scale, 1).to(votes)
            pieces.append(torch.einsum("nk,nkw->nw", shares, votes[positions]))
        return torch.cat(pieces)

    def is_heard(self, own: Tensor | None = None) -> bool:
        """Whether there is a neighbour at all, given who is left out."""
        return len(self.targets) > (own is not None)

    def mixed(self, predictions: Tensor, votes: Tensor) -> Tensor:
        """Return lambda_t p_knn + (1 - lambda_t) p_model, ``[n, K]``."""
        return self.weight * votes + (1 - self.weight) * predictions


def predict(model: Model, mixture: Mixture, inputs: Tensor, neighbours: Neighbours | None = None) -> Tensor:
    """Return one client's predictions: the components' probabilities (or means), mixed, and its neighbours'. [n, K]."""
    if neighbours is None:
        pieces = outputs_of_one(model, mixture, inputs, with_features=False)
        return torch.cat([each.predictions(model) for each in pieces])
    found, votes = with_votes(model, mixture, inputs, neighbours)
    return neighbours.mixed(found, votes)


def with_votes(model: Model, mixture: Mixture, inputs: Tensor, neighbours: Neighbours) -> tuple[Tensor, Tensor]:
    """Return one client's predictions and its neighbours', ``[n, K]`` each."""
    pairs = [_voted(model, each, neighbours) for each in outputs_of_one(model, mixture, inputs)]
    predictions, votes = zip(*pairs, strict=True)
    return torch.cat(predictions), torch.cat(votes)


def _voted(model: Model, given: ClientOutputs, neighbours: Neighbours) -> tuple[Tensor, Tensor]:
    found = given.predictions(model)
    return found, neighbours.vote(model, given.features, found.shape[1])


@dataclass(frozen=True, eq=False)
class Memory:
    """What all clients remember."""

    features: Tensor  # [N, F], one client after the other
    targets: Tensor  # [N], or [N, D]
    offsets: Tensor  # [T + 1] int64 on the CPU: client t's rows are offsets[t] up to offsets[t + 1]
    scales: Tensor  # [T] float64 on the CPU, s_t
    weights: Tensor  # [T] float64 on the CPU, lambda_t; 0 of those who remember nothing
    curve: Tensor  # [L] float64 on the CPU, everybody's mean loss on validation samples by lambda
    number: int  # k

    def of(self, position: int) -> Neighbours | None:
        """Return what one client remembers; None where that is nothing."""
        start, end = int(self.offsets[position]), int(self.offsets[position + 1])
        if start == end:
            return None
        scale, weight = float(self.scales[position]), float(self.weights[position])
        return Neighbours(self.features[start:end], self.targets[start:end], scale, weight, self.number)

    @property
    def mean_weight(self) -> float:
        """The mean of lambda_t over the clients that remember anything."""
        return float(self.weights[self.offsets.diff() > 0].mean())

    def settled(self, round_index: int) -> State:
        """Return it as a state, which needs no data to be read."""
        everybody = {"scales": self.scales, "weights": self.weights}
        common = {"offsets": self.offsets, "curve": self.curve, "number": torch.tensor(self.number)}
        return State(round_index, {"features": self.features, "targets": self.targets}, everybody, common)

    @classmethod
    def from_state(cls, state: State) -> Memory:
        shared, small = state.shared, {name: leaf.cpu() for name, leaf in (state.personal | state.memory).items()}
        number = int(small.pop("number"))
        found = cls(shared["features"], shared["targets"], **small, number=number)
        steps, rows = found.offsets.diff(), len(found.features)
        if bool((steps < 0).any()) or found.offsets[0] != 0 or found.offsets[-1] != rows or len(found.targets) != rows:
            raise ValueError(
                f"offsets are {found.offsets.tolist()[:9]} for {rows} features, {len(found.targets)} targets"
            )
        if not len(found.scales) == len(found.weights) == len(steps):
            raise ValueError(f"there are {len(found.scales)} scales and {len(found.weights)} weights for {len(steps)}")
        return found


def remember(
    model: Model,
    mixture_of: Callable[[int], Mixture],
    train: Samples,
    validation: Samples | None,
    number: int,
    curve: Tensor | None = None,
) -> Memory | None:
    """Let clients remember their training samples, ``number`` of which each asks, and choose how much that counts.

    ``mixture_of`` returns a client's models by its position. lambda_t minimises

        sum over the client's validation samples of -log p(y|x), plus _PSEUDO_SAMPLES times ``curve``,

    where the curve, everybody's mean of the same, is that of these clients unless it is given: then they are new ones.
    Who has no validation samples goes by the curve alone. None where nobody has training samples.
    """
    if not len(train):
        return None

    def everybody() -> Iterator[Mixture]:
        return (mixture_of(position) for position in range(train.num_clients))

    seen = [(each.features, each.samples.targets) for each in client_outputs(model, everybody(), train)]
    features, targets = (torch.cat(pieces) for pieces in zip(*seen, strict=True))
    scales = torch.tensor([scale_of(mine) for mine in features.split(train.sizes.tolist())], dtype=torch.float64)
    # At first neighbours have all the say, and it is seen what everybody would lose with less.
    alone = Memory(features, targets, train.offsets, scales, torch.ones_like(scales), WEIGHTS, number)
    sums = torch.zeros(train.num_clients, len(WEIGHTS), dtype=torch.float64)
    count = 0
    for each in () if validation is None else client_outputs(model, everybody(), validation):
        if (near := alone.of(each.position)) is not None:
            lost = losses_by_weight(model, *_voted(model, each, near), each.samples.targets)
            sums[each.position] += lost.sum(1)
            count += lost.shape[1]
    if curve is None:
        curve = sums.sum(0) / count
    weights = torch.where(train.sizes > 0, choose_weights(sums, curve), 0.0)
    return replace(alone, weights=weights, curve=curve)


def scale_of(features: Tensor) -> float:
    """Return the mean distance of a sample ``[m, F]`` to the nearest other one; 1 where there is none, or it is 0."""
    if len(features) < 2:
        return 1.0
    own = torch.arange(len(features), device=features.device)
    return float(nearest(features, features, 1, own).distances.mean()) or 1.0


def losses_by_weight(model: Model, predictions: Tensor, votes: Tensor, targets: Tensor) -> Tensor:
    """Return -log p(target) of each sample by lambda, ``[L, n]`` float64 on the CPU.

    For numbers p is the Gaussian of the loss around the mean that is predicted, so the best lambda is that of the least
    squared error.
    """
    predictions, votes, targets = predictions.double().cpu(), votes.double().cpu(), targets.cpu()
    tried = (weight * votes + (1 - weight) * predictions for weight in WEIGHTS)
    return torch.stack([model.loss.surprise(each, targets) for each in tried])


def choose_weights(sums: Tensor, curve: Tensor, pseudo_samples: float = _PSEUDO_SAMPLES) -> Tensor:
    """Return each client's lambda_t, ``[T, L], [L] -> [T]``: that of the least summed loss, the smallest if several."""
    # numpy's is the first of several; torch's may be any.
    return WEIGHTS[torch.from_numpy((sums + pseudo_samples * curve).numpy().argmin(1))]
