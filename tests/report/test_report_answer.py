"""The paragraph that a report opens with."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from report_runs import compared, gathered, regressed, trained

from fedem.report.answer import answer, gains
from fedem.report.page import build_page
from fedem.report.runs import Clients, Gathered


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    return gathered(compared(tmp_path_factory.mktemp("runs") / "comparison"))


def scored(data: Gathered, scores: dict[str, list[list[float]]]) -> Gathered:
    """The same runs with clients a, b, c, ... of these scores, seed by seed; averages are theirs, the best first."""
    runs = {}
    for method in sorted(scores, key=lambda name: -np.mean(scores[name])):
        own = []
        for run, values in zip(data.runs[method], scores[method], strict=True):
            names = tuple(chr(ord("a") + place) for place in range(len(values)))
            clients = Clients(names, np.ones(len(values)), np.array(values), np.zeros((len(values), 0)))
            own.append(dataclasses.replace(run, clients=clients, summary={data.score: float(np.mean(values))}))
        runs[method] = own
    rows = {row.method: row for row in data.comparison.rows}
    spread = rows["fedem"].figures[data.score]
    ordered = [
        dataclasses.replace(
            rows[name], figures={data.score: spread._replace(mean=float(np.mean([r.clients.scores for r in own])))}
        )
        for name, own in runs.items()
    ]
    return dataclasses.replace(data, runs=runs, comparison=dataclasses.replace(data.comparison, rows=ordered))


def test_the_best_is_told_with_intervals_and_who_loses(data: Gathered) -> None:
    alone = [[0.50, 0.60, 0.70, 0.95], [0.52, 0.58, 0.70, 0.95]]
    common = [[0.40, 0.50, 0.60, 0.70], [0.40, 0.52, 0.60, 0.70]]
    best = [[0.80, 0.85, 0.90, 0.90], [0.82, 0.85, 0.90, 0.91]]
    told = answer(scored(data, {"local": alone, "fedavg": common, "fedem": best}))
    by_client = np.mean(best, axis=0) - np.mean(alone, axis=0)
    by_seed = np.mean(best, axis=1) - np.mean(alone, axis=1)
    for values, what in ((by_seed, "2 seeds"), (by_client, "4 clients")):
        low, high = scipy.stats.ttest_1samp(100 * values, 0).confidence_interval()
        assert f"95 % interval over {what}: {low:+.2f} to {high:+.2f}" in told
    # The mean over clients might be zero, however sure the seeds are.
    assert f"It is level with the next, Local: {100 * by_seed.mean():.2f} points better on average" in told
    assert "better for 3 of 4 clients" in told
    assert told.startswith("No method is clearly the best; the highest average has FedEM: accuracy 86.6 %, mean over 2")
    assert "Worse off than with Local: 1 of 4 clients: d." in told
    assert "No client is worse off than with FedAvg." in told
    assert "It is ahead of FedAvg: " in told


def test_a_clear_winner_is_called_the_best(data: Gathered) -> None:
    best, other = [[0.9, 0.91, 0.89], [0.9, 0.92, 0.88]], [[0.5, 0.52, 0.49], [0.5, 0.51, 0.5]]
    told = answer(scored(data, {"fedavg": other, "fedem": best}))
    assert told.startswith(
        "The best method is FedEM: accuracy 90.0 %, mean over 2 seeds. It is ahead of the next, FedAvg:"
    )
    assert "Local" not in told


def test_at_most_ten_are_named_those_that_lose_most_first(data: Gathered) -> None:
    places = np.arange(12)
    best = np.concatenate([0.5 - places / 100, [1.0] * 8])
    told = answer(scored(data, {"local": [[0.51] * 20] * 2, "fedem": [best.tolist()] * 2}))
    losers = re.search(r"Worse off than with Local: 12 of 20 clients; the 10 that lose most: ([^.]*)\.", told)
    assert losers
    assert losers[1].split(", ") == list("lkjihgfedc")


def test_gains_are_those_of_the_clients_files(data: Gathered) -> None:
    expected: dict[tuple[str, int], float] = {}
    for sign, method in ((1, "fedem"), (-1, "local")):
        for run in data.runs[method]:
            with (run.folder.path / "clients.csv").open() as file:
                for row in csv.DictReader(file):
                    if row["role"] == "train":
                        key = (row["client"], run.seed)
                        expected[key] = expected.get(key, 0.0) + sign * float(row["test_accuracy"])
    found = gains(data, "fedem", "local")
    # Each seed deals other samples to a name.
    assert found == pytest.approx({f"{name} (seed {seed})": gain for (name, seed), gain in expected.items()})


def test_of_errors_the_smallest_is_the_best(tmp_path: Path) -> None:
    errors = gathered(regressed(tmp_path / "run"))
    best, other = errors.runs
    told = answer(errors)
    assert "mean squared error" in told
    assert "one seed, so no interval" in told
    found = gains(errors, best, other)
    ours, theirs = (errors.runs[name][0].clients.scores for name in (best, other))
    assert list(found.values()) == pytest.approx(theirs - ours)


def test_one_method_is_not_compared_and_a_page_opens_with_the_answer(tmp_path: Path) -> None:
    trained(tmp_path / "run", "fedem", 0)
    alone = gathered(tmp_path / "run")
    assert answer(alone).startswith("The only method with scores is FedEM: accuracy ")
    page = build_page([alone])
    assert answer(alone) in page
    assert page.index('<section id="answer">') < page.index('<section id="scores">') < page.index("<table>")
