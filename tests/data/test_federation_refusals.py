"""Samples that make no federation are refused by name, whichever way they come in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from labelled import Pair, good
from numpy.typing import NDArray

from fedem.core.errors import UserError
from fedem.data.federation import Federation


def with_bad(what: str, row: int, value: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    arrays = {"inputs": np.ones((6, 3)), "targets": np.ones(6)}
    arrays[what][row] = value
    return arrays["inputs"], arrays["targets"]


class TestRefusals:
    """Each message names the client and what was wrong with it."""

    @pytest.mark.parametrize("what", ["inputs", "targets"])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("row", [0, 4])
    def test_numbers_that_are_not_finite(self, what: str, value: float, row: int) -> None:
        pairs = [(np.ones((6, 3)), np.ones(6)), with_bad(what, row, value)]
        with pytest.raises(UserError, match=rf"Client 'bob' has NaN or infinite {what}, first in row {row};"):
            Federation.from_clients(pairs, ["ann", "bob"])

    def test_the_first_row_that_is_not_finite_is_named(self) -> None:
        inputs = np.ones((6, 2, 2))
        inputs[5, 0, 0] = inputs[2, 1, 1] = np.nan
        with pytest.raises(UserError, match="first in row 2;"):
            Federation.from_clients([(inputs, np.ones(6))])

    def test_a_matrix_of_targets_that_is_not_finite(self) -> None:
        targets = np.ones((6, 2))
        targets[3, 1] = np.nan
        with pytest.raises(UserError, match="'0' has NaN or infinite targets, first in row 3;"):
            Federation.from_clients([(np.ones((6, 3)), targets)])

    @pytest.mark.parametrize(
        ("pair", "message"),
        [
            ((np.ones((6, 2)), np.ones(4)), "6 inputs but 4 targets"),
            ((np.ones((6, 2)), np.ones((6, 1, 1))), r"targets of shape \[6, 1, 1\]"),
            ((torch.tensor(1.0), torch.tensor([1.0])), "a single number as inputs"),
            ((torch.tensor([1.0]), torch.tensor(1.0)), "a single number as targets"),
            ((np.ones((6, 2)), np.array(["a"] * 6)), "targets that are not an array of numbers"),
            ((np.array([["a"]] * 6), np.ones(6)), "inputs that are not an array of numbers"),
            ((np.array([[1.0]] * 6, dtype=object), np.ones(6)), "inputs that are not an array of numbers"),
            ((np.ones((6, 2)), np.ones(6, dtype=object)), "targets that are not an array of numbers"),
            (([[1.0, 2.0], [3.0]], [0, 1]), "inputs that are not an array of numbers"),
            ((np.ones((6, 2), dtype=np.complex128), np.ones(6)), "inputs of type torch.complex128"),
            ((np.ones((6, 2)), np.ones(6, dtype=np.complex64)), "targets of type torch.complex64"),
            ((np.ones((6, 2), dtype=np.bool_), np.ones(6)), "inputs of type torch.bool"),
            (np.ones((6, 2)), "is a ndarray; allowed: a pair"),
            ((np.ones((6, 2)),), "is a tuple; allowed: a pair"),
            ({"x": 1, "y": 2}, "is a dict; allowed: a pair"),
        ],
    )
    def test_a_pair_that_is_no_samples(self, pair: Any, message: str) -> None:
        with pytest.raises(UserError, match=f"Client 'bob' (has|is).*{message}|Client 'bob' {message}"):
            Federation.from_clients([(np.ones((6, 2)), np.ones(6)), pair], ["ann", "bob"])

    @pytest.mark.parametrize(
        ("pair", "message"),
        [
            ((np.ones((6, 3)), np.zeros(6, dtype=np.int64)), r"inputs float64 of shape \[n, 3\].*\[n, 2\]"),
            ((np.ones((6, 2), dtype=np.float32), np.zeros(6, dtype=np.int64)), r"inputs float32.*float64"),
            ((np.ones((6, 2), dtype=np.uint8), np.zeros(6, dtype=np.int64)), r"inputs uint8.*float64"),
            ((np.ones((6, 2)), np.zeros(6)), r"targets float64 of shape \[n\].*int64"),
            ((np.ones((6, 2)), np.zeros((6, 2), dtype=np.int64)), r"targets int64 of shape \[n, 2\].*\[n\]"),
        ],
    )
    def test_clients_that_differ_in_kind(self, pair: Pair, message: str) -> None:
        with pytest.raises(UserError, match=rf"Client 'bob' has {message}"):
            Federation.from_clients([good(), pair], ["ann", "bob"])

    def test_no_clients(self) -> None:
        with pytest.raises(UserError, match="at least one client; got none"):
            Federation.from_clients([])

    def test_a_client_without_samples(self) -> None:
        with pytest.raises(UserError, match="Client 'bob' has no training samples"):
            Federation.from_clients([good(), good(0), good()], ["ann", "bob", "cem"])

    def test_a_name_that_stands_twice(self) -> None:
        with pytest.raises(UserError, match="'bob' stands more than once"):
            Federation.from_clients([good()] * 3, ["ann", "bob", "bob"])

    def test_names_that_are_equal_as_strings(self) -> None:
        with pytest.raises(UserError, match="'1' stands more than once"):
            Federation.from_clients([good()] * 2, [1, "1"])

    @pytest.mark.parametrize("names", [["ann"], ["ann", "bob", "cem"]])
    def test_a_wrong_number_of_names(self, names: list[str]) -> None:
        with pytest.raises(UserError, match=f"Got {len(names)} names for 2 clients"):
            Federation.from_clients([good(), good()], names)

    @pytest.mark.parametrize(
        ("validation", "test"), [(-0.1, 0.2), (0.2, -0.1), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.7, 0.6), (2.0, 0.1)]
    )
    def test_shares_out_of_range(self, validation: float, test: float) -> None:
        with pytest.raises(UserError, match=re.escape(f"are {validation} and {test}; allowed")):
            Federation.from_clients([good()], validation=validation, test=test)


BUILDERS: dict[str, Callable[[NDArray[Any], NDArray[Any]], Federation]] = {
    "from_clients": lambda x, y: Federation.from_clients([(x, y)]),
    "from_arrays": lambda x, y: Federation.from_arrays(x, y, ["ann"] * len(y)),
    "from_generator": lambda x, y: Federation.from_generator([("ann", x, y)]),
    "from_parts": lambda x, y: Federation.from_parts([(x, y)]),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=list(BUILDERS))
class TestEveryBuilder:
    def test_refuses_inputs_that_are_not_finite(self, build: Callable[..., Federation]) -> None:
        with pytest.raises(UserError, match="NaN or infinite inputs, first in row 3;"):
            build(*with_bad("inputs", 3, np.nan))

    def test_refuses_targets_that_are_not_finite(self, build: Callable[..., Federation]) -> None:
        with pytest.raises(UserError, match="NaN or infinite targets, first in row 3;"):
            build(*with_bad("targets", 3, np.inf))

    def test_refuses_unequal_lengths(self, build: Callable[..., Federation]) -> None:
        with pytest.raises(UserError, match="6 inputs but 5 targets"):
            build(np.ones((6, 2)), np.ones(5))

    def test_refuses_complex_inputs(self, build: Callable[..., Federation]) -> None:
        with pytest.raises(UserError, match="complex"):
            build(np.ones((6, 2), dtype=np.complex128), np.ones(6))

    def test_keeps_uint8_inputs(self, build: Callable[..., Federation]) -> None:
        assert build(np.ones((6, 2), dtype=np.uint8), np.ones(6)).train.inputs.dtype == torch.uint8

    def test_keeps_float_targets(self, build: Callable[..., Federation]) -> None:
        assert build(np.ones((6, 2)), np.full(6, 0.25)).train.targets.unique().tolist() == [0.25]
