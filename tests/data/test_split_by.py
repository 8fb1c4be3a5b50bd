"""--split-by: each client's rows are cut in the order of a column, which is no input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deployments
import numpy as np
import pandas
import pytest
import torch
from shops import COLUMNS, NAMES, make_shops, write_shops

from fedem.core.errors import UserError
from fedem.data import FromFile
from fedem.data.dataset import Dataset
from fedem.data.federation import PARTS, Federation
from fedem.data.files import from_frame, from_huggingface
from fedem.data.partitions import Uniform
from fedem.deploy.node import Node
from fedem.deploy.plan import Plan
from fedem.runs.folder import RunFolder

Run = Callable[..., tuple[int, str, str]]
DAYS = pandas.date_range("2023-12-20", periods=30, freq="D")
# The same day in each of these; those of text don't sort as text, or not by their first characters.
WRITTEN: dict[str, Callable[[pandas.Timestamp], object]] = {
    "date": lambda day: day.date().isoformat(),
    "hour": lambda day: day.isoformat() + "Z",
    "zone": lambda day: day.tz_localize("UTC").tz_convert("Asia/Tokyo").isoformat(),
    "number": lambda day: (day - DAYS[15]).days,
    "fraction": lambda day: (day - DAYS[15]).total_seconds() / 7,
    "stamp": lambda day: day.value,
}
NAMED = ["--client-column", "shop", "--target-column", "sold", "--split-by"]
FAST = ["--rounds", "2", "--device", "cpu", "-q"]


def dated(kind: str = "date", names: tuple[str, ...] = NAMES[:4], rows: int = 30) -> list[dict[str, Any]]:
    """Rows of shops, mixed: a day of each is one row, whose price says which day it is."""
    made: list[dict[str, Any]] = []
    counts = dict.fromkeys(names, 0)
    for row in make_shops(rows, names=names):
        place = counts[str(row["shop"])]
        counts[str(row["shop"])] += 1
        made.append(row | {"day": WRITTEN[kind](DAYS[place]), "price": float(place)})
    order = np.random.default_rng(7).permutation(len(made))
    return [made[place] for place in order]


def write(path: Path, rows: list[dict[str, Any]], without: str = "") -> Path:
    return write_shops(path, rows, tuple(name for name in (*COLUMNS, "day") if name != without))


def days_of(dataset: Dataset) -> list[list[list[float]]]:
    """The days of each client's parts, read from the prices."""
    names, encoding = dataset.feature_names, dataset.encoding
    assert names is not None
    assert encoding is not None
    price = next(feature for feature in encoding.features or () if feature.name == "price")
    found = []
    for client in range(dataset.federation.num_clients):
        parts = (dataset.federation.part(part).client(client).inputs for part in PARTS)
        found.append(
            [(part[:, names.index("price")] * price.deviation + price.mean).round().tolist() for part in parts]
        )
    return found


def same(one: Federation, other: Federation) -> bool:
    pairs = ((one.part(part), other.part(part)) for part in PARTS)
    return all(torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) for a, b in pairs)


EXPECTED = [[*range(18)], [*range(18, 24)], [*range(24, 30)]]


@pytest.mark.parametrize("kind", WRITTEN)
def test_training_comes_first_then_validation_then_test(run: Run, tmp_path: Path, kind: str) -> None:
    shops = write(tmp_path / "shops.csv", dated(kind))
    code, _, err = run("train", "--data", shops, *NAMED, "day", *FAST, "--out", tmp_path / "r")
    assert code == 0, err
    config = RunFolder(tmp_path / "r").config()
    assert config.values("data")["split_by"] == "day"
    made = config.make_data()
    assert days_of(made) == [EXPECTED] * 4
    # The column is no input: neither its name nor anything made of it is among them.
    bare = write(tmp_path / "bare.csv", dated(kind), "day")
    undated = FromFile(path=str(bare), target_column="sold", client_column="shop").make(0)
    assert made.feature_names == undated.feature_names
    assert run("train", "--out", tmp_path / "r", "--resume", "-q")[0] == 0
    code, _, err = run("train", "--out", tmp_path / "r", "--resume", "--split-by", "temperature", "-q")
    assert code == 2
    assert "the clients got other samples" in err


@pytest.mark.parametrize("without", ["", "day"])
def test_new_rows_may_have_the_column_or_not(run: Run, tmp_path: Path, without: str) -> None:
    shops, tomorrow = write(tmp_path / "shops.csv", dated()), write(tmp_path / "t.csv", dated(), without)
    assert run("train", "--data", shops, *NAMED, "day", *FAST, "--out", tmp_path / "r")[0] == 0
    code, _, err = run("predict", tmp_path / "r", "--data", tomorrow, "--out", tmp_path / "p.csv", "-q")
    assert code == 0, err
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 1 + 120
    code, _, err = run("personalize", tmp_path / "r", "--data", tomorrow, "--out", tmp_path / "n", "-q")
    assert code == 0, err


