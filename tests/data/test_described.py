"""Figures of a federation's data against values computed by hand and by scipy; pictures that can be opened."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from numpy.typing import NDArray
from rich.console import Console
from scipy.spatial.distance import jensenshannon

from fedem.data.dataset import Dataset
from fedem.data.federation import Federation
from fedem.report.described import (
    Description,
    between_share,
    by_dominant_label,
    describe,
    draw_clients,
    jensen_shannon,
    label_counts,
    labels_table,
    remarks,
    shares,
    sizes_table,
    total_variation,
)

COUNTS = numpy_strategies.arrays(
    np.int64, st.tuples(st.integers(1, 6), st.integers(2, 5)), elements=st.integers(0, 9)
).filter(lambda counts: bool((counts.sum(1) > 0).all()))


def make(labels: list[list[int]]) -> Federation:
    """Clients with these labels, and one feature that plays no part."""
    return Federation.from_clients([(np.ones((len(own), 1)), own) for own in labels], test=0.4)


class TestLabels:
    def test_by_hand(self) -> None:
        counts = np.array([[4, 0], [0, 4]])  # the pool is (1/2, 1/2), each client as far from it as can be
        assert total_variation(counts) == 0.5
        # The entropy of the middle (3/4, 1/4) is 2 - 3/4 log 3 bits, that of the pool 1, that of a client 0.
        assert jensen_shannon(counts) == pytest.approx(1.5 - 0.75 * np.log2(3))
        assert total_variation(np.array([[1, 3], [2, 6]])) == 0
        assert jensen_shannon(np.array([[1, 3], [2, 6]])) == pytest.approx(0)

    @given(COUNTS)
    def test_the_divergence_is_scipys(self, counts: NDArray[np.int64]) -> None:
        expected = np.mean([jensenshannon(row, counts.sum(0), base=2) ** 2 for row in counts])
        assert jensen_shannon(counts) == pytest.approx(expected, abs=1e-7)

    @given(COUNTS)
    def test_distances_are_bounded_and_ordered(self, counts: NDArray[np.int64]) -> None:
        distance = total_variation(counts)
        assert 0 <= distance < 1
        # Both bounds are known of any pair of distributions, and so of the mean.
        assert -1e-12 <= jensen_shannon(counts) <= distance + 1e-12

    def test_counts_are_of_all_parts(self) -> None:
        labels = [[0, 0, 2, 1], [2, 2, 2, 2, 0, 0]]
        assert label_counts(make(labels)).tolist() == [[2, 1, 1], [2, 0, 4]]
        assert label_counts(make(labels), num_labels=5).tolist() == [[2, 1, 1, 0, 0], [2, 0, 4, 0, 0]]

    def test_clients_are_sorted_by_dominant_label(self) -> None:
        counts = np.array([[1, 2], [9, 1], [1, 9], [2, 1]])
        assert by_dominant_label(counts, ["a", "b", "c", "d"]).tolist() == [1, 3, 2, 0]
        assert shares(counts)[1].tolist() == [0.9, 0.1]


class TestRegression:
    def test_by_hand(self) -> None:
        owners = np.array([0, 0, 1, 1])
        assert between_share(np.array([1.0, 1.0, 5.0, 5.0]), owners) == 1
        assert between_share(np.array([1.0, 5.0, 1.0, 5.0]), owners) == 0
        # Means 1 and 4, squares within 2 * 1 + 2 * 1, between 4 * 1.5^2.
        assert between_share(np.array([0.0, 2.0, 3.0, 5.0]), owners) == pytest.approx(9 / 13)
        assert between_share(np.ones(4), owners) == 0

    @given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=2, max_size=20))
    def test_the_rest_is_within(self, rows: list[tuple[int, float]]) -> None:
        owners, values = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
        total = np.square(values - values.mean()).sum()
        within = sum(np.square(values[owners == t] - values[owners == t].mean()).sum() for t in set(owners.tolist()))
        if total > 1e-6:
            assert between_share(values, owners) == pytest.approx(1 - within / total, abs=1e-9)

    def test_quartiles_are_each_clients(self) -> None:
        targets = [np.arange(9.0), 10 * np.arange(5.0)]
        federation = Federation.from_clients([(np.ones((len(own), 1)), own) for own in targets])
        found = describe(Dataset(federation), "numbers")
        assert found.counts is None
        assert found.quartiles.tolist() == [[2, 4, 6], [10, 20, 30]]
        assert found.between == pytest.approx(between_share(np.concatenate(targets), np.repeat([0, 1], [9, 5])))


def printed(description: Description) -> str:
    text = io.StringIO()
    for table in (sizes_table(description), labels_table(description)):
        Console(width=120, file=text).print(table)
    return text.getvalue()


class TestText:
    def test_sizes_and_labels(self) -> None:
        found = describe(Dataset(make([[0] * 10, [1] * 5, [0, 1, 1, 1, 1] * 4])), "[three]")
        text = printed(found)
        assert "[three]: samples of 3 clients" in text
        rows = {words[0]: words[1:] for line in text.splitlines() if (words := line.replace("│", " ").split())}
        assert rows["train"] == ["14", "2", "4", "8"]
        assert rows["together"] == ["35", "5", "10", "20"]
        assert rows["0"] == ["14", "40.0", "2"]
        assert rows["1"] == ["21", "60.0", "2"]

    def test_how_much_clients_differ(self) -> None:
        lines = list(remarks(describe(Dataset(make([[0, 0], [1, 1]])), "two")))
        assert "total variation distance 0.500, Jensen-Shannon divergence 0.311 bits" in lines[-1]

    def test_labels_have_the_names_of_the_data_set(self) -> None:
        found = describe(Dataset(make([[0, 2, 1], [2, 2, 2]]), label_names=("cat", "\n", " ", "dog")), "named")
        assert found.labels == ("cat", "'\\n'", "' '", "dog")
        assert found.counts is not None
        assert found.counts.sum(0).tolist() == [1, 1, 4, 0]

    def test_many_labels_are_cut(self) -> None:
        found = describe(Dataset(make([list(range(30)) + [7] * 5])), "many")
        text = printed(found)
        assert "the 20 most frequent of 30" in text
        assert "│ 29 " not in text


class TestPictures:
    @pytest.mark.slow
    @pytest.mark.parametrize(("clients", "labels"), [(5, 3), (100, 10), (60, 62), (1, 2)])
    def test_pictures_open_and_repeat(self, clients: int, labels: int, tmp_path: Path) -> None:
        from matplotlib.image import imread

        rng = np.random.default_rng(0)
        own = [rng.integers(0, labels, 20).tolist() for _ in range(clients)]
        found = describe(Dataset(make(own)), f"{clients} clients")
        for ending in ("png", "svg"):
            content = draw_clients(found, ending)
            assert content == draw_clients(found, ending)
            (tmp_path / f"picture.{ending}").write_bytes(content)
        assert min(imread(tmp_path / "picture.png").shape[:2]) > 500
        assert b"<svg" in (tmp_path / "picture.svg").read_bytes()

    @pytest.mark.parametrize("ending", ["png", "svg"])
    def test_names_may_be_of_any_script(self, ending: str) -> None:
        # Warnings are errors: that a font has not all of these is none, and a dollar is no formula.
        names = ("東京", "النيل", "$\\nonsense$")
        federation = Federation.from_clients([(np.ones((4, 1)), [0, 1, 0, 1]) for _ in names], names)
        found = describe(Dataset(federation, label_names=("はい", "$a_{$")), "データ")
        assert draw_clients(found, ending)

    def test_numbers_have_a_picture_too(self) -> None:
        federation = Federation.from_clients([(np.ones((9, 1)), np.arange(9.0) * t) for t in range(1, 5)])
        assert draw_clients(describe(Dataset(federation), "numbers"), "png").startswith(b"\x89PNG")
