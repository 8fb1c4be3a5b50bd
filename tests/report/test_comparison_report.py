"""Figures of a comparison: how they are aggregated, saved, printed and drawn."""

from __future__ import annotations

import io
import json
import math
import statistics
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import scipy.stats
from comparisons import TWO, table_of

import fedem
from fedem.core.errors import UserError
from fedem.report.studies import comparison_markdown, comparison_tables, draw
from fedem.runs.folder import Failure, RunFolder
from fedem.studies.comparison import Comparison, Row, summarize
from fedem.studies.sweep import Entry, Gap, Spread


def written(folder: Path, method: str, seed: int, **figures: object) -> Entry:
    """A complete run, hand-made."""
    config = fedem.Config.build({"method": {"name": method}, "run": {"seed": seed, "rounds": 2}})
    place = RunFolder(folder / f"{method}-seed{seed}")
    with place.created(config):
        pass
    facts = {"num_components": 1, "num_clients": 5, "num_unseen_clients": 0, "data": "synthetic", "rounds": 2}
    costs = {"seconds_per_round": 0.5, "bytes_up_per_round": 1000, "bytes_down_per_round": 3000}
    summary = {
        "method": method,
        "seed": seed,
        "bottom_decile": 0.25,
        "train_loss": 0.5,
        "test_loss": 0.5,
        **facts,
        **costs,
        **figures,
    }
    name = "test_accuracy" if "test_accuracy" in figures else "test_mean_squared_error"
    spent = {"seconds": 0.5, "bytes_up": 1000, "bytes_down": 3000}
    lines = [{"round": 1, name: 0.5, **spent}, {"round": 2, name: figures[name], **spent}]
    (place.path / "metrics.jsonl").write_text("".join(RunFolder.line(line) for line in lines))
    place.finish(summary, [])
    return Entry({"method": method}, seed, config, place)


