"""The synthetic mixture against the paper's recipe. Seeds are fixed; bounds are about five standard errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.integrate import quad
from scipy.special import expit
from torch import Tensor

from fedem.data import Dataset, Synthetic, Truth
from fedem.data.synthetic import SyntheticTruth
from fedem.errors import UserError
from fedem.federation import PARTS
from fedem.samples import Samples
from fedem.settings import names_of

SMALL = Synthetic(
    num_clients=8, num_components=3, dimension=4, max_samples=60, min_samples=20, num_validation=6, num_test=9
)
FIELDS = ("inputs", "targets", "offsets")


def truth_of(dataset: Dataset) -> Truth:
    assert dataset.truth is not None
    return dataset.truth


def same_samples(first: Samples, second: Samples) -> bool:
    return all(torch.equal(getattr(first, field), getattr(second, field)) for field in FIELDS)


def same_truth(first: Truth, second: Truth) -> bool:
    return torch.equal(first.components, second.components) and torch.equal(
        first.mixture_weights, second.mixture_weights
    )


def fingerprint(dataset: Dataset) -> list[Any]:
    """Everything that a data set holds, as lists."""
    truth = truth_of(dataset)
    samples = [getattr(dataset.federation.part(part), field).tolist() for part in PARTS for field in FIELDS]
    return [*samples, truth.components.tolist(), truth.mixture_weights.tolist()]


def one_sample_each(**changes: Any) -> Synthetic:
    """Clients with one sample of one number, for what concerns clients alone."""
    recipe = Synthetic(num_clients=20_000, dimension=1, min_samples=1, max_samples=1, num_validation=0, num_test=0)
    return replace(recipe, **changes)


def weights_of_rows(dataset: Dataset, part: str) -> Tensor:
    """The true mixture weights of each sample's client, ``[N, M]``."""
    samples = dataset.federation.part(part)
    return torch.repeat_interleave(truth_of(dataset).mixture_weights, samples.sizes, dim=0)


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


def calibration(probabilities: Tensor, labels: Tensor, num_bins: int = 10) -> list[float]:
    """In each bin of predicted probability: by how many standard errors the positive labels miss their number."""
    p, y = probabilities.double(), labels.double()
    bins = (p * num_bins).long().clamp(max=num_bins - 1)
    misses = []
    for index in range(num_bins):
        rows = bins == index
        variance = float((p[rows] * (1 - p[rows])).sum())
        if variance > 50:
            misses.append(float((y[rows] - p[rows]).sum()) / variance**0.5)
    return misses


LABELS = Synthetic(num_clients=20, dimension=20, min_samples=3000, max_samples=3000, num_validation=3000, num_test=3000)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return LABELS.make(0)


@pytest.fixture(scope="module")
def clustered() -> Dataset:
    return replace(LABELS, clustered=True).make(1)


@pytest.fixture(scope="module")
def noiseless() -> Dataset:
    return replace(LABELS, noise_scale=0.0).make(2)


