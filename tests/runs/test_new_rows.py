"""New rows of known clients, and of others: scored, and predicted by the names of their classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
from sklearn.metrics import accuracy_score, log_loss, mean_absolute_error, roc_auc_score

import fedem

RNG = np.random.default_rng(0)
OWNER = np.arange(300) % 5
INPUTS = RNG.normal(size=(300, 2))
FRAME = pandas.DataFrame(
    {
        "shop": [f"shop {owner}" for owner in OWNER],
        "a": 5 + INPUTS[:, 0],
        "b": INPUTS[:, 1],
        "y": np.where(np.where(OWNER < 2, 1, -1) * INPUTS[:, 0] > 0, "sold", "kept"),
    }
)
OLD, NEW = FRAME[:200], FRAME[203:]  # of the new rows clients have different numbers
FEATURES = ["a", "b"]


@pytest.fixture(scope="module")
def result() -> fedem.Result:
    data = fedem.from_frame(OLD, client="shop")
    return fedem.train(data, num_components=2, rounds=10, learning_rate=1.0, metrics="accuracy,roc_auc")


def _probabilities(result: fedem.Result, frame: pandas.DataFrame, which: str = "last") -> np.ndarray:
    rows = [result.predict(row["shop"], row[FEATURES].to_frame().T.astype(float), which) for _, row in frame.iterrows()]
    return np.concatenate(rows)


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_frame_is_scored_as_scikit_learn_does(result: fedem.Result, which: str) -> None:
    found = result.score(NEW, which=which)
    probabilities, sold = _probabilities(result, NEW, which), NEW["y"] == "sold"
    assert (found["samples"], found["clients"]) == (len(NEW), 5)
    assert found["accuracy"] == pytest.approx(accuracy_score(sold, probabilities[:, 1] > 0.5))
    assert found["loss"] == pytest.approx(log_loss(sold, probabilities), rel=1e-5)
    assert found["roc_auc_pooled"] == pytest.approx(roc_auc_score(sold, probabilities[:, 1]))
    right = pandas.Series((probabilities[:, 1] > 0.5) == sold, index=NEW.index)
    assert found["accuracy_unweighted"] == pytest.approx(right.groupby(NEW["shop"]).mean().mean())


def test_arrays_and_one_client_are_scored_alike(result: fedem.Result) -> None:
    arrays = result.score(NEW[FEATURES], NEW["y"].to_numpy(), NEW["shop"].to_numpy())
    assert arrays == pytest.approx(result.score(NEW))
    mine = NEW[NEW["shop"] == "shop 1"]
    assert result.score(mine[FEATURES], mine["y"], "shop 1") == pytest.approx(result.score(mine))


def test_rows_of_unknown_clients_are_a_newcomer_s(result: fedem.Result) -> None:
    newcomer, sold = result.newcomer(), NEW["y"] == "sold"
    mean = np.mean([result.client(name).mixture_weights.numpy() for name in result.names], axis=0)
    np.testing.assert_allclose(newcomer.mixture_weights.numpy(), mean, rtol=1e-5)
    found = result.score(NEW[FEATURES], NEW["y"], "nobody")
    assert found["accuracy"] == pytest.approx(accuracy_score(sold, newcomer.predict(NEW[FEATURES])[:, 1] > 0.5))


def test_classes_have_their_names(result: fedem.Result) -> None:
    assert result.client("shop 0").classes == ("kept", "sold")
    named = result.predict_classes("shop 0", NEW[FEATURES])
    most = result.predict("shop 0", NEW[FEATURES]).argmax(1).numpy()
    assert named.tolist() == np.where(most == 1, "sold", "kept").tolist()
    plain = fedem.train(fedem.Federation.from_clients([(INPUTS, OWNER)]), rounds=1)
    assert set(plain.predict_classes("0", INPUTS).tolist()) <= set(plain.client("0").classes) == set(range(5))


def test_numbers_have_no_classes_and_are_scored_as_in_training() -> None:
    frame = FRAME.assign(y=100 + 10 * INPUTS[:, 0] + INPUTS[:, 1])
    result = fedem.train(fedem.from_frame(frame[:200], client="shop"), method="fedavg", rounds=2, metrics="mae")
    with pytest.raises(fedem.UserError, match="predicts numbers, which have no classes"):
        result.predict_classes("shop 0", frame[FEATURES])
    mine = frame[frame["shop"] == "shop 3"]
    error = mean_absolute_error(mine["y"], result.predict("shop 3", mine[FEATURES]).numpy())
    encoding = result.recipe.format.encoding
    assert encoding is not None
    assert result.score(mine)["mae"] * encoding.target.deviation == pytest.approx(error, rel=1e-4)


def test_what_is_missing_is_said(result: fedem.Result) -> None:
    with pytest.raises(fedem.UserError, match="The targets are not given"):
        result.score(INPUTS)
    with pytest.raises(fedem.UserError, match="The clients are not given"):
        result.score(NEW.drop(columns="shop"))
    with pytest.raises(fedem.UserError, match="is none of the 2 classes of training"):
        result.score(NEW.assign(y="stolen"))
    with pytest.raises(fedem.UserError, match="Metric 'mae' does not fit the task"):
        result.score(NEW, metrics="mae")


def test_the_command_scores_new_rows_by_client(run, tmp_path: Path) -> None:
    OLD.to_csv("old.csv", index=False)
    NEW.to_csv("new.csv", index=False)
    columns = ["--client-column", "shop", "--rounds", "3"]
    assert run("train", "--data", "old.csv", *columns, "--out", "r", "-q")[0] == 0
    code, out, err = run("evaluate", "r", "--data", "new.csv", "--out", "by.csv")
    assert (code, err.replace("Scoring ...", "").strip()) == (0, "")
    result, rows = fedem.Result.load("r"), pandas.read_csv("by.csv").set_index("client")
    found = result.score(NEW)
    assert f"{100 * found['accuracy']:.1f}" in next(line for line in out.splitlines() if "all 5 clients" in line)
    right = pandas.Series(_probabilities(result, NEW)[:, 1] > 0.5, index=NEW.index) == (NEW["y"] == "sold")
    pandas.testing.assert_series_equal(rows["accuracy"], right.groupby(NEW["shop"]).mean(), check_names=False)
    assert rows["samples"].to_dict() == NEW["shop"].value_counts().to_dict()


def test_the_command_names_clients_that_took_no_part(run, tmp_path: Path) -> None:
    OLD[OLD["shop"] != "shop 4"].to_csv("old.csv", index=False)
    NEW.to_csv("new.csv", index=False)
    scored, left = "scored by what the method has", "left out. Clients that train alone leave nothing"
    for method, said, count in (("fedem", scored, 5), ("local", left, 4)):
        train = ["train", "--data", "old.csv", "--client-column", "shop", "--method", method, "--rounds", "1"]
        assert run(*train, "--out", method, "-q")[0] == 0
        code, _, err = run("evaluate", method, "--data", "new.csv", "--out", f"{method}.csv", "-q")
        assert code == 0
        assert f"1 client took no part in training ('shop 4'): {said}" in err
        roles = pandas.read_csv(f"{method}.csv").set_index("client")["role"]
        assert len(roles) == count
        assert (roles == "unknown").sum() == count - 4
    NEW[NEW["shop"] == "shop 4"].to_csv("none.csv", index=False)
    assert "No row is left to score" in run("evaluate", "local", "--data", "none.csv")[2]
    for words, said in (
        (["--fine-tune-epochs", "1"], "--fine-tune-epochs is given with --data"),
        (["--out", "x.json"], "allowed with --data: a file ending in .csv"),
    ):
        assert said in run("evaluate", "fedem", "--data", "new.csv", *words)[2]
    assert "--which is given without --data" in run("evaluate", "fedem", "--which", "best")[2]
    for column, said in (("y", "bare.csv has no targets"), ("shop", "bare.csv has no column 'shop' of clients' names")):
        NEW.drop(columns=column).to_csv("bare.csv", index=False)
        assert said in run("evaluate", "fedem", "--data", "bare.csv")[2]
