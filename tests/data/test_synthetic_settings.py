"""The seed and every setting of the synthetic mixture take effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from recipes import SMALL, truth_of

from fedem.core.errors import UserError
from fedem.core.settings import names_of
from fedem.data import Dataset, Synthetic, Truth
from fedem.data.federation import PARTS
from fedem.data.samples import Samples

FIELDS = ("inputs", "targets", "offsets")


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
    "input_shift": 2.0,
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
