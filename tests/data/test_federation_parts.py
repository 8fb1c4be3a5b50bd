"""Every sample stands in one part only, and every client is trained or held out."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from helpers import NAMES, make_federation
from hypothesis import given
from hypothesis import strategies as st
from labelled import (
    client_sizes,
    good,
    labelled,
    labelled_clients,
    rows_of,
    same_federation,
    seeds,
    share,
    split_of,
    splits,
)

from fedem.core.errors import UserError
from fedem.data.federation import PARTS, Federation

shares = st.tuples(share, share).filter(lambda pair: sum(pair) < 1)


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
