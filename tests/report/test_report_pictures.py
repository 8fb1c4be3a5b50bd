"""Each picture shows what it says it shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from numpy.typing import NDArray
from report_runs import METHODS, SEEDS, compared, drawn, gathered, regressed

from fedem.report.pictures import FIGURES, curves
from fedem.report.pictures import clients as fairness
from fedem.report.pictures.canvas import Picture, paint, thinned
from fedem.report.runs import Clients, Gathered


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    return gathered(compared(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    return gathered(regressed(tmp_path_factory.mktemp("runs") / "run"))


def lines_of(picture: Picture, panel: int) -> dict[str, NDArray[np.float64]]:
    return {line.get_label(): line.get_xydata() for line in picture.figure.axes[panel].lines}


def only(data: Gathered, *methods: str) -> Gathered:
    rows = [row for row in data.comparison.rows if row.method in methods]
    runs = {row.method: data.runs[row.method] for row in rows}
    return dataclasses.replace(data, comparison=dataclasses.replace(data.comparison, rows=rows), runs=runs)


def with_scores(data: Gathered, method: str, scores: list[list[float]]) -> Gathered:
    """The same runs, but for the clients' scores, seed by seed."""
    runs = []
    for run, values in zip(data.runs[method], scores, strict=True):
        names = tuple(map(str, range(len(values))))
        clients = Clients(names, np.ones(len(values)), np.array(values), np.zeros((len(values), 0)))
        runs.append(dataclasses.replace(run, clients=clients))
    return dataclasses.replace(data, runs=data.runs | {method: runs})


# --- all of them


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_title_a_sentence_and_labelled_axes(data: Gathered, name: str) -> None:
    picture = drawn(name, data)
    assert picture.title
    assert picture.sentence.endswith(".")
    for axes in picture.figure.axes:
        assert not axes.axison or axes.get_xlabel() or axes.get_ylabel()


@pytest.mark.parametrize("name", ["gains", "weights", "simplex", "entropy", "components", "diagnostics"])
def test_a_figure_that_does_not_apply_is_not_drawn(data: Gathered, name: str) -> None:
    assert paint(FIGURES[name].painter, only(data, "fedavg")) is None


def test_errors_are_drawn_too(errors: Gathered) -> None:
    found = {name for name, kind in FIGURES.items() if paint(kind.painter, errors) is not None}
    assert found >= {"rounds", "bytes", "clients", "histogram", "gains", "sizes", "weights"}


def test_without_test_samples_sizes_are_left(tmp_path: Path) -> None:
    untested = gathered(regressed(tmp_path / "run", test=0))
    found = {name for name, kind in FIGURES.items() if paint(kind.painter, untested) is not None}
    assert found == {"weights", "simplex", "entropy", "components", "sizes"}


# --- curves


@pytest.mark.parametrize(("panel", "figure"), [(0, "test_accuracy"), (1, "test_loss")])
def test_lines_are_means_and_bands_hold_the_seeds(data: Gathered, panel: int, figure: str) -> None:
    picture = drawn("rounds", data)
    axes = picture.figure.axes[panel]
    bands = [patch for patch in axes.collections if isinstance(patch, PolyCollection)]
    assert len(bands) == len(METHODS)
    lines = lines_of(picture, panel)
    for band, (method, runs) in zip(bands, data.runs.items(), strict=True):
        records = [{line["round"]: line.get(figure) for line in run.history} for run in runs]
        outline = band.get_paths()[0].vertices
        for number, mean in lines[data.titles[method]]:
            values = [record[number] * (100 if panel == 0 else 1) for record in records]
            assert mean == pytest.approx(np.mean(values))
            heights = outline[outline[:, 0] == number, 1]
            assert heights.min() == pytest.approx(min(values))
            assert heights.max() == pytest.approx(max(values))
    oracle = np.mean([run.summary[figure.replace("test", "oracle")] for run in data.runs["fedem"]])
    assert lines["oracle"][:, 1] == pytest.approx(oracle * (100 if panel == 0 else 1))


def test_bytes_end_at_what_was_sent_in_all(data: Gathered) -> None:
    picture = drawn("bytes", data)
    assert picture.figure.axes[0].get_xlabel().startswith("kB")
    lines = lines_of(picture, 0)
    assert data.titles["local"] not in lines  # it sends nothing
    for method in ("fedem", "fedavg"):
        totals = [sum(line["bytes_up"] + line["bytes_down"] for line in run.history) for run in data.runs[method]]
        assert lines[data.titles[method]][-1, 0] == pytest.approx(np.mean(totals) / 1e3)


def test_the_sentence_tells_what_each_has_sent_on_reaching_the_worst_final_score(data: Gathered) -> None:
    worst = data.comparison.rows[-1].figures["test_accuracy"].mean
    told = drawn("bytes", data).sentence
    assert f"On reaching {100 * worst:.1f} %, the worst of the final scores" in told
    for method in METHODS:
        runs = data.runs[method]
        scores = np.mean([[line["test_accuracy"] for line in run.history[1::2]] for run in runs], axis=0)
        first = 2 * int((scores > worst - 1e-12).argmax()) + 1
        amount = np.mean([run.sent[first] for run in runs]) / 1e3
        assert f"{data.name(method)} has sent {f'{amount:.3g} kB' if amount else 'nothing'}" in told
    assert "its final score" in drawn("bytes", only(data, "fedem")).sentence


