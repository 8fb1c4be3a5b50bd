"""What is computed some rows at a time is what it would be all at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedem.core.random import client_keys
from fedem.data import samples, synthetic
from fedem.data.samples import offsets_of, split_rows
from fedem.data.synthetic import Synthetic


@pytest.mark.parametrize("gap", [None, 1])
@pytest.mark.parametrize("rows_at_once", [1, 7, 50])
def test_a_split_does_not_depend_on_how_many_rows_are_ordered_at_once(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int, gap: int | None
) -> None:
    rng = np.random.default_rng(0)
    offsets = offsets_of(torch.tensor([0, 9, 30, 0, 1, 60, 0]))
    rows, ids = torch.from_numpy(rng.permutation(100)), torch.from_numpy(rng.integers(0, 10, 100))
    keys = client_keys([str(client) for client in range(7)])
    whole = split_rows(keys, rows, offsets, ids, gap=gap)
    monkeypatch.setattr(samples, "_SORTED_ROWS", rows_at_once)
    for (own, starts), (expected, expected_starts) in zip(
        split_rows(keys, rows, offsets, ids, gap=gap), whole, strict=True
    ):
        assert torch.equal(own, expected)
        assert torch.equal(starts, expected_starts)


def test_synthetic_labels_do_not_depend_on_how_many_rows_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Synthetic(num_clients=20, dimension=4, max_samples=60, num_validation=3, num_test=5)
    whole = source.make(0).federation
    monkeypatch.setattr(synthetic, "_ROWS", 64)
    some = source.make(0).federation
    assert some.fingerprint == whole.fingerprint
