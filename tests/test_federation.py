"""Federations: what goes in comes out, in one part only, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import NAMES, SIZES, make_federation
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedem.errors import UserError
from fedem.federation import PARTS, Federation
from fedem.samples import Samples

Pair = tuple[NDArray[Any], NDArray[Any]]

client_sizes = st.lists(st.integers(1, 25), min_size=1, max_size=8)
share = st.floats(0, 1, exclude_max=True)
shares = st.tuples(share, share).filter(lambda pair: sum(pair) < 1)
seeds = st.integers(0, 2**31)


def labelled(client: int, size: int) -> Pair:
    """Samples that say whose they are: inputs (client, row), target 1000 client + row."""
    rows = np.arange(size)
    return np.stack([np.full(size, client), rows], axis=1).astype(np.float64), 1000 * client + rows


def labelled_clients(sizes: list[int]) -> list[Pair]:
    return [labelled(client, size) for client, size in enumerate(sizes)]


def good(size: int = 6) -> Pair:
    return labelled(0, size)


def rows_of(federation: Federation, position: int, part: str) -> list[int]:
    """Which rows of the client's own samples stand in a part."""
    return [int(row) for row in federation.part(part).client(position)[0][:, 1]]


def split_of(federation: Federation, name: str) -> dict[str, list[int]]:
    return {part: rows_of(federation, federation.position(name), part) for part in PARTS}


def splits(federation: Federation) -> dict[str, dict[str, list[int]]]:
    return {name: split_of(federation, name) for name in federation.names}


def same_samples(first: Samples, second: Samples) -> bool:
    return all(torch.equal(getattr(first, field), getattr(second, field)) for field in ("inputs", "targets", "offsets"))


def same_federation(first: Federation, second: Federation) -> bool:
    return first.names == second.names and all(same_samples(first.part(part), second.part(part)) for part in PARTS)