class TestLabels:
    @pytest.mark.parametrize("part", PARTS)
    def test_labels_are_classes(self, dataset: Dataset, part: str) -> None:
        targets = dataset.federation.part(part).targets
        assert targets.dtype == torch.int64
        assert targets.unique().tolist() == [0, 1]

    @pytest.mark.parametrize("part", PARTS)
    def test_labels_agree_with_the_truth(self, dataset: Dataset, part: str) -> None:
        samples = dataset.federation.part(part)
        predicted = truth_of(dataset).predict(samples.inputs, weights_of_rows(dataset, part))[:, 1]
        misses = calibration(predicted, samples.targets)
        assert len(misses) >= 8
        assert max(map(abs, misses)) < 4.5

    @pytest.mark.parametrize("part", PARTS)
    def test_labels_of_clusters_agree_with_the_truth(self, clustered: Dataset, part: str) -> None:
        samples = clustered.federation.part(part)
        predicted = truth_of(clustered).predict(samples.inputs, weights_of_rows(clustered, part))[:, 1]
        misses = calibration(predicted, samples.targets)
        assert len(misses) >= 8
        assert max(map(abs, misses)) < 4.5

    def test_labels_agree_with_an_independent_account(self, clustered: Dataset) -> None:
        """A client's one component and noise drawn here, not the truth's own integral."""
        samples, truth = clustered.federation.test, truth_of(clustered)
        own = truth.components[truth.mixture_weights.argmax(1)].repeat_interleave(samples.sizes, dim=0)
        logits = (samples.inputs * own).sum(1).double().numpy()
        noise = np.random.default_rng(0).standard_normal(400)
        predicted = torch.from_numpy(np.mean([expit(logits + draw) for draw in noise], axis=0))
        misses = calibration(predicted, samples.targets)
        assert len(misses) >= 8
        assert max(map(abs, misses)) < 6  # a little wider: the noise is a sample

    def test_labels_are_noisier_than_the_plain_sigmoid(self, clustered: Dataset) -> None:
        samples, truth = clustered.federation.test, truth_of(clustered)
        plain = replace(_synthetic(truth), noise_scale=0.0)
        misses = calibration(plain.predict(samples.inputs, weights_of_rows(clustered, "test"))[:, 1], samples.targets)
        assert misses[0] > 5
        assert misses[-1] < -5

    def test_labels_without_noise_agree_with_the_plain_sigmoid(self, noiseless: Dataset) -> None:
        samples, truth = noiseless.federation.test, truth_of(noiseless)
        by_component = expit(samples.inputs.double().numpy() @ truth.components.double().numpy().T)
        predicted = (by_component * weights_of_rows(noiseless, "test").double().numpy()).sum(1)
        misses = calibration(torch.from_numpy(predicted), samples.targets)
        assert len(misses) >= 8
        assert max(map(abs, misses)) < 4.5

    def test_every_client_follows_its_own_weights(self, dataset: Dataset) -> None:
        samples, truth = dataset.federation.test, truth_of(dataset)
        for position in range(samples.num_clients):
            inputs, targets = samples.client(position)
            p = truth.predict(inputs, truth.mixture_weights[position].expand(len(inputs), -1))[:, 1].double()
            slope = ((p - 0.5) * (targets - p)).sum() / ((p - 0.5) ** 2 * p * (1 - p)).sum().sqrt()
            assert abs(float(slope)) < 4.5

    def test_another_clients_weights_fit_worse(self, clustered: Dataset) -> None:
        samples, weights = clustered.federation.test, weights_of_rows(clustered, "test")
        likelihoods = [
            truth_of(clustered).predict(samples.inputs, chosen).gather(1, samples.targets[:, None]).log().mean()
            for chosen in (weights, weights.roll(1, dims=1), weights.roll(2, dims=1))
        ]
        assert likelihoods[0] > max(likelihoods[1:]) + 0.1


def _synthetic(truth: Truth) -> SyntheticTruth:
    assert isinstance(truth, SyntheticTruth)
    return truth


