"""Clients of the synthetic mixture against the paper's recipe. Seeds are fixed; bounds: about five standard errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from recipes import SMALL, truth_of
from scipy import stats

from fedem.data import Dataset, Synthetic
from fedem.data.federation import PARTS


def one_sample_each(**changes: Any) -> Synthetic:
    """Clients with one sample of one number, for what concerns clients alone."""
    recipe = Synthetic(num_clients=20_000, dimension=1, min_samples=1, max_samples=1, num_validation=0, num_test=0)
    return replace(recipe, **changes)


class TestMixtureWeights:
    @pytest.mark.parametrize("concentration", [0.4, 3.0])
    @pytest.mark.parametrize("num_components", [2, 3, 5])
    def test_mean_and_variance_are_those_of_the_dirichlet(self, concentration: float, num_components: int) -> None:
        recipe = one_sample_each(dirichlet=concentration, num_components=num_components)
        weights = truth_of(recipe.make(0)).mixture_weights.double().numpy()
        mean = 1 / num_components
        variance = mean * (1 - mean) / (num_components * concentration + 1)
        deviations = (weights - mean) ** 2
        assert np.abs(weights.mean(0) - mean).max() < 5 * np.sqrt(variance / len(weights))
        assert np.all(np.abs(deviations.mean(0) - variance) < 5 * deviations.std(0) / np.sqrt(len(weights)))

    def test_each_weight_follows_a_beta_distribution(self) -> None:
        weights = truth_of(one_sample_each().make(1)).mixture_weights.double().numpy()
        for column in weights.T:
            assert stats.kstest(column, stats.beta(0.4, 0.8).cdf).pvalue > 1e-4

    @pytest.mark.parametrize("clustered", [False, True])
    def test_rows_are_distributions(self, clustered: bool) -> None:
        weights = truth_of(one_sample_each(num_clients=500, clustered=clustered).make(0)).mixture_weights
        assert weights.shape == (500, 3)
        assert (weights >= 0).all()
        assert torch.allclose(weights.sum(1), torch.ones(500), atol=1e-6)

    def test_clustered_clients_have_one_component(self) -> None:
        weights = truth_of(one_sample_each(clustered=True).make(0)).mixture_weights
        assert set(weights.unique().tolist()) == {0.0, 1.0}
        assert (weights.sum(1) == 1).all()

    def test_clusters_are_equally_likely(self) -> None:
        weights = truth_of(one_sample_each(clustered=True).make(0)).mixture_weights.double()
        assert (weights.mean(0) - 1 / 3).abs().max() < 5 * np.sqrt(2 / 9 / 20_000)

    def test_clients_differ(self) -> None:
        weights = truth_of(one_sample_each(num_clients=100).make(0)).mixture_weights
        assert len(weights.unique(dim=0)) == 100


class TestComponents:
    def test_numbers_are_uniform(self) -> None:
        recipe = one_sample_each(num_clients=1, dimension=20_000)
        components = truth_of(recipe.make(0)).components.double().numpy()
        assert components.shape == (3, 20_000)
        for component in components:
            assert stats.kstest(component, stats.uniform(-1, 2).cdf).pvalue > 1e-4

    def test_components_are_independent(self) -> None:
        recipe = one_sample_each(num_clients=1, dimension=20_000)
        correlations = np.corrcoef(truth_of(recipe.make(0)).components.double().numpy())
        assert np.abs(correlations - np.eye(3)).max() < 5 / np.sqrt(20_000)


@pytest.fixture(scope="module")
def uniform() -> Dataset:
    recipe = Synthetic(
        num_clients=5, dimension=6, min_samples=2000, max_samples=2000, num_validation=2000, num_test=2000
    )
    return recipe.make(0)


class TestInputs:
    @pytest.mark.parametrize("part", PARTS)
    def test_numbers_lie_between_minus_one_and_one(self, uniform: Dataset, part: str) -> None:
        assert uniform.federation.part(part).inputs.abs().max() <= 1

    @pytest.mark.parametrize("part", PARTS)
    def test_mean_and_variance_are_those_of_the_uniform(self, uniform: Dataset, part: str) -> None:
        inputs = uniform.federation.part(part).inputs.double()
        count = len(inputs)
        assert inputs.mean(0).abs().max() < 5 * np.sqrt(1 / 3 / count)
        assert (inputs.square().mean(0) - 1 / 3).abs().max() < 5 * np.sqrt(4 / 45 / count)

    @pytest.mark.parametrize("part", PARTS)
    def test_numbers_are_uniform(self, uniform: Dataset, part: str) -> None:
        inputs = uniform.federation.part(part).inputs.double().flatten().numpy()
        assert stats.kstest(inputs, stats.uniform(-1, 2).cdf).pvalue > 1e-4

    @pytest.mark.parametrize("part", PARTS)
    def test_features_are_independent(self, uniform: Dataset, part: str) -> None:
        inputs = uniform.federation.part(part).inputs.double()
        correlations = torch.corrcoef(inputs.T)
        assert (correlations - torch.eye(6)).abs().max() < 5 / np.sqrt(len(inputs))

    def test_no_sample_stands_twice(self, uniform: Dataset) -> None:
        inputs = torch.cat([uniform.federation.part(part).inputs for part in PARTS])
        assert len(inputs.unique(dim=0)) == len(inputs)


@pytest.fixture(scope="module")
def sizes() -> NDArray[np.int64]:
    recipe = Synthetic(num_clients=4000, dimension=1, num_validation=0, num_test=0)
    sizes: NDArray[np.int64] = recipe.make(0).federation.train.sizes.numpy()
    return sizes


class TestSizes:
    def test_no_client_has_fewer_than_the_minimum(self, sizes: NDArray[np.int64]) -> None:
        assert 50 <= sizes.min() <= 52

    def test_no_client_has_more_than_the_maximum(self, sizes: NDArray[np.int64]) -> None:
        assert sizes.max() == 1000

    @pytest.mark.parametrize("quantile", [0.1, 0.25, 0.5, 0.75, 0.9])
    def test_quantiles_are_those_of_the_lognormal(self, sizes: NDArray[np.int64], quantile: float) -> None:
        # The share of clients below the true quantile is binomial; sizes are rounded down.
        border = 50 + np.exp(4 + 2 * stats.norm.ppf(quantile))
        share = (sizes < np.floor(border)).mean()
        upper = (sizes <= np.ceil(border)).mean()
        error = 5 * np.sqrt(quantile * (1 - quantile) / len(sizes))
        assert share - error < quantile < upper + error

    def test_the_median_is_fifty_and_a_lognormal_median(self, sizes: NDArray[np.int64]) -> None:
        error = np.exp(4) * 5 * 2 * np.sqrt(np.pi / 2 / len(sizes))
        assert abs(np.median(sizes) - (50 + np.exp(4))) < error

    def test_the_share_at_the_maximum_is_that_of_the_tail(self, sizes: NDArray[np.int64]) -> None:
        tail = stats.norm.sf((np.log(950) - 4) / 2)
        assert abs((sizes == 1000).mean() - tail) < 5 * np.sqrt(tail * (1 - tail) / len(sizes))

    def test_sizes_without_spread_are_equal(self) -> None:
        sizes = Synthetic(num_clients=5, dimension=1, size_sigma=0.0, num_test=0).make(0).federation.train.sizes
        assert set(sizes.tolist()) == {50 + int(np.exp(4))}

    def test_minimum_and_maximum_can_be_the_same(self) -> None:
        sizes = replace(SMALL, min_samples=33, max_samples=33).make(0).federation.train.sizes
        assert set(sizes.tolist()) == {33}

    def test_the_mean_of_the_logarithm_takes_effect(self) -> None:
        recipe = Synthetic(num_clients=2000, dimension=1, size_mean=5.0, size_sigma=0.5, num_validation=0, num_test=0)
        sizes = recipe.make(0).federation.train.sizes.double()
        logarithms = (sizes - 50 + 0.5).log()
        assert abs(float(logarithms.mean()) - 5) < 5 * 0.5 / np.sqrt(2000)
        assert abs(float(logarithms.std()) - 0.5) < 5 * 0.5 / np.sqrt(2 * 2000)

    def test_every_client_has_a_training_sample(self) -> None:
        recipe = replace(SMALL, min_samples=0, size_mean=-10.0, size_sigma=0.1)
        assert recipe.make(0).federation.train.sizes.tolist() == [1] * 8

    def test_enormous_draws_are_capped(self) -> None:
        assert replace(SMALL, size_mean=900.0).make(0).federation.train.sizes.tolist() == [60] * 8

    @pytest.mark.parametrize(("part", "size"), [("validation", 6), ("test", 9)])
    def test_the_other_parts_have_the_same_size_everywhere(self, part: str, size: int) -> None:
        assert SMALL.make(0).federation.part(part).sizes.tolist() == [size] * 8

    @pytest.mark.parametrize(("part", "key"), [("validation", "num_validation"), ("test", "num_test")])
    def test_the_other_parts_may_be_empty(self, part: str, key: str) -> None:
        samples = replace(SMALL, **{key: 0}).make(0).federation.part(part)
        assert samples.inputs.shape == (0, 4)
