"""Declared experiments: read, planned, worked off by one process or several, and put beside the paper."""

from __future__ import annotations

import contextlib
import fcntl
import json
from pathlib import Path

import pytest
from declared import SMALL, declare, nobody_watches

import fedem
from fedem.core.errors import UserError
from fedem.methods import METHODS
from fedem.report.console import console
from fedem.report.studies import experiment_markdown, experiments_table
from fedem.runs.config import Config
from fedem.runs.rounds import RoundCosts, State, Training
from fedem.studies.experiments import (
    Experiment,
    find,
    listed,
    plan,
    sort_settings,
    tabulate,
)
from fedem.studies.sweep import Entry, SharedData, work_off

DECLARED = Path(__file__).parents[2] / "experiments"
ALIKE = """
title = "A small one"
figures = ["test_accuracy"]

[settings]
"data.name" = "synthetic"
"data.num_clients" = 4
"run.rounds" = 2
"run.evaluate_every" = 0

[axes.method]
"FedAvg" = { "method.name" = "fedavg" }
"FedAvg+" = { "method.name" = "fedavg+" }
"kNN-Per" = { "method.name" = "fedavg", "run.neighbours" = 2 }
"""


@pytest.fixture
def small(tmp_path: Path) -> Experiment:
    return declare(tmp_path, SMALL)


def test_a_plan_has_every_choice_and_seed_once(small: Experiment, tmp_path: Path) -> None:
    entries = plan(small, tmp_path / "out", [0, 1])
    assert len(entries) == len({entry.folder.path for entry in entries}) == 6
    assert {tuple(entry.labels.values()) for entry in entries} == {
        ("FedEM", "slow"),
        ("FedEM", "fast"),
        ("FedAvg", "fast"),
    }
    for entry in entries:
        assert entry.config.name("method") == entry.labels["method"].lower()
        assert entry.config.schedule.learning_rate == {"slow": 0.01, "fast": 0.5}[entry.labels["rate"]]
        assert entry.config.run.seed == entry.seed
    # Those with the same data come one after the other.
    assert [entry.seed for entry in entries] == [0, 0, 0, 1, 1, 1]


def test_choices_and_settings_narrow_a_plan(small: Experiment, tmp_path: Path) -> None:
    shared, own = sort_settings(small, ["run.rounds=3", "slow:solver.momentum=0.5"])
    entries = plan(small, tmp_path, [0], {"method": ["FedEM"]}, shared, own)
    found = {entry.labels["rate"]: entry.config for entry in entries}
    assert set(found) == {"slow", "fast"}
    assert all(config.run.rounds == 3 for config in found.values())
    assert found["slow"].values("solver")["momentum"] == 0.5
    assert found["fast"].values("solver")["momentum"] == 0.9


def test_runs_share_their_data_and_are_never_done_twice(small: Experiment, tmp_path: Path) -> None:
    entries = plan(small, tmp_path / "out", [0, 1])
    made: list[int] = []

    def make(config: Config):
        made.append(config.run.seed)
        return config.make_data()

    assert work_off(entries[:2], nobody_watches, SharedData(make)) == {}
    assert made == [0]
    before = {entry.title: (entry.folder.path / "summary.json").stat().st_mtime_ns for entry in entries[:2]}
    assert work_off(entries, nobody_watches, SharedData(make)) == {}
    assert made == [0, 0, 1]
    assert all(entry.is_complete for entry in entries)
    for entry in entries[:2]:
        assert (entry.folder.path / "summary.json").stat().st_mtime_ns == before[entry.title]
    # The same clients and samples for all methods of a seed.
    for seed in (0, 1):
        rows = [entry.folder.clients() for entry in entries if entry.seed == seed]
        assert len({json.dumps([(row["client"], row["train_samples"]) for row in table]) for table in rows}) == 1


