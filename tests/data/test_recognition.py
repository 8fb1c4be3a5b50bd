"""Columns as people have them: thousands separators, dates, identifiers, indices, constants, 0 and 1."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from shops import COLUMNS, make_shops, write_shops

import fedem
from fedem.core.errors import UserError
from fedem.data import FromFile
from fedem.data.encoding import Encoding
from fedem.data.federation import PARTS, Federation
from fedem.data.files import from_frame

Run = Callable[..., tuple[int, str, str]]
NAMED = ["--client-column", "shop", "--target-column", "sold"]
FAST = ["--rounds", "1", "--device", "cpu"]
ROWS = make_shops(10)
PRICES = [1234.5 + 999 * row for row in range(len(ROWS))]
DAYS = pandas.date_range("2023-01-30", periods=len(ROWS), freq="5D")


@pytest.fixture
def frame() -> pandas.DataFrame:
    return pandas.DataFrame([{name: row[name] for name in COLUMNS} for row in ROWS])


def column(made: Any, name: str) -> np.ndarray:
    """An input of all rows, in the file's order."""
    return made.federation.train.pool.inputs[:, made.feature_names.index(name)].double().numpy()


def same(one: Federation, other: Federation) -> bool:
    pairs = ((one.part(part), other.part(part)) for part in PARTS)
    return all(torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) for a, b in pairs)


class TestTask:
    def test_exam_scores_are_numbers(self, run: Run, tmp_path: Path, frame: pandas.DataFrame) -> None:
        scores = np.random.default_rng(0).permutation(np.arange(len(frame)) % 70 + 30)
        frame.assign(sold=scores).to_csv(tmp_path / "t.csv", index=False)
        code, told, err = run("data", "describe", tmp_path / "t.csv", *NAMED)
        assert code == 0, err
        assert "target 'sold': regression (70 distinct whole numbers; data.task=classification makes them" in told

    def test_what_is_unclear_is_said(self, run: Run, tmp_path: Path, frame: pandas.DataFrame) -> None:
        frame.assign(sold=np.arange(len(frame)) % 12).to_csv(tmp_path / "t.csv", index=False)
        code, told, err = run("data", "describe", tmp_path / "t.csv", *NAMED)
        assert code == 0, err
        said = "target 'sold': 12 classes (0, 1, 2, 3, 4, ...), for they count from 0 without gaps and each has 5 rows"
        assert f"{said} or more; data.task=regression regresses on them" in told
        code, told, err = run("data", "describe", tmp_path / "t.csv", *NAMED, "--set", "data.task=regression")
        assert "target 'sold': regression (12 distinct whole numbers; data.task=classification" in told


class TestThousands:
    @pytest.mark.parametrize("sign", [",", " ", "'", "\u00a0"])
    def test_they_are_numbers(self, frame: pandas.DataFrame, tmp_path: Path, sign: str) -> None:
        texts = [f"{price:,.1f}".replace(",", sign) for price in PRICES]
        frame.assign(price=texts).to_csv(tmp_path / "t.csv", index=False)
        made = FromFile(path=str(tmp_path / "t.csv"), target_column="sold", client_column="shop").make(0)
        frame.assign(price=PRICES).to_csv(tmp_path / "plain.csv", index=False)
        plain = FromFile(path=str(tmp_path / "plain.csv"), target_column="sold", client_column="shop").make(0)
        assert same(made.federation, plain.federation)
        assert made.partition_hash == plain.partition_hash
        assert made.encoding is not None
        assert "numbers with thousands separators: 'price'" in made.encoding.notes
        in_memory = (from_frame(frame.assign(price=prices), "sold", "shop") for prices in (texts, PRICES))
        assert same(*(made.federation for made in in_memory))

    def test_targets_too(self, frame: pandas.DataFrame) -> None:
        made = from_frame(frame.assign(sold=[f"{price:,.1f}" for price in PRICES]), "sold", "shop")
        assert made.encoding is not None
        targets = made.encoding.decode(made.federation.train.pool.targets.double())
        np.testing.assert_allclose(targets, PRICES, rtol=1e-5)
        assert made.encoding.accept_targets(["1,234.5"]) == pytest.approx(made.federation.train.pool.targets[:1])

    @pytest.mark.parametrize("odd", ["12,34", "1,2345", "1'234", "many"])
    def test_other_text_stays_text(self, frame: pandas.DataFrame, odd: str) -> None:
        made = from_frame(
            frame.assign(price=["1,234" if row % 2 else odd for row in range(len(frame))]), "sold", "shop"
        )
        assert f"price={odd}" in made.feature_names


