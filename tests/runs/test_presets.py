"""Presets follow from the searches in experiments/tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedem.methods import METHODS
from fedem.runs.config import Config

TUNING = Path(__file__).parents[2] / "experiments" / "tuning"
SEARCHES = {data: json.loads((TUNING / f"{data}.json").read_text()) for data in ("synthetic", "emnist", "femnist")}


@pytest.mark.parametrize("data", SEARCHES)
def test_presets_are_what_the_search_chose(data: str) -> None:
    shipped, chosen = {}, {}
    for method, search in SEARCHES[data].items():
        sections = Config.build({"data": {"name": data}, "method": {"name": method}}).sections
        for key, value in search["chosen"].items():
            section, _, name = key.partition(".")
            shipped[method, key], chosen[method, key] = sections[section][name], value
    assert shipped == chosen


@pytest.mark.parametrize("data", SEARCHES)
def test_every_method_had_the_same_number_of_trials(data: str) -> None:
    # MOCHA trains linear models alone, so there is nothing to search for on images.
    expected = set(METHODS) - (set() if data == "synthetic" else {"mocha"})
    assert {method: len(search["trials"]) for method, search in SEARCHES[data].items()} == dict.fromkeys(expected, 8)
    assert all("--seeds 100," in search["command"] for search in SEARCHES[data].values())
