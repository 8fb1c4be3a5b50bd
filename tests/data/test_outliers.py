"""Numbers absurdly far from all others: named before training, and cut off where that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedem.core.errors import UserError
from fedem.data.dataset import Dataset
from fedem.data.encoding import Encoding, cut_off, outside, usual_range
from fedem.data.files import from_frame
from fedem.data.tables import read_frame

Run = Callable[..., tuple[int, str, str]]
ROWS = 200


def frame(**changes: object) -> pandas.DataFrame:
    draw = np.random.default_rng(0)
    size = draw.normal(50, 10, ROWS).round(3)
    days = pandas.date_range("2024-01-01", periods=ROWS).strftime("%Y-%m-%d")
    made = pandas.DataFrame({"size": size, "day": days, "colour": ["red", "blue"] * (ROWS // 2)})
    return made.assign(sold=(size > 50).astype(int), shop=[f"shop {row % 4}" for row in range(ROWS)], **changes)


def with_cell(value: object, column: str = "size", row: int = 17) -> pandas.DataFrame:
    changed = frame()
    changed[column] = changed[column].astype(object)
    changed.loc[row, column] = value
    return changed


def made(rows: pandas.DataFrame, **options: object) -> Dataset:
    return from_frame(rows, "sold", "shop", **options)


def notes(data: Dataset) -> list[str]:
    assert data.encoding is not None
    return [line for line in data.encoding.notes if "far out" in line]


def encoding_of(data: Dataset) -> Encoding:
    assert data.encoding is not None
    return data.encoding


def test_nothing_is_said_of_ordinary_numbers() -> None:
    plain, clipped = made(frame()), made(frame(), clip_outliers=True)
    assert notes(plain) == notes(clipped) == []
    for one, other in zip(encoding_of(plain).features or (), encoding_of(clipped).features or (), strict=True):
        assert (one.mean, one.deviation) == (other.mean, other.deviation)
    table = read_frame(frame(), "sold", "shop")
    assert np.array_equal(encoding_of(plain).inputs(table), encoding_of(clipped).inputs(table))


@pytest.mark.parametrize("value", [1e30, -1e30, 1e6])
def test_a_cell_far_out_is_named_with_its_row(value: float) -> None:
    (note,) = notes(made(with_cell(value)))
    assert f"'size' ({value} in the data frame, row 17); --clip-outliers" in note


def test_one_cell_no_longer_flattens_a_feature() -> None:
    row = next(filter(made_flat, range(ROWS)))  # one that is for training
    flat, kept = (made(with_cell(1e30, row=row), clip_outliers=clip) for clip in (False, True))
    table = read_frame(frame(), "sold", "shop")
    spreads = [encoding_of(data).inputs(table)[:, 0].std() for data in (flat, kept)]
    assert spreads[0] < 1e-6
    assert spreads[1] == pytest.approx(1, rel=0.2)
    assert "cut off at the others' least and largest" in notes(kept)[0]


def made_flat(row: int) -> bool:
    features = encoding_of(made(with_cell(1e30, row=row))).features
    assert features is not None
    return features[0].deviation > 1e20


@pytest.mark.parametrize("value", [1e300, float("inf")])
def test_what_single_precision_does_not_hold(value: float) -> None:
    with pytest.raises(UserError, match=r"row 17, column 'size': .* is not finite in single precision"):
        made(with_cell(value))
    assert notes(made(with_cell(value), clip_outliers=True))


def test_dates_as_well() -> None:
    (note,) = notes(made(with_cell("9999-12-31", "day"), clip_outliers=True))
    assert "'day' (9999-12-31 in the data frame, row 17)" in note


def test_targets_are_named_and_stay() -> None:
    changed = with_cell(1e30).assign(sold=np.random.default_rng(1).normal(size=ROWS))
    changed["sold"] = [1e9, *changed["sold"][1:]]
    data = made(changed.drop(columns="size"), clip_outliers=True)
    (note,) = notes(data)
    assert "'sold' (1000000000.0 in the data frame, row 0); targets stay as they are" in note
    assert encoding_of(data).target.encode(read_frame(changed, "sold", "shop"))[0] > 5


def test_later_rows_are_cut_off_alike_and_the_encoding_is_kept() -> None:
    encoding = encoding_of(made(frame(), clip_outliers=True))
    again = Encoding.from_json(json.loads(json.dumps(encoding.to_json())))
    assert again == encoding
    feature = next(each for each in again.features or () if each.name == "size")
    assert feature.usual is not None
    later = read_frame(with_cell(1e30), "sold", "shop")
    edge = read_frame(with_cell(feature.usual[3]), "sold", "shop")
    np.testing.assert_array_equal(again.inputs(later), again.inputs(edge))
    assert again.clipped(later) == {"size": 1}
    assert again.clipped(edge) == {}
    unclipped = encoding_of(made(frame()))
    assert "usual" not in json.dumps(unclipped.to_json())  # what was learnt before there was a choice has the same hash


@given(st.lists(st.floats(-1e6, 1e6), min_size=8, max_size=60), st.floats(1e-3, 1e3), st.floats(-1e6, 1e6))
def test_ranges_move_with_their_numbers(values: list[float], scale: float, shift: float) -> None:
    numbers = np.array(values)
    usual, moved = usual_range(numbers), usual_range(numbers * scale + shift)
    if usual is not None and moved is not None:
        allowed = 1e-6 * (1 + abs(shift) + scale * (usual[1] - usual[0]))
        np.testing.assert_allclose(moved, np.array(usual) * scale + shift, atol=allowed)
    if usual is not None:
        low, high, least, largest = usual
        assert low <= least <= np.median(numbers) <= largest <= high
        assert len(outside(numbers, usual)) <= max(1, 0.05 * len(numbers))
        cut = cut_off(numbers, usual)
        assert (cut.min(), cut.max()) == (least, largest)
        stays = (numbers >= low) & (numbers <= high)
        assert np.array_equal(cut[stays], numbers[stays])


@pytest.mark.parametrize(
    ("values", "far"),
    [
        ([0.0] * 90 + [1.0] * 10, []),
        ([0.0] * 90 + [1000.0, 1001.0] * 5, []),  # the others lie far from 0, and are usual
        ([0.0] * 90 + [1.0] * 9 + [1e9], [99]),
        ([0.0] * 80 + [1.0] * 10 + [1e9] * 10, []),  # what a tenth has is no mistake
        ([5.0] * 99 + [1e30], []),  # nobody knows how far apart values are
        (list(np.exp(np.random.default_rng(0).normal(size=100))), []),
        ([np.nan, np.inf, *np.arange(50.0)], [1]),
    ],
)
def test_which_numbers_are_far_out(values: list[float], far: list[int]) -> None:
    numbers = np.array(values)
    usual = usual_range(numbers)
    assert ([] if usual is None else outside(numbers, usual).tolist()) == far


def test_the_commands_say_so(run: Run, tmp_path: Path) -> None:
    with_cell(1e30).to_csv(tmp_path / "t.csv", index=False)
    named = ["--client-column", "shop", "--target-column", "sold"]
    code, told, err = run("data", "describe", tmp_path / "t.csv", *named)
    assert code == 0, err
    assert "'size' (1e+30 in" in told.replace("\n", " ")
    assert "t.csv, line 19)" in told.replace("\n", "")
    fast = ["--rounds", "1", "--device", "cpu", "--set", "model.name=linear", "--clip-outliers"]
    code, _, err = run("train", "--data", tmp_path / "t.csv", *named, *fast, "--out", tmp_path / "r")
    assert code == 0, err
    assert "line 19); cut off at the others' least and largest" in err
    code, _, err = run("predict", tmp_path / "r", "--data", tmp_path / "t.csv", "--out", tmp_path / "p.csv")
    assert code == 0, err
    assert "note: column 'size' has 1 value far out, cut off as in training." in err
