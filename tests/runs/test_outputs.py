"""What clients' models put out: as each alone, by one pass where components are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import advance, make_personalizer, make_training
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedem.core.tree import Tree, tree_stack
from fedem.data.samples import Pool, Samples
from fedem.methods.base import Mixture
from fedem.models import MLP, Model
from fedem.models.losses import CrossEntropy
from fedem.runs import outputs
from fedem.runs.evaluate import evaluate
from fedem.runs.outputs import client_outputs, features_of


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    groups=st.lists(st.integers(0, 1), min_size=8, max_size=8),
    rows=st.sampled_from([1, 4, 1000]),
    with_features=st.booleans(),
)
def test_outputs_are_those_of_each_clients_own_models(
    sizes: list[int], groups: list[int], rows: int, with_features: bool
) -> None:
    """Whoever shares a pass, and however many it takes."""
    model = Model(lambda: MLP(hidden=5).build((4,), 3), CrossEntropy(), torch.float64)
    parts = [[model.init(2 * group), model.init(2 * group + 1)] for group in range(2)]
    trees = [tree_stack(components) for components in parts]
    rng = np.random.default_rng(sum(sizes))
    weights = torch.from_numpy(rng.dirichlet(np.ones(2), len(sizes))).log()
    mixtures = [Mixture(trees[group], own) for group, own in zip(groups, weights, strict=False)]
    total = sum(sizes)
    samples = Samples(
        Pool(torch.from_numpy(rng.normal(size=(total, 4))), torch.from_numpy(rng.integers(0, 3, size=total))),
        torch.tensor([0, *np.cumsum(sizes)]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "_MOST_ROWS", rows)
        seen = list(client_outputs(model, iter(mixtures), samples, with_features))
    for position, mixture in enumerate(mixtures):
        mine = [each for each in seen if each.position == position]
        own = samples.client(position)
        assert sum(len(each.samples.targets) for each in mine) == sizes[position]
        if not sizes[position]:
            continue
        assert [each.start for each in mine] == [0, *np.cumsum([len(each.samples.targets) for each in mine])][:-1]
        torch.testing.assert_close(torch.cat([each.samples.targets for each in mine]), own.targets, rtol=0, atol=0)
        found = torch.cat([each.predictions(model) for each in mine])
        probabilities = torch.stack([model.outputs(part, own.inputs).softmax(1) for part in parts[groups[position]]])
        torch.testing.assert_close(found, (mixture.log_weights.exp()[:, None, None] * probabilities).sum(0))
        features = torch.cat([each.features for each in mine])
        expected = features_of(model, mixture, own.inputs)
        torch.testing.assert_close(features, expected if with_features else expected[:, :0])


@pytest.mark.parametrize(("method", "passes"), [("fedavg", 1), ("fedem", 1), ("local", 5)])
def test_clients_with_the_same_components_are_scored_by_one_pass(method: str, passes: int) -> None:
    training = make_training(method)
    found = make_personalizer(training, neighbours=2).predictors(advance(training), training.federation)
    model, seen = training.algorithm.model, list[int]()
    whole = model.component_outputs_and_features

    def counted(components: Tree, inputs: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(inputs))
        return whole(components, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "component_outputs_and_features", counted)
        evaluate(training.algorithm, training.engine, found, training.federation)
    parts = [training.federation.part(part) for part in ("train", "validation", "test")]
    assert len(seen) == passes * sum(len(part) > 0 for part in parts)
    assert sum(seen) == sum(map(len, parts))