class TestDates:
    @pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%d %b %Y", "%B %d, %Y", "%Y/%m/%d"])
    def test_days_and_places_in_cycles(self, frame: pandas.DataFrame, form: str) -> None:
        made = from_frame(frame.assign(when=DAYS.strftime(form)), "sold", "shop")
        rows = made.federation.train.rows.numpy()
        days = np.arange(len(DAYS)) * 5.0
        np.testing.assert_allclose(column(made, "when: days"), (days - days[rows].mean()) / days[rows].std(), atol=1e-6)
        for name, length, gone in (("year", 365.25, DAYS.day_of_year - 1), ("week", 7, DAYS.day_of_week - 3)):
            angle = 2 * np.pi * gone.to_numpy() / length
            np.testing.assert_allclose(column(made, f"when: sine of the {name}"), np.sin(angle), atol=1e-6)
            np.testing.assert_allclose(column(made, f"when: cosine of the {name}"), np.cos(angle), atol=1e-6)
        assert not any("of the day" in name for name in made.feature_names)
        assert "dates, as days since the first and as places in cycles: 'when' (year, week)" in made.encoding.notes

    def test_times_are_places_in_the_day(self, frame: pandas.DataFrame) -> None:
        hours = pandas.date_range("2023-01-30 00:30", periods=len(frame), freq="7h")
        made = from_frame(frame.assign(when=hours), "sold", "shop")
        angle = 2 * np.pi * (hours.hour + 0.5).to_numpy() / 24
        np.testing.assert_allclose(column(made, "when: sine of the day"), np.sin(angle), atol=1e-6)

    def test_new_dates_may_be_written_as_iso_has_it(self, frame: pandas.DataFrame) -> None:
        made = from_frame(frame.assign(when=DAYS.strftime("%d.%m.%Y")), "sold", "shop")
        assert made.encoding is not None
        expected = made.federation.train.pool.inputs.numpy()
        assert np.array_equal(made.encoding.accept(frame.assign(when=DAYS)), expected)
        with pytest.raises(UserError, match="row 0, column 'when': 'soon' is not a date such as 2024-05-31"):
            made.encoding.accept(frame.assign(when="soon"))

    def test_those_that_may_be_meant_in_two_ways_are_text(self, frame: pandas.DataFrame) -> None:
        dates = [f"0{1 + row % 3}/0{1 + row % 5}/2024" for row in range(len(frame))]
        made = from_frame(frame.assign(when=dates), "sold", "shop")
        assert "when=01/01/2024" in made.feature_names
        assert any(
            "'when' is text: its dates may be meant as %d/%m/%Y or %m/%d/%Y" in note for note in made.encoding.notes
        )