def hand_made(folder: Path) -> Comparison:
    oracle = {"oracle_accuracy": 0.875, "oracle_bottom_decile": 0.5, "oracle_loss": 0.25}
    figures = {"fedavg": (0.5, 0.625, 0.75), "local": (0.25, 0.25, 1.0), "fedem": (0.75, 0.75, 0.75)}
    return summarize(
        [
            written(folder, method, seed, test_accuracy=values[seed], train_accuracy=0.5, test_loss=0.5, **oracle)
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
    assert found.rows[1].curve == {1: Spread(0.5, 0.0), 2: average["fedavg"]}
    assert [(line["method"], line["seed"]) for line in found.runs[:4]] == [
        ("fedem", 0),
        ("fedem", 1),
        ("fedem", 2),
        ("fedavg", 0),
    ]


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    found = hand_made(tmp_path)
    assert found.gaps["fedem"] == (0, 0, 3)
    assert found.gaps["fedavg"] == (-0.125, pytest.approx(0.125 / math.sqrt(3)), 3)
    assert found.gaps["local"] == (-0.25, pytest.approx(0.25), 3)
    told = "Test score against FedEM, paired by seed, mean ± standard error: FedAvg -12.50 ±7.22, Local -25.00 ±25.00."
    assert told in comparison_markdown(found, "fedem compare")
    assert found.rows[0].title == "FedEM"
    # What the seeds' data do to both falls out; a seed that one of them lacks does not count.
    scores = {0: 0.5, 1: 0.9, 2: 0.7, 3: None}
    ahead = {seed: score and score + 0.1 for seed, score in scores.items()} | {4: 0.0}
    assert Gap.of(ahead, scores) == (pytest.approx(0.1), pytest.approx(0, abs=1e-12), 3)
    assert Gap.of({0: 0.5}, {0: 0.25}) == (0.25, None, 1)
    assert Gap.of({0: 0.5}, {1: 0.25}) == (None, None, 0)


def test_errors_are_sorted_from_the_smallest_and_what_diverged_comes_last(tmp_path: Path) -> None:
    scores = {"fedavg": 2.0, "local": 0.5, "fedem": None}
    found = summarize([written(tmp_path, name, 0, test_mean_squared_error=score) for name, score in scores.items()])
    assert [row.method for row in found.rows] == ["local", "fedavg", "fedem"]
    assert not found.oracle
    assert found.rows[2].figures["test_mean_squared_error"] == (None, None)
    assert set(draw(found)) == {"png", "svg"}
    assert "| FedEM | - |" in comparison_markdown(found, "fedem compare")


def test_a_run_that_is_not_complete_is_not_summed_up(tmp_path: Path) -> None:
    entry = written(tmp_path, "local", 0, test_accuracy=0.5)
    (entry.folder.path / "summary.json").unlink()
    with pytest.raises(UserError, match="is not complete"):
        summarize([entry])


def test_intervals_are_students() -> None:
    gains = dict(enumerate([0.1, 0.3, 0.25, -0.05]))
    low, high = Gap.of(gains, dict.fromkeys(gains, 0.0)).interval or (0, 0)
    assert (low, high) == pytest.approx(scipy.stats.ttest_1samp(list(gains.values()), 0).confidence_interval())
    assert Gap.of({0: 0.5}, {0: 0.25}).interval is None


def test_whom_the_bottom_decile_leaves_out_is_told(tmp_path: Path) -> None:
    few = {"test_accuracy": 0.5, "bottom_decile_left_out": 3}
    found = summarize([written(tmp_path, "local", 0, **few), written(tmp_path, "local", 1, test_accuracy=0.25)])
    assert "with fewer than five test samples: 0 to 3 of 5 clients." in comparison_markdown(found, "fedem compare")
    assert "five test samples" not in comparison_markdown(hand_made(tmp_path / "others"), "fedem compare")


def test_a_method_that_failed_with_one_seed_is_not_ranked(tmp_path: Path) -> None:
    entries = [written(tmp_path, name, seed, test_accuracy=0.5) for name in ("local", "fedavg") for seed in (0, 1)]
    place = entries[3].folder
    place.clear()
    with place.created(entries[3].config):
        pass
    place.fail(Failure("diverged", "Training diverged in round 2."))
    # Complete, but its classifiers can't have learnt.
    entries.append(written(tmp_path, "fedem", 0, test_accuracy=0.75, train_accuracy=0.75, train_loss=1e9))
    found = summarize(entries)
    assert [row.method for row in found.rows] == ["local"]
    assert [(each.method, list(each.failures)) for each in found.failed] == [("fedavg", [1]), ("fedem", [0])]
    found.save(tmp_path, "fedem compare")
    lines = {(line["method"], line["seed"]): line for line in table_of(tmp_path)}
    assert lines["fedavg", "0"]["test_accuracy"] == "0.5", "what is known is kept"
    assert lines["fedavg", "1"]["failed"] == "Training diverged in round 2."
    told = json.loads((tmp_path / "comparison.json").read_text())["failed"]
    assert told[0]["seeds"] == {"1": {"phrase": "diverged", "message": "Training diverged in round 2."}}
    text = comparison_markdown(found, "fedem compare")
    assert "| FedAvg | failed: diverged | - |" in text
    assert "FedAvg failed with seed 1: Training diverged in round 2." in text
    assert "FedEM failed with seed 0: Training diverged: the loss on the training samples is 1000000000.0." in text
    with pytest.raises(UserError, match=r"No method came to an end. fedem failed with seed 0"):
        summarize(entries[4:])


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
        Console(file=out, width=80).print(*comparison_tables(comparison))
        lines = [line for line in out.getvalue().splitlines() if "Clustered FL" in line]
        assert len(lines[0]) <= 80
        assert lines[0].count("±1.1") == 4, out.getvalue()


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
        Row(name, row.title, {"test_accuracy": Spread(0.5, None)}, {1: Spread(0.5, None)})
        for name, row in fedem.METHODS.items()
    ]
    from fedem.report import studies as figures

    looks = [figures.look(row.method) for row in rows]
    assert len({look["color"] for look in looks}) == len(fedem.METHODS)
    # In the grey of paper, too.
    assert len({(str(look["linestyle"]), look["marker"]) for look in looks}) == len(fedem.METHODS)
    many = [str(figures.look(str(place), map(str, range(90)))) for place in range(90)]
    assert len(set(many)) == len(many)
    drawing = draw(Comparison("synthetic", "accuracy", 1, 5, 0, [0], rows, {}, []))["svg"].decode()
    assert all(row.title in drawing for row in rows)
