"""Kept runs: what they were made with, how a method is paired with FedEM, and what is written down about it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept import declare_made_up, keep
from scipy import stats

from fedem.core.errors import UserError
from fedem.report.board import board_page
from fedem.runs.folder import RunFolder
from fedem.studies.board import Board, Cell, Plain, client_scores, gather
from fedem.studies.experiments import Experiment, kept, tabulate
from fedem.studies.sweep import Gap

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
KEPT = sorted(path.parent for path in EXPERIMENTS.glob("*/results/*/summary.json"))


@pytest.fixture
def made_up(tmp_path: Path) -> Experiment:
    return declare_made_up(tmp_path)


def cells(board: Board, data: str) -> dict[str, Cell]:
    (section,) = (each for each in board.sections if each.data == data)
    return {cell.method: cell for cell in section.cells}


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.integers(1, 500)), min_size=2, max_size=30))
def test_the_error_of_a_weighted_difference_is_that_of_a_weighted_regression(
    clients: list[tuple[float, float, int]],
) -> None:
    ours, theirs, weights = map(np.array, zip(*clients, strict=True))
    gap = Gap.of(*(dict(enumerate(each.tolist())) for each in (ours, theirs, weights)))
    # On a constant, by weighted least squares, with the covariance that allows each residual a variance of its own.
    design, weighing = np.ones((len(ours), 1)), np.diag(weights.astype(float))
    bread = np.linalg.inv(design.T @ weighing @ design)
    mean = float(np.squeeze(bread @ design.T @ weighing @ (ours - theirs)))
    meat = design.T @ weighing @ np.diag((ours - theirs - mean) ** 2) @ weighing @ design
    covariance = len(ours) / (len(ours) - 1) * bread @ meat @ bread
    assert gap.mean == pytest.approx(mean, abs=1e-12)
    assert gap.error == pytest.approx(float(np.sqrt(covariance.item())), abs=1e-12)
    alike = Gap.of(dict(enumerate(ours.tolist())), dict(enumerate(theirs.tolist())))
    assert alike.error == pytest.approx(stats.sem(ours - theirs), abs=1e-12)


def test_two_seeds_and_more_are_paired_by_seed(made_up: Experiment, tmp_path: Path) -> None:
    out = tmp_path / "made-up/results"
    avg, em = {0: 0.5, 1: 0.7, 2: 0.65}, {1: 0.8, 2: 0.7, 5: 0.1}
    for method, scores in {"FedAvg": avg, "FedEM": em}.items():
        for seed, score in scores.items():
            keep(made_up, out, "Here", method, [score] * 4, seed)
    (board,) = gather(tmp_path)
    cell = cells(board, "Here")["FedAvg"]
    both = np.array([avg[seed] - em[seed] for seed in (1, 2)])
    assert cell.gap == (pytest.approx(both.mean()), pytest.approx(stats.sem(both)), 2)
    assert not cell.by_clients
    assert cell.line.seeds == (0, 1, 2)
    assert cell.line.ours["test_accuracy"].mean == pytest.approx(np.mean(list(avg.values())))
    assert cells(board, "Here")["FedEM"].gap is None


def test_one_seed_is_paired_by_client_weighted_as_the_accuracy(made_up: Experiment, tmp_path: Path) -> None:
    out, weights = tmp_path / "made-up/results", [1, 2, 3, 94]
    ours, theirs = np.array([0.1, 0.9, 0.5, 0.6]), np.array([0.5, 0.5, 0.2, 0.7])
    keep(made_up, out, "Here", "FedAvg", ours.tolist(), weights=weights)
    keep(made_up, out, "Here", "FedEM", theirs.tolist(), weights=weights)
    keep(made_up, out, "Here", "FedEM", [0.0] * 4, seed=1, weights=weights)
    (board,) = gather(tmp_path)
    cell = cells(board, "Here")["FedAvg"]
    assert cell.by_clients
    assert cell.gap is not None
    assert cell.gap.num_seeds == 4
    assert cell.gap.mean == pytest.approx(np.average(ours, weights=weights) - np.average(theirs, weights=weights))
    shares, apart = np.array(weights) / 100, ours - theirs
    assert cell.gap.error == pytest.approx(np.sqrt(4 / 3 * np.sum(shares**2 * (apart - shares @ apart) ** 2)))


@pytest.mark.parametrize("other", [{"partition_hash": "b"}, {"data_num_clients": 7}])
def test_other_clients_are_never_paired(made_up: Experiment, tmp_path: Path, other: dict[str, object]) -> None:
    out = tmp_path / "made-up/results"
    keep(made_up, out, "Here", "FedEM", [0.5] * 4, partition_hash="a")
    keep(made_up, out, "Here", "FedAvg", [0.6] * 4, **{"partition_hash": "a", **other})
    keep(made_up, out, "Here", "Local", [0.7] * 4, partition_hash="a")
    (board,) = gather(tmp_path)
    found = cells(board, "Here")
    assert found["FedAvg"].gap is None
    assert found["FedAvg"].line.gap is not None
    assert found["FedAvg"].line.gap.mean is None, "nor in the experiment's own table"
    assert found["Local"].gap is not None


def test_the_best_come_first_and_what_is_not_run_is_counted(made_up: Experiment, tmp_path: Path) -> None:
    out = tmp_path / "made-up/results"
    keep(made_up, out, "There", "FedAvg", [0.4] * 5)
    keep(made_up, out, "There", "FedEM", [0.6] * 5)
    (board,) = gather(tmp_path)
    assert board.counts == (2, 6)
    assert list(cells(board, "There")) == ["FedEM", "FedAvg", "Local"]
    assert list(cells(board, "Here")) == ["Local", "FedAvg", "FedEM"]
    assert not cells(board, "There")["Local"].is_run


def test_methods_with_different_seeds_are_in_the_order_that_those_give_that_both_have(
    made_up: Experiment, tmp_path: Path
) -> None:
    out = tmp_path / "made-up/results"
    for seed, score in enumerate((0.5, 0.9, 0.9)):
        keep(made_up, out, "Here", "FedEM", [score] * 4, seed)
    keep(made_up, out, "Here", "FedAvg", [0.6] * 4)
    keep(made_up, out, "Here", "Local", [0.4] * 4)
    (board,) = gather(tmp_path)
    assert list(cells(board, "Here")) == ["FedAvg", "FedEM", "Local"]
    (section,) = (each for each in board.sections if each.data == "Here")
    assert section.verdict is not None
    assert (section.verdict.other.method, section.verdict.form_leads) == ("FedAvg", False)
    gaps = {line.labels["method"]: line.gap for line in tabulate(made_up, kept(made_up, out, only={"data": ["Here"]}))}
    assert gaps["FedAvg"] is None, "the best"
    assert {name: gap.mean for name, gap in gaps.items() if gap} == pytest.approx({"FedEM": -0.1, "Local": -0.2})


def test_a_ratio_is_over_the_seeds_that_both_have(made_up: Experiment, tmp_path: Path) -> None:
    out = tmp_path / "made-up/results"
    for seed, score in enumerate((0.8, 0.1, 0.1)):
        keep(made_up, out, "Here", "FedEM", [score] * 4, seed)
    keep(made_up, out, "Here", "FedAvg", [0.4] * 4)
    ratio = "test_accuracy / FedAvg"
    lines = tabulate(
        dataclasses.replace(made_up, figures=[ratio], paper={}), kept(made_up, out, only={"data": ["Here"]})
    )
    found = {line.labels["method"]: line.ours[ratio].mean for line in lines}
    assert found == {"FedAvg": 1, "FedEM": pytest.approx(2), "Local": None}


def test_a_cell_differs_from_the_paper_by_more_than_a_point_in_any_figure(made_up: Experiment, tmp_path: Path) -> None:
    out = tmp_path / "made-up/results"
    keep(made_up, out, "Here", "FedAvg", [0.503, 0.603, 0.604, 0.690])  # 60.0 / 50.3
    keep(made_up, out, "Here", "FedEM", [0.72, 0.7, 0.7, 0.65])
    keep(made_up, out, "There", "FedEM", [0.55, 0.7, 0.72, 0.75, 0.78])
    (board,) = gather(tmp_path)
    here, there = cells(board, "Here"), cells(board, "There")
    assert here["FedAvg"].distances == {"test_accuracy": pytest.approx(0), "bottom_decile": pytest.approx(0.3)}
    assert not here["FedAvg"].differs
    assert not here["FedEM"].differs, "the paper has no bottom decile for it"
    assert there["FedEM"].distances["test_accuracy"] == pytest.approx(0)
    assert there["FedEM"].differs


def test_runs_of_other_settings_are_shown_with_them(made_up: Experiment, tmp_path: Path) -> None:
    keep(made_up, tmp_path / "out", "Here", "FedEM", [0.5] * 4, run_rounds=9, run_device="cuda", run_chunk_size=7)
    keep(made_up, tmp_path / "out", "Here", "FedAvg", [0.5] * 4, seed=3, run_fine_tune_rate=0.2)
    entries = kept(made_up, tmp_path / "out", only={"data": ["Here"]})
    found = {entry.labels["method"]: entry for entry in entries}
    assert found["FedEM"].departures == {"run.rounds": 9}, "where and how it is worked off does not matter"
    assert (found["FedAvg"].departures, found["FedAvg"].seed) == ({}, 3), (
        "its clients don't fine-tune, at whatever rate"
    )
    assert not found["Local"].is_complete
    seldom = kept(made_up, tmp_path / "out", [0], {"method": ["FedAvg"]})
    assert not any(entry.is_complete for entry in seldom), "with this seed it was not run"
    tuned = {"run_fine_tune_epochs": 1, "run_fine_tune_rate": 0.2}
    keep(made_up, tmp_path / "out", "Here", "Local", [0.5] * 4, **tuned)
    (local,) = kept(made_up, tmp_path / "out", only={"data": ["Here"], "method": ["Local"]})
    assert local.departures == {"run.fine_tune_epochs": 1, "run.fine_tune_rate": 0.2}


def test_seeds_of_different_settings_make_no_mean(made_up: Experiment, tmp_path: Path) -> None:
    keep(made_up, tmp_path / "out", "Here", "FedEM", [0.5] * 4)
    keep(made_up, tmp_path / "out", "Here", "FedEM", [0.5] * 4, seed=1, run_rounds=9)
    with pytest.raises(UserError, match=r"Here, FedEM, seed 0 and Here, FedEM, seed 1 .*\(run\.rounds\)") as error:
        kept(made_up, tmp_path / "out")
    assert "--seeds" in str(error.value)
    assert kept(made_up, tmp_path / "out", [1], {"data": ["Here"]})


def test_seeds_may_be_scored_on_the_way_or_not_unless_that_decides_when_they_end(
    made_up: Experiment, tmp_path: Path
) -> None:
    for patience, name in ((0, "full"), (5, "early")):
        keep(made_up, tmp_path / name, "Here", "FedEM", [0.5] * 4, run_patience=patience)
        keep(made_up, tmp_path / name, "Here", "FedEM", [0.7] * 4, seed=1, run_patience=patience, run_evaluate_every=1)
    (line,) = tabulate(made_up, kept(made_up, tmp_path / "full", None, {"data": ["Here"], "method": ["FedEM"]}))
    assert (line.seeds, line.ours["test_accuracy"].mean) == ((0, 1), pytest.approx(0.6))
    with pytest.raises(UserError, match=r"made with different settings \(run\.evaluate_every\)"):
        kept(made_up, tmp_path / "early")


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ("abut = ''", "abut is unknown; allowed: about, partition, why, published"),
        ("[why.Nowhere]\nFedEM = 'so'", "Unknown data set in"),
        ("[why.Here]\nFedProx = 'so'", "Unknown method in"),
        ("[why]\nHere = 'so'", "why.Here is 'so'"),
        ("[[published]]\nsource = 'A'\nfigures = {}", "published[0].partition is missing"),
        (
            "[[published]]\nsource = 'A'\npartition = 'B'\nfigures = { Here = { C = [1, 2, 3] } }",
            "published figures of Here / C; allowed: 1 to 2 numbers, of test_accuracy, bottom_decile",
        ),
    ],
)
def test_mistakes_in_notes_are_told(tmp_path: Path, notes: str, message: str) -> None:
    declare_made_up(tmp_path, notes)
    with pytest.raises(UserError) as error:
        gather(tmp_path, ["made-up"])
    assert message in str(error.value)
    assert "notes.toml" in str(error.value)


def test_experiments_on_something_else_are_there_as_their_tables_are(tmp_path: Path) -> None:
    declare_made_up(tmp_path)
    declare_made_up(tmp_path, name="other")
    path = tmp_path / "other/experiment.toml"
    text = path.read_text().replace('FedEM = { "method.name" = "fedem" }', "").split("[paper]")[0]
    path.write_text(text)
    assert gather(tmp_path) == [], "nothing is kept"
    declare_made_up(tmp_path, "about = 'Soon.'")
    (board,) = gather(tmp_path)
    assert isinstance(board, Board)
    assert (board.about, board.counts) == ("Soon.", (0, 6))
    (other,) = gather(tmp_path, ["other"])
    assert isinstance(other, Plain)
    assert (other.lines, other.num_lines) == ([], 4)
    keep(other.experiment, tmp_path / "other/results", "Here", "FedAvg", [0.625] * 4, 3)
    both = gather(tmp_path)
    assert [each.experiment.name for each in both] == ["made-up", "other"], "boards first"
    page = board_page(both)
    assert "0 of 6 cells run" in page
    assert "1 of 4 lines run, by `fedem experiment run other`." in page
    assert "| Here | FedAvg | 3 | 62.5 |" in page
    (tmp_path / "other/notes.toml").write_text("about = 'Nobody would see it.'")
    with pytest.raises(
        UserError, match=r"notes.toml is of an experiment with the axes data, method; allowed: notes where"
    ):
        gather(tmp_path)


def test_runs_of_another_experiment_are_on_the_board(made_up: Experiment, tmp_path: Path) -> None:
    keep(made_up, tmp_path / "made-up/results", "Here", "FedAvg", [0.625] * 4)
    declare_made_up(tmp_path, name="guest")
    path = tmp_path / "guest/experiment.toml"
    path.write_text('runs = "made-up"\n' + path.read_text())
    host, guest = gather(tmp_path, ["made-up", "guest"])
    assert isinstance(host, Board)
    assert isinstance(guest, Board)
    assert host.counts == guest.counts == (1, 6)
    assert cells(guest, "Here") == cells(host, "Here")


def test_experiments_that_are_not_there_are_told(tmp_path: Path) -> None:
    declare_made_up(tmp_path)
    with pytest.raises(UserError, match="Unknown experiment 'table9'"):
        gather(tmp_path, ["table9"])
    with pytest.raises(UserError, match="the experiments are none; allowed: one"):
        gather(tmp_path, out=tmp_path)


@pytest.mark.parametrize("folder", KEPT, ids=lambda path: path.name)
def test_the_clients_of_a_kept_run_make_its_figure(folder: Path) -> None:
    """So the pairs of clients have the same weights as the accuracy that they are to explain."""
    run = RunFolder(folder)
    summary = run.summary() or {}
    for figure in {"test_accuracy", "unseen_test_accuracy"} & set(summary):
        scores, weights = client_scores(run, figure)
        assert np.average(list(scores.values()), weights=list(weights.values())) == pytest.approx(summary[figure])
