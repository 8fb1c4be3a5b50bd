"""Labels of the synthetic mixture, and its truth. Seeds are fixed; bounds are about five standard errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from recipes import SMALL, truth_of
from scipy import stats
from scipy.integrate import quad
from scipy.special import expit
from torch import Tensor

from fedem.data import Dataset, Synthetic, Truth
from fedem.data.federation import PARTS


def weights_of_rows(dataset: Dataset, part: str) -> Tensor:
    """The true mixture weights of each sample's client, ``[N, M]``."""
    samples = dataset.federation.part(part)
    return torch.repeat_interleave(truth_of(dataset).mixture_weights, samples.sizes, dim=0)


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
        plain = replace(truth, noise_scale=0.0)
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


class TestTruth:
    components = torch.tensor([[1.0, -0.5, 2.0], [-1.5, 0.25, 0.0]], dtype=torch.float64)
    inputs = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.5, -0.5], [-1.0, 1.0, 1.0], [1.0, -1.0, 1.0]], dtype=torch.float64)
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0], [0.2, 0.8]], dtype=torch.float64)

    def truth(self, noise_scale: float = 1.0) -> Truth:
        return Truth(("ann", "bob"), self.components, self.weights[:2], noise_scale)

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