def test_neither_the_order_of_rows_nor_the_kind_of_file_matters(tmp_path: Path) -> None:
    rows = dated(rows=12) * 2  # each row twice, and ties between rows of other content
    rows += [row | {"temperature": 1.5} for row in rows[:30]]
    frame = pandas.DataFrame(rows)[[*COLUMNS, "day"]]
    frame["promotion"] = frame["promotion"] == "true"
    write(tmp_path / "one.csv", rows)
    write(tmp_path / "other.csv", rows[::-1])
    frame.assign(day=pandas.to_datetime(frame["day"])).to_parquet(tmp_path / "typed.parquet")
    options = {"target_column": "sold", "client_column": "shop", "split_by": "day"}
    made = [
        FromFile(path=str(tmp_path / name), **options).make(3) for name in ("one.csv", "other.csv", "typed.parquet")
    ]
    made.append(from_frame(frame, "sold", "shop", seed=3, split_by="day"))
    assert len({found.federation.fingerprint for found in made}) == 1
    assert len({found.partition_hash for found in made}) == 1
    assert all(same(made[0].federation, found.federation) for found in made)
    for train, validation, test in days_of(made[0]):
        assert max(train) <= min(validation) <= max(validation) <= min(test)


def test_rows_that_differ_in_time_alone_are_told_apart(tmp_path: Path) -> None:
    rows = [row | {"price": 1.0, "temperature": 2.0, "weekday": "Monday", "promotion": "true"} for row in dated()]
    options = {"target_column": "sold", "client_column": "shop", "split_by": "day", "keep": "price"}
    one, other = (
        FromFile(path=str(write(tmp_path / name, some)), **options).make(0)
        for name, some in (("a.csv", rows), ("b.csv", rows[::-1]))
    )
    assert one.federation.fingerprint == other.federation.fingerprint


def test_dealt_rows_are_cut_in_order_too(tmp_path: Path) -> None:
    source = FromFile(
        path=str(write(tmp_path / "a.csv", dated())), target_column="sold", client_column="shop", split_by="day"
    )
    for train, validation, test in days_of(source.make(0, Uniform(num_clients=3))):
        assert len(train) + len(validation) + len(test) == 40
        assert max(train) <= min(validation) <= max(validation) <= min(test)


def test_clients_held_out_are_cut_in_order_too(tmp_path: Path) -> None:
    source = FromFile(
        path=str(write(tmp_path / "a.csv", dated())), target_column="sold", client_column="shop", split_by="day"
    )
    made = source.make(0, unseen=0.5)
    unseen = made.federation.hold_out(0.5, 0).unseen
    assert unseen is not None
    assert days_of(made._replace(federation=unseen)) == [EXPECTED] * 2


def test_arrays_have_their_times_beside_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    times = rng.permutation(40)
    arrays = {"x": times[:, None].astype(np.float32), "y": np.arange(40) % 2, "client": np.repeat(["a", "b"], 20)}
    np.savez(tmp_path / "a.npz", **arrays, when=times)
    federation = FromFile(path=str(tmp_path / "a.npz"), split_by="when").make(0).federation
    for client in range(2):
        parts = [federation.part(part).client(client).inputs.flatten().tolist() for part in PARTS]
        assert parts[0] + parts[1] + parts[2] == sorted(times[20 * client : 20 * client + 20].tolist())
    np.savez(tmp_path / "b.npz", **arrays, when=times[:3])
    with pytest.raises(UserError, match="40 inputs but 3 of 'when'"):
        FromFile(path=str(tmp_path / "b.npz"), split_by="when").make(0)
    np.savez(tmp_path / "c.npz", **arrays, when=times.reshape(40, 1))
    with pytest.raises(UserError, match=r"one 'when' per row: got shape \(40, 1\)"):
        FromFile(path=str(tmp_path / "c.npz"), split_by="when").make(0)


