"""What all partitions promise, the natural one, fingerprints and errors."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from collections_of_samples import EVEN, UNEVEN, owned, permuted, rows_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from fedem.core.errors import UserError
from fedem.core.settings import names_of
from fedem.data.partitions import (
    PARTITIONS,
    Assignment,
    Dirichlet,
    LabelGroups,
    Natural,
    Pachinko,
    Partition,
    Shards,
    Uniform,
    fingerprint,
    from_arrays,
)

SMALL: dict[str, Partition] = {
    "natural": Natural(share=0.6),
    "dirichlet": Dirichlet(num_clients=4, min_samples=3, share=0.8),
    "label_groups": LabelGroups(num_clients=4, min_samples=3, share=0.8),
    "pachinko": Pachinko(num_clients=4, samples_per_client=0, share=0.8),
    "shards": Shards(num_clients=4, share=0.8),
    "uniform": Uniform(num_clients=4, share=0.8),
}
BY_LABELS = [name for name in SMALL if name not in ("natural", "uniform")]


class TestAll:
    def test_the_table_of_examples_is_complete(self) -> None:
        assert {name: type(partition) for name, partition in SMALL.items()} == PARTITIONS

    @pytest.mark.parametrize("name", SMALL)
    @given(data=st.data(), seed=st.integers(0, 2**63 - 1))
    def test_the_order_of_rows_and_owners_plays_no_part(self, name: str, data: st.DataObject, seed: int) -> None:
        order = data.draw(st.permutations(range(len(UNEVEN.ids))))
        names = data.draw(st.permutations(range(len(UNEVEN.owner_names))))
        other = permuted(UNEVEN, order, names)
        first, second = (SMALL[name].assign(collection, seed) for collection in (UNEVEN, other))
        assert first.names == second.names
        assert owned(first, UNEVEN) == owned(second, other)
        assert fingerprint(first, UNEVEN) == fingerprint(second, other)

    @pytest.mark.parametrize("name", SMALL)
    def test_equal_samples_are_harmless(self, name: str) -> None:
        # Every sample twice, among them at the edges of what is kept and of what clients get.
        twice = permuted(UNEVEN, np.repeat(np.arange(len(UNEVEN.ids)), 2), np.arange(12))
        other = permuted(twice, np.random.default_rng(0).permutation(len(twice.ids)), np.arange(12))
        assert owned(SMALL[name].assign(twice, 5), twice) == owned(SMALL[name].assign(other, 5), other)

    @pytest.mark.parametrize("name", SMALL)
    @given(seed=st.integers(0, 2**63 - 1), share=st.floats(0.5, 1))
    def test_clients_share_no_sample_and_none_is_too_small(self, name: str, seed: int, share: float) -> None:
        partition = replace(SMALL[name], share=share)
        assignment = partition.assign(UNEVEN, seed)
        sizes = assignment.offsets.diff()
        assert len(set(assignment.names)) == len(assignment.names) == len(sizes)
        assert assignment.rows.dtype == assignment.offsets.dtype == torch.int64
        assert int(assignment.offsets[0]) == 0
        assert len(assignment.rows.unique()) == len(assignment.rows) == int(assignment.offsets[-1])
        assert int(sizes.min()) >= partition.min_samples
        assert all((np.diff(rows) > 0).all() for rows in rows_of(assignment).values())

    @pytest.mark.parametrize("name", SMALL)
    def test_the_seed_decides(self, name: str) -> None:
        found = [owned(SMALL[name].assign(UNEVEN, seed), UNEVEN) for seed in (0, 0, 1, 2**32, 2**63 - 1)]
        assert found[0] == found[1]
        assert all(found[0] != other for other in found[2:])

    @pytest.mark.parametrize("name", [name for name in SMALL if name != "natural"])
    @pytest.mark.parametrize("share", [0.31, 0.5, 1.0])
    def test_the_share_is_exact_and_the_same_for_all(self, name: str, share: float) -> None:
        rows = replace(SMALL[name], share=share, min_samples=1).assign(EVEN, 3).rows
        # Pachinko's clients have equal sizes: what is left over, fewer than there are clients, is nobody's.
        assert 0 <= round(share * 240) - len(rows) < (4 if name == "pachinko" else 1)
        assert set(rows.tolist()) <= set(Uniform(share=share, num_clients=4).assign(EVEN, 3).rows.tolist())

    def test_a_smaller_share_is_part_of_a_larger_one(self) -> None:
        smaller, larger = (Uniform(share=share, num_clients=4).assign(EVEN, 0).rows for share in (0.2, 0.4))
        assert set(smaller.tolist()) < set(larger.tolist())

    def test_every_sample_is_as_likely_to_be_kept(self) -> None:
        kept = np.zeros(240)
        for seed in range(400):
            kept[Uniform(share=0.25, num_clients=1).assign(EVEN, seed).rows] += 1
        assert np.abs(kept - 100).max() < 5 * np.sqrt(400 * 3 / 16)

    @pytest.mark.parametrize("name", SMALL)
    def test_every_setting_takes_effect(self, name: str) -> None:
        other: dict[str, Any] = {
            "share": 0.9,
            "min_samples": 20,
            "max_clients": 2,
            "num_clients": 5,
            "alpha": 8.0,
            "beta": 0.5,
            "num_groups": 2,
            "shards_per_client": 3,
            "samples_per_client": 7,
        }
        before = owned(SMALL[name].assign(UNEVEN, 2), UNEVEN)
        for key in names_of(PARTITIONS[name]):
            if key == "min_samples" and name in ("pachinko", "shards", "uniform"):
                continue  # there it refuses and changes nothing
            assert owned(replace(SMALL[name], **{key: other[key]}).assign(UNEVEN, 2), UNEVEN) != before, key


class TestNatural:
    def test_clients_are_the_owners_in_the_order_of_their_names(self) -> None:
        found = rows_of(Natural(min_samples=1).assign(UNEVEN, 0))
        assert list(found) == sorted(f"writer {n}" for n in range(12))
        assert all(found[f"writer {n}"].tolist() == list(range(n**2, min((n + 1) ** 2, 130))) for n in range(12))

    @pytest.mark.parametrize("minimum", [1, 2, 9, 10, 21])
    def test_small_clients_are_left_out(self, minimum: int) -> None:
        expected = [f"writer {n}" for n, size in enumerate([*range(1, 22, 2), 9]) if size >= minimum]
        assert Natural(min_samples=minimum).assign(UNEVEN, 0).names == tuple(sorted(expected))

    def test_share_and_maximum_count_clients(self) -> None:
        labels, names = np.zeros(4000, dtype=np.int64), np.arange(4000).astype(str)
        owners = np.concatenate([np.repeat(names[:1000], 3), names[1000:2000]])
        writers = from_arrays(np.arange(4000)[:, None], labels, owners)
        settings = [(0.15, 0), (0.15, 70), (0.15, 500), (0.0001, 0), (1.0, 0)]
        chosen = [Natural(share=share, max_clients=most).assign(writers, 4).names for share, most in settings]
        assert [len(found) for found in chosen] == [150, 70, 150, 1, 1000]
        assert set(chosen[3]) < set(chosen[1]) < set(chosen[0]) == set(chosen[2]) < set(chosen[4])

    def test_every_client_is_as_likely(self) -> None:
        chosen = Counter(name for seed in range(900) for name in Natural(max_clients=2).assign(EVEN, seed).names)
        assert stats.chisquare(list(chosen.values())).pvalue > 1e-3
        assert len(chosen) == len(Natural().assign(EVEN, 0).names)


class TestFingerprint:
    assignment = Assignment(("1", "12", "b"), torch.tensor([4, 7, 9, 1, 2, 3]), torch.tensor([0, 2, 3, 6]))

    @pytest.mark.parametrize(
        "same",
        [
            Assignment(("1", "12", "b"), torch.tensor([7, 4, 9, 2, 3, 1]), torch.tensor([0, 2, 3, 6])),
            Assignment(("b", "1", "12"), torch.tensor([1, 2, 3, 4, 7, 9]), torch.tensor([0, 3, 5, 6])),
        ],
    )
    def test_orders_play_no_part(self, same: Assignment) -> None:
        assert fingerprint(same, EVEN) == fingerprint(self.assignment, EVEN)

    @pytest.mark.parametrize(
        "other",
        [
            assignment._replace(names=("1", "12", "c")),
            assignment._replace(names=("12", "1", "b")),
            assignment._replace(offsets=torch.tensor([0, 2, 4, 6])),
            assignment._replace(offsets=torch.tensor([0, 2, 3, 5]), rows=assignment.rows[:5]),
            assignment._replace(rows=torch.tensor([4, 7, 9, 1, 2, 5])),
            assignment._replace(names=("1", "12", "b", "d"), offsets=torch.tensor([0, 2, 3, 6, 6])),
        ],
    )
    def test_another_owner_or_sample_shows(self, other: Assignment) -> None:
        assert fingerprint(other, EVEN) != fingerprint(self.assignment, EVEN)

    def test_a_name_does_not_run_into_the_samples(self) -> None:
        words = np.frombuffer(b"bbbbbbbbcccccccc", dtype=np.int64).copy()
        collection = replace(EVEN, ids=torch.from_numpy(words))
        first = Assignment(("a",), torch.tensor([0, 1]), torch.tensor([0, 2]))
        second = Assignment(("abbbbbbbb",), torch.tensor([1]), torch.tensor([0, 1]))
        assert fingerprint(first, collection) != fingerprint(second, collection)

    def test_is_a_plain_word(self) -> None:
        assert len(bytes.fromhex(fingerprint(self.assignment, EVEN))) == 16


class TestErrors:
    @pytest.mark.parametrize("name", SMALL)
    @pytest.mark.parametrize("seed", [-1, 2**63])
    def test_the_seed(self, name: str, seed: int) -> None:
        with pytest.raises(UserError, match=rf"The seed is {seed}; allowed: at least 0 and below 2\*\*63"):
            SMALL[name].assign(EVEN, seed)

    @pytest.mark.parametrize("name", BY_LABELS)
    @pytest.mark.parametrize("targets", [np.zeros(240, np.float32), np.zeros((240, 2), np.int64)])
    def test_targets_that_are_no_labels(self, name: str, targets: NDArray[Any]) -> None:
        numbers = replace(from_arrays(np.arange(240)[:, None], targets), coarse=EVEN.coarse)
        with pytest.raises(UserError, match=r"The targets are (float32|int64) of shape \[n.*; allowed.*integers"):
            SMALL[name].assign(numbers, 0)

    @pytest.mark.parametrize(("name", "missing"), [("natural", "owners"), ("pachinko", "coarse")])
    def test_what_a_collection_lacks(self, name: str, missing: str) -> None:
        with pytest.raises(UserError, match=rf"have no .*the {name} partition needs; allowed: .*dirichlet"):
            SMALL[name].assign(replace(EVEN, **dict[str, Any]({missing: None})), 0)

    @pytest.mark.parametrize(
        ("partition", "message"),
        [
            (
                Uniform(num_clients=241),
                r"num_clients is 241; allowed: at most 240, since 240 of 240 samples .* least 1\.",
            ),
            (Uniform(num_clients=49, share=0.1), r"num_clients is 49; allowed: at most 24, since 24 of 240"),
            (Uniform(share=0.001), r"num_clients is 100; allowed: at most 0, since 0 of 240"),
            (Dirichlet(num_clients=25), r"num_clients is 25; allowed: at most 24, .* at least 10\."),
            (Shards(num_clients=30, shards_per_client=9), r"num_clients is 30; allowed: at most 26, .* least 9\."),
            (Pachinko(num_clients=3, samples_per_client=81), r"num_clients is 3; allowed: at most 2, .* least 81\."),
            (Pachinko(num_clients=4, samples_per_client=5, min_samples=6), r"min_samples is 6; allowed: at most 5,"),
            (Shards(num_clients=7, shards_per_client=10, min_samples=34), r"min_samples is 34; allowed: at most 3\d,"),
            (Natural(min_samples=241), r"min_samples is 241; allowed: at most \d+, what the largest client has"),
            (LabelGroups(num_clients=4, num_groups=13), r"num_groups is 13; allowed: at most 12, the number of labels"),
            (
                Dirichlet(num_clients=13, alpha=1e-9),
                r"partition\.alpha 1e-09, each of 100 draws left one of 13 clients with fewer than 10 samples; allowed",
            ),
        ],
        ids=str,
    )
    def test_what_can_not_be_served(self, partition: Partition, message: str) -> None:
        with pytest.raises(UserError, match=message):
            partition.assign(EVEN, 0)

    @pytest.mark.parametrize(
        ("name", "key", "value"),
        [
            *((name, "share", value) for name in SMALL for value in (0.0, -0.5, 1.01, float("nan"))),
            *((name, "min_samples", 0) for name in SMALL),
            *((name, "num_clients", 0) for name in SMALL if name != "natural"),
            *((name, "alpha", value) for name in ("dirichlet", "label_groups", "pachinko") for value in (0.0, -1.0)),
            ("natural", "max_clients", -1),
            ("label_groups", "num_groups", 0),
            ("pachinko", "beta", 0.0),
            ("pachinko", "samples_per_client", -1),
            ("shards", "shards_per_client", 0),
        ],
    )
    def test_a_bad_value(self, name: str, key: str, value: Any) -> None:
        with pytest.raises(UserError, match=rf"{PARTITIONS[name].__name__}\.{key} is {value!r}; allowed: "):
            replace(SMALL[name], **{key: value})