class TestSplit:
    @given(client_sizes, shares, seeds)
    def test_every_sample_lands_in_exactly_one_part(
        self, sizes: list[int], share: tuple[float, float], seed: int
    ) -> None:
        federation = Federation.from_clients(labelled_clients(sizes), validation=share[0], test=share[1], seed=seed)
        for position, size in enumerate(sizes):
            rows = [row for part in PARTS for row in rows_of(federation, position, part)]
            assert sorted(rows) == list(range(size))

    @given(client_sizes, shares, seeds)
    def test_every_sample_keeps_its_owner_and_its_target(
        self, sizes: list[int], share: tuple[float, float], seed: int
    ) -> None:
        federation = Federation.from_clients(labelled_clients(sizes), validation=share[0], test=share[1], seed=seed)
        for part in PARTS:
            for position in range(len(sizes)):
                inputs, targets = federation.part(part).client(position)
                assert (inputs[:, 0] == position).all()
                assert torch.equal(targets, (1000 * inputs[:, 0] + inputs[:, 1]).long())

    @given(client_sizes, shares, seeds)
    def test_every_client_keeps_a_training_sample(
        self, sizes: list[int], share: tuple[float, float], seed: int
    ) -> None:
        federation = Federation.from_clients(labelled_clients(sizes), validation=share[0], test=share[1], seed=seed)
        assert int(federation.train.sizes.min()) >= 1

    @given(client_sizes, shares)
    def test_nothing_is_padded(self, sizes: list[int], share: tuple[float, float]) -> None:
        federation = Federation.from_clients(labelled_clients(sizes), validation=share[0], test=share[1])
        for part in PARTS:
            samples = federation.part(part)
            assert len(samples.inputs) == len(samples.targets) == len(samples) == int(samples.sizes.sum())
        assert sum(len(federation.part(part)) for part in PARTS) == sum(sizes)

    @given(st.data(), client_sizes, seeds)
    def test_the_order_of_the_clients_does_not_change_a_split(
        self, data: st.DataObject, sizes: list[int], seed: int
    ) -> None:
        names = [f"client {position}" for position in range(len(sizes))]
        pairs = labelled_clients(sizes)
        order = data.draw(st.permutations(range(len(sizes))))
        straight = Federation.from_clients(pairs, names, seed=seed)
        permuted = Federation.from_clients([pairs[i] for i in order], [names[i] for i in order], seed=seed)
        assert splits(straight) == splits(permuted)

    @given(st.text(min_size=1), st.text(min_size=1), seeds)
    def test_other_clients_do_not_change_a_split(self, name: str, other: str, seed: int) -> None:
        alone = Federation.from_clients([good(20)], [name], seed=seed)
        together = Federation.from_clients([labelled(1, 7), good(20)], [other + name, name], seed=seed)
        assert split_of(alone, name) == split_of(together, name)

    def test_the_values_do_not_change_a_split(self) -> None:
        inputs, targets = good(20)
        changed = inputs * np.array([-3.5, 1.0])
        assert splits(Federation.from_clients([(inputs, targets)])) == splits(
            Federation.from_clients([(changed, targets % 2)])
        )

    def test_the_same_seed_splits_alike(self) -> None:
        pairs = labelled_clients([20, 30])
        assert same_federation(Federation.from_clients(pairs, seed=5), Federation.from_clients(pairs, seed=5))

    def test_another_seed_splits_otherwise(self) -> None:
        assert splits(Federation.from_clients([good(30)], seed=0)) != splits(
            Federation.from_clients([good(30)], seed=1)
        )

    def test_another_name_splits_otherwise(self) -> None:
        federation = Federation.from_clients([good(30), good(30)], ["ann", "bob"])
        assert split_of(federation, "ann") != split_of(federation, "bob")

    def test_every_row_is_tested_equally_often(self) -> None:
        repeats = 600
        counts = np.zeros(10)
        for seed in range(repeats):
            counts[rows_of(Federation.from_clients([good(10)], seed=seed), 0, "test")] += 1
        expected = 0.2 * repeats
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected * 0.8)

    @pytest.mark.parametrize(
        ("size", "validation", "test", "expected"),
        [
            (10, 0.2, 0.2, [6, 2, 2]),
            (100, 0.1, 0.25, [65, 10, 25]),
            (10, 0.0, 0.3, [7, 0, 3]),
            (10, 0.3, 0.0, [7, 3, 0]),
            (10, 0.0, 0.0, [10, 0, 0]),
            (2, 0.49, 0.49, [1, 0, 1]),
            (1, 0.49, 0.49, [1, 0, 0]),
            (1, 0.0, 0.9, [1, 0, 0]),
            (1, 0.9, 0.0, [1, 0, 0]),
            (4, 0.0, 0.99, [1, 0, 3]),
        ],
    )
    def test_shares_are_kept(self, size: int, validation: float, test: float, expected: list[int]) -> None:
        federation = Federation.from_clients([good(size)], validation=validation, test=test)
        assert [len(federation.part(part)) for part in PARTS] == expected


