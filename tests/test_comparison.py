"""Methods side by side: what is aggregated and how, what is refused, and that a comparison can be killed."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

import fedem
from fedem import cells
from fedem.cells import Cell, plan, prepare, resolve_methods, sort_settings
from fedem.comparison import Comparison, Point, Row, Spread, summarize
from fedem.errors import UserError
from fedem.job import Job
from fedem.report.comparisons import comparison_markdown, comparison_table
from fedem.report.figures import draw
from fedem.runs import RunFolder

TINY = ["--set", "data.num_clients=6", "--set", "data.dimension=4", "--set", "data.num_test=20", "--rounds", "2"]
TWO = ["compare", "--methods", "local,fedavg", "--seeds", "2", *TINY, "--set", "run.checkpoint_every=1"]


def table_of(folder: Path) -> list[dict[str, str]]:
    """The lines of comparison.csv without what a clock says."""
    lines = csv.DictReader((folder / "comparison.csv").read_text().splitlines())
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


def written_cell(folder: Path, method: str, seed: int, **figures: object) -> Cell:
    """A complete run, hand-made."""
    config = fedem.Config.build({"method": {"name": method}, "run": {"seed": seed, "rounds": 2}})
    place = RunFolder(folder / f"{method}-seed{seed}")
    place.create(config)
    facts = {"num_components": 1, "num_clients": 5, "num_unseen_clients": 0, "data": "synthetic", "rounds": 2}
    costs = {"seconds_per_round": 0.5, "bytes_up_per_round": 1000, "bytes_down_per_round": 3000}
    summary = {"method": method, "seed": seed, "bottom_decile": 0.25, **facts, **costs, **figures}
    name = "test_accuracy" if "test_accuracy" in figures else "test_mean_squared_error"
    lines = [{"round": 1, name: 0.5}, {"round": 2, name: figures[name]}]
    (place.path / "metrics.jsonl").write_text("".join(RunFolder.line(line) for line in lines))
    place.finish(summary, [])
    return Cell(method, seed, config, place)


def hand_made(folder: Path) -> Comparison:
    oracle = {"oracle_accuracy": 0.875, "oracle_bottom_decile": 0.5, "oracle_loss": 0.25}
    figures = {"fedavg": (0.5, 0.625, 0.75), "local": (0.25, 0.25, 1.0), "fedem": (0.75, 0.75, 0.75)}
    return summarize(
        [
            written_cell(folder, method, seed, test_accuracy=values[seed], train_accuracy=0.5, test_loss=0.5, **oracle)
            for seed in range(3)
            for method, values in figures.items()
        ]
    )


def test_means_and_sample_deviations() -> None:
    assert Spread.of([1.0, 2.0, 6.0]) == (3.0, statistics.stdev([1, 2, 6]))
    assert Spread.of([1.0, 2.0, 6.0]).deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert Spread.of([4.0]) == (4.0, None)
    assert Spread.of([]) == (None, None)
    assert Spread.of([1.0, None]) == (None, None)


def test_rows_are_aggregated_over_seeds_and_sorted(tmp_path: Path) -> None:
    found = hand_made(tmp_path)
    assert [row.method for row in found.rows] == ["fedem", "fedavg", "local"]
    average = {row.method: row.figures["test_accuracy"] for row in found.rows}
    assert average["fedem"] == (0.75, 0.0)
    assert average["fedavg"] == (0.625, pytest.approx(0.125))
    assert average["local"] == (0.5, pytest.approx(math.sqrt(3) / 4))
    assert found.rows[1].figures["bytes_down_per_round"] == (3000.0, 0.0)
    assert "unseen_test_accuracy" not in found.rows[0].figures
    assert found.oracle["test_accuracy"] == (0.875, 0.0)
    assert found.rows[1].curve == [Point(1, Spread(0.5, 0.0)), Point(2, average["fedavg"])]
    assert [(line["method"], line["seed"]) for line in found.runs[:4]] == [
        ("fedem", 0),
        ("fedem", 1),
        ("fedem", 2),
        ("fedavg", 0),
    ]


def test_errors_are_sorted_from_the_smallest_and_what_diverged_comes_last(tmp_path: Path) -> None:
    scores = {"fedavg": 2.0, "local": 0.5, "fedem": None}
    found = summarize(
        [written_cell(tmp_path, name, 0, test_mean_squared_error=score) for name, score in scores.items()]
    )
    assert [row.method for row in found.rows] == ["local", "fedavg", "fedem"]
    assert not found.oracle
    assert found.rows[2].figures["test_mean_squared_error"] == (None, None)
    assert set(draw(found)) == {"png", "svg"}
    assert "| FedEM | - |" in comparison_markdown(found, "fedem compare")


def test_a_run_that_is_not_complete_is_not_summed_up(tmp_path: Path) -> None:
    cell = written_cell(tmp_path, "local", 0, test_accuracy=0.5)
    (cell.folder.path / "summary.json").unlink()
    with pytest.raises(UserError, match="is not complete"):
        summarize([cell])


def test_what_is_saved_is_what_was_found(tmp_path: Path) -> None:
    found = hand_made(tmp_path)
    found.save(tmp_path, "fedem compare")
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["command"] == "fedem compare"
    assert content["methods"][2]["figures"]["test_accuracy"] == {"mean": 0.5, "deviation": math.sqrt(3) / 4}
    assert content["methods"][0]["curve"][1] == {"round": 2, "mean": 0.75, "deviation": 0.0}
    assert len(table_of(tmp_path)) == 9
    text = comparison_markdown(found, "fedem compare --seeds 3")
    assert "    fedem compare --seeds 3\n" in text
    assert "| FedAvg | 62.5 ±12.5 |" in text
    assert "| oracle | 87.5 ±0.0 | 50.0 ±0.0 |" in text


def test_the_table_fits_eighty_columns() -> None:
    from rich.console import Console

    names = ["test_accuracy", "bottom_decile", "unseen_test_accuracy", "train_accuracy", "seconds_per_round"]
    figures = {name: Spread(0.9951, 0.0111) for name in names}
    for size in (10.0, 9.9e6, 9.9e9, 3e11):
        figures |= {f"bytes_{way}_per_round": Spread(size, 0.0) for way in ("up", "down")}
        rows = [Row("clustered", "Clustered FL", dict(figures), []), Row("fedem", "FedEM (M=3)", dict(figures), [])]
        comparison = Comparison("synthetic", "accuracy", 200, 5, 1, [0, 1], rows, {}, [])
        out = io.StringIO()
        Console(file=out, width=80).print(comparison_table(comparison))
        lines = [line for line in out.getvalue().splitlines() if "Clustered FL" in line]
        assert len(lines[0]) <= 80
        assert lines[0].count("±1.1") == 4, out.getvalue()


def test_one_seed_has_no_deviation(run, tmp_path: Path) -> None:
    code, out, _ = run("compare", "--methods", "fedavg", "--seeds", "5,", *TINY, "--out", "c")
    assert code == 0
    assert "one seed" in out
    assert "±-" in out
    assert (tmp_path / "c/fedavg-seed5/summary.json").exists()


def test_a_comparison_prints_and_saves_one_table(run, tmp_path: Path) -> None:
    code, out, err = run(*TWO, "--unseen", "0.3", "--out", "c")
    assert code == 0, err
    assert all(word in out for word in ("FedAvg", "Local", "oracle", "unseen", "Comparison: c"))
    assert "Without a model for clients held out: Local." in out
    assert "FedAvg seed 1" in err
    lines = table_of(tmp_path / "c")
    assert {(line["method"], line["seed"]) for line in lines} == {(m, s) for m in ("local", "fedavg") for s in "01"}
    for line in lines:
        summary = fedem.Result.load(tmp_path / "c" / f"{line['method']}-seed{line['seed']}").summary
        assert float(line["test_accuracy"]) == summary["test_accuracy"]
        assert line["unseen_test_accuracy"] == str(summary.get("unseen_test_accuracy", ""))
    markdown = (tmp_path / "c/comparison.md").read_text()
    assert "    fedem compare --methods local,fedavg --seeds 2" in markdown
    # Or there would be no curve.
    assert fedem.Result.load(tmp_path / "c/local-seed0").config.run.evaluate_every == 1


def test_all_methods_of_a_seed_have_the_same_data_and_splits(run, tmp_path: Path) -> None:
    arguments = ["--methods", "local,fedavg,fedem,fedavg+", "--seeds", "2", *TINY, "--unseen", "0.3", "--quiet"]
    assert run("compare", *arguments, "--out", "c") == (0, "Comparison: c\n", "")
    prints = {path.name: RunFolder(path).load()[1]["data"] for path in (tmp_path / "c").glob("*-seed*")}
    assert len(prints) == 8
    for seed in "01":
        assert len({value for name, value in prints.items() if name.endswith(seed)}) == 1
    assert len(set(prints.values())) == 2


def test_the_data_are_made_once_a_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []
    original = fedem.Synthetic.make

    def make(self: fedem.Synthetic, seed: int, *more: Any) -> fedem.Dataset:
        made.append(seed)
        return original(self, seed, *more)

    monkeypatch.setattr(fedem.Synthetic, "make", make)
    shared = {"data": {"num_clients": 6, "dimension": 4, "num_test": 20}}
    pending = prepare(plan(tmp_path / "c", ["local", "fedavg", "fedem"], [0, 4], [shared], {}))
    assert made == [0, 4]
    assert [(entry.cell.method, entry.cell.seed) for entry in pending][2:4] == [("fedem", 0), ("local", 4)]
    assert pending[0].dataset is pending[2].dataset
    # Nothing may be fitted on the clients that a method holds out, so these are other data.
    prepare(plan(tmp_path / "c", ["local", "fedavg"], [0], [shared], {"fedavg": [{"run": {"unseen": 0.5}}]}))
    assert made == [0, 4, 0, 0]
    assert not (tmp_path / "c").exists()


def test_the_picture_opens_and_shows_every_method(run, tmp_path: Path) -> None:
    assert run(*TWO, "--out", "c", "-q")[0] == 0
    pixels = matplotlib.image.imread(tmp_path / "c/accuracy.png")[:, :, :3]
    assert min(pixels.shape[:2]) > 300
    assert (pixels[0, 0] == 1).all()
    colours = np.unique((255 * pixels.reshape(-1, 3)).astype(np.uint8), axis=0)
    saturated = (colours.max(1).astype(int) - colours.min(1)) > 100
    assert saturated.sum() > 10
    drawing = (tmp_path / "c/accuracy.svg").read_text()
    assert "communication rounds" in drawing  # the text, as a comment beside its outlines
    assert all(title in drawing for title in ("FedAvg", "Local"))


def test_the_same_figures_make_the_same_picture(tmp_path: Path) -> None:
    found = hand_made(tmp_path)
    assert draw(found) == draw(found)


def test_methods_look_different() -> None:
    rows = [
        Row(name, row.title, {"test_accuracy": Spread(0.5, None)}, [Point(1, Spread(0.5, None))])
        for name, row in fedem.METHODS.items()
    ]
    from fedem.report import figures

    looks = {str(figures._look(row.method)) for row in rows}
    assert len(looks) == len(fedem.METHODS)
    drawing = draw(Comparison("synthetic", "accuracy", 1, 5, 0, [0], rows, {}, []))["svg"].decode()
    assert all(row.title in drawing for row in rows)


def test_complete_cells_are_not_run_again(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*TWO, "--out", "c", "-q")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*-seed*/**/*") if path.is_file()}
    table = table_of(tmp_path / "c")

    def advance(*_: object) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr(Job, "advance", advance)
        code, _, err = run(*TWO, "--out", "c", "--resume")
    assert code == 0
    assert "4 of 4 runs are complete already." in err
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert table == table_of(tmp_path / "c")
    assert "--resume" not in (tmp_path / "c/comparison.md").read_text()
    more = ["compare", "--methods", "fedavg,local,fedprox", *TWO[3:]]
    assert run(*more, "--out", "c", "--resume", "-q")[0] == 0
    assert len(table_of(tmp_path / "c")) == 6


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_a_killed_comparison_goes_on_to_the_same_table(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    assert run(*TWO, "--out", "whole", "-q")[0] == 0
    advance, calls = Job.advance, []

    def killed(self: Job, progress):
        calls.append(progress.state.round)
        if len(calls) > stop:
            raise KeyboardInterrupt
        return advance(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "advance", killed)
        code, _, err = run(*TWO, "--out", "cut", "-q")
    assert code == 130
    assert "--resume" in err
    assert not (tmp_path / "cut/comparison.csv").exists()
    calls.clear()
    done, stop = stop, 100
    with monkeypatch.context() as patch:
        patch.setattr(Job, "advance", killed)
        assert run(*TWO, "--out", "cut", "-q", "--resume")[0] == 0
    assert len(calls) == 8 - done  # what was done before is not done again
    assert table_of(tmp_path / "cut") == table_of(tmp_path / "whole")


def test_a_method_that_diverges_does_not_stop_the_others(run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(60, 3)), y=rng.normal(size=60), client=np.arange(60) % 4)
    arguments = ["compare", "--data", "d.npz", "--methods", "local,fedavg", "--seeds", "2", "--rounds", "40"]
    code, out, err = run(*arguments, "--set", "local:schedule.learning_rate=1e6", "--out", "c")
    assert code == 2
    assert "FedAvg" in out
    assert "Local" not in out
    assert "error: local left out of the table. c/local-seed0: Training diverged" in err
    assert [line["method"] for line in table_of(tmp_path / "c")] == ["fedavg", "fedavg"]


def test_without_test_samples_there_is_a_table_but_no_picture(run, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.eye(40, 3), y=np.arange(40) % 2, client=np.arange(40) % 4)
    assert run("compare", "--data", "d.npz", "--rounds", "1", "--set", "data.test=0", "--out", "c")[0] == 0
    assert not list((tmp_path / "c").glob("*.png"))
    assert [line["test_accuracy"] for line in table_of(tmp_path / "c")] == [""] * 9


def test_settings_are_sorted_by_whose_they_are() -> None:
    texts = ["data.num_clients=6", "fedem:schedule.learning_rate=0.5", "hypcluster:method.num_clusters=2"]
    shared, own = sort_settings(texts, ["fedem", "ifca", "local"])
    assert shared == [{"data": {"num_clients": 6}}]
    assert own == {
        "fedem": [{"schedule": {"learning_rate": 0.5}}],
        "ifca": [{"method": {"num_clusters": 2}}],
        "local": [],
    }
    found = plan(Path("c"), ["fedem", "local"], [0], shared, own)
    assert [cell.config.schedule.learning_rate for cell in found] == [0.5, 0.1]
    assert all(cell.config.values("data")["num_clients"] == 6 for cell in found)
    alone = fedem.Config.build({"method": {"name": "local"}})
    assert set(found[1].config.differences(alone)) == {"data.num_clients"}
    assert sort_settings(["data.path=C:/x=y.csv"], ["local"])[0] == [{"data": {"path": "C:/x=y.csv"}}]


def test_methods_by_name() -> None:
    assert resolve_methods(["all"]) == list(fedem.METHODS)
    assert resolve_methods(["hypcluster", "local"]) == ["ifca", "local"]
    assert cells.resolve_method("hypcluster") == "ifca"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "fedavg,nothing"], "Unknown method 'nothing'"),
        (["--methods", "fedavg,fedavg"], "The methods are fedavg, fedavg; allowed: all, or one or several, each once"),
        (["--methods", ""], "The methods are none"),
        (["--seeds", "0"], "--seeds is '0'; allowed: how many (from 1), or which, such as 0,4,7"),
        (["--seeds", "a"], "--seeds is 'a'"),
        (["--seeds", "1,-2"], "--seeds is '1,-2'"),
        (["--seeds", "4,4"], "The seeds are 4, 4; allowed: one or several, each once"),
        (["--data", "mnist"], "Unknown data 'mnist'"),
        (["--data", "none.csv"], "There is no file"),
        (["--rounds", "0"], "run.rounds is 0"),
        (["--unseen", "1"], "run.unseen is 1.0"),
        (["--set", "data.num_clients=0"], "data.num_clients is 0"),
        (["--set", "schedule.learning_rate=1"], "allowed: METHOD:schedule.key=value, such as fedem:schedule.learning"),
        (["--set", "ditto:method.pull=1"], "allowed before the colon: local, fedavg, fedem"),
        (["--set", "ditta:method.pull=1"], "Unknown method 'ditta'"),
        (["--set", "fedem:data.num_clients=3"], "data.num_clients is the same for all methods"),
        (["--set", "fedem:run.unseen=0.5"], "run.unseen is the same for all methods"),
        (["--set", "fedem:method.pull=3"], "Unknown key in [method] 'pull'"),
        (["--set", "fedem:method.name=local"], "method.name is given by --methods"),
        (["--set", "run.seed=3"], "run.seed is given by --seeds"),
        (["--set", "nonsense"], "allowed: section.key=value"),
        ([*TINY, "--device", "tpu"], "Unknown device 'tpu'"),
        (["--resume"], "--resume needs the folder"),
        (["--resume", "--out", "nowhere"], "There is no comparison to resume in nowhere"),
        (["--out", "full"], "full is not empty; go on with --resume, or choose another folder"),
        (["--out", "full/file/c"], "can't be written"),
        (["--out", "run", "--resume"], "run holds a run, not a comparison"),
    ],
)
def test_bad_input_is_refused_before_work(run, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("compare", "--quiet", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_method_that_can_not_train_the_model_is_found_before_any_training(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*_: object) -> None:
        raise UserError("Method fedem can't train this model.")

    monkeypatch.setattr(fedem.METHODS["fedem"].algorithm, "check", check)
    code, _, err = run("compare", "--methods", "local,fedem", *TINY, "--out", "c")
    assert (code, err) == (2, "error: Method fedem can't train this model.\n")
    assert not (tmp_path / "c").exists()


def test_other_settings_and_other_data_are_not_mixed_in(run, tmp_path: Path) -> None:
    def write(seed: int) -> None:
        rng = np.random.default_rng(seed)
        np.savez(tmp_path / "d.npz", x=rng.normal(size=(60, 3)), y=np.arange(60) % 2, client=np.arange(60) % 4)

    write(0)
    arguments = ["compare", "--data", "d.npz", "--methods", "local", "--seeds", "1", "--out", "c", "-q", "--rounds"]
    assert run(*arguments, "2")[0] == 0
    code, _, err = run(*arguments, "3", "--resume")
    assert code == 2
    assert "other settings (run.rounds)" in err
    write(1)
    code, _, err = run(*arguments, "2", "--resume")
    assert code == 2
    assert "The data are not those" in err
