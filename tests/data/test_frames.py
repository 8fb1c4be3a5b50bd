"""Data that are in memory already: the same as from a file, or an error that names the client and the item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shops import COLUMNS, make_shops, write_shops
from torch.utils.data import IterableDataset, TensorDataset

from fedem.core.errors import UserError
from fedem.data import FromFile
from fedem.data.federation import PARTS, Federation
from fedem.data.files import from_datasets, from_frame, from_huggingface
from fedem.data.tables import read_frame

ROWS = make_shops(6)


def same(first: Federation, second: Federation) -> bool:
    return first.names == second.names and all(
        torch.equal(getattr(first.part(part), name), getattr(second.part(part), name))
        for part in PARTS
        for name in ("inputs", "targets", "offsets")
    )


class TestFrames:
    @pytest.fixture
    def frame(self) -> Any:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame([{name: row[name] for name in COLUMNS} for row in ROWS])
        return frame.assign(promotion=frame["promotion"] == "true")

    def test_a_frame_is_what_its_file_is(self, frame: Any, tmp_path: Path) -> None:
        path = write_shops(tmp_path / "shops.csv", ROWS)
        expected = FromFile(path=str(path), target_column="sold", client_column="shop").make(3)
        found = from_frame(frame, "sold", "shop", seed=3)
        assert same(found.federation, expected.federation)
        assert found.encoding == expected.encoding

    @pytest.mark.parametrize("kind", ["category", "string", "object"])
    def test_text_may_be_of_any_type(self, frame: Any, kind: str) -> None:
        changed = frame.assign(weekday=frame["weekday"].astype(kind))
        assert from_frame(changed, "sold", "shop").encoding == from_frame(frame, "sold", "shop").encoding

    def test_types_say_what_a_column_is(self) -> None:
        pandas = pytest.importorskip("pandas")
        from decimal import Decimal

        columns = {
            "whole": pandas.array([1, 2], dtype="Int64"),
            "number": [Decimal("1.5"), Decimal(2)],
            "boolean": pandas.array([True, False], dtype="boolean"),
            "text": pandas.Categorical([1, 2]),
        }
        table = read_frame(pandas.DataFrame(columns))
        assert {name: column.kind for name, column in table.columns.items()} == {name: name for name in columns}

    @pytest.mark.parametrize("kind", ["uint64", "UInt64", "object"])
    @pytest.mark.parametrize("column", ["price", "sold"])
    def test_large_whole_numbers_do_not_wrap(self, frame: Any, kind: str, column: str) -> None:
        pandas = pytest.importorskip("pandas")
        numbers = pandas.Series([2**64 - 1 if row == 4 else row % 2 for row in range(len(frame))], dtype=kind)
        with pytest.raises(UserError, match=rf"row 4, column '{column}': 18446744073709551615 does not fit in 64 bits"):
            from_frame(frame.assign(**{column: numbers}), "sold", "shop")
        small = numbers.where(numbers < 2, 1).astype(kind)
        assert from_frame(frame.assign(**{column: small}), "sold", "shop").encoding is not None

    @pytest.mark.parametrize(("value", "why"), [(10**30, "in 64 bits"), (-(10**30), "in 64 bits")])
    def test_pythons_whole_numbers_may_be_larger_still(self, frame: Any, value: int, why: str) -> None:
        pandas = pytest.importorskip("pandas")
        prices = [value, *range(1, len(frame))]
        with pytest.raises(UserError, match=f"row 0, column 'price': {value} does not fit {why}"):
            from_frame(frame.assign(price=prices), "sold", "shop")
        huge = pandas.Series([10**400, 1.5, *prices[2:]], dtype=object)  # pandas itself may refuse to guess a type
        with pytest.raises(UserError, match=r"row 0, column 'price': 10+ does not fit in a float"):
            from_frame(frame.assign(price=huge), "sold", "shop")

    def test_clients_may_be_named_by_any_whole_number(self, frame: Any) -> None:
        pandas = pytest.importorskip("pandas")
        codes = frame["shop"].map(lambda name: 2**64 - ord(name[-1]))
        for kind in ("uint64", "object"):
            found = from_frame(frame.assign(shop=pandas.Series(codes, dtype=kind)), "sold", "shop")
            assert found.federation.names == tuple(sorted(map(str, set(codes.tolist()))))

    def test_words_for_nothing_among_numbers_are_missing(self, frame: Any) -> None:
        prices = ["NA" if row == 3 else price for row, price in enumerate(frame["price"])]
        with pytest.raises(UserError, match=r"1 in column 'price' \(first: the data frame, row 3\)"):
            from_frame(frame.assign(price=prices), "sold", "shop")
        weekdays = frame["weekday"].replace("Monday", "NA")
        assert "weekday=NA" in from_frame(frame.assign(weekday=weekdays), "sold", "shop").feature_names

    def test_clients_to_be_held_out_teach_nothing(self, frame: Any) -> None:
        frame = frame.assign(temperature=np.arange(len(frame), dtype=float))
        made = from_frame(frame, "sold", "shop", seed=2, unseen=0.25)
        assert (made.seed, made.unseen) == (2, 0.25)
        training = made.federation.hold_out(0.25, 2).train
        names = list(made.feature_names)
        held = training.inputs[:, [names.index("price"), names.index("temperature")]].double()
        assert held.mean(0).abs().max() < 1e-5
        assert (held.std(0, correction=0) - 1).abs().max() < 1e-5
        assert made.encoding != from_frame(frame, "sold", "shop", seed=2).encoding
        with pytest.raises(UserError, match="unseen is 1; allowed: at least 0 and below 1"):
            from_frame(frame, "sold", "shop", unseen=1)

    def test_new_rows_are_encoded_as_in_training(self, frame: Any) -> None:
        made = from_frame(frame, "sold", "shop")
        pool = made.federation.train.pool
        assert np.array_equal(made.encoding.accept(frame), pool.inputs.numpy())
        assert np.array_equal(
            made.encoding.accept(frame.drop(columns=["sold", "shop"])[::-1]), pool.inputs.numpy()[::-1]
        )
        assert np.array_equal(made.encoding.accept_targets(frame["sold"]), pool.targets.numpy())
        assert made.encoding.accept(pool.inputs) is pool.inputs

    def test_what_turns_into_a_frame_is_one(self, frame: Any) -> None:
        arrow = pytest.importorskip("pyarrow")
        found = from_frame(arrow.Table.from_pandas(frame), "sold", "shop")
        assert same(found.federation, from_frame(frame, "sold", "shop").federation)

    def test_missing_values_are_named(self, frame: Any) -> None:
        changed = frame.copy()
        changed.loc[changed.index[[2, 5]], "price"] = None
        changed["weekday"] = changed["weekday"].where(changed.index != 4)
        message = r"1 in column 'weekday' \(first: the data frame, row 4\), 2 in column 'price' \(.* row 2\)"
        with pytest.raises(UserError, match=message):
            from_frame(changed, "sold", "shop")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda frame: frame.to_numpy(), "The data are a ndarray; allowed: a pandas data frame"),
            (lambda frame: frame[:0], "the data frame has no rows"),
            (lambda frame: frame.drop(columns="sold"), "no column 'sold'"),
            (lambda frame: frame.drop(columns="shop"), "no column 'shop'"),
            (lambda frame: frame.assign(price=[[1]] * len(frame)), "column 'price' holds a list; allowed"),
            (lambda frame: frame.set_axis(["a", "a", *frame.columns[2:]], axis=1), "column 'a' more than once"),
        ],
    )
    def test_what_is_none_is_refused(self, frame: Any, change: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            from_frame(change(frame), "sold", "shop")


class _Stream(IterableDataset[tuple[np.ndarray, int]]):
    def __iter__(self) -> Any:
        return iter([(np.ones(2), 0), (np.zeros(2), 1)])


class _Counted:
    """A data set without an end of its own that counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> tuple[list[float], int]:
        self.reads += 1
        return [float(row), 0.0], row % 2


