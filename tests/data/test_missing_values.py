"""--impute: missing values filled by what the training rows have, kept with the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from shops import COLUMNS, make_shops
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler

import fedem
from fedem.core.errors import UserError
from fedem.data.files import from_frame

Run = Callable[..., tuple[int, str, str]]
NAMED = ["--client-column", "shop", "--target-column", "sold"]


@pytest.fixture
def frame() -> pandas.DataFrame:
    frame = pandas.DataFrame(make_shops(10))[list(COLUMNS)]
    rng = np.random.default_rng(0)
    for name in ("weekday", "price", "promotion"):
        frame.loc[rng.random(len(frame)) < 0.2, name] = None
    return frame


@pytest.mark.parametrize(
    ("impute", "strategy"), [("median", "median"), ("mode", "most_frequent"), ("indicator", "median")]
)
def test_inputs_are_as_scikit_learn_makes_them(frame: pandas.DataFrame, impute: str, strategy: str) -> None:
    frame["price"] = frame["price"].round(1)
    made = from_frame(frame, "sold", "shop", impute=impute)
    rows, names = made.federation.train.rows.numpy(), list(made.feature_names)
    inputs = made.federation.train.pool.inputs.numpy()
    prices = SimpleImputer(strategy=strategy).fit(frame[["price"]].iloc[rows]).transform(frame[["price"]])
    expected = StandardScaler().fit(prices[rows]).transform(prices)[:, 0]
    np.testing.assert_allclose(inputs[:, names.index("price")], expected, rtol=1e-5, atol=1e-6)
    frequent = frame["weekday"].iloc[rows].mode()[0]
    days = frame["weekday"].fillna(frequent)
    for day in days.unique():
        assert inputs[:, names.index(f"weekday={day}")].tolist() == (days == day).astype(float).tolist()
    told = [name for name in names if name.endswith(" is missing")]
    wanted = ["weekday", "price", "promotion"] if impute == "indicator" else []
    assert told == [f"{name} is missing" for name in wanted]
    for name in wanted:
        assert inputs[:, names.index(f"{name} is missing")].tolist() == frame[name].isna().astype(float).tolist()


def test_other_rows_teach_nothing(frame: pandas.DataFrame) -> None:
    made = from_frame(frame, "sold", "shop", impute="median")
    rows = set(made.federation.train.rows.tolist())
    changed = frame.copy()
    for row in range(len(frame)):
        if row not in rows and not np.isnan(frame.loc[row, "price"]):
            changed.loc[row, "price"] = 1e6
    table = fedem.data.tables.read_frame(changed, "sold", "shop")
    again = fedem.data.encoding.Encoding.fit(table, made.federation.train.rows.numpy(), impute="median")
    assert again.features == made.encoding.features


@pytest.mark.parametrize("impute", ["median", "indicator"])
def test_from_training_to_predictions(run: Run, tmp_path: Path, frame: pandas.DataFrame, impute: str) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "r"
    frame.to_csv(path, index=False)
    code, _, err = run("train", "--data", path, *NAMED, "--out", out)
    assert code == 2
    said = " ".join(err.split())
    assert "training with --impute median, mode or indicator (data.impute) fills them" in said
    fast = ["--rounds", "1", "--device", "cpu"]
    code, _, err = run("train", "--data", path, *NAMED, "--impute", impute, *fast, "--out", out)
    assert code == 0, err
    note = next(line for line in err.splitlines() if line.startswith("  - missing values, filled: 'weekday' ("))
    assert note.endswith("each with an input that says where") == (impute == "indicator")
    # A column that had none in training may have some later; all of one may be missing.
    later = frame.drop(columns="sold").assign(price=None, temperature=None)
    later.to_csv(tmp_path / "later.csv", index=False)
    code, _, err = run("predict", out, "--data", tmp_path / "later.csv", "--out", tmp_path / "p.csv")
    assert (code, "that training had not" in err) == (0, False), err
    encoding: Any = fedem.Result.load(out).recipe.format.encoding
    fills = {feature.name: feature.fill for feature in encoding.features}
    filled = later.assign(price=fills["price"], temperature=fills["temperature"])
    inputs, expected = encoding.accept(later), encoding.accept(filled)
    told = [place for place, name in enumerate(encoding.input_names) if name == "price is missing"]
    assert (inputs[:, told] == 1).all()
    assert np.array_equal(np.delete(inputs, told, 1), np.delete(expected, told, 1))


def test_dates_are_filled_by_the_one_in_the_middle(frame: pandas.DataFrame) -> None:
    days = pandas.Series(pandas.date_range("2024-01-01", periods=len(frame)).strftime("%d.%m.%Y"))
    made = from_frame(frame.assign(when=days.where(frame.index % 5 > 0)), "sold", "shop", impute="median")
    own = pandas.Series(sorted(row for row in made.federation.train.rows.tolist() if row % 5))
    feature = next(feature for feature in made.encoding.features if feature.name == "when")
    assert feature.fill == days[own.quantile(interpolation="lower")]


def test_targets_and_clients_are_not_filled(frame: pandas.DataFrame) -> None:
    for name in ("sold", "shop"):
        holes = frame.assign(**{name: frame[name].where(frame.index != 3)})
        with pytest.raises(UserError, match=rf"1 in column '{name}' .* leave those rows or columns out\.$"):
            from_frame(holes, "sold", "shop", impute="mode")


def test_a_column_without_values_to_learn_from_is_refused(frame: pandas.DataFrame) -> None:
    rows = from_frame(frame, "sold", "shop", impute="mode").federation.train.rows.numpy()
    table = fedem.data.tables.read_frame(
        frame.assign(price=frame["price"].where(~frame.index.isin(rows))), "sold", "shop"
    )
    with pytest.raises(UserError, match=r"Column 'price' has no value in the training rows; data\.ignore=price"):
        fedem.data.encoding.Encoding.fit(table, rows, impute="mode")


def test_unknown_ways_are_refused(run: Run, tmp_path: Path, frame: pandas.DataFrame) -> None:
    frame.to_csv(tmp_path / "t.csv", index=False)
    code, _, err = run("data", "describe", tmp_path / "t.csv", *NAMED, "--impute", "mean")
    assert (code, "Unknown data.impute 'mean'" in err) == (2, True)
