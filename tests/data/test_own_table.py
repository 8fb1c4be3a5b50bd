"""From a user's own table to personal predictions, through the command line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shops import COLUMNS, NAMES, make_shops, write_shops

import fedem
from fedem.cli.runs import _written
from fedem.data.files import from_frame

Run = Callable[..., tuple[int, str, str]]
OLD, NEW = make_shops(40), make_shops(10, seed=1)
NAMED = ["--client-column", "shop", "--target-column"]
FAST = ["--rounds", "5", "-q"]


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def train(run: Run, path: Path, target: str, out: Path, *more: str) -> str:
    code, _, err = run("train", "--data", path, *NAMED, target, "--out", out, *more)
    assert code == 0, err
    return err


def test_two_commands(run: Run, tmp_path: Path) -> None:
    shops, tomorrow = write_shops(tmp_path / "shops.csv", OLD), write_shops(tmp_path / "t.csv", NEW, COLUMNS[:-1])
    said = train(run, shops, "sold", tmp_path / "r")
    assert "note: target 'sold': 3 classes (few, many, some); 2 numeric features" in " ".join(said.split())
    out = tmp_path / "predictions.csv"
    code, told, err = run("predict", tmp_path / "r", "--data", tomorrow, "--out", out)
    assert code == 0, err
    assert "120 predictions" in told
    rows = read(out)
    assert list(rows[0]) == ["shop", "prediction", "probability_few", "probability_many", "probability_some"]
    assert [row["shop"] for row in rows] == [row["shop"] for row in NEW]
    for row in rows:
        chances = {name: float(row[f"probability_{name}"]) for name in ("few", "many", "some")}
        assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == max(chances, key=lambda name: chances[name])
    hits = np.mean([row["prediction"] == new["sold"] for row, new in zip(rows, NEW, strict=True)])
    assert hits > 0.7  # one model for all is right in less than half of them


def test_rows_are_predicted_by_their_own_clients(run: Run, tmp_path: Path) -> None:
    shops, tomorrow = write_shops(tmp_path / "shops.csv", OLD), write_shops(tmp_path / "t.csv", NEW)
    train(run, shops, "sold", tmp_path / "r", *FAST)
    outcomes: dict[str, list[dict[str, str]]] = {}
    for name in ("", "shop A", "shop B"):
        out = tmp_path / f"p{name}.csv"
        client = ["--client", name] if name else []
        assert run("predict", tmp_path / "r", *client, "--data", tomorrow, "--out", out, "-q")[0] == 0
        outcomes[name] = read(out)
    for name in ("shop A", "shop B"):
        assert "shop" not in outcomes[name][0]
        mine = [(row, other) for row, other in zip(outcomes[""], outcomes[name], strict=True) if row["shop"] == name]
        assert len(mine) == 10
        for row, other in mine:
            for column in ("probability_few", "probability_many", "probability_some"):
                assert float(row[column]) == pytest.approx(float(other[column]), abs=1e-6)
    assert outcomes["shop A"] != outcomes["shop B"]
    out = tmp_path / "p.npz"
    assert run("predict", tmp_path / "r", "--data", tomorrow, "--out", out, "-q")[0] == 0
    with np.load(out) as archive:
        assert archive["client"].tolist() == [row["shop"] for row in NEW]
        assert archive["labels"][archive["prediction"]].tolist() == [row["prediction"] for row in outcomes[""]]


@pytest.mark.parametrize("name", ["file", "labels", "prediction", "predictions", "probability_few", "client"])
def test_the_column_of_clients_may_have_any_name(run: Run, tmp_path: Path, name: str) -> None:
    rows = [{name: row["shop"], **row} for row in OLD]
    path = write_shops(tmp_path / "shops.csv", rows, (name, "price", "temperature", "sold"))
    options = ["--client-column", name, "--target-column", "sold", "--rounds", "1", "-q"]
    assert run("train", "--data", path, *options, "--out", tmp_path / "r")[0] == 0
    for ending in ("csv", "npz"):
        code, _, err = run("predict", tmp_path / "r", "--data", path, "--out", tmp_path / f"p.{ending}", "-q")
        assert code == 0, err
    with np.load(tmp_path / "p.npz") as archive:
        assert set(archive) == {"client", "prediction", "predictions", "labels"}
        assert archive["client"].tolist() == [row["shop"] for row in OLD]
        names, predictions = archive["labels"].tolist(), archive["predictions"]
        assert np.array_equal(predictions.argmax(1), archive["prediction"])
    found = read(tmp_path / "p.csv")
    shown = "client" if name in ("prediction", "probability_few") else name
    assert list(found[0]) == [shown, "prediction", *(f"probability_{label}" for label in names)]
    assert [row[shown] for row in found] == [row["shop"] for row in OLD]
    assert [float(row["probability_few"]) for row in found] == pytest.approx(predictions[:, names.index("few")])


@pytest.mark.parametrize("ending", [".csv", ".npz"])
def test_names_and_probabilities_must_fit(run: Run, tmp_path: Path, ending: str) -> None:
    train(run, write_shops(tmp_path / "shops.csv", OLD), "sold", tmp_path / "r", "--rounds", "1", "-q")
    result = fedem.Result.load(tmp_path / "r")
    with pytest.raises(ValueError, match="zip"):
        _written(result, np.eye(2), "shop", None, ending)


def test_numbers_come_back_in_their_own_units(run: Run, tmp_path: Path) -> None:
    columns = (*COLUMNS[:-1], "units")
    shops, tomorrow = write_shops(tmp_path / "shops.csv", OLD, columns), write_shops(tmp_path / "t.csv", NEW, columns)
    code, told, err = run("train", "--data", shops, *NAMED, "units", "--rounds", "40", "--out", tmp_path / "r")
    assert code == 0, err
    assert run("predict", tmp_path / "r", "--data", tomorrow, "--out", tmp_path / "p.csv", "-q")[0] == 0
    rows = read(tmp_path / "p.csv")
    assert list(rows[0]) == ["shop", "prediction"]
    found, true = (np.array([float(row[key]) for row in some]) for some, key in ((rows, "prediction"), (NEW, "units")))
    assert np.square(found - true).mean() < 0.15 * true.var()
    # The error that is told is that of the test part's predictions, clients weighted by their training samples.
    data = fedem.Result.load(tmp_path / "r").config.make_data()
    assert data.encoding is not None
    result, errors = fedem.Result.load(tmp_path / "r"), []
    for position, name in enumerate(data.federation.names):
        x, y = data.federation.test.client(position)
        errors.append(float((result.predict(name, x)[:, 0] - data.encoding.decode(y)).square().mean()))
    expected = np.average(errors, weights=data.federation.train.sizes.tolist()) ** 0.5
    line = next(line for line in told.splitlines() if line.startswith("In the targets' own units: test root mean"))
    assert float(line.rstrip(".").split()[-1]) == pytest.approx(expected, rel=1e-3)


def test_newcomers_are_named_and_personalised(run: Run, tmp_path: Path) -> None:
    others = make_shops(20, seed=5, names=("Yves", "Zoe"))
    train(run, write_shops(tmp_path / "shops.csv", OLD), "sold", tmp_path / "r", "--rounds", "40", "-q")
    path = write_shops(tmp_path / "others.csv", others)
    code, _, err = run("predict", tmp_path / "r", "--data", path, "--out", tmp_path / "p.csv")
    assert code == 2
    assert "2 clients took no part in training: 'Yves', 'Zoe'" in err
    assert "fedem personalize" in err
    code, told, err = run("personalize", tmp_path / "r", "--data", path, "--out", tmp_path / "n")
    assert code == 0, err
    assert "2 clients; train accuracy" in told
    new = write_shops(tmp_path / "new.csv", make_shops(20, seed=6, names=("Yves", "Zoe")))
    assert run("predict", tmp_path / "n", "--data", new, "--out", tmp_path / "p.csv", "-q")[0] == 0
    hits = np.mean(
        [row["prediction"] == true["sold"] for row, true in zip(read(tmp_path / "p.csv"), read(new), strict=True)]
    )
    assert hits > 0.6


def test_new_categories_are_told_and_wrong_files_refused(run: Run, tmp_path: Path) -> None:
    train(run, write_shops(tmp_path / "shops.csv", OLD), "sold", tmp_path / "r", *FAST)
    sundays = [row | {"weekday": "Sunday"} for row in NEW]
    path = write_shops(tmp_path / "t.csv", sundays, COLUMNS[:-1])
    code, _, err = run("predict", tmp_path / "r", "--data", path, "--out", tmp_path / "p.csv")
    assert code == 0
    assert "note: column 'weekday' has 1 category that training had not (Sunday)" in err
    for columns, rows, message in (
        (
            ("weekday", "price", "temperature", "promotion"),
            NEW,
            "no column 'shop' of clients' names (see --client-column)",
        ),
        (
            ("shop", "weekday", "price", "promotion"),
            NEW,
            "price, temperature, promotion, as in training; missing: temperature.",
        ),
        (COLUMNS[:-1], [row | {"price": "high"} for row in NEW], "line 2, column 'price': 'high' is not a number"),
        (COLUMNS[:-1], [*NEW[:3], NEW[3] | {"price": ""}], "1 in column 'price' (first: "),
    ):
        code, _, err = run("predict", tmp_path / "r", "--data", write_shops(path, rows, columns), "--out", "q.csv")
        assert code == 2
        assert message in err


def test_columns_that_training_had_not_are_named_and_left_out(run: Run, tmp_path: Path) -> None:
    train(run, write_shops(tmp_path / "shops.csv", OLD), "sold", tmp_path / "r", *FAST)
    rows = [row | {"weather": "mild", "staff": 3} for row in NEW]
    plain = write_shops(tmp_path / "plain.csv", NEW, COLUMNS[:-1])
    wide = write_shops(tmp_path / "wide.csv", rows, ("weather", *COLUMNS, "staff"))  # with the targets, too
    found = []
    for path in (plain, wide):
        code, _, err = run("predict", tmp_path / "r", "--data", path, "--out", tmp_path / "p.csv", "--force")
        assert code == 0, err
        note = "note: columns that training had not are left out: 'weather', 'staff'."
        assert err.count(note) == int(path == wide)
        found.append((tmp_path / "p.csv").read_text())
    assert found[0] == found[1]


def test_a_folder_of_clients(run: Run, tmp_path: Path) -> None:
    for folder, rows in (("old", OLD), ("new", NEW)):
        (tmp_path / folder).mkdir()
        for name in NAMES:
            own = [row for row in rows if row["shop"] == name]
            write_shops(tmp_path / folder / f"{name}.csv", own, COLUMNS[1:])
    train(run, tmp_path / "old", "sold", tmp_path / "r", *FAST)
    assert run("predict", tmp_path / "r", "--data", tmp_path / "new", "--out", tmp_path / "p.csv", "-q")[0] == 0
    assert [row["shop"] for row in read(tmp_path / "p.csv")] == [name for name in NAMES for _ in range(10)]


def test_describe(run: Run, tmp_path: Path) -> None:
    shops = write_shops(tmp_path / "shops.csv", OLD)
    picture = tmp_path / "clients.png"
    code, told, err = run("data", "describe", shops, *NAMED, "sold", "--out", picture)
    assert code == 0, err
    assert "shops.csv: samples of 12 clients" in told
    assert "Jensen-Shannon divergence" in told
    assert "Columns: target 'sold': 3 classes" in told
    assert "Missing values: none." in told
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, told, err = run("data", "describe", "synthetic", "--set", "data.num_clients=3", "--set", "data.num_test=9")
    assert code == 0, err
    assert "synthetic: samples of 3 clients" in told
    code, _, err = run("data", "describe", shops, "--out", "p.gif")
    assert (code, "p.gif; allowed: a file ending in .png or .svg" in err) == (2, True)
    broken = write_shops(tmp_path / "broken.csv", [OLD[0] | {"price": ""}, *OLD[1:]])
    code, _, err = run("data", "describe", broken, *NAMED, "sold")
    assert (code, "Missing values: 1 in column 'price'" in err) == (2, True)


def test_columns_are_for_files_alone(run: Run) -> None:
    code, _, err = run("train", "--data", "synthetic", "--client-column", "shop")
    assert code == 2
    assert "Unknown key in [data] 'client_column'" in err


def test_a_frame_in_python(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame, new = (pandas.DataFrame(rows)[list(COLUMNS)] for rows in (OLD, NEW))
    data = from_frame(frame, target="sold", client="shop")
    result = fedem.train(data, rounds=5)
    mine = new[new["shop"] == "shop A"]
    expected = result.predict("shop A", mine)
    assert expected.shape == (10, 3)
    loaded = fedem.Result.load(result.save(tmp_path / "r"))
    assert np.array_equal(loaded.predict("shop A", mine.drop(columns=["shop", "sold"])), expected)
    personal = loaded.personalize(mine, mine["sold"])
    assert personal.predict(mine).shape == (10, 3)
    manifest: dict[str, Any] = json.loads((tmp_path / "r/checkpoints/checkpoint.json").read_text())
    assert manifest["facts"]["encoding"]["target"]["classes"] == ["few", "many", "some"]