class TestFromClients:
    def test_names_default_to_positions(self) -> None:
        assert Federation.from_clients([good(), good(), good()]).names == ("0", "1", "2")

    def test_names_become_strings(self) -> None:
        assert Federation.from_clients([good(), good()], [7, 8]).names == ("7", "8")

    def test_takes_any_iterable(self) -> None:
        pairs = labelled_clients([4, 6])
        assert same_federation(Federation.from_clients(iter(pairs)), Federation.from_clients(pairs))

    def test_takes_lists_of_numbers(self) -> None:
        federation = Federation.from_clients([([[1.0, 2.0], [3.0, 4.0]], [0, 1])], validation=0, test=0)
        assert sorted(federation.train.inputs.tolist()) == [[1.0, 2.0], [3.0, 4.0]]

    def test_tensors_and_arrays_give_the_same(self) -> None:
        inputs, targets = good()
        tensors = (torch.from_numpy(inputs), torch.from_numpy(targets))
        assert same_federation(Federation.from_clients([(inputs, targets)]), Federation.from_clients([tensors]))

    def test_inputs_are_detached_from_their_graph(self) -> None:
        inputs = torch.ones(4, 2, requires_grad=True)
        assert not Federation.from_clients([(inputs, torch.ones(4))]).train.inputs.requires_grad

    def test_later_changes_of_the_arrays_do_not_reach_the_federation(self) -> None:
        inputs, targets = good()
        federation = Federation.from_parts([(inputs, targets)])
        before = federation.train.inputs.clone()
        inputs += 1
        assert torch.equal(federation.train.inputs, before)

    def test_strided_arrays_are_read_in_order(self) -> None:
        inputs, targets = good()
        reversed_rows = Federation.from_parts([(inputs[::-1], targets[::-1])])
        assert reversed_rows.train.targets.tolist() == targets[::-1].tolist()
        assert reversed_rows.train.inputs[:, 1].tolist() == inputs[::-1, 1].tolist()

    @pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, np.float64])
    def test_inputs_keep_their_type(self, dtype: type) -> None:
        inputs, targets = good()
        federation = Federation.from_clients([(inputs.astype(dtype), targets)])
        assert federation.train.inputs.numpy().dtype == dtype

    @pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
    def test_small_signed_inputs_become_int64(self, dtype: type) -> None:
        federation = Federation.from_parts([(np.array([[-3], [4]], dtype=dtype), np.array([0, 1]))])
        assert federation.train.inputs.dtype == torch.int64
        assert federation.train.inputs.tolist() == [[-3], [4]]

    def test_half_precision_inputs_become_float32(self) -> None:
        federation = Federation.from_parts([(np.array([[0.5], [1.5]], dtype=np.float16), np.array([0, 1]))])
        assert federation.train.inputs.dtype == torch.float32
        assert federation.train.inputs.tolist() == [[0.5], [1.5]]

    @pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.bool_])
    def test_whole_targets_become_int64(self, dtype: type) -> None:
        federation = Federation.from_parts([(np.ones((2, 1)), np.array([0, 1], dtype=dtype))])
        assert federation.train.targets.dtype == torch.int64
        assert federation.train.targets.tolist() == [0, 1]

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_float_targets_keep_their_type(self, dtype: type) -> None:
        federation = Federation.from_parts([(np.ones((2, 1)), np.array([0.25, 1.5], dtype=dtype))])
        assert federation.train.targets.numpy().dtype == dtype
        assert federation.train.targets.tolist() == [0.25, 1.5]

    def test_targets_may_have_two_dimensions(self) -> None:
        inputs, _ = good(10)
        targets = np.stack([inputs[:, 1], -inputs[:, 1], inputs[:, 1] ** 2], axis=1)
        federation = Federation.from_clients([(inputs, targets)])
        for part in PARTS:
            samples = federation.part(part)
            row = samples.inputs[:, 1]
            assert torch.equal(samples.targets, torch.stack([row, -row, row**2], dim=1))

    def test_images_keep_their_shape(self) -> None:
        images = np.arange(5 * 2 * 3 * 4, dtype=np.uint8).reshape(5, 2, 3, 4)
        federation = Federation.from_clients([(images, np.arange(5))])
        assert federation.input_shape == (2, 3, 4)
        assert all((image == images[target]).all() for image, target in zip(*_arrays(federation.train), strict=True))

    def test_bytes_are_counted_at_their_stored_size(self) -> None:
        images = np.zeros((5, 3, 4), dtype=np.uint8)
        assert Federation.from_parts([(images, np.arange(5))]).train.num_bytes == 5 * 12 + 5 * 8

    def test_a_client_with_one_sample_trains_on_it(self) -> None:
        federation = Federation.from_clients([good(20), labelled(1, 1)])
        assert federation.train.client(1)[1].tolist() == [1000]
        assert federation.validation.sizes[1] == 0
        assert federation.test.sizes[1] == 0

    def test_a_client_with_one_class_is_allowed(self) -> None:
        inputs, _ = good(10)
        federation = Federation.from_clients([(inputs, np.ones(10, dtype=np.int64)), good(10)])
        assert federation.train.client(0)[1].unique().tolist() == [1]


