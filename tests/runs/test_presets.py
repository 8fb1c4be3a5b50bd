"""Presets follow from the searches in experiments/tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedem.methods import METHODS
from fedem.runs.config import Config

TUNING = Path(__file__).parents[2] / "experiments" / "tuning"
SEARCHES = {data: json.loads((TUNING / f"{data}.json").read_text()) for data in ("synthetic", "emnist", "femnist")}
FULL_SIZE = {data: json.loads((TUNING / f"{data}-full-size.json").read_text()) for data in SEARCHES}
# Searched again at full size (experiments/tuning/README.md).
KEPT = {
    "synthetic": set[str](),
    "emnist": {"pfedme"},
    "femnist": {"pfedme"},
}
# Methods that part layers train no linear models, MOCHA nothing else, and the paper's CNN has no batch normalisation.
PARTING = {"fedem-heads", "fedper", "fedrep", "fedbabu", "lgfedavg", "fedbn"}
NOTHING_TO_SEARCH = {"synthetic": PARTING, "emnist": {"mocha", "fedbn"}, "femnist": {"mocha", "fedbn"}}


def _better(data: str, method: str) -> dict[str, float]:
    """Return the best one at full size of those that never diverged or, where none was run there, the search's.

    Where the best were run with more seeds, their means decide.
    """
    if method not in FULL_SIZE[data]:
        return SEARCHES[data][method]["chosen"]
    entries = FULL_SIZE[data][method].values()
    ended = [entry for entry in entries if "accuracy" in entry and not entry.get("diverged_with_seeds")]
    again = [entry for entry in ended if "mean_of_four_seeds" in entry]
    if again:
        return max(again, key=lambda entry: entry["mean_of_four_seeds"])["values"]
    return max(ended, key=lambda entry: entry["accuracy"])["values"]


@pytest.mark.parametrize("data", SEARCHES)
def test_presets_are_what_the_search_chose(data: str) -> None:
    shipped, chosen = {}, {}
    for method in SEARCHES[data].keys() - KEPT[data]:
        sections = Config.build({"data": {"name": data}, "method": {"name": method}}).sections
        for key, value in _better(data, method).items():
            section, _, name = key.partition(".")
            shipped[method, key], chosen[method, key] = sections[section][name], value
    assert shipped == chosen


@pytest.mark.parametrize("data", SEARCHES)
def test_every_method_had_the_same_number_of_trials(data: str) -> None:
    expected = METHODS.keys() - NOTHING_TO_SEARCH[data]
    assert {method: len(search["trials"]) for method, search in SEARCHES[data].items()} == dict.fromkeys(expected, 8)
    assert all("--seeds 100," in search["command"] for search in SEARCHES[data].values())


@pytest.mark.parametrize("data", SEARCHES)
def test_what_was_compared_at_full_size_is_what_the_search_found_and_other_values(data: str) -> None:
    for method, entry in FULL_SIZE[data].items():
        found, *others = (entry[name]["values"] for name in sorted(entry, key=lambda name: name != "found"))
        assert found == SEARCHES[data][method]["chosen"]
        assert others
        assert found not in others


@pytest.mark.parametrize(
    ("searches", "least"), [("cifar100", 3), ("shakespeare", 5), ("emnist-50-rounds", 3), ("femnist-50-rounds", 3)]
)
def test_what_was_searched_at_full_size_is_shipped_at_its_best(searches: str, least: int) -> None:
    data = searches.partition("-")[0]
    for method, search in json.loads((TUNING / f"{searches}.json").read_text()).items():
        best = max(search["trials"], key=lambda trial: trial["accuracy"] or 0)  # none where training diverged
        assert len(search["trials"]) >= least
        assert search["chosen"] == {key: value for key, value in best.items() if key != "accuracy"}
        sections = Config.build({"data": {"name": data}, "method": {"name": method}}).sections
        for key, value in search["chosen"].items():
            section, _, name = key.partition(".")
            assert sections[section][name] == value, (method, key)


@pytest.mark.parametrize(("data", "heading"), [("cifar100", "## CIFAR-100"), ("shakespeare", "## Shakespeare")])
def test_the_table_of_a_search_has_each_trial_in_its_column(data: str, heading: str) -> None:
    found = {
        METHODS[method].title: {trial["schedule.learning_rate"]: trial["accuracy"] for trial in search["trials"]}
        for method, search in json.loads((TUNING / f"{data}.json").read_text()).items()
        if method not in ("fedprox", "pfedme")  # which the text below has
    }
    section = (TUNING / "README.md").read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
    table = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    (_, *rates), _, *rows = table
    for name, *cells in rows:
        trials = found.pop(name.partition(",")[0])
        told = {float(rate): cell for rate, cell in zip(rates, cells, strict=True) if cell}
        assert told.keys() == trials.keys()
        for rate, accuracy in trials.items():
            said = None if told[rate] == "diverged" else float(told[rate]) / 100
            assert said == pytest.approx(accuracy, abs=0.000501), (name, rate)
    assert not found
