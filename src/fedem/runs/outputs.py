"""What clients' models put out for their samples, by as few passes through the models as can be.

Shapes: n samples of a client, M components, K outputs, F features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fedem.core.em import mix
from fedem.core.tree import Tree
from fedem.data.samples import Pool, Samples
from fedem.methods.base import Mixture
from fedem.models.base import Model

_MOST_ROWS = 1 << 13  # samples that a model predicts at once, at most
_TRAINING_BYTES = 1 << 34  # what training would hold for these samples, at most: a deep network predicts fewer at once


class ClientOutputs(NamedTuple):
    """What a client's models put out for n of its samples, which follow each other."""

    position: int  # of the client
    start: int  # the first sample's place among the client's
    mixture: Mixture
    samples: Pool  # n, where the mixture is
    outputs: Tensor  # [M, n, K], of each component
    features: Tensor  # [n, F], of all together; F is 0 where they were not asked for

    def predictions(self, model: Model) -> Tensor:
        """Return the components' probabilities (or means), mixed, ``[n, K]``."""
        return mix(model.loss.probabilities(self.outputs), self.mixture.log_weights)


def client_outputs(
    model: Model, mixtures: Iterable[Mixture], samples: Samples, with_features: bool = True
) -> Iterator[ClientOutputs]:
    """Run every client's models on its own samples, in order; for a large client in several pieces.

    Clients that have the same components, one after the other, share a pass through them: only weights tell such
    clients apart.
    """
    offsets, most = samples.offsets.tolist(), _rows_at_once(model)
    first, together = 0, list[Mixture]()
    for position, mixture in enumerate(mixtures):
        full = offsets[position] - offsets[first] >= most
        if together and (full or not _are_one(together[0].components, mixture.components)):
            yield from _shared_pass(model, first, together, samples, with_features)
            first, together = position, []
        together.append(mixture)
    if together:
        yield from _shared_pass(model, first, together, samples, with_features)


def _shared_pass(
    model: Model, first: int, together: Sequence[Mixture], samples: Samples, with_features: bool
) -> Iterator[ClientOutputs]:
    """Run the common components of the clients from ``first`` on, on their samples."""
    components, device = together[0].components, together[0].log_weights.device
    bounds = samples.offsets[first : first + len(together) + 1].tolist()
    for low in range(bounds[0], bounds[-1], _rows_at_once(model)):
        high = min(bounds[-1], low + _rows_at_once(model))
        pool = samples.span(low, high).to(device)
        outputs, features = _component_outputs(model, components, pool.inputs, with_features)
        for position, (mixture, (start, end)) in enumerate(zip(together, pairwise(bounds), strict=True), first):
            rows = slice(max(start, low) - low, min(end, high) - low)
            if rows.start < rows.stop:
                mine, own = _joined(model, mixture, features[:, rows]), Pool(*(array[rows] for array in pool))
                yield ClientOutputs(position, low + rows.start - start, mixture, own, outputs[:, rows], mine)


def _component_outputs(model: Model, components: Tree, inputs: Tensor, with_features: bool) -> tuple[Tensor, Tensor]:
    """Return each component's outputs ``[M, n, K]`` and features, ``[M, n, 0]`` where they are not asked for."""
    if with_features:
        return model.component_outputs_and_features(components, inputs)
    outputs = model.component_outputs(components, inputs)
    return outputs, outputs[..., :0]


def _rows_at_once(model: Model) -> int:
    return max(1, min(_MOST_ROWS, _TRAINING_BYTES // max(1, model.bytes_per_sample)))


def _are_one(first: Tree, second: Tree) -> bool:
    """Whether two trees are the same memory."""
    return all(leaf.is_set_to(second[name]) for name, leaf in first.items())


def _joined(model: Model, mixture: Mixture, features: Tensor) -> Tensor:
    """Return the features of a mixture of models: each one's times the square root of its weight, side by side.

    So a squared distance is the mean of the components' squared distances by their weights, and a component that has no
    weight does not count. ``[M, n, F / M] -> [n, F]``.
    """
    if all(len(mixture.components[name]) == 1 for name in model.body):
        # All components have the same features, and their weights sum to one.
        return features[0]
    roots = (mixture.log_weights / 2).exp()
    return (roots[:, None, None] * features).transpose(0, 1).flatten(1)


def outputs_of_one(
    model: Model, mixture: Mixture, inputs: Tensor, with_features: bool = True
) -> Iterator[ClientOutputs]:
    """Run one client's models on samples whose targets nobody knows; in one piece at least, which may be empty."""
    pool = Pool(inputs, inputs.new_zeros(count := len(inputs)))
    if count:
        yield from client_outputs(model, [mixture], Samples(pool, torch.tensor([0, count])), with_features)
    else:
        outputs, features = _component_outputs(model, mixture.components, inputs, with_features)
        yield ClientOutputs(0, 0, mixture, pool, outputs, _joined(model, mixture, features))


def features_of(model: Model, mixture: Mixture, inputs: Tensor) -> Tensor:
    """Return the features of a mixture of models, ``[n, ...] -> [n, F]``, by which samples are near each other."""
    return torch.cat([each.features for each in outputs_of_one(model, mixture, inputs)])