def _arrays(samples: Samples) -> tuple[NDArray[Any], NDArray[Any]]:
    return samples.inputs.numpy(), samples.targets.numpy()


class TestFromArrays:
    @given(st.data(), client_sizes, seeds)
    def test_rows_may_stand_anywhere(self, data: st.DataObject, sizes: list[int], seed: int) -> None:
        owners = np.repeat(np.arange(len(sizes)), sizes)
        order = np.array(data.draw(st.permutations(range(len(owners)))), dtype=np.int64)
        pairs = labelled_clients(sizes)
        inputs, targets = np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])
        federation = Federation.from_arrays(inputs[order], targets[order], owners[order], seed=seed)
        found = torch.cat([federation.part(part).targets for part in PARTS])
        assert sorted(found.tolist()) == sorted(targets.tolist())
        for part in PARTS:
            for position, name in enumerate(federation.names):
                mine = federation.part(part).client(position)
                assert (mine[0][:, 0] == int(name)).all()
                assert (mine[1] // 1000 == int(name)).all()

    def test_matches_from_clients(self) -> None:
        pairs = labelled_clients([4, 9, 2])
        names = ["ann", "bob", "cem"]
        federation = Federation.from_arrays(
            np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs]), np.repeat(names, [4, 9, 2])
        )
        assert same_federation(federation, Federation.from_clients(pairs, names))

    def test_clients_are_ordered_by_name(self) -> None:
        federation = Federation.from_arrays(np.ones((4, 1)), np.arange(4), ["dan", "ann", "cem", "bob"])
        assert federation.names == ("ann", "bob", "cem", "dan")
        assert federation.train.targets.tolist() == [1, 3, 2, 0]

    def test_options_reach_the_split(self) -> None:
        federation = Federation.from_arrays(np.ones((10, 1)), np.arange(10), ["ann"] * 10, validation=0, test=0.5)
        assert [len(federation.part(part)) for part in PARTS] == [5, 0, 5]

    def test_the_seed_reaches_the_split(self) -> None:
        inputs, targets = good(30)
        first, second = (Federation.from_arrays(inputs, targets, ["ann"] * 30, seed=seed) for seed in (0, 1))
        assert splits(first) != splits(second)

    def test_one_name_a_row_is_needed(self) -> None:
        with pytest.raises(UserError, match=r"one client name a row.*\(5,\).*6 rows"):
            Federation.from_arrays(*good(6), ["ann"] * 5)

    def test_names_in_a_matrix_are_refused(self) -> None:
        with pytest.raises(UserError, match=r"one client name a row.*\(6, 1\)"):
            Federation.from_arrays(*good(6), [["ann"]] * 6)

    def test_unequal_lengths_are_refused(self) -> None:
        inputs, targets = good(6)
        with pytest.raises(UserError, match="6 inputs but 4 targets"):
            Federation.from_arrays(inputs, targets[:4], ["ann"] * 6)

    def test_no_rows_are_refused(self) -> None:
        with pytest.raises(UserError, match="at least one client; got none"):
            Federation.from_arrays(np.zeros((0, 2)), np.zeros(0), np.array([], dtype=str))

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_inputs_that_are_not_finite_name_their_client(self, value: float) -> None:
        inputs, targets = good(6)
        inputs[4, 1] = value
        with pytest.raises(UserError, match=r"Client 'bob' has NaN or infinite inputs"):
            Federation.from_arrays(inputs, targets, ["ann"] * 3 + ["bob"] * 3)

    def test_targets_that_are_not_finite_name_their_client(self) -> None:
        inputs, _ = good(6)
        with pytest.raises(UserError, match=r"Client 'bob' has NaN or infinite targets"):
            Federation.from_arrays(inputs, np.array([0, 0, 0, 0, np.nan, 0]), ["ann"] * 3 + ["bob"] * 3)