class TestLeftOut:
    @pytest.fixture
    def wide(self, frame: pandas.DataFrame) -> pandas.DataFrame:
        count = len(frame)
        return frame.assign(
            token=[f"k{row * 7}" for row in range(count)],
            number=np.random.default_rng(0).permutation(count) + 501,
            CustomerId=np.random.default_rng(1).permutation(count * 9)[:count],
            land="CH",
            nothing=None,
            income=np.random.default_rng(2).permutation(count * 9)[:count],
            share=np.random.default_rng(3).random(count),
        )

    def test_they_are_named_and_later_files_may_have_them_or_not(
        self, run: Run, tmp_path: Path, wide: pandas.DataFrame
    ) -> None:
        wide.to_csv(tmp_path / "t.csv")  # with its index
        run_folder = tmp_path / "r"
        code, _, err = run("train", "--data", tmp_path / "t.csv", *NAMED, *FAST, "--out", run_folder)
        assert code == 0, err
        assert "'' (an index that was saved with the table)" in err
        for name in ("token", "number", "CustomerId"):
            assert f"'{name}' (an identifier: it differs in every row)" in err
        assert "'land' (always CH), 'nothing' (empty); data.keep=token,number,CustomerId,land,nothing takes them" in err
        names = fedem.Result.load(run_folder).recipe.format.encoding.input_names
        assert [name for name in names if "=" not in name] == ["price", "temperature", "promotion", "income", "share"]
        wide[[*COLUMNS, "income", "share"]].to_csv(tmp_path / "few.csv", index=False)
        found = []
        for name in ("t", "few"):
            code, _, err = run(
                "predict", run_folder, "--data", tmp_path / f"{name}.csv", "--out", tmp_path / f"{name}_p.csv"
            )
            assert (code, "left out" in err) == (0, False), err
            found.append((tmp_path / f"{name}_p.csv").read_text())
        assert found[0] == found[1]

    def test_pandas_name_for_an_index(self, tmp_path: Path, frame: pandas.DataFrame) -> None:
        frame[:12].reset_index(names="Unnamed: 0").to_csv(tmp_path / "t.csv", index=False)
        made = FromFile(path=str(tmp_path / "t.csv"), target_column="sold", client_column="shop").make(0)
        assert made.encoding.ignored == ("Unnamed: 0",)

    def test_they_can_be_kept(self, wide: pandas.DataFrame) -> None:
        made = from_frame(wide, "sold", "shop", keep="number, land")
        assert made.encoding.ignored == ("token", "CustomerId", "nothing")
        assert {"number", "land=CH"} < set(made.feature_names)
        with pytest.raises(UserError, match=r"data\.keep names 'numbr'; allowed: weekday"):
            from_frame(wide, "sold", "shop", keep="numbr")

    def test_something_must_be_left(self, frame: pandas.DataFrame) -> None:
        bare = frame[["shop", "sold"]].assign(a=1)
        with pytest.raises(UserError, match=r"No column is left as a feature: 'a' \(always 1\); data\.keep=a takes"):
            from_frame(bare, "sold", "shop")

    def test_few_rows_say_nothing(self, wide: pandas.DataFrame) -> None:
        made = from_frame(wide[:19].drop(columns="nothing"), "sold", "shop")
        assert made.encoding.ignored == ()

    def test_a_deployed_client_leaves_out_the_same(self, tmp_path: Path, wide: pandas.DataFrame) -> None:
        wide = wide.assign(when=DAYS.strftime("%d.%m.%Y"), price=[f"{price:,.1f}" for price in PRICES], further="x")
        source = FromFile(path=str(tmp_path / "t.csv"), target_column="sold", client_column="shop", impute="indicator")
        wide.loc[wide.index[::7], ["price", "weekday", "when", "promotion"]] = None
        wide.to_csv(tmp_path / "t.csv", index=False)
        made = source.make(3)
        assert same(source.make_by(made.encoding, 3), made.federation)
        mine = wide[wide["shop"] == "shop A"]
        mine.to_csv(tmp_path / "mine.csv", index=False)
        own = replace(source, path=str(tmp_path / "mine.csv")).make_by(made.encoding, 3)
        position = torch.tensor([made.federation.position("shop A")])
        for part in PARTS:
            assert torch.equal(own.part(part).inputs, made.federation.part(part).take(position).inputs)


