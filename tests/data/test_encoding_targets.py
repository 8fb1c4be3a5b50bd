"""What a column of targets becomes: classes, two of them, or numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from encoded_tables import all_rows, table_of
from sklearn.preprocessing import StandardScaler

from fedem.core.errors import UserError
from fedem.data import FromFile
from fedem.data.encoding import Encoding, Target


class TestTargets:
    @pytest.mark.parametrize(
        ("values", "classes", "codes"),
        [
            (["no", "yes", "no"], ("no", "yes"), [0, 1, 0]),
            (["10", "9", "+9"], ("9", "10"), [1, 0, 0]),
            (["-1", "5", "2"], ("-1", "2", "5"), [0, 2, 1]),
            (["TRUE", "false", "True"], ("false", "true"), [1, 0, 1]),
            (["1", "two", "1"], ("1", "two"), [0, 1, 0]),
            (["1.5", "2", "x"], ("1.5", "2", "x"), [0, 1, 2]),
        ],
    )
    def test_classes_keep_their_names(self, values: list[str], classes: tuple[str, ...], codes: list[int]) -> None:
        table = table_of(a=[1, 2, 3], y=values)
        encoding = Encoding.fit(table, all_rows(table))
        assert encoding.target.classes == classes
        assert encoding.target.encode(table).tolist() == codes
        assert encoding.target.encode(table).dtype == np.int64

    def test_floats_are_regression_and_come_back(self) -> None:
        values = [1.0, 2.0, 40.5, -3.25]
        table = table_of(a=[1, 2, 3, 4], y=values)
        encoding = Encoding.fit(table, np.arange(3))
        targets = encoding.target.encode(table)
        assert encoding.target.classes is None
        assert targets.dtype == np.float32
        expected = StandardScaler().fit(np.array(values[:3])[:, None]).transform(np.array(values)[:, None])[:, 0]
        np.testing.assert_allclose(targets, expected, rtol=1e-6)
        decoded = encoding.decode(torch.from_numpy(targets.astype(np.float64))[:, None])
        np.testing.assert_allclose(decoded[:, 0], values, rtol=1e-6)

    def test_probabilities_are_left_alone(self) -> None:
        table = table_of(a=[1, 2], y=["no", "yes"])
        shares = torch.tensor([[0.25, 0.75]])
        assert torch.equal(Encoding.fit(table, all_rows(table)).decode(shares), shares)

    @pytest.mark.parametrize(
        ("values", "classes", "said"),
        [
            ([*range(5, 15)], 10, "10 classes (5, 6, 7, 8, 9, ...)"),
            (
                [*range(12)] * 5,
                12,
                "for they count from 0 without gaps and each has 5 rows or more; data.task=regression",
            ),
            (
                [*range(1, 31)] * 5,
                30,
                "for they count from 1 without gaps and each has 5 rows or more; data.task=regression",
            ),
            ([*range(12)] * 4, None, "12 distinct whole numbers, some in fewer than 5 rows; data.task=classification"),
            ([*range(2, 14)] * 5, None, "which don't count from 0 or 1 without gaps; data.task=classification"),
            ([*range(11), 12] * 5, None, "which don't count from 0 or 1 without gaps; data.task=classification"),
            ([*range(31)] * 9, None, "regression (31 distinct whole numbers; data.task=classification"),
        ],
    )
    def test_whole_numbers_are_classes_if_few(self, values: list[int], classes: int | None, said: str) -> None:
        target = Target.fit(table_of(a=[1] * len(values), y=values))
        assert (None if target.classes is None else len(target.classes)) == classes
        assert said in target.describe()

    @pytest.mark.parametrize(("count", "classes"), [(100, 100), (101, None)])
    @pytest.mark.parametrize("as_array", [True, False])
    def test_beside_arrays_and_in_older_runs_they_may_be_more(
        self, count: int, classes: int | None, as_array: bool
    ) -> None:
        table = table_of(a=[1] * count, y=list(range(count)))
        target = Target.fit(replace(table, array=np.ones((count, 2))) if as_array else table, recognize=as_array)
        assert (None if target.classes is None else len(target.classes)) == classes

    def test_the_task_can_be_told(self) -> None:
        table = table_of(a=[1, 2, 3], y=["1.0", "2.5", "1"])
        assert Target.fit(table, task="classification").classes == ("1", "2.5")
        assert Target.fit(table_of(a=[1, 2], y=["3", "4"]), task="regression").classes is None
        assert len(Target.fit(table_of(a=[1] * 101, y=list(range(101))), task="classification").classes or ()) == 101
        with pytest.raises(UserError, match=r"t\.csv, line 3, column 'y': 'x' is not a number"):
            Target.fit(table_of(a=[1, 2], y=["3", "x"]), task="regression")
        with pytest.raises(UserError, match=r"Unknown FromFile\.task 'clasification'"):
            FromFile(task="clasification")

    def test_one_class_is_none(self) -> None:
        with pytest.raises(UserError, match=r"'y' has one value only \('3'\)"):
            Target.fit(table_of(a=[1, 2], y=["3", "3"]))

    def test_new_targets_are_matched_by_value(self) -> None:
        table = table_of(a=[1, 2], y=["7", "8"])
        encoding = Encoding.fit(table, all_rows(table))
        assert encoding.target.encode(table_of(a=[1, 2, 3], y=["8.0", "+7", "8"])).tolist() == [1, 0, 1]
        for values in ([8, 7], [8.0, 7.0], np.array([8, 7], dtype=np.uint8)):
            assert encoding.accept_targets(values).tolist() == [1, 0]
        with pytest.raises(UserError, match=r"t\.csv, line 3, column 'y': '9' is none of the 2 classes .*\(7, 8\)"):
            encoding.target.encode(table_of(a=[1, 2], y=["8", "9"]))
        with pytest.raises(UserError, match="the targets, row 1, column 'y': 9 is none of the 2 classes"):
            encoding.accept_targets([7, 9])
        with pytest.raises(UserError, match="no column 'y' of targets"):
            encoding.target.encode(table_of(a=[1]))

    def test_text_is_compared_as_it_stands(self) -> None:
        table = table_of(a=["01", "1", "x"], y=["01", "1", "x"])
        encoding = Encoding.fit(table, all_rows(table))
        new = table_of(a=["1", "01"], y=["1", "01"])  # numbers all, but not in training
        assert encoding.inputs(new).tolist() == [[0, 1, 0], [1, 0, 0]]
        assert encoding.target.encode(new).tolist() == [1, 0]
