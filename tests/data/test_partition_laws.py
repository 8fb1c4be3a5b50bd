"""Dealt samples against the laws that they are drawn from. Seeds are fixed; bounds are about five standard errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collections_of_samples import EVEN, UNEVEN, collection_of, counts_of, counts_over_seeds
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from fedem.data.partitions import Dirichlet, LabelGroups, Pachinko, Shards, Uniform, from_arrays, log_gammas, normalized


def follow(observed: NDArray[np.int64], pmf: Callable[[Any], Any]) -> bool:
    """Whether counts follow a law on 0, 1, ...; neighbouring values are pooled to at least ten expected."""
    actual = np.bincount(observed.flatten())
    expected = pmf(np.arange(len(actual))) * observed.size
    pooled = [np.zeros(2)]
    for pair in np.stack([actual, expected], axis=1):
        if pooled[-1][1] >= 10:
            pooled.append(np.zeros(2))
        pooled[-1] += pair
    pooled[-1][1] += observed.size - expected.sum()  # values above all those observed
    return len(pooled) > 3 and bool(stats.chisquare(*np.stack(pooled, axis=1)).pvalue > 1e-4)


def have_moments(counts: NDArray[Any], trials: Any, first: float, rest: float) -> bool:
    """Whether independent counts have the mean and variance of multinomial draws from Beta(first, rest) shares."""
    law = stats.betabinom(trials, first, rest)
    deviations = (counts - law.mean()) ** 2 - law.var()
    return bool(
        abs((counts - law.mean()).sum()) < 5 * np.sqrt((law.var() * np.ones(len(counts))).sum())
        and abs(deviations.mean()) < 5 * deviations.std() / np.sqrt(len(counts))
    )


@pytest.mark.parametrize("concentration", [0.05, 0.4, 10.0])
def test_shares_are_those_of_a_dirichlet(concentration: float) -> None:
    logs = log_gammas(np.random.default_rng(0), concentration, 20_000, 4)
    for column in normalized(logs).T:
        assert stats.kstest(column, stats.beta(concentration, 3 * concentration).cdf).pvalue > 1e-4


class TestDirichlet:
    def test_counts_of_a_label_are_multinomial_with_dirichlet_shares(self) -> None:
        partition = Dirichlet(num_clients=5, min_samples=1)
        counts = counts_over_seeds(partition, collection_of([30] * 20), 150)
        for client in range(5):
            assert have_moments(counts[:, client].flatten(), 30, 0.4, 1.6)
            assert follow(counts[:, client], stats.betabinom(30, 0.4, 1.6).pmf)

    def test_all_samples_are_dealt(self) -> None:
        assert counts_over_seeds(Dirichlet(num_clients=5), UNEVEN, 1)[0].sum(0).tolist() == [17, 3, 40, 1, 25, 30, 5, 9]

    def test_a_large_concentration_deals_evenly(self) -> None:
        counts = counts_over_seeds(Dirichlet(num_clients=4, alpha=1e8), collection_of([4000] * 3), 3)
        assert np.abs(counts - 1000).max() < 5 * np.sqrt(4000 * 3 / 16)

    @pytest.mark.parametrize("alpha", [1e-4, 1e-300])
    def test_a_small_concentration_gives_each_label_to_one_client(self, alpha: float) -> None:
        counts = counts_over_seeds(Dirichlet(num_clients=3, min_samples=1, alpha=alpha), EVEN, 5)
        assert set(counts.flatten().tolist()) == {0, 20}

    def test_clients_that_are_too_small_are_drawn_again(self) -> None:
        """Two clients' sizes follow the law of one label's counts, cut off at both ends."""
        sizes = counts_over_seeds(Dirichlet(num_clients=2, min_samples=8), collection_of([40]), 1500)[:, 0, 0]
        law = stats.betabinom(40, 0.4, 0.4)
        assert (sizes.min(), sizes.max()) == (8, 32)
        inside = law.cdf(32) - law.cdf(7)
        assert follow(sizes, lambda n: np.where((n >= 8) & (n <= 32), law.pmf(n) / inside, 0))


class TestLabelGroups:
    def test_labels_of_a_group_go_together(self) -> None:
        counts = counts_over_seeds(LabelGroups(num_clients=3, alpha=1e-300), collection_of([20] * 7), 5)
        assert set(counts.flatten().tolist()) == {0, 20}
        for found in counts:
            assert sorted((found > 0).sum(1).tolist()) == [2, 2, 3]

    def test_labels_are_grouped_at_random(self) -> None:
        partition = LabelGroups(num_clients=2, num_groups=2, alpha=1e-300)
        counts = counts_over_seeds(partition, collection_of([20] * 4), 600)
        for label in (1, 2, 3):
            together = int((counts[:, 0, 0] == counts[:, 0, label]).sum())
            assert abs(together - 200) < 5 * np.sqrt(600 * 2 / 9)

    def test_a_groups_samples_are_dealt_as_one(self) -> None:
        partition = LabelGroups(num_clients=4, num_groups=1, alpha=5.0, min_samples=1)
        counts = counts_over_seeds(partition, collection_of([25] * 4), 800)
        for client in range(4):
            assert follow(counts[:, client].sum(-1), stats.betabinom(100, 5, 15).pmf)

    def test_groups_of_one_label_follow_the_law_of_labels(self) -> None:
        partition = LabelGroups(num_clients=5, num_groups=20, min_samples=1)
        counts = counts_over_seeds(partition, collection_of([30] * 20), 100)
        assert follow(counts[:, 0], stats.betabinom(30, 0.4, 1.6).pmf)


class TestPachinko:
    def test_coarse_and_fine_shares_are_dirichlet(self) -> None:
        """Samples abound, so no label leaves and the clients are independent."""
        counts = counts_over_seeds(
            Pachinko(num_clients=200, samples_per_client=20, beta=2.0), collection_of([800] * 12), 8
        )
        assert counts.sum(1).max() < 800
        coarse = counts.reshape(-1, 4, 3).sum(-1)
        assert set(coarse.sum(-1).tolist()) == {20}
        for group in range(4):
            trials = coarse[:, group]
            assert have_moments(trials, 20, 0.4, 1.2)
            assert follow(trials, stats.betabinom(20, 0.4, 1.2).pmf)
            for label in range(3):
                fine = counts.reshape(-1, 12)[:, 3 * group + label]
                assert have_moments(fine[trials > 0], trials[trials > 0], 2.0, 4.0)

    def test_fine_labels_leave_and_their_coarse_label_keeps_its_share(self) -> None:
        """Two fine labels of the first coarse one are all but absent; coarse counts do not notice."""
        scarce = collection_of([1, 2, 500, 500, 500, 500])
        counts = counts_over_seeds(Pachinko(num_clients=10, samples_per_client=20, alpha=1.0), scarce, 150)
        assert (counts[..., :2].sum(1) == [1, 2]).mean() > 0.95
        assert follow(counts[..., :3].sum(-1), stats.betabinom(20, 1.0, 1.0).pmf)

    def test_a_label_is_drawn_until_it_is_used_up(self) -> None:
        """Of two labels, the one with five samples gets as many draws as if it had more, up to five."""
        partition = Pachinko(num_clients=1, samples_per_client=10, beta=1e8)
        counts = counts_over_seeds(partition, collection_of([5, 50]), 1000)[:, 0, 0]
        law = stats.binom(10, 0.5)
        assert follow(counts, lambda n: np.where(n < 5, law.pmf(n), law.sf(4)))

    @pytest.mark.slow
    def test_draws_at_once_have_the_law_of_draws_one_by_one(self) -> None:
        """All samples are used up; how those of the fine labels fall to the clients, against a plain loop."""
        collection = collection_of([2, 3, 1, 3], parts=2)
        partition = Pachinko(num_clients=3, samples_per_client=3, alpha=0.7, beta=1.5)
        found = Counter(tuple(c[:2].flatten()) for c in counts_over_seeds(partition, collection, 1200))
        rng = np.random.default_rng(0)
        plain = Counter(tuple(_one_by_one(rng, [2, 3, 1, 3], 0.7, 1.5)[:2].flatten()) for _ in range(1200))
        common = [key for key in plain | found if plain[key] + found[key] >= 20]
        table = np.array([[law[key] for key in common] for law in (plain, found)])
        table = np.column_stack([table, 1200 - table.sum(1)])
        assert table.shape[1] > 20
        assert stats.chi2_contingency(table).pvalue > 1e-3

    def test_everybody_has_the_same_size_and_all_samples_can_be_used(self) -> None:
        counts = counts_over_seeds(Pachinko(num_clients=12, samples_per_client=0), EVEN, 3)
        assert (counts.sum(2) == 20).all()
        assert (counts.sum(1) == 20).all()

    @pytest.mark.parametrize("value", [1e-4, 1e-300])
    def test_small_concentrations_give_one_label(self, value: float) -> None:
        wide = collection_of([300] * 12)
        coarse = (
            counts_over_seeds(Pachinko(num_clients=10, samples_per_client=30, alpha=value), wide, 3)
            .reshape(3, 10, 4, 3)
            .sum(-1)
        )
        assert set(coarse.flatten().tolist()) == {0, 30}
        fine = counts_over_seeds(Pachinko(num_clients=10, samples_per_client=30, alpha=value, beta=value), wide, 3)
        assert set(fine.flatten().tolist()) == {0, 30}

    def test_large_concentrations_deal_evenly(self) -> None:
        counts = counts_over_seeds(
            Pachinko(num_clients=3, samples_per_client=1200, alpha=1e8, beta=1e8), collection_of([400] * 12), 3
        )
        assert np.abs(counts - 100).max() < 5 * np.sqrt(1200 * 11 / 144)


def _one_by_one(rng: np.random.Generator, sizes: list[int], alpha: float, beta: float) -> NDArray[np.int64]:
    """Three clients of three samples, two coarse labels of two fine ones each, as the method's text has it."""
    left, counts = np.array(sizes), np.zeros((3, len(sizes)), dtype=np.int64)
    for own in counts:
        coarse, fine = rng.dirichlet([alpha] * 2), rng.dirichlet([beta] * 2, 2)
        for _ in range(3):
            open_fine = fine * (left.reshape(2, 2) > 0)
            open_coarse = coarse * (open_fine.sum(1) > 0)
            group = int(rng.random() * open_coarse.sum() > open_coarse[0])
            label = 2 * group + int(rng.random() * open_fine[group].sum() > open_fine[group, 0])
            own[label] += 1
            left[label] -= 1
    return counts