class TestFromGenerator:
    def test_matches_from_clients(self) -> None:
        pairs = labelled_clients([4, 9])
        triples = ((name, *pair) for name, pair in zip(["ann", "bob"], pairs, strict=True))
        assert same_federation(Federation.from_generator(triples), Federation.from_clients(pairs, ["ann", "bob"]))

    def test_options_reach_the_split(self) -> None:
        federation = Federation.from_generator([("ann", *good(10))], validation=0.4, test=0.1)
        assert [len(federation.part(part)) for part in PARTS] == [5, 4, 1]

    def test_nothing_is_refused(self) -> None:
        with pytest.raises(UserError, match="at least one client; got none"):
            Federation.from_generator(iter(()))

    def test_a_name_that_stands_twice_is_refused(self) -> None:
        with pytest.raises(UserError, match="'ann' stands more than once"):
            Federation.from_generator([("ann", *good()), ("ann", *good())])


class TestFromParts:
    def test_parts_stay_as_they_are(self) -> None:
        train, validation, test = (labelled_clients(sizes) for sizes in ([4, 2], [3, 1], [1, 5]))
        federation = Federation.from_parts(train, validation, test, ["ann", "bob"])
        for part, pairs in zip(PARTS, (train, validation, test), strict=True):
            for position, (inputs, targets) in enumerate(pairs):
                found = federation.part(part).client(position)
                assert found[0].numpy().tolist() == inputs.tolist()
                assert found[1].numpy().tolist() == targets.tolist()

    def test_parts_not_given_are_empty(self) -> None:
        federation = Federation.from_parts(labelled_clients([4, 2]))
        for part in ("validation", "test"):
            samples = federation.part(part)
            assert samples.sizes.tolist() == [0, 0]
            assert samples.inputs.shape == (0, 2)
            assert samples.targets.dtype == torch.int64

    def test_a_client_may_have_an_empty_test_part(self) -> None:
        federation = Federation.from_parts(labelled_clients([4, 2]), None, [labelled(0, 0), labelled(1, 3)])
        assert federation.test.sizes.tolist() == [0, 3]

    def test_a_part_with_another_number_of_clients_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"test part has 1 clients; allowed: 2"):
            Federation.from_parts(labelled_clients([4, 2]), None, labelled_clients([3]))

    def test_a_part_with_other_inputs_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"validation inputs are float64 of shape \[n, 3\].*\[n, 2\]"):
            Federation.from_parts([good()], [(np.ones((2, 3)), np.array([0, 1]))])

    def test_a_part_with_other_targets_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"test targets are float32 of shape \[n\].*int64"):
            Federation.from_parts([good()], None, [(np.ones((2, 2)), np.zeros(2, dtype=np.float32))])

    def test_a_client_without_training_samples_is_refused(self) -> None:
        with pytest.raises(UserError, match="'bob' has no training samples"):
            Federation.from_parts([good(), good(0)], names=["ann", "bob"])

    def test_no_clients_are_refused(self) -> None:
        with pytest.raises(UserError, match="at least one client; got none"):
            Federation.from_parts([])


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
            ((np.ones((6, 2)), np.array(["a"] * 6)), "targets that are no array of numbers"),
            ((np.array([["a"]] * 6), np.ones(6)), "inputs that are no array of numbers"),
            ((np.array([[1.0]] * 6, dtype=object), np.ones(6)), "inputs that are no array of numbers"),
            ((np.ones((6, 2)), np.ones(6, dtype=object)), "targets that are no array of numbers"),
            (([[1.0, 2.0], [3.0]], [0, 1]), "inputs that are no array of numbers"),
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


