"""Every way into a federation: what goes in comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from labelled import client_sizes, good, labelled, labelled_clients, same_federation, seeds, splits
from numpy.typing import NDArray

from fedem.core.errors import UserError
from fedem.data.federation import PARTS, Federation
from fedem.data.samples import Samples


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
        with pytest.raises(UserError, match=r"one client name per row.*\(5,\).*6 rows"):
            Federation.from_arrays(*good(6), ["ann"] * 5)

    def test_names_in_a_matrix_are_refused(self) -> None:
        with pytest.raises(UserError, match=r"one client name per row.*\(6, 1\)"):
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
        with pytest.raises(UserError, match=r"test part has 1 client; allowed: 2"):
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
