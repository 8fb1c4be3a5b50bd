"""Federations: names, parts and samples as they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import NAMES, SIZES, make_federation
from hypothesis import given
from hypothesis import strategies as st
from labelled import good, same_samples

from fedem.core.errors import UserError
from fedem.data.federation import PARTS, Federation
from fedem.data.samples import Pool, Samples


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
        samples = Samples(Pool(torch.arange(2 * total).reshape(total, 2), torch.arange(total)), offsets)
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
        assert samples.take(torch.tensor([0, 1, 2, 4, 3])).sizes.tolist() == [*SIZES[:3], SIZES[4], SIZES[3]]

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