class TestShards:
    def test_shards_of_one_label_stay_whole(self) -> None:
        counts = counts_over_seeds(Shards(num_clients=12, shards_per_client=2), EVEN, 5)
        assert set(counts.flatten().tolist()) <= {0, 10, 20}
        assert (counts.sum(2) == 20).all()
        assert (counts.sum(1) == 20).all()

    @given(seed=st.integers(0, 99), clients=st.integers(1, 12), shards=st.integers(1, 5))
    def test_clients_have_few_labels_and_nearly_equal_sizes(self, seed: int, clients: int, shards: int) -> None:
        counts = counts_of(Shards(num_clients=clients, shards_per_client=shards).assign(EVEN, seed), EVEN.pool.targets)
        cuts = np.arange(clients * shards + 1) * 240 / (clients * shards)
        labels_of_a_shard = int((np.ceil(cuts[1:] / 20) - np.floor(cuts[:-1] / 20)).max())
        assert (counts > 0).sum(1).max() <= shards * labels_of_a_shard
        assert np.ptp(counts.sum(1)) <= shards
        assert counts.sum() == 240

    def test_shards_are_dealt_at_random(self) -> None:
        labels = counts_over_seeds(Shards(num_clients=12, shards_per_client=1), EVEN, 600)[:, 4].argmax(1)
        assert stats.chisquare(np.bincount(labels, minlength=12)).pvalue > 1e-3


class TestUniform:
    def test_counts_are_those_of_draws_without_replacement(self) -> None:
        counts = counts_over_seeds(Uniform(num_clients=6), EVEN, 400)
        assert follow(counts[:, 2, 5], stats.hypergeom(240, 20, 40).pmf)
        assert follow(counts[:, 3, :4].sum(-1), stats.hypergeom(240, 80, 40).pmf)

    @given(st.integers(1, 130))
    def test_sizes_differ_by_one_at_most(self, clients: int) -> None:
        sizes = Uniform(num_clients=clients).assign(UNEVEN, 0).offsets.diff()
        assert int(sizes.sum()) == 130
        assert int(sizes.max() - sizes.min()) <= 1

    def test_targets_may_be_of_any_kind(self) -> None:
        numbers = from_arrays(np.arange(9.0)[:, None], np.arange(18.0).reshape(9, 2))
        assert Uniform(num_clients=3).assign(numbers, 0).offsets.tolist() == [0, 3, 6, 9]
