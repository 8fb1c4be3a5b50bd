"""Reports of runs that are not all alike: several data sets, other seeds, one method with several settings."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import drawn, gathered, trained
from typer.testing import CliRunner

from fedem.cli import app
from fedem.report import page as page_module
from fedem.report.page import build_page
from fedem.report.pictures import FIGURES
from fedem.report.pictures import clients as gains
from fedem.report.runs import Gathered, differing, distinct_labels, gather

SMALL = {"data": {"num_clients": 6}, "rounds": 2, "unseen": 0.0}
OTHER = {"data": {"num_clients": 7}, "rounds": 2, "unseen": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets; on the first FedEM has three seeds, FedAvg two and Local another one."""
    place = tmp_path_factory.mktemp("runs") / "experiment"
    for method, seeds in (("fedem", (0, 1, 2)), ("fedavg", (1, 2)), ("local", (3,))):
        for seed in seeds:
            trained(place / f"small_{method}_seed{seed}", method, seed, **SMALL)
    for method in ("fedem", "local"):
        trained(place / f"other_{method}_seed0", method, 0, **OTHER)
    return place


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw two figures on pages: the others would be drawn alike."""
    monkeypatch.setattr(page_module, "FIGURES", {name: FIGURES[name] for name in ("rounds", "sizes")})


@pytest.fixture(scope="module")
def sets(folder: Path) -> dict[str, Gathered]:
    return {data.comparison.data: data for data in gather([folder])}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    """FedEM with two and with three components, the latter with another learning rate as well; and Local."""
    place = tmp_path_factory.mktemp("runs") / "variants"
    trained(place / "local", "local", 0, **SMALL)
    for seed in (0, 1):
        trained(place / f"two-{seed}", "fedem", seed, sections={"method": {"num_components": 2}}, **SMALL)
    more = {"method": {"num_components": 3}, "schedule": {"learning_rate": 0.05}}
    trained(place / "three", "fedem", 0, sections=more, **SMALL)
    return gathered(place)


def summaries(folder: Path, pattern: str) -> list[dict[str, float]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{pattern}/summary.json"))]


# --- several data sets


def test_data_sets_of_one_name_are_distinct_labels_by_what_differs(sets: dict[str, Gathered]) -> None:
    assert set(sets) == {f"synthetic (data.num_clients={count})" for count in (6, 7)}
    for count in (6, 7):
        data = sets[f"synthetic (data.num_clients={count})"]
        assert {len(run.clients.names) for runs in data.runs.values() for run in runs} == {count}
        assert data.place == f"synthetic-data.num-clients-{count}"


def test_a_page_has_a_table_and_figures_for_each_data_set(sets: dict[str, Gathered], folder: Path) -> None:
    text = build_page(list(sets.values()))
    names = re.findall(r'\sid="([^"]*)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'<a href="#([^"]*)"', text)) <= set(names)
    tables = re.findall(r"<caption>(.*?):.*?<tbody>(.*?)</tbody>", text[: text.index("<figure")], re.DOTALL)
    assert [name for name, _ in tables] == list(sets)
    for (name, body), pattern in zip(tables, ("other", "small"), strict=True):
        for method in sets[name].runs:
            mean = statistics.fmean(found["test_accuracy"] for found in summaries(folder, f"{pattern}_{method}_*"))
            assert f"<td>{sets[name].titles[method]}</td><td>{100 * mean:.1f}" in body
    titles = re.findall(r'<h3 id="([^"]*)-title">(.*?)</h3>', text)
    assert titles
    for place, title in titles:
        owners = [name for name, data in sets.items() if place.startswith(f"{data.place}-")]
        assert len(owners) == 1
        assert title.endswith(f": {owners[0]}")


def test_figures_of_each_data_set_have_a_folder(folder: Path, tmp_path: Path, sets: dict[str, Gathered]) -> None:
    outcome = CliRunner().invoke(app, ["plot", str(folder), "--figure", "rounds,gains", "--out", str(tmp_path), "-q"])
    assert outcome.exit_code == 0, outcome.output
    for name, data in sets.items():
        assert {path.name for path in (tmp_path / data.place).iterdir()} == {"rounds.svg", "gains.svg"}
        assert name in (tmp_path / data.place / "rounds.svg").read_text()


def test_a_method_looks_the_same_on_all_data(sets: dict[str, Gathered]) -> None:
    colours = [drawn("rounds", data).figure.axes[0].lines for data in sets.values()]
    found = [{line.get_label(): line.get_color() for line in lines} for lines in colours]
    shared = set(found[0]) & set(found[1])
    assert shared >= {"Local", "FedEM (M=3)"}
    assert all(found[0][label] == found[1][label] for label in shared)


# --- other seeds


def test_figures_are_over_the_seeds_that_there_are(sets: dict[str, Gathered], folder: Path) -> None:
    data = sets["synthetic (data.num_clients=6)"]
    assert data.comparison.seeds == [0, 1, 2, 3]
    assert {method: [run.seed for run in runs] for method, runs in data.runs.items()} == {
        "fedem": [0, 1, 2],
        "fedavg": [1, 2],
        "local": [3],
    }
    for row in data.comparison.rows:
        values = [found["test_accuracy"] for found in summaries(folder, f"small_{row.method}_*")]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        assert row.figures["test_accuracy"] == (pytest.approx(statistics.fmean(values)), pytest.approx(deviation))
    means = [row.figures["test_accuracy"].mean or 0.0 for row in data.comparison.rows]
    assert means == sorted(means, reverse=True)
    # The oracle is over all seeds, each once.
    oracles = {found["seed"]: found["oracle_accuracy"] for found in summaries(folder, "small_*")}
    assert data.comparison.oracle["test_accuracy"].mean == pytest.approx(statistics.fmean(oracles.values()))


def test_the_number_of_seeds_is_told_where_it_differs(sets: dict[str, Gathered]) -> None:
    unequal, equal = (sets[f"synthetic (data.num_clients={count})"] for count in (6, 7))
    assert '<th scope="col">seeds</th>' not in build_page([equal])
    text = build_page([unequal])
    assert "seeds 0, 1, 2, 3, of which not every row has all" in text
    rows = dict(re.findall(r"<tr><td>([^<]*)</td>.*?<td>(\d*)</td></tr>", text[: text.index("<figure")]))
    assert rows == {"FedEM (M=3)": "3", "FedAvg": "2", "Local": "1", "oracle": ""}


def test_gains_are_over_the_seeds_that_both_have(sets: dict[str, Gathered]) -> None:
    data = sets["synthetic (data.num_clients=6)"]
    assert len(gains.pairs(data, "fedavg", "fedem")[0]) == 2 * 6
    assert len(gains.pairs(data, "local", "fedem")[0]) == 0
    picture = drawn("gains", data)
    assert "Local" not in picture.sentence
    assert "of 12 clients" in picture.sentence


def test_sizes_are_of_all_seeds(sets: dict[str, Gathered]) -> None:
    data = sets["synthetic (data.num_clients=6)"]
    assert drawn("sizes", data).figure.axes[0].patches[0].get_data().values.sum() == 4 * 6


# --- one method with several settings


def test_settings_of_a_method_are_rows_of_their_own(variants: Gathered) -> None:
    assert {name: [run.seed for run in runs] for name, runs in variants.runs.items()} == {
        "local": [0],
        "fedem (M=2)": [0, 1],
        "fedem (M=3)": [0],
    }
    assert set(variants.titles.values()) == {"Local", "FedEM (M=2)", "FedEM (M=3)"}
    assert {variants.name(entry) for entry in variants.runs} == set(variants.titles.values())
    assert variants.differences == {"FedEM": ["method.num_components", "schedule.learning_rate"]}
    assert "The rows of FedEM differ in method.num_components, schedule.learning_rate." in build_page([variants])


def test_settings_of_a_method_look_different(variants: Gathered) -> None:
    lines = [line for line in drawn("rounds", variants).figure.axes[0].lines if line.get_label() != "oracle"]
    assert {line.get_label() for line in lines} == set(variants.titles.values())
    assert len({line.get_color() for line in lines}) == len(lines)


def test_gains_are_those_of_the_best_settings(variants: Gathered) -> None:
    best = next(entry for entry in variants.runs if entry.startswith("fedem"))
    assert gains.subject(variants) == best
    assert f"{variants.name(best)} is better than Local for" in drawn("gains", variants).sentence


SETTINGS = st.dictionaries(
    st.sampled_from(["run.rounds", "solver.name", "solver.momentum", "schedule.learning_rate"]),
    st.sampled_from([0, 0.5, 1, True, "sgd"]),
    min_size=1,
)


@given(st.lists(SETTINGS, min_size=1, max_size=6, unique_by=lambda each: json.dumps(each, sort_keys=True)))
def test_labels_name_values_that_differ(settings: list[dict[str, object]]) -> None:
    labels = distinct_labels(settings)
    for label, each in zip(labels, settings, strict=True):
        for word in filter(None, label.split(", ")):
            place, _, value = word.partition("=")
            assert place in differing(settings)
            assert str(each[place]).lower() == value.lower()
    if len(settings) == 1:
        assert labels == [""]


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=8, unique=True))
def test_labels_tell_settings_apart_and_say_no_more(values: list[tuple[int, ...]]) -> None:
    places = ("a.name", "a.x", "b.y")
    labels = distinct_labels([dict(zip(places, each, strict=True)) for each in values])
    assert len(set(labels)) == len(values)
    columns = np.array(values).T
    constant = [place for place, column in zip(places, columns, strict=True) if len(set(column.tolist())) == 1]
    assert not [place for place in constant if place in "".join(labels)]