class TestTruth:
    components = torch.tensor([[1.0, -0.5, 2.0], [-1.5, 0.25, 0.0]], dtype=torch.float64)
    inputs = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.5, -0.5], [-1.0, 1.0, 1.0], [1.0, -1.0, 1.0]], dtype=torch.float64)
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0], [0.2, 0.8]], dtype=torch.float64)

    def truth(self, noise_scale: float = 1.0) -> SyntheticTruth:
        return SyntheticTruth(("ann", "bob"), self.components, self.weights[:2], noise_scale)

    def test_agrees_with_a_monte_carlo_integral(self) -> None:
        rng = np.random.default_rng(0)
        count = 200_000
        predicted = self.truth().predict(self.inputs, self.weights)[:, 1]
        for row in range(len(self.inputs)):
            component = (rng.random(count) >= float(self.weights[row, 0])).astype(int)
            logits = (self.components @ self.inputs[row]).numpy()[component] + rng.standard_normal(count)
            labels = rng.random(count) < expit(logits)
            assert abs(labels.mean() - float(predicted[row])) < 5 * 0.5 / np.sqrt(count)

    @pytest.mark.parametrize("noise_scale", [0.25, 0.5, 1.0])
    def test_agrees_with_numerical_integration(self, noise_scale: float) -> None:
        predicted = self.truth(noise_scale).predict(self.inputs, self.weights)[:, 1]
        logits = (self.inputs @ self.components.T).numpy()
        for row, (first, second) in enumerate(logits):
            exact = [
                quad(lambda e, z=z: expit(z + noise_scale * e) * stats.norm.pdf(e), -10, 10, epsabs=1e-12)[0]
                for z in (first, second)
            ]
            assert float(predicted[row]) == pytest.approx(float(self.weights[row].numpy() @ exact), abs=1e-8)

    def test_without_noise_is_the_plain_sigmoid(self) -> None:
        predicted = self.truth(0.0).predict(self.inputs, self.weights)[:, 1]
        expected = (self.weights * torch.sigmoid(self.inputs @ self.components.T)).sum(1)
        assert torch.allclose(predicted, expected, atol=1e-12, rtol=0)

    def test_noise_draws_towards_a_half(self) -> None:
        plain, noisy = (self.truth(noise).predict(self.inputs, self.weights)[1:3, 1] for noise in (0.0, 1.0))
        assert ((noisy - 0.5).abs() < (plain - 0.5).abs()).all()

    def test_rows_are_distributions(self) -> None:
        predicted = self.truth().predict(self.inputs, self.weights)
        assert predicted.shape == (4, 2)
        assert (predicted >= 0).all()
        assert torch.allclose(predicted.sum(1), torch.ones(4, dtype=torch.float64))

    def test_a_mixture_lies_between_its_components(self) -> None:
        first, second, mixed = (
            self.truth().predict(self.inputs, torch.tensor([row], dtype=torch.float64).expand(4, -1))[:, 1]
            for row in ([1.0, 0.0], [0.0, 1.0], [0.3, 0.7])
        )
        assert torch.allclose(mixed, 0.3 * first + 0.7 * second)

    def test_weights_are_found_by_name(self) -> None:
        assert self.truth().weights_of(("bob", "ann", "bob")).tolist() == [[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]

    def test_the_truth_knows_the_federations_clients(self) -> None:
        federation, truth = SMALL.make(0)[:2]
        assert truth is not None
        assert truth.names == federation.names
        assert torch.equal(truth.weights_of(federation.names), truth.mixture_weights)


class TestSeed:
    def test_the_same_seed_makes_the_same(self) -> None:
        assert fingerprint(SMALL.make(3)) == fingerprint(SMALL.make(3))

    def test_global_generators_play_no_part(self) -> None:
        first = SMALL.make(3)
        np.random.seed(12)
        torch.manual_seed(34)
        assert fingerprint(SMALL.make(3)) == fingerprint(first)

    def test_global_generators_are_left_alone(self) -> None:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        SMALL.make(0)
        assert torch.equal(torch.rand(3), expected)

    @pytest.mark.parametrize("part", PARTS)
    def test_another_seed_makes_other_samples(self, part: str) -> None:
        recipe = replace(SMALL, min_samples=20, max_samples=20)
        first, second = (recipe.make(seed).federation.part(part) for seed in (0, 1))
        assert not torch.equal(first.inputs, second.inputs)
        assert not torch.equal(first.targets, second.targets)

    def test_another_seed_makes_another_truth(self) -> None:
        first, second = (truth_of(SMALL.make(seed)) for seed in (0, 1))
        assert not torch.equal(first.components, second.components)
        assert not torch.equal(first.mixture_weights, second.mixture_weights)

    def test_another_seed_makes_other_sizes(self) -> None:
        recipe = replace(SMALL, max_samples=1000)
        assert recipe.make(0).federation.train.sizes.tolist() != recipe.make(1).federation.train.sizes.tolist()

    def test_the_number_of_test_samples_changes_nothing_else(self) -> None:
        first, second = SMALL.make(0), replace(SMALL, num_test=31).make(0)
        assert same_samples(first.federation.train, second.federation.train)
        assert same_samples(first.federation.validation, second.federation.validation)
        assert same_truth(truth_of(first), truth_of(second))

    def test_the_number_of_validation_samples_changes_nothing_else(self) -> None:
        first, second = SMALL.make(0), replace(SMALL, num_validation=0).make(0)
        assert same_samples(first.federation.train, second.federation.train)
        assert same_samples(first.federation.test, second.federation.test)
        assert same_truth(truth_of(first), truth_of(second))

    def test_parts_of_equal_size_differ(self) -> None:
        recipe = replace(SMALL, min_samples=20, max_samples=20, num_validation=20, num_test=20)
        federation = recipe.make(0).federation
        assert not torch.equal(federation.train.inputs, federation.test.inputs)
        assert not torch.equal(federation.validation.inputs, federation.test.inputs)


CHANGES: dict[str, Any] = {
    "num_clients": 9,
    "num_components": 4,
    "dimension": 5,
    "dirichlet": 2.0,
    "clustered": True,
    "size_mean": 2.0,
    "size_sigma": 0.5,
    "min_samples": 21,
    "max_samples": 59,
    "noise_scale": 4.0,
    "num_validation": 7,
    "num_test": 10,
}


class TestParameters:
    def test_the_table_of_changes_is_complete(self) -> None:
        assert set(CHANGES) == set(names_of(Synthetic))

    @pytest.mark.parametrize("name", CHANGES)
    def test_every_parameter_takes_effect(self, name: str) -> None:
        assert fingerprint(replace(SMALL, **{name: CHANGES[name]}).make(0)) != fingerprint(SMALL.make(0))

    def test_noise_changes_labels_only(self) -> None:
        first, second = (replace(SMALL, noise_scale=noise).make(0).federation.train for noise in (0.0, 4.0))
        assert torch.equal(first.inputs, second.inputs)
        assert not torch.equal(first.targets, second.targets)

    @pytest.mark.parametrize(
        ("num_clients", "num_components", "dimension"), [(1, 1, 1), (1, 3, 2), (5, 1, 3), (4, 6, 2)]
    )
    def test_shapes_follow_the_parameters(self, num_clients: int, num_components: int, dimension: int) -> None:
        recipe = replace(SMALL, num_clients=num_clients, num_components=num_components, dimension=dimension)
        federation, truth = recipe.make(0)[:2]
        assert truth is not None
        assert (federation.num_clients, federation.input_shape) == (num_clients, (dimension,))
        assert truth.components.shape == (num_components, dimension)
        assert truth.mixture_weights.shape == (num_clients, num_components)

    def test_inputs_are_single_precision(self) -> None:
        assert SMALL.make(0).federation.train.inputs.dtype == torch.float32

    def test_the_defaults_are_the_papers(self) -> None:
        paper = Synthetic(
            num_clients=300,
            num_components=3,
            dimension=150,
            dirichlet=0.4,
            clustered=False,
            size_mean=4.0,
            size_sigma=2.0,
            min_samples=50,
            max_samples=1000,
            noise_scale=1.0,
            num_test=5000,
        )
        assert Synthetic() == paper

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_clients", 0),
            ("num_clients", -3),
            ("num_clients", 2.5),
            ("num_clients", True),
            ("num_clients", "many"),
            ("num_components", 0),
            ("dimension", 0),
            ("dirichlet", 0.0),
            ("dirichlet", -0.4),
            ("dirichlet", float("nan")),
            ("dirichlet", float("inf")),
            ("clustered", 1),
            ("clustered", "yes"),
            ("size_mean", float("nan")),
            ("size_sigma", -1.0),
            ("min_samples", -1),
            ("max_samples", 0),
            ("noise_scale", -0.5),
            ("noise_scale", float("inf")),
            ("num_validation", -1),
            ("num_test", -1),
        ],
    )
    def test_a_bad_value_is_refused(self, name: str, value: Any) -> None:
        with pytest.raises(UserError, match=rf"Synthetic\.{name} is {value!r}; allowed: "):
            replace(SMALL, **{name: value})

    def test_a_maximum_below_the_minimum_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"max_samples is 10; allowed: at least .*min_samples \(20\)"):
            replace(SMALL, max_samples=10).make(0)