class TestAccess:
    @pytest.mark.parametrize("part", PARTS)
    def test_part_returns_the_part(self, part: str) -> None:
        federation = make_federation()
        assert federation.part(part) is getattr(federation, part)

    def test_an_unknown_part_is_refused_with_a_suggestion(self) -> None:
        with pytest.raises(UserError, match=r"Unknown part 'tests'.*Did you mean 'test'\?"):
            make_federation().part("tests")

    def test_position_finds_a_client(self) -> None:
        federation = make_federation()
        assert [federation.position(name) for name in NAMES] == list(range(len(NAMES)))

    def test_an_unknown_client_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"Unknown client 'zoe'; allowed: one of the 5 clients \(ann, bob"):
            make_federation().position("zoe")

    def test_keys_belong_to_names(self) -> None:
        straight = Federation.from_clients([good()] * 3, ["ann", "bob", "cem"])
        turned = Federation.from_clients([good()] * 3, ["cem", "bob", "ann"])
        assert straight.keys.tolist() == turned.keys.tolist()[::-1]

    def test_keys_differ(self) -> None:
        assert Federation.from_clients([good(1)] * 200).keys.unique().numel() == 200

    def test_sizes_are_what_was_given(self) -> None:
        assert make_federation().train.sizes.tolist() == list(SIZES)

    def test_the_number_of_clients_is_the_number_of_names(self) -> None:
        federation = make_federation()
        assert federation.num_clients == federation.train.num_clients == federation.test.num_clients == len(NAMES)

    def test_client_returns_views(self) -> None:
        samples = make_federation().train
        inputs, _ = samples.client(2)
        assert inputs.data_ptr() == samples.inputs[int(samples.offsets[2])].data_ptr()


class TestTake:
    @given(st.data(), st.lists(st.integers(0, 6), min_size=1, max_size=8))
    def test_samples_follow_their_client(self, data: st.DataObject, sizes: list[int]) -> None:
        offsets = torch.tensor([0, *np.cumsum(sizes).tolist()])
        total = int(offsets[-1])
        samples = Samples.of(torch.arange(2 * total).reshape(total, 2), torch.arange(total), offsets)
        chosen = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=10))
        taken = samples.take(torch.tensor(chosen))
        assert taken.sizes.tolist() == [sizes[position] for position in chosen]
        assert len(taken) == sum(sizes[position] for position in chosen)
        for place, position in enumerate(chosen):
            for mine, theirs in zip(taken.client(place), samples.client(position), strict=True):
                assert torch.equal(mine, theirs)

    def test_all_in_order_is_the_same(self) -> None:
        samples = make_federation().train
        assert same_samples(samples.take(torch.arange(len(SIZES))), samples)

    def test_as_many_in_another_order_is_not_the_same(self) -> None:
        samples = make_federation().train
        assert samples.take(torch.tensor([0, 1, 2, 4, 3])).sizes.tolist() == [7, 1, 12, 5, 30]

    def test_types_are_kept(self) -> None:
        images = np.arange(8, dtype=np.uint8).reshape(4, 2)
        federation = Federation.from_parts([(images, np.arange(4)), (images, np.arange(4))])
        taken = federation.train.take(torch.tensor([1]))
        assert (taken.inputs.dtype, taken.targets.dtype) == (torch.uint8, torch.int64)

    def test_names_and_all_parts_follow(self) -> None:
        federation = make_federation()
        taken = federation.take(torch.tensor([3, 0]))
        assert taken.names == ("dan", "ann")
        for part in PARTS:
            for place, position in enumerate((3, 0)):
                assert torch.equal(taken.part(part).client(place)[0], federation.part(part).client(position)[0])
                assert torch.equal(taken.part(part).client(place)[1], federation.part(part).client(position)[1])

    def test_keys_follow(self) -> None:
        federation = make_federation()
        assert federation.take(torch.tensor([3, 0])).keys.tolist() == federation.keys[torch.tensor([3, 0])].tolist()


