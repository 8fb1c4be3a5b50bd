"""Inputs that say which component, or which cluster of clients, they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recipes import SMALL, truth_of
from stores import CLIENTS, make_home, write_source

from fedem.core.errors import UserError
from fedem.data import Femnist, Synthetic
from fedem.data.federation import PARTS
from fedem.data.store import prepare

# The synthetic mixture.


def test_inputs_move_by_their_components_means() -> None:
    """All else that is drawn stays; the means lie as far from each other as was asked for, around zero."""
    plain, moved = SMALL.make(0), replace(SMALL, input_shift=3.0).make(0)
    means = truth_of(moved).input_means
    assert means is not None
    torch.testing.assert_close(means.sum(0), torch.zeros(4), atol=1e-6, rtol=0)
    apart = torch.cdist(means, means)
    torch.testing.assert_close(apart, 3 / np.sqrt(3) * (1 - torch.eye(3)), atol=1e-5, rtol=0)
    for part in PARTS:
        away = moved.federation.part(part).inputs - plain.federation.part(part).inputs
        assert float(torch.cdist(away.double(), means.double()).amin(1).max()) < 1e-5
    assert truth_of(plain).input_means is None
    assert torch.equal(truth_of(plain).components, truth_of(moved).components)


def test_the_unit_is_the_standard_deviation_of_an_input() -> None:
    inputs = Synthetic(num_clients=20, dimension=3, num_test=2000).make(0).federation.test.inputs
    direction = torch.tensor([0.6, 0.0, 0.8])
    assert float((inputs @ direction).std()) == pytest.approx(1 / np.sqrt(3), rel=0.02)


def test_the_oracle_knows_which_components_an_input_may_come_from() -> None:
    """Where they lie far apart it is certain of the component, whatever the client's weights."""
    truth = truth_of(replace(SMALL, input_shift=20.0, noise_scale=0.0).make(0))
    assert truth.input_means is not None
    inputs = truth.input_means + 0.3
    found = truth.predict(inputs, torch.full((3, 3), 1 / 3))
    expected = torch.sigmoid((inputs * truth.components).sum(1))
    torch.testing.assert_close(found[:, 1], expected)


def test_more_components_than_dimensions_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.dimension is 2; allowed with data\.input_shift: at least .*\(3\)"):
        replace(SMALL, dimension=2, input_shift=1.0).make(0)


# Images.


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(Femnist(), write_source(make_home(tmp_path, monkeypatch)))


def test_each_client_turns_all_of_its_images_alike() -> None:
    plain = Femnist().make(0).federation
    seen = set()
    for seed in range(8):
        upright, turned = (Femnist(rotations=rotations).make(seed).federation for rotations in (1, 4))
        assert upright.fingerprint != turned.fingerprint or torch.equal(upright.train.inputs, turned.train.inputs)
        for position in range(len(set(CLIENTS.tolist()))):
            fits = [
                turn
                for turn in range(4)
                if all(
                    torch.equal(upright.part(part).client(position).inputs.rot90(turn, (2, 3)), own)
                    and torch.equal(upright.part(part).client(position).targets, targets)
                    for part in PARTS
                    for own, targets in [turned.part(part).client(position)]
                )
            ]
            assert len(fits) == 1
            seen.add(fits[0])
    assert seen == {0, 1, 2, 3}
    assert plain.ids is not None  # nothing is read or copied where nothing is turned


def test_the_turns_are_the_first_multiples_and_the_partition_stays() -> None:
    for seed in range(6):
        made = {rotations: Femnist(rotations=rotations).make(seed) for rotations in (1, 2)}
        assert made[1].partition_hash == made[2].partition_hash
        for position in range(3):
            first, second = (each.federation.train.client(position).inputs for each in made.values())
            assert any(torch.equal(first.rot90(turn, (2, 3)), second) for turn in (0, 1))
    with pytest.raises(UserError, match=r"rotations is 5; allowed: at least 1 and at most 4"):
        Femnist(rotations=5)