class TestDatasets:
    def test_items_come_back(self) -> None:
        x, y = torch.randn(10, 3), torch.arange(10) % 2
        found = from_datasets([TensorDataset(x[:4], y[:4]), TensorDataset(x[4:], y[4:])], ["ann", "bob"], seed=2)
        assert same(found, Federation.from_clients([(x[:4], y[:4]), (x[4:], y[4:])], ["ann", "bob"], seed=2))

    def test_each_is_read_once(self) -> None:
        data = _Counted()
        assert from_datasets([data]).train.inputs.shape[1:] == (2,)
        assert data.reads == 3

    def test_streams_are_read_to_their_end(self) -> None:
        found = from_datasets([_Stream()], validation=0, test=0)
        assert sorted(found.train.targets.tolist()) == [0, 1]

    @pytest.mark.parametrize(
        ("items", "message"),
        [
            ([{"x": 1, "y": 2}], "Client 'ann', item 0 is a dict; allowed: a pair"),
            ([(1.0, 0), (1.0, 0, 2)], "item 1 is a tuple of 3; allowed: a pair"),
            ([(object(), 0)], "item 0 has an input of type object; allowed: numbers"),
            ([(np.ones(2), 0), (np.ones(3), 0)], r"item 1 has an input of shape \[3\].*allowed: \[2\]"),
            ([(1.0, 0), (1.0, 0.5)], "item 1 has an target .*float64; allowed"),
            ([], "Client 'ann' has an empty data set"),
        ],
    )
    def test_other_items_are_refused(self, items: list[Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            from_datasets([items], ["ann"])

    def test_names_must_fit(self) -> None:
        with pytest.raises(UserError, match="Got 2 names for 1 data sets"):
            from_datasets([_Counted()], ["ann", "bob"])
        with pytest.raises(UserError, match="The data sets are a _Counted; allowed: a list"):
            from_datasets(_Counted())


class TestHuggingFace:
    @pytest.fixture
    def datasets(self) -> Any:
        return pytest.importorskip("datasets")

    def test_tables_are_encoded(self, datasets: Any) -> None:
        shops = sorted({str(row["shop"]) for row in ROWS})
        parts = {
            shop: datasets.Dataset.from_list(
                [{name: row[name] for name in COLUMNS[1:]} for row in ROWS if row["shop"] == shop]
            )
            for shop in shops
        }
        found = from_huggingface(parts, "sold", features=["weekday", "price"])
        assert found.federation.names == tuple(shops)
        assert found.encoding.target.classes == ("few", "many", "some")
        assert found.feature_names == ("weekday=Friday", "weekday=Monday", "weekday=Saturday", "price")
        assert len(from_huggingface(list(parts.values()), "sold").feature_names) == 7

    def test_images_and_labels_stay(self, datasets: Any) -> None:
        images = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3)
        kinds = datasets.Features(
            {"image": datasets.Array2D((2, 3), "uint8"), "label": datasets.ClassLabel(names=["dog", "cat"])}
        )
        data = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 1, 0]}, features=kinds)
        found = from_huggingface([data, data], validation=0, test=0)
        assert np.array_equal(found.federation.train.pool.inputs.numpy(), np.concatenate([images, images]))
        assert found.federation.train.pool.inputs.dtype == torch.uint8
        assert [found.encoding.target.classes[code] for code in found.federation.train.pool.targets[:4]] == [
            "dog",
            "cat",
            "cat",
            "dog",
        ]

    def test_what_does_not_fit_is_refused(self, datasets: Any) -> None:
        data = datasets.Dataset.from_dict({"a": [1.0, 2.0], "b": [[1], [2, 3]], "label": [0, 1]})
        for arguments, message in (
            (([data], "y"), "Unknown column of client '0' 'y'; allowed: a, b, label"),
            (([data], "label", ["a", "c"]), "Unknown column of client '0' 'c'"),
            (([data], "label"), "column 'b' holds .*; allowed beside other features"),
            (([data], "label", "b"), "inputs of different shapes"),
            (([1],), "A client's data are a int; allowed: datasets.Dataset"),
        ):
            with pytest.raises(UserError, match=message):
                from_huggingface(*arguments)

    def test_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "datasets", None)
        with pytest.raises(UserError, match=r"needs the package datasets.*fedem\[huggingface\]"):
            from_huggingface([])