def tiny(names: list[str]) -> Federation:
    """One sample a client; the target is the length of its name."""
    return Federation.from_parts([(np.ones((1, 1)), np.array([len(name)])) for name in names], names=names)


def unseen_of(federation: Federation) -> Federation:
    assert federation.unseen is not None
    return federation.unseen


distinct_names = st.lists(st.text(max_size=4), min_size=2, max_size=12, unique=True)


class TestHoldOut:
    @given(distinct_names, st.floats(0.3, 0.7), seeds)
    def test_clients_are_trained_on_or_held_out(self, names: list[str], share: float, seed: int) -> None:
        federation = tiny(names).hold_out(share, seed)
        unseen = unseen_of(federation).names if federation.unseen else ()
        assert not set(federation.names) & set(unseen)
        assert set(federation.names) | set(unseen) == set(names)
        assert len(unseen) == round(share * len(names))

    @given(st.data(), distinct_names, seeds)
    def test_the_order_of_the_clients_does_not_matter(self, data: st.DataObject, names: list[str], seed: int) -> None:
        turned = data.draw(st.permutations(names))
        first, second = (unseen_of(tiny(list(order)).hold_out(0.5, seed)) for order in (names, turned))
        assert set(first.names) == set(second.names)

    def test_samples_stay_with_their_client(self) -> None:
        federation = make_federation()
        held = federation.hold_out(0.4)
        for group in (held, unseen_of(held)):
            for part in PARTS:
                for position, name in enumerate(group.names):
                    found = group.part(part).client(position)
                    given_ = federation.part(part).client(federation.position(name))
                    assert torch.equal(found[0], given_[0])
                    assert torch.equal(found[1], given_[1])

    def test_clients_keep_their_order(self) -> None:
        held = make_federation().hold_out(0.4)
        assert list(held.names) == sorted(held.names)
        assert list(unseen_of(held).names) == sorted(unseen_of(held).names)

    def test_unseen_clients_are_not_counted(self) -> None:
        held = make_federation().hold_out(0.4)
        assert (held.num_clients, unseen_of(held).num_clients) == (3, 2)

    def test_the_same_seed_chooses_alike(self) -> None:
        federation = tiny([f"client {position}" for position in range(40)])
        assert unseen_of(federation.hold_out(0.3, 7)).names == unseen_of(federation.hold_out(0.3, 7)).names

    def test_another_seed_chooses_otherwise(self) -> None:
        federation = tiny([f"client {position}" for position in range(40)])
        assert unseen_of(federation.hold_out(0.3, 7)).names != unseen_of(federation.hold_out(0.3, 8)).names

    def test_every_client_is_held_out_equally_often(self) -> None:
        federation, repeats = make_federation(), 600
        counts = dict.fromkeys(NAMES, 0)
        for seed in range(repeats):
            for name in unseen_of(federation.hold_out(0.4, seed)).names:
                counts[name] += 1
        deviation = max(abs(count - 0.4 * repeats) for count in counts.values())
        assert deviation < 5 * np.sqrt(repeats * 0.4 * 0.6)

    def test_nothing_held_out_leaves_all(self) -> None:
        federation = make_federation()
        held = federation.hold_out(0.0)
        assert held.unseen is None
        assert same_federation(held, federation)

    @pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
    def test_a_share_out_of_range_is_refused(self, share: float) -> None:
        with pytest.raises(UserError, match=rf"share of unseen clients is {re.escape(str(share))}; allowed"):
            make_federation().hold_out(share)

    def test_holding_out_all_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"Holding out 0\.95 of 5 clients leaves none"):
            make_federation().hold_out(0.95)


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