def test_other_commands_take_it_too(run: Run, tmp_path: Path) -> None:
    shops = write(tmp_path / "shops.csv", dated())
    data = ["--data", shops, *NAMED, "day"]
    code, told, err = run("data", "describe", shops, *NAMED, "day")
    assert code == 0, err
    assert "'day'" not in told
    code, _, err = run("compare", *data, "--methods", "fedavg,local", "--seeds", "1", *FAST, "--out", tmp_path / "c")
    assert code == 0, err
    grid = ["--grid", "schedule.learning_rate=0.1", "--method", "fedavg", "--seeds", "1"]
    code, _, err = run("tune", *data, *grid, *FAST, "--out", tmp_path / "t")
    assert code == 0, err
    code, _, err = run("deploy", "init", tmp_path / "app", *data, "-q")
    assert code == 0, err
    code, _, err = run("peer", "plan", tmp_path / "peers", *data)
    assert code == 0, err
    folders = [tmp_path / "c" / "fedavg-seed0", *(tmp_path / "t" / "trials").glob("*/seed0")]
    assert len(folders) == 2
    for folder in folders:
        assert days_of(RunFolder(folder).config().make_data()) == [EXPECTED] * 4
    plans = [*tmp_path.glob("app/**/plan.json"), *tmp_path.glob("peers/**/plan.json")]
    assert len(plans) == 2
    for plan in plans:
        assert Plan.load(plan.parent).config.values("data")["split_by"] == "day"


def test_a_node_cuts_its_rows_as_the_simulator_does(tmp_path: Path) -> None:
    rows = dated(names=deployments.NAMES)
    whole = write(tmp_path / "all.csv", rows)
    plan, trainer = deployments.make_plan(whole, data={"split_by": "day"})
    for name in deployments.NAMES:
        own = [row for row in rows if row["shop"] == name]
        alone = Node.open(plan, write(tmp_path / "own.csv", own[::-1], "shop"), name).federation
        simulated = trainer.federation.take(torch.tensor([trainer.federation.position(name)]))
        assert same(alone, simulated)
        assert days_of(Dataset(alone, feature_names=plan.format.features, encoding=plan.format.encoding)) == [EXPECTED]
    with pytest.raises(UserError, match=r"no column 'day' \(see data\.split_by, --split-by\)"):
        Node.open(plan, write(tmp_path / "own.csv", own, "day"), name)


def test_hugging_face_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = dated()
    tables = {name: [row for row in rows if row["shop"] == name] for name in NAMES[:4]}
    columns = (*COLUMNS[1:], "day")
    parts = {
        name: datasets.Dataset.from_list([{column: row[column] for column in columns} for row in own])
        for name, own in tables.items()
    }
    for features in (None, ["price", "temperature"]):
        made = from_huggingface(parts, "sold", features, split_by="day")
        assert days_of(made) == [EXPECTED] * 4
    days = np.random.default_rng(0).permutation(30)
    kinds = {"image": datasets.Array2D((1, 1), "uint8"), "label": datasets.ClassLabel(names=["dog", "cat"])}
    content = {"image": days.astype(np.uint8).reshape(30, 1, 1), "label": [0, 1] * 15, "when": days}
    features = datasets.Features(kinds | {"when": datasets.Value("int64")})
    data = datasets.Dataset.from_dict(content, features=features)
    federation = from_huggingface([data, data], split_by="when").federation
    assert [federation.part(part).client(1).inputs.flatten().tolist() for part in PARTS] == EXPECTED


@pytest.mark.parametrize(
    ("column", "changed", "message"),
    [
        ("dya", {}, "no column 'dya' (see data.split_by, --split-by); rows are to be ordered by it."),
        ("dya", {}, "Did you mean 'day'?"),
        ("day", {"day": ""}, "Missing values: 1 in column 'day' (first: "),
        ("day", {"day": "31.5.2024"}, "column 'day': '31.5.2024' is neither a number nor a date such as 2024-05-31."),
        ("sold", {}, "data.split_by is 'sold', the column of targets; allowed: one of its own."),
        ("shop", {}, "data.split_by is 'shop', the column of clients; allowed: one of its own."),
    ],
)
def test_what_is_refused(run: Run, tmp_path: Path, column: str, changed: dict[str, str], message: str) -> None:
    rows = dated()
    shops = write(tmp_path / "shops.csv", [*rows[:5], rows[5] | changed, *rows[6:]])
    code, _, err = run("train", "--data", shops, *NAMED, column, *FAST, "--out", tmp_path / "r")
    assert code == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "r").exists()
    code, _, err = run("train", "--data", "synthetic", "--split-by", "day", "--out", tmp_path / "r")
    assert code == 2
    assert "Unknown key in [data] 'split_by'" in err


def test_it_may_be_ignored_as_well_and_may_not_be_the_only_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", dated())
    options = {"target_column": "sold", "client_column": "shop", "split_by": "day"}
    made = FromFile(path=str(path), ignore="day, weekday", **options).make(0)
    assert days_of(made) == [EXPECTED] * 4
    assert made.encoding is not None
    assert made.encoding.ignored == ("weekday", "day")
    alone = write_shops(tmp_path / "b.csv", dated(), ("shop", "day", "sold"))
    with pytest.raises(UserError, match="at least one feature is needed"):
        FromFile(path=str(alone), **options).make(0)
