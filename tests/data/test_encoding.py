"""Columns become inputs and targets as scikit-learn would make them, by the training rows alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoded_tables import ROWS, all_rows, column, table_of
from hypothesis import given
from hypothesis import strategies as st
from shops import COLUMNS, write_shops
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedem.core.errors import UserError
from fedem.data import FromFile
from fedem.data.encoding import Encoding, Target
from fedem.data.federation import PARTS
from fedem.data.tables import Piece, Table, read_table


class TestReferences:
    rows = np.random.default_rng(0).permutation(len(ROWS))[:50]
    table = table_of("sold", **{name: column(name) for name in COLUMNS[1:]})
    encoding = Encoding.fit(table, rows)
    inputs = encoding.inputs(table)

    def test_numbers_are_standardised(self) -> None:
        numbers = np.array([column("price"), column("temperature")], dtype=float).T
        expected = StandardScaler().fit(numbers[self.rows]).transform(numbers)
        names = self.encoding.input_names
        assert names is not None
        found = self.inputs[:, [names.index("price"), names.index("temperature")]]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)

    def test_text_is_one_hot(self) -> None:
        texts = np.array(column("weekday"), dtype=object)[:, None]
        few = self.rows[texts[self.rows, 0] != "Monday"]  # a category that training has not
        encoding = Encoding.fit(self.table, few)
        reference = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(texts[few])
        assert encoding.input_names[:2] == ("weekday=Friday", "weekday=Saturday")
        assert np.array_equal(encoding.inputs(self.table)[:, :2], reference.transform(texts))
        assert encoding.unseen(self.table) == {"weekday": ["Monday"]}

    def test_booleans_are_one_and_nought(self) -> None:
        found = self.inputs[:, self.encoding.input_names.index("promotion")]
        assert found.tolist() == [float(word == "true") for word in column("promotion")]

    def test_inputs_are_single_precision_in_the_order_of_their_names(self) -> None:
        assert self.inputs.dtype == np.float32
        assert self.encoding.input_names == (
            *(f"weekday={day}" for day in ("Friday", "Monday", "Saturday")),
            "price",
            "temperature",
            "promotion",
        )
        assert self.inputs.shape == (len(ROWS), 6)


class TestTrainingRowsAlone:
    def test_other_rows_change_nothing(self, tmp_path: Path) -> None:
        source = FromFile(path=str(write_shops(tmp_path / "a.csv", ROWS)), target_column="sold", client_column="shop")
        made = source.make(0)
        rows = {part: made.federation.part(part).rows for part in PARTS}
        changed = [dict(row) for row in ROWS]
        for row in torch.cat([rows["validation"], rows["test"]]).tolist():
            changed[row] |= {"price": 1e6, "weekday": "never"}
        table = read_table(write_shops(tmp_path / "b.csv", changed), "sold", "shop")
        again = Encoding.fit(table, rows["train"].numpy())
        assert replace(again, notes=()) == made.encoding  # nothing is learnt of them; that they lie far out is said
        assert "47 more" in again.notes[0]
        changed[int(rows["train"][0])]["price"] = 1e6
        table = read_table(write_shops(tmp_path / "c.csv", changed), "sold", "shop")
        assert Encoding.fit(table, rows["train"].numpy()) != made.encoding

    def test_training_rows_have_mean_nought_and_deviation_one(self, tmp_path: Path) -> None:
        path = write_shops(tmp_path / "a.csv", ROWS, (*COLUMNS[:-1], "units"))
        made = FromFile(path=str(path), target_column="units", client_column="shop").make(0)
        place = made.feature_names.index("price")
        for values in (made.federation.train.inputs[:, place], made.federation.train.targets):
            assert float(values.double().mean()) == pytest.approx(0, abs=1e-6)
            assert float(values.double().std(correction=0)) == pytest.approx(1, abs=1e-6)

    def test_clients_that_will_be_held_out_are_not_known(self, tmp_path: Path) -> None:
        path = write_shops(tmp_path / "a.csv", ROWS)
        source = FromFile(path=str(path), target_column="sold", client_column="shop")
        made = source.make(0, unseen=0.25)
        assert made.federation.num_clients == 12
        held = made.federation.hold_out(0.25, seed=0)
        place = made.feature_names.index("price")
        assert float(held.train.inputs[:, place].double().mean()) == pytest.approx(0, abs=1e-6)
        changed = [row | {"price": 99.0} if row["shop"] in held.unseen.names else row for row in ROWS]
        other = replace(source, path=str(write_shops(tmp_path / "b.csv", changed))).make(0, unseen=0.25)
        assert other.encoding == made.encoding

    def test_constant_columns_have_deviation_one(self) -> None:
        table = table_of(a=[0.1] * 7 + [1.1], y=[0, 1] * 4)
        found = Encoding.fit(table, np.arange(7)).inputs(table)
        np.testing.assert_allclose(found[:, 0], [0] * 7 + [1], atol=1e-7)

    def test_standardising_can_be_left(self) -> None:
        table = table_of(a=[1, 2, 4], y=[0.5, 1.5, 7.0])
        encoding = Encoding.fit(table, all_rows(table), standardize=False)
        assert encoding.inputs(table)[:, 0].tolist() == [1, 2, 4]
        assert encoding.target.encode(table).tolist() == [0.5, 1.5, 7.0]


class TestNewTables:
    table = table_of(a=[1, 2, 3], b=["u", "v", "u"], y=["no", "yes", "no"])
    encoding = Encoding.fit(table, np.arange(3))

    def test_columns_are_found_by_name(self) -> None:
        swapped = table_of(b=["u", "v", "u"], y=["?"] * 3, a=[1, 2, 3])
        assert np.array_equal(self.encoding.inputs(swapped), self.encoding.inputs(self.table))
        assert np.array_equal(self.encoding.inputs(table_of(b=["v"], a=[2])), self.encoding.inputs(self.table)[1:2])

    @pytest.mark.parametrize(
        ("columns", "message"),
        [
            ({"a": [1]}, "The columns are a; allowed: a, b, as in training"),
            ({"a": [1], "c": ["u"]}, "The columns are a, c; allowed: a, b, as in training"),
            ({"a": ["much"], "b": ["u"]}, r"t\.csv, line 2, column 'a': 'much' is not a number"),
        ],
    )
    def test_other_columns_are_refused(self, columns: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            self.encoding.inputs(table_of(**columns))

    def test_booleans_are_wanted_where_training_had_them(self) -> None:
        encoding = Encoding.fit(table_of(a=["true", "false"], y=[0, 1]), np.arange(2))
        assert encoding.inputs(table_of(a=["1", "FALSE", "true"]))[:, 0].tolist() == [1, 0, 1]
        with pytest.raises(UserError, match="line 2, column 'a': 'maybe' is neither true nor false"):
            encoding.inputs(table_of(a=["maybe"]))

    def test_ignored_columns_may_be_there_or_not(self) -> None:
        table = table_of(a=[1, 2], when=["2024-01-05", "2024-01-06"], y=[0, 1])
        encoding = replace(Encoding.fit(table.without(["when"]), all_rows(table)), ignored=("when",))
        assert encoding.input_names == ("a",)
        assert np.array_equal(encoding.inputs(table), encoding.inputs(table.without(["when"])))

    def test_arrays_have_no_names(self) -> None:
        array = Table({}, "y", "client", (Piece("t.npz", 2),), np.ones((2, 3)))
        with pytest.raises(UserError, match="array without names; allowed: the columns a, b"):
            self.encoding.inputs(array)

    def test_numbers_far_beyond_training_are_named(self) -> None:
        encoding = Encoding.fit(table_of(a=[1e-30, 2e-30], y=[0, 1]), np.arange(2))
        with pytest.raises(UserError, match="line 2, column 'a': '1e30' is too large"):
            encoding.inputs(table_of(a=["1e30"]))


class TestWordsForNothing:
    @pytest.mark.parametrize("word", ["NA", "-"])
    def test_text_of_training_stays_text(self, word: str) -> None:
        table = table_of(a=["12", "B", word], y=["5", word, "much"])
        encoding = Encoding.fit(table, all_rows(table))
        assert encoding.input_names == tuple(f"a={text}" for text in sorted(["12", "B", word]))
        new = table_of(a=[word, "12"], y=["5", word])  # nothing but numbers beside it
        assert encoding.inputs(new).argmax(1).tolist() == [
            sorted(["12", "B", word]).index(text) for text in (word, "12")
        ]
        assert encoding.target.encode(new).tolist() == [encoding.target.classes.index(text) for text in ("5", word)]

    def test_numbers_of_training_want_numbers(self) -> None:
        table = table_of(a=[1, 2], y=[0, 1])
        with pytest.raises(UserError, match=r"Missing values: 2 in column 'a' \(first: t\.csv, line 2\)"):
            Encoding.fit(table, all_rows(table)).inputs(table_of(a=["NA", "?"]))


def test_an_encoding_has_a_hash_of_what_it_learnt() -> None:
    table = table_of(a=[1, 2, 4], b=["u", "v", "u"], y=[10.0, 30.0, 20.0])
    first, second = (Encoding.fit(table, np.array(rows)) for rows in ([0, 1], [0, 2]))
    assert first.fingerprint == Encoding.fit(table, np.arange(2)).fingerprint != second.fingerprint
    assert first.fingerprint == Encoding.from_json(json.loads(json.dumps(first.to_json()))).fingerprint
    assert first.target.deviation == 10
    assert Encoding.fit(table, np.arange(2), standardize=False).target.deviation == 1


class TestTooManyCategories:
    def test_the_count_and_a_value_are_named(self) -> None:
        table = table_of(ticket=[f"A {number}" for number in range(120)], y=[0, 1] * 60)
        message = r"Column 'ticket' is text with 120 categories \(such as 'A 0'; identifiers .*at most 100"
        with pytest.raises(UserError, match=message):
            Encoding.fit(table, all_rows(table))
        assert len(Encoding.fit(table, all_rows(table), max_categories=120).input_names or ()) == 120
        assert Encoding.fit(table, np.arange(100)).describe().endswith("100 inputs in all")

    def test_dates_that_may_be_meant_in_two_ways_are_explained(self) -> None:
        days = [
            f"{one:02}/{other:02}/{year}" for one in (1, 2, 3) for other in range(1, 13) for year in range(2020, 2024)
        ]
        table = table_of(when=days, y=[0, 1] * 72)
        with pytest.raises(
            UserError, match=r"dates such as '01/01/2020' may be meant as %d/%m/%Y or %m/%d/%Y; 2024-05-31"
        ):
            Encoding.fit(table, all_rows(table))

    def test_what_spoils_a_column_of_numbers_is_named(self) -> None:
        table = table_of(a=[*range(150), "low", *range(49)], y=[0, 1] * 100)
        with pytest.raises(UserError, match=r"199 of its values are numbers; the first that is none: t\.csv, line 152"):
            Encoding.fit(table, all_rows(table))

    def test_targets_of_text_too(self) -> None:
        table = table_of(a=[1] * 101, y=[f"name {row}" for row in range(101)])
        with pytest.raises(UserError, match=r"Column 'y' is text with 101 categories"):
            Target.fit(table)


class TestStatement:
    def test_a_table_in_one_line(self) -> None:
        table = table_of(
            a=[1, 2, 3], b=[1.5, 2, 3], c=["u", "v", "w"], d=["true", "false", "true"], y=["no", "yes", "no"]
        )
        assert Encoding.fit(table, np.arange(2)).describe() == (
            "target 'y': 2 classes (no, yes); 2 numeric features, 1 true/false feature, "
            "1 categorical ('c' with 2 categories); 5 inputs in all"
        )

    def test_a_regression_tells_its_scale(self) -> None:
        table = table_of(a=[1, 2], y=[10.0, 30.0])
        said = Encoding.fit(table, all_rows(table)).describe()
        assert said.startswith(
            "target 'y': regression (2 distinct numbers; data.task=classification makes them classes)"
        )
        assert ", standardised by mean 20 and deviation 10" in said


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.text(max_size=3), st.booleans(), st.sampled_from(["p", "q", "r"])),
        min_size=2,
        max_size=12,
    ).filter(lambda rows: len({row[0] for row in rows}) > 1 and len({row[3] for row in rows}) > 1)
)
def test_plain_json_gives_the_same_encoding_back(rows: list[tuple[float, str, bool, str]]) -> None:
    a, b, c, y = zip(*rows, strict=True)
    table = table_of(a=a, b=[f"{text}!" for text in b], c=c, y=y)
    for own, ignored in (
        (table, ("b",)),
        (replace(table, target="a"), ()),
        (replace(table, array=np.ones((len(rows), 2))), ()),
    ):
        encoding = replace(Encoding.fit(own.without(ignored), all_rows(own)), ignored=ignored)
        again = Encoding.from_json(json.loads(json.dumps(encoding.to_json(), allow_nan=False)))
        assert again == encoding
        assert np.array_equal(again.inputs(own), encoding.inputs(own))
        assert np.array_equal(again.target.encode(own), encoding.target.encode(own))