def test_runs_that_differ_in_what_unseen_clients_have_train_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SMALL.replace("[axes.rate]", "[axes.share]").replace('rate = "slow"', 'share = "slow"')
    for label, share in {"slow": 0.0, "fast": 1.0}.items():
        before = next(line for line in text.splitlines() if line.startswith(f"{label} ="))
        text = text.replace(before, f'{label} = {{ "run.unseen_share" = {share} }}')
    text = text.replace('"run.rounds" = 2', '"run.rounds" = 2\n"run.unseen" = 0.5\n"run.evaluate_every" = 1')
    entries, trained, real = plan(declare(tmp_path, text), tmp_path / "out", [0]), list[int](), Training.step

    def step(training: Training, state: State) -> tuple[State, RoundCosts]:
        trained.append(state.round)
        return real(training, state)

    monkeypatch.setattr(Training, "step", step)
    assert work_off(entries, nobody_watches, SharedData()) == {}
    assert [entry.labels["method"] for entry in entries] == ["FedEM", "FedEM", "FedAvg"]
    assert trained == [0, 1] * 2, "once for each method"
    for entry in entries:
        alone = fedem.run(entry.config, entry.config.make_data()).summary
        own = {"seconds_total", "seconds_per_round", "peak_host_bytes", "clients_together"}
        mine = entry.folder.summary() or {}
        assert {k: v for k, v in mine.items() if k not in own} == {k: v for k, v in alone.items() if k not in own}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that are run from here on, whatever run they are of."""
    rounds, real = list[int](), Training.step

    def step(training: Training, state: State) -> tuple[State, RoundCosts]:
        rounds.append(state.round)
        return real(training, state)

    monkeypatch.setattr(Training, "step", step)
    return rounds


def test_what_acts_after_training_needs_none_even_in_a_later_command(tmp_path: Path, trained: list[int]) -> None:
    """FedAvg+ is FedAvg until it is fine-tuned, and kNN-Per until samples are asked."""
    experiment = declare(tmp_path, ALIKE)
    for label in ("FedAvg", "FedAvg+", "kNN-Per"):
        (entry,) = plan(experiment, tmp_path / "out", [0], {"method": [label]})
        assert work_off([entry], nobody_watches, SharedData()) == {}
        (tmp_path / "out" / "damaged").mkdir(exist_ok=True)
        (tmp_path / "out" / "damaged" / "config.toml").write_text("[run")  # is nobody's business here
        (tmp_path / "out" / "damaged" / "summary.json").write_text("{}")
        assert trained == [0, 1], "once for all three"
        alone = fedem.run(entry.config, entry.config.make_data()).summary
        del trained[2:]
        mine = entry.folder.summary() or {}
        assert mine["test_accuracy"] == alone["test_accuracy"]
        assert entry.departures == {}, "what the data decided, such as the loss, is none"


def test_a_run_lends_its_training_to_one_that_is_not_scored_on_the_way_in_another_folder(
    tmp_path: Path, trained: list[int]
) -> None:
    experiment, places = declare(tmp_path, ALIKE), tmp_path / "runs"

    def work(folder: str, label: str, settings: str, around: Path | None = places) -> Entry:
        del trained[:]
        shared, own = sort_settings(experiment, settings.split())
        (entry,) = plan(experiment, places / folder, [0], {"method": [label]}, shared, own)
        assert work_off([entry], nobody_watches, SharedData(), around) == {}
        return entry

    scored = work("curves", "FedAvg", "run.evaluate_every=1")
    assert [line["round"] for line in scored.folder.metrics() if "test_loss" in line] == [1, 2]
    assert trained == [0, 1]
    tuned = work("others", "FedAvg+", "")
    assert trained == [], "from the other folder"
    alone = work("alone", "FedAvg+", "", around=None)
    assert trained == [0, 1], "nobody is around"
    for first, second in zip(tuned.folder.metrics(), alone.folder.metrics(), strict=True):
        assert first | {"seconds": 0} == second | {"seconds": 0}
    own = {"seconds_total", "seconds_per_round", "peak_host_bytes", "clients_together"}
    mine, theirs = (entry.folder.summary() or {} for entry in (tuned, alone))
    assert mine["best"] == theirs["best"], "it has the fine-tuned last state, whatever was best on the way"
    assert {k: v for k, v in mine.items() if k not in own} == {k: v for k, v in theirs.items() if k not in own}
    work("on-the-way", "FedAvg+", "run.evaluate_every=1")
    assert trained == [0, 1], "its clients are fine-tuned whenever they are scored"
    work("early", "FedAvg", "run.evaluate_every=1 run.patience=1")
    work("patient", "FedAvg", "run.patience=1")
    assert trained == [0, 1], "scores on the way may have ended the other"


def test_a_run_that_another_process_holds_is_left_to_it(small: Experiment, tmp_path: Path) -> None:
    entries = plan(small, tmp_path / "out", [0])
    (tmp_path / "out" / ".claims").mkdir(parents=True)
    with (tmp_path / "out" / ".claims" / entries[1].folder.path.name).open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        work_off(entries, nobody_watches, SharedData())
        assert [entry.is_complete for entry in entries] == [True, False, True]
    work_off(entries, nobody_watches, SharedData())
    assert all(entry.is_complete for entry in entries)


def test_a_killed_run_is_gone_on_with(small: Experiment, tmp_path: Path) -> None:
    entries = plan(small, tmp_path / "out", [0])

    @contextlib.contextmanager
    def killing(entry: object):
        def listen(record: dict[str, float]) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

        yield listen

    with pytest.raises(KeyboardInterrupt):
        work_off(entries, killing, SharedData())
    assert entries[0].folder.exists()
    assert not entries[0].is_complete
    work_off(entries, nobody_watches, SharedData())
    whole = plan(small, tmp_path / "whole", [0])
    work_off(whole, nobody_watches, SharedData())
    for entry, reference in zip(entries, whole, strict=True):
        first, second = entry.folder.summary(), reference.folder.summary()
        assert first is not None
        assert second is not None
        assert first["test_loss"] == second["test_loss"]


def test_one_failure_does_not_stop_the_others(small: Experiment, tmp_path: Path) -> None:
    shared, own = sort_settings(small, ["FedAvg:schedule.learning_rate=1e30"])
    entries = plan(small, tmp_path / "out", [0], asked=shared, own=own)
    failed = work_off(entries, nobody_watches, SharedData())
    assert [entry.is_complete for entry in entries if entry.labels["method"] == "FedEM"] == [True, True]
    assert set(failed) <= {"FedAvg, fast, seed 0"}


def test_our_figures_stand_beside_the_papers(small: Experiment, tmp_path: Path) -> None:
    entries = plan(small, tmp_path / "out", [0, 1])
    work_off([entry for entry in entries if entry.labels["method"] == "FedEM"], nobody_watches, SharedData())
    lines = {tuple(line.labels.values()): line for line in tabulate(small, entries)}
    fast = lines["FedEM", "fast"]
    summaries = [entry.folder.summary() for entry in entries if entry.labels == fast.labels]
    scores = [summary["test_accuracy"] for summary in summaries if summary is not None]
    assert fast.seeds == (0, 1)
    assert fast.ours["test_accuracy"].mean == pytest.approx(sum(scores) / 2)
    largest = [max(summary["recovery"]["component_distances"]) for summary in summaries if summary is not None]
    assert fast.ours["recovery.component_distances"].mean == pytest.approx(sum(largest) / 2)
    assert fast.paper == {"test_accuracy": 74.7, "recovery.component_distances": None}
    assert lines["FedAvg", "fast"].seeds == ()
    assert lines["FedAvg", "fast"].ours["test_accuracy"].mean is None
    row = next(
        line for line in experiment_markdown(small, tabulate(small, entries)).splitlines() if "| fast | 0, 1 |" in line
    )
    assert f"| {100 * sum(scores) / 2 - 74.7:+.1f} |" in row


def test_methods_are_compared_with_the_best_on_the_same_data(small: Experiment, tmp_path: Path) -> None:
    entries = plan(small, tmp_path / "out", [0, 1])
    scores = {("FedEM", "slow"): (0.9, 0.9), ("FedEM", "fast"): (0.5, 0.6), ("FedAvg", "fast"): (0.6, 0.8)}
    for entry in entries:
        folder, score = entry.folder.path, scores[tuple(entry.labels.values())][entry.seed]
        folder.mkdir(parents=True)
        head = {"method": entry.config.name("method"), "data": "synthetic", "rounds": 2, "seed": entry.seed}
        figures = {"num_clients": 4, "num_components": 1, "test_accuracy": score, "test_loss": 0.5}
        (folder / "summary.json").write_text(json.dumps(head | figures))
    lines = tabulate(small, entries)
    gaps = {tuple(line.labels.values()): line.gap for line in lines}
    assert gaps["FedEM", "slow"] is None, "nobody else has its data and settings"
    assert gaps["FedAvg", "fast"] is None, "it is the best"
    assert gaps["FedEM", "fast"] == (pytest.approx(-0.15), pytest.approx(0.05), 2)
    text = experiment_markdown(small, lines).splitlines()
    assert text[0].startswith("| method | rate | seeds | to the best, ± s.e. | test, % |")
    assert any(line.startswith("| FedEM | fast | 0, 1 | -15.00 ±5.00 | 55.0 ±7.1 |") for line in text)
    assert any(line.startswith("| FedAvg | fast | 0, 1 | best |") for line in text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('place = "Nowhere"', 'plaice = "Nowhere"'), "plaice"),
        (('"run.rounds" = 2', '"rounds" = 2'), "has 'rounds'; allowed: \"section.key\" = value"),
        (('"FedEM / fast" = [74.7, ""]', '"FedEM / quick" = [74.7, ""]'), "a label of each axis"),
        (
            ('"FedEM / fast" = [74.7, ""]', '"FedEM / fast" = [74.7]'),
            "'FedEM / fast' = [74.7]; allowed: 2 numbers",
        ),
        (("seeds = 2", "seeds = two"), "can't be read as an experiment"),
        (("seeds = 2", 'seeds = "2"'), "has seeds = '2'; allowed: a whole number from 1"),
        (('"test_accuracy", "recovery', '3, "recovery'), "allowed: a list of names"),
        (('"test_accuracy", "recovery', '"test_accuracy / FedProx", "recovery'), "Unknown label"),
        (('rate = "slow"', 'rate = "slower"'), "allowed: tables of labels by axis (method, rate)"),
        (("[paper]", "[quick.FedProx]\n[paper]"), "Unknown label"),
        (("fast = {", '"fast, wild" = {'), "has label = 'fast, wild'; allowed: labels without ','"),
        (('{ "schedule.learning_rate" = 0.5 }', "0.5"), 'has 0.5; allowed: { "section.key" = value }'),
    ],
)
def test_mistakes_in_a_file_are_told(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        declare(tmp_path, SMALL.replace(*change))
    assert message in str(error.value)


def test_wrong_names_are_told(small: Experiment, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Unknown axis 'methods'"):
        plan(small, tmp_path, [0], {"methods": ["FedEM"]})
    with pytest.raises(UserError, match="Unknown choice of method 'FedProx'"):
        plan(small, tmp_path, [0], {"method": ["FedProx"]})
    with pytest.raises(UserError, match="Unknown label"):
        sort_settings(small, ["FedProx:run.rounds=3"])
    with pytest.raises(UserError, match=r"Unknown label in --set 'FedEM:fast:run\.rounds=3' 'fast'"):
        sort_settings(small, ["FedEM:fast:run.rounds=3"])
    with pytest.raises(UserError, match=r"run\.seed is given by --seeds"):
        sort_settings(small, ["run.seed=3"])
    with pytest.raises(UserError, match="Unknown experiment 'table9'"):
        find(DECLARED, "table9")
    with pytest.raises(UserError, match="There are no experiments in"):
        listed(tmp_path / "nothing")


PART = SMALL.replace('place = "Nowhere"', 'runs = "small"').replace('slow = { "schedule.learning_rate" = 0.01 }', "")
PART = PART.partition("[[without]]")[0]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_experiment_may_select_from_anothers_runs(
    small: Experiment, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(tmp_path, PART, "part")
    monkeypatch.chdir(tmp_path)
    where = ["--seeds", "1", "--experiments", tmp_path]
    assert run("experiment", "run", "small", *where)[0] == 0
    made = contents(Path("runs"))
    code, out, _ = run("experiment", "run", "part", *where)
    assert (code, "Experiment: runs/experiments/small" in out) == (0, True)
    now = contents(Path("runs"))
    page = Path("runs/experiments/small/part.md")
    assert now.keys() - made.keys() == {page}, "nothing was trained"
    assert made == {path: content for path, content in now.items() if path != page}
    assert [line.split(" | ")[0] for line in page.read_text().splitlines()[2:]] == ["| FedEM", "| FedAvg"]
    code, out, _ = run("experiment", "table", "part", "--experiments", tmp_path)
    assert (code, "Runs: runs/experiments/small" in out) == (0, True)


@pytest.mark.parametrize(
    "change",
    [
        ('"run.rounds" = 2', '"run.rounds" = 3'),
        ('"schedule.learning_rate" = 0.5', '"schedule.learning_rate" = 0.6'),
        ("fast =", "quick ="),
        ("[axes.rate]", "[axes.speed]"),
        ('runs = "small"', 'runs = "part"'),
    ],
)
def test_runs_that_are_not_the_others_are_refused(small: Experiment, tmp_path: Path, change: tuple[str, str]) -> None:
    declare(tmp_path, PART, "part")
    with pytest.raises(UserError, match=r"has runs = '(small|part)'; allowed: an experiment with runs by itself"):
        declare(tmp_path, PART.replace(*change), "other")


def test_a_label_with_an_equals_sign_has_settings_of_its_own(tmp_path: Path) -> None:
    experiment = declare(tmp_path, SMALL.replace("fast = {", '"rate = 0.5" = {').replace("/ fast", "/ rate = 0.5"))
    shared, own = sort_settings(experiment, ["rate = 0.5:run.rounds=3", "run.evaluate_every=4"])
    assert (shared, own) == ([{"run": {"evaluate_every": 4}}], {"rate = 0.5": [{"run": {"rounds": 3}}]})


def test_a_list_of_experiments_fills_the_width_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 80)
    with console.capture() as captured:
        console.print(experiments_table([find(DECLARED, name) for name in listed(DECLARED)]))
    lines = captured.get().splitlines()
    assert max(len(line.rstrip()) for line in lines) > 70
    for name in listed(DECLARED):
        assert any(line.split()[:1] == [name] for line in lines)


@pytest.mark.parametrize("name", listed(DECLARED))
def test_every_declared_experiment_is_sound_and_has_a_readme(name: str, tmp_path: Path) -> None:
    experiment = find(DECLARED, name)
    entries = plan(experiment, tmp_path, range(experiment.seeds))
    assert len({entry.folder.path for entry in entries}) == len(entries)
    assert all(entry.config.name("method") in METHODS for entry in entries)
    quick = plan(experiment, tmp_path, [0], quick=True)
    assert all(entry.config.run.rounds <= 2 for entry in quick)
    text = (DECLARED / name / "README.md").read_text()
    assert f"fedem experiment run {name}" in text


def test_no_name_is_cut_in_a_narrow_terminal(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 80)
    code, out, _ = run("experiment", "table", "table2", "--data", "EMNIST", "--experiments", DECLARED)
    assert code == 0
    assert "…" not in out
    words = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert {word for name in find(DECLARED, "table2").axes["method"] for word in name.split()[:1]} <= words


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in listed(DECLARED) if name != "larger_models"])
def test_every_declared_experiment_runs_quickly_on_synthetic_data(name: str, run, tmp_path: Path) -> None:
    only = ["--data", "Synthetic"] if "data" in find(DECLARED, name).axes else []
    options = ["--quick", *only, "--experiments", DECLARED, "--out", tmp_path / "x"]
    code, out, _ = run("experiment", "run", name, *options)
    assert code == 0
    assert "Experiment: " in out
    assert (tmp_path / "x" / "table.md").read_text().startswith("| ")
    code, out, _ = run(
        "experiment", "status", name, "--quick", *only, "--experiments", DECLARED, "--out", tmp_path / "x"
    )
    assert (code, "to do" in out) == (0, False)


def test_the_convergence_plots_are_drawn_from_the_experiments_folder(run, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    options = ["--quick", "--data", "Synthetic", "--experiments", DECLARED, "--out", folder]
    assert (
        run("experiment", "run", "convergence", *options, "--only", "method=FedAvg", "--only", "method=FedEM")[0] == 0
    )
    runs = sorted(folder.glob("synthetic_*"))
    assert len(runs) == 2
    assert run("plot", *runs, "--figure", "rounds,bytes", "--out", tmp_path / "figures")[0] == 0
    for name in ("rounds", "bytes"):
        picture = (tmp_path / "figures" / f"{name}.svg").read_text()
        assert "FedAvg" in picture
        assert "FedEM (M=3)" in picture
