"""Edges where input is easily taken for something else: each is refused, or read as it was meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

import fedem
from fedem.core.errors import UserError
from fedem.data.tables import read_table


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut short"])
def test_files_that_are_no_archives(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match="is not an npz archive"):
        read_table(_write(tmp_path / "t.npz", content))


def test_archives_of_something_else(tmp_path: Path) -> None:
    with (tmp_path / "t.npz").open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(UserError, match="is not an npz archive"):
        read_table(tmp_path / "t.npz")
    np.savez(tmp_path / "u.npz", x=np.ones((2, 2)), y=np.array(1))
    with pytest.raises(UserError, match="'y' is a single value"):
        read_table(tmp_path / "u.npz")


def test_positions_that_do_not_exist() -> None:
    federation = fedem.Federation.from_clients([(np.eye(3), [0, 1, 0])] * 2)
    for position in (-1, 2):
        with pytest.raises(UserError, match="allowed: 0 to 1"):
            federation.train.take(torch.tensor([position]))


def test_the_row_of_the_users_own_array_is_named() -> None:
    inputs = np.zeros((6, 2))
    inputs[4, 1] = np.nan
    with pytest.raises(UserError, match="Client 'v' has NaN or infinite inputs, first in row 4"):
        fedem.Federation.from_arrays(inputs, [0, 1, 0, 1, 0, 1], list("uuuvvv"))


def test_clients_are_held_out_once() -> None:
    federation = fedem.Federation.from_clients([(np.eye(3), [0, 1, 0])] * 4).hold_out(0.5)
    with pytest.raises(UserError, match="2 clients are held out already"):
        federation.hold_out(0.5)


def test_kinds_of_arrays_that_torch_is_particular_about() -> None:
    frozen = np.eye(4)
    frozen.flags.writeable = False
    flat = np.arange(4, dtype=np.float16)
    for inputs in (frozen, flat):
        federation = fedem.Federation.from_clients([(inputs, np.arange(4) % 2)])
        assert fedem.train(federation, rounds=1).state().round == 1
    with pytest.raises(UserError, match="above 9223372036854775807"):
        fedem.Federation.from_clients([(np.eye(1), np.array([2**64 - 1], dtype=np.uint64))])
    with pytest.raises(UserError, match="shares of validation and test are nan"):
        fedem.Federation.from_clients([(np.eye(2), [0, 1])], validation=float("nan"))


def test_numbers_from_numpy_are_numbers(tmp_path: Path) -> None:
    federation = fedem.Federation.from_clients([(np.eye(4), [0, 1, 0, 1])] * 2)
    result = fedem.train(federation, rounds=np.int64(2), learning_rate=np.float32(0.5), out=tmp_path / "r")
    assert fedem.Result.load(tmp_path / "r").config == result.config


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"solvr": {"momentum": 0.5}}, "Unknown section 'solvr'.*'solver'"),
        ({"run": 5}, "'run' is 5; allowed: a section"),
        ({"solver": {"name": None}}, "Unknown solver None"),
        ({"solver": {"name": ["sgd"]}}, r"Unknown solver \['sgd'\]"),
        ({"run": {"seed": 2**64}}, "run.seed is 18446744073709551616; allowed: at least 0 and at most"),
    ],
)
def test_sections_that_would_be_ignored_or_crash(layer: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fedem.Config.build(layer)


def test_a_new_name_in_a_later_layer_drops_what_it_does_not_know() -> None:
    config = fedem.Config.build({"solver": {"momentum": 0.5, "weight_decay": 0.1}}, {"solver": {"name": "adam"}})
    assert config.values("solver")["weight_decay"] == 0.1
    assert "momentum" not in config.values("solver")


@pytest.mark.parametrize("noise_scale", [0.0, 1.0, 3.0, 10.0])
def test_the_noise_is_integrated_exactly(noise_scale: float) -> None:
    recipe = fedem.Synthetic(num_clients=1, num_components=1, dimension=1, num_test=1)
    truth = type(recipe.make(0).truth)(("0",), torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1), noise_scale)
    logits = torch.tensor([[-4.0], [0.3], [2.0]], dtype=torch.float64)
    found = truth.predict(logits, torch.ones(3, 1))[:, 1]
    for logit, probability in zip(logits.flatten().tolist(), found.tolist(), strict=True):

        def integrand(e: float, logit: float = logit) -> float:
            return norm.pdf(e) * (1 + np.tanh((logit + noise_scale * e) / 2)) / 2

        expected, _ = quad(integrand, -9, 9, limit=500, points=[-logit / noise_scale] if noise_scale else None)
        assert probability == pytest.approx(expected, abs=1e-8)