class TestNoughtAndOne:
    def test_rare_ones_are_not_divided_by_a_tiny_deviation(self, run: Run, tmp_path: Path, frame: Any) -> None:
        rare = (np.arange(len(frame)) == 7).astype(int)
        made = from_frame(frame.assign(rare=rare, count=2 * rare), "sold", "shop")
        assert column(made, "rare").tolist() == rare.tolist()
        assert np.abs(column(made, "count")).max() > 5
        frame.assign(rare=rare).to_csv(tmp_path / "t.csv", index=False)
        code, told, err = run("data", "describe", tmp_path / "t.csv", *NAMED)
        assert code == 0, err
        assert "nothing but 0 and 1, which stay as they are: 'rare'" in told
        # A later file may have other numbers.
        assert made.encoding.accept(frame.assign(rare=2, count=0))[:, made.feature_names.index("rare")].tolist() == [
            2.0
        ] * len(frame)


class TestAsBefore:
    def test_an_ordinary_table_has_the_same_hashes(self, tmp_path: Path) -> None:
        path = write_shops(tmp_path / "t.csv", ROWS)
        source = FromFile(path=str(path), target_column="sold", client_column="shop")
        new, old = (
            source.make(0),
            replace(source, recognize=False, separator=",", decimal=".", encoding="utf-8").make(0),
        )
        assert new.encoding == old.encoding
        assert new.partition_hash == old.partition_hash
        assert new.federation.fingerprint == old.federation.fingerprint
        content = new.encoding.to_json()
        assert set(content) == {"features", "target", "client", "ignored"}
        assert set(content["features"][0]) == {"name", "kind", "mean", "deviation", "categories"}
        assert set(content["target"]) == {"name", "kind", "distinct", "classes", "mean", "deviation"}
        assert Encoding.from_json(json.loads(json.dumps(content))) == new.encoding

    def test_a_run_that_was_written_goes_on_as_it_was(self, run: Run, tmp_path: Path, frame: pandas.DataFrame) -> None:
        frame.assign(number=range(len(frame))).to_csv(tmp_path / "t.csv", index=False)
        old = ["--set", "data.recognize=false", "--set", "schedule.name=constant"]
        assert run("train", "--data", tmp_path / "t.csv", *NAMED, *FAST, *old, "--out", tmp_path / "r", "-q")[0] == 0
        config = tmp_path / "r/config.toml"
        later = ("recognize", "separator", "decimal", "encoding", "impute", "keep")
        lines = [line for line in config.read_text().splitlines() if line.partition(" = ")[0] not in later]
        assert len(lines) == len(config.read_text().splitlines()) - len(later)
        config.write_text("\n".join(lines) + "\n")
        code, _, err = run("train", "--resume", "--out", tmp_path / "r", "--rounds", "2", "-q")
        assert code == 0, err
        assert "number" in fedem.Result.load(tmp_path / "r").recipe.format.encoding.input_names

    def test_words_are_no_part_of_the_hash(self, frame: pandas.DataFrame) -> None:
        encoding = from_frame(frame.assign(land="CH"), "sold", "shop").encoding
        assert replace(encoding, notes=("other words",)).fingerprint == encoding.fingerprint
        again = Encoding.from_json(json.loads(json.dumps(encoding.to_json())))
        assert again == encoding
        assert again.notes


def test_clients_without_a_test_part_are_named_once(run: Run, tmp_path: Path) -> None:
    few = {"shop B", "shop C"}
    rows = [row for row in ROWS if row["shop"] not in few]
    rows += [next(row for row in ROWS if row["shop"] == name) for name in sorted(few)]
    path = write_shops(tmp_path / "t.csv", rows)
    more = ["--baselines", "local", "--out", tmp_path / "r"]
    code, _, err = run("train", "--data", path, *NAMED, *FAST, *more)
    assert code == 0, err
    assert err.count("2 clients have too few samples for a test part and no part in its scores: shop B, shop C") == 1
    code, _, err = run("train", "--data", path, *NAMED, *FAST, "--set", "data.test=0", "--out", tmp_path / "none")
    assert (code, "test part" in err) == (0, False), err
