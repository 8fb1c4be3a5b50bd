"""A small synthetic mixture, and its truth."""

from __future__ import annotations

from fedem.data import Dataset, Synthetic, Truth

SMALL = Synthetic(
    num_clients=8, num_components=3, dimension=4, max_samples=60, min_samples=20, num_validation=6, num_test=9
)


def truth_of(dataset: Dataset) -> Truth:
    assert dataset.truth is not None
    return dataset.truth