def test_a_seed_that_lacks_a_round_takes_it_from_the_curve(data: Gathered) -> None:
    first, second = data.runs["fedem"]
    longer = dataclasses.replace(second, history=[*second.history, second.history[-1] | {"round": 6}])
    rounds, values = curves.common_curve([first, longer], "test_loss")
    assert rounds.tolist() == [2, 4]
    assert values.shape == (2, 2)


def test_a_seed_scored_at_its_end_alone_or_kept_without_rounds_takes_no_others_curve(data: Gathered) -> None:
    first, second = data.runs["fedem"]
    for history in (second.history[-1:], []):
        short = dataclasses.replace(second, history=history)
        rounds, values = curves.common_curve([first, short], "test_loss")
        assert rounds.tolist() == [2, 4]
        np.testing.assert_array_equal(values, [[line["test_loss"] for line in first.history[1::2]]])
        mixed = dataclasses.replace(data, runs=data.runs | {"fedem": [first, short]})
        for name in ("rounds", "bytes"):
            panes = drawn(name, mixed).figure.axes
            (line,) = (line for line in panes[0].lines if line.get_label() == data.titles["fedem"])
            assert line.get_ydata() == pytest.approx([100 * line["test_accuracy"] for line in first.history[1::2]])


def test_the_sentence_compares_the_best_with_the_worst(data: Gathered) -> None:
    best, worst = data.comparison.rows[0], data.comparison.rows[-1]
    apart = 100 * (best.figures["test_accuracy"].mean - worst.figures["test_accuracy"].mean)
    assert f"{apart:.1f} points above {data.name(worst.method)}" in drawn("rounds", data).sentence


def test_diagnostics_show_what_was_recorded(data: Gathered) -> None:
    picture = drawn("diagnostics", data)
    titles = [axes.get_title(loc="left") for axes in picture.figure.axes]
    line = picture.figure.axes[titles.index("|grad f|^2")].lines[0]
    recorded = [[entry["gradient_norm2"] for entry in run.history[1::2]] for run in data.runs["fedem"]]
    assert line.get_ydata() == pytest.approx(np.mean(recorded, axis=0))


@given(st.integers(1, 10_000), st.integers(2, 300))
def test_thinned_curves_keep_their_ends(count: int, most: int) -> None:
    kept = thinned(count, most)
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert len(kept) == min(count, most)


# --- fairness

SCORES = st.lists(st.floats(0, 1), min_size=1, max_size=30)


@given(SCORES, SCORES)
def test_sorted_curves_are_sorted_from_the_worst_to_the_best(
    data: Gathered, first: list[float], second: list[float]
) -> None:
    places, found = fairness.sorted_curves(with_scores(data, "local", [first, second]), "local")
    assert (np.diff(places) > 0).all()
    assert (np.diff(found) >= -1e-12).all()
    for curve, scores in zip(found, (first, second), strict=True):
        assert curve[0] == min(scores)
        assert len(places) == 1 or curve[-1] == pytest.approx(max(scores))
        if len(scores) == len(places):
            assert curve == pytest.approx(np.sort(scores))


def test_errors_go_from_the_largest_to_the_smallest(errors: Gathered) -> None:
    _, found = fairness.sorted_curves(errors, "fedem")
    assert (np.diff(found) <= 0).all()
    assert found[0, 0] == errors.runs["fedem"][0].clients.scores.max()


@pytest.mark.parametrize("method", METHODS)
def test_the_bottom_decile_lies_on_every_seed_s_curve(data: Gathered, method: str) -> None:
    places, found = fairness.sorted_curves(data, method)
    for curve, run in zip(found, data.runs[method], strict=True):
        there = np.interp(fairness.decile_place(data, method), places, curve)
        assert there == pytest.approx(run.summary["bottom_decile"])


def test_a_histogram_holds_all_clients(data: Gathered) -> None:
    axes = drawn("histogram", data).figure.axes[0]
    assert len(axes.patches) == len(METHODS)
    for steps in axes.patches:
        assert steps.get_data().values.sum() == pytest.approx(100)


def test_sizes_hold_all_clients_of_all_seeds(data: Gathered) -> None:
    picture = drawn("sizes", data)
    total = sum(run.summary["num_clients"] for run in data.runs["fedem"])
    assert picture.figure.axes[0].patches[0].get_data().values.sum() == total
    sizes = np.concatenate([run.clients.sizes for run in data.runs["fedem"]])
    assert f"{sizes.min():.0f} to {sizes.max():.0f} training samples" in picture.sentence
    places, found = fairness.by_size(data, "fedem")
    assert (np.diff(places) >= 0).all()
    assert found.shape == (len(SEEDS), len(places))
