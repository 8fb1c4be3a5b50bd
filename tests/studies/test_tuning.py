"""Settings are chosen by the validation part alone, whatever happens to the search on its way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import TINY
from helpers import same_states

import fedem
from fedem.core.errors import UserError
from fedem.report.studies import trials_table, tuning_remarks
from fedem.runs.config import Config, read_toml
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import RoundCosts, State, Training
from fedem.runs.trainer import Trainer
from fedem.studies import tuning as trials
from fedem.studies.tuning import RATE, Search, Tuned, tune

LAYER = {
    "method": {"name": "fedavg"},
    "data": {
        "num_clients": 4,
        "num_components": 1,
        "dimension": 3,
        "max_samples": 60,
        "num_validation": 40,
        "num_test": 5,
        "noise_scale": 0.0,
    },
    "run": {"rounds": 3, "checkpoint_every": 1},
}
HUGE = 1e38  # no float32 survives a step so long
SEARCH = Search((LAYER,), {RATE: (1e-6, 0.3, HUGE)}, seeds=(0, 1))


def outcome(found: Tuned) -> list[dict[str, Any]]:
    """The trials without what a clock says."""
    return [trial.record() | {"seconds": None} for trial in found.trials]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs that were trained, in order."""
    folders: list[Path] = []
    real = trials.carry_out

    def carry_out(trainer: Trainer, *, out: Path, **options: Any) -> fedem.Result:
        folders.append(out)
        return real(trainer, out=out, **options)

    monkeypatch.setattr(trials, "carry_out", carry_out)
    return folders


def test_the_one_rate_that_learns_is_chosen_and_the_one_that_diverges_is_told(tmp_path: Path) -> None:
    found = tune(SEARCH, tmp_path / "t")
    assert found.best is not None
    assert found.best.values == {RATE: 0.3}
    assert found.edges == {}
    failed = found.trials[-1]
    assert (failed.number, failed.scores, failed.spread.mean) == (2, None, None)
    assert str(failed.error).startswith("seed 0: Training diverged in round")
    told = tuning_remarks(found)
    assert told[0] == f"Chosen: {RATE} = 0.3."
    assert told[1] == "The paper's learning rate is 0.1; the one chosen is 3 times as large."
    assert told[2].startswith("Trial 002 failed: seed 0: Training diverged")
    assert trials_table(found).row_count == 3


@pytest.mark.parametrize("metric", ["log_loss", "calibration_error"])
def test_what_diverged_ranks_last_though_its_score_is_finite(tmp_path: Path, metric: str) -> None:
    # At this rate predictions are finite, and the losses on training samples absurd.
    layers = (LAYER, {"run": {"metrics": metric}})
    found = tune(Search(layers, {RATE: (1e9, 1e-6, 0.3)}), tmp_path / "t")
    assert [trial.number for trial in found.trials][-1] == 0
    assert "the loss on the training samples is" in str(found.trials[-1].error)
    summary = RunFolder(tmp_path / "t/trials/000/seed0").summary() or {}
    assert np.isfinite(summary[f"validation_{metric}"])


def test_an_absurd_error_ranks_last(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(60, 3)), y=rng.normal(size=60), client=np.arange(60) % 4)
    data = {"name": "file", "path": str(tmp_path / "d.npz"), "validation": 0.3}
    layers = ({"method": {"name": "fedavg"}, "data": data, "run": {"rounds": 2}},)
    found = tune(Search(layers, {RATE: (1e3, 0.01)}), tmp_path / "t")
    assert [trial.number for trial in found.trials] == [1, 0]
    assert "Training diverged: the loss on the training samples is" in str(found.trials[-1].error)


def test_a_failed_trial_is_made_again_only_where_that_is_asked_for(tmp_path: Path, trained: list[Path]) -> None:
    search = replace(SEARCH, seeds=(0,))
    before = tune(search, tmp_path / "t")
    assert (tmp_path / "t/trials/002/seed0/failed.json").exists()
    trained.clear()
    assert outcome(tune(search, tmp_path / "t", resume=True)) == outcome(before)
    assert trained == []
    assert outcome(tune(search, tmp_path / "t", resume=True, retry_failed=True)) == outcome(before)
    assert trained == [tmp_path / "t/trials/002/seed0"]


def test_a_value_that_can_not_be_trained_fails_its_trial_alone(tmp_path: Path) -> None:
    grids = {"run.device": ("cpu", "cuda:77")}
    found = tune(Search((LAYER,), grids), tmp_path / "t")
    assert found.best is not None
    assert found.best.values == {"run.device": "cpu"}
    assert "Device 'cuda:77' is not there" in str(found.trials[1].error)
    with pytest.raises(UserError, match="Device 'cuda:78' is not there"):
        tune(Search((LAYER,), {"run.device": ("cuda:78", "cuda:77")}), tmp_path / "none")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that were trained, in order."""
    done: list[int] = []
    real = Training.step

    def step(training: Training, state: State) -> tuple[State, RoundCosts]:
        done.append(state.round)
        return real(training, state)

    monkeypatch.setattr(Training, "step", step)
    return done


@pytest.mark.slow
def test_trials_that_differ_in_fine_tuning_share_their_training(tmp_path: Path, rounds: list[int]) -> None:
    grids = {RATE: (0.1, 0.3), "run.fine_tune_rate": (0.01, 0.1, 1.0)}
    search = Search((LAYER, {"run": {"fine_tune_epochs": 1, "unseen": 0.25}}), grids, seeds=(0, 1))
    found = tune(search, tmp_path / "t")
    assert rounds == [0, 1, 2] * 4, "two rates, two seeds"
    assert len({trial.scores for trial in found.trials}) == 6
    own = {"seconds_total", "seconds_per_round", "peak_host_bytes", "clients_together"}
    for trial in found.trials:
        for seed in (0, 1):
            config = search.config(trial.values, seed)
            alone = fedem.run(config, search.prepare()[0].of(config))
            folder = RunFolder(tmp_path / f"t/trials/{trial.number:03d}/seed{seed}")
            mine = folder.summary() or {}
            assert {k: v for k, v in mine.items() if k not in own} == {
                k: v for k, v in alone.summary.items() if k not in own
            }
            assert [line | {"seconds": 0} for line in folder.metrics()] == [
                dict(line) | {"seconds": 0} for line in alone.history
            ]
            for role, state in fedem.Result.load(folder.path).tuned.items():
                assert same_states(state, alone.tuned[role])


def test_scores_on_the_way_keep_trials_apart(tmp_path: Path, rounds: list[int]) -> None:
    grids = {"run.fine_tune_rate": (0.01, 0.1)}
    asked = {"run": {"fine_tune_epochs": 1, "evaluate_every": 1}}
    tune(Search((LAYER, asked), grids), tmp_path / "t")
    assert rounds == [0, 1, 2] * 2, "which state is best depends on how clients fine-tune"


def test_values_that_do_not_go_together_fail_their_trial_alone(tmp_path: Path) -> None:
    grids = {"solver.momentum": (0.5, 0.0), "solver.nesterov": (False, True)}
    found = tune(Search((LAYER, {"run": {"rounds": 1}}), grids, seeds=(0,)), tmp_path / "t")
    (failed,) = (trial for trial in found.trials if trial.error is not None)
    assert failed.values == {"solver.momentum": 0.0, "solver.nesterov": True}
    assert str(failed.error).startswith("seed 0: SGD.nesterov is true but SGD.momentum is 0")


def test_a_trial_scores_what_an_ordinary_run_does_on_the_validation_part(tmp_path: Path) -> None:
    found = tune(SEARCH, tmp_path / "t")
    assert found.best is not None
    config = [SEARCH.config(found.best.values, seed) for seed in SEARCH.seeds]
    summaries = [fedem.run(entry, entry.make_data()).summary for entry in config]
    assert found.best.scores == tuple(summary["validation_accuracy"] for summary in summaries)
    mine = [RunFolder(tmp_path / "t/trials/001" / f"seed{seed}").summary() for seed in SEARCH.seeds]
    assert not [key for summary in mine if summary for key in summary if "test" in key or "oracle" in key]
    assert any("test" in key for key in summaries[0])


@pytest.mark.parametrize("unseen", [0.0, 0.5])
def test_poisoned_test_targets_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unseen: float) -> None:
    search = replace(SEARCH, layers=(LAYER, {"run": {"unseen": unseen}}), seeds=(0,))
    clean = outcome(tune(search, tmp_path / "clean"))
    real = Config.make_data

    def poisoned(config: Config) -> fedem.Dataset:
        dataset = real(config)
        samples = dataset.federation.test
        pool = samples.pool._replace(targets=samples.pool.targets + 99)
        return dataset._replace(federation=replace(dataset.federation, test=replace(samples, pool=pool)))

    monkeypatch.setattr(Config, "make_data", poisoned)
    config = search.config({RATE: 0.3}, 0)
    recipe = config.resolve(config.make_data())
    assert recipe.format.outputs > 2, "whoever reads them trains otherwise"
    assert outcome(tune(search, tmp_path / "poisoned")) == clean


@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_a_search_that_was_stopped_goes_on_as_if_it_never_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[Path], sampler: str
) -> None:
    search = replace(SEARCH, sampler=sampler, num_trials=None if sampler == "grid" else 4)
    whole = tune(search, tmp_path / "whole")
    total = len(trained)
    trained.clear()
    counting = trials.carry_out

    def stopped(trainer: Trainer, *, listener: Any, **options: Any) -> fedem.Result:
        def stop(record: dict[str, Any]) -> None:
            if len(trained) == 3 and record["round"] == 2:
                raise KeyboardInterrupt

        return counting(trainer, listener=stop, **options)

    with monkeypatch.context() as patch:
        patch.setattr(trials, "carry_out", stopped)
        with pytest.raises(KeyboardInterrupt):
            tune(search, tmp_path / "cut")
    stopped_at = trained[-1]
    assert len(RunFolder(stopped_at).metrics()) == 2
    trained.clear()
    listened: list[int] = []
    found = tune(search, tmp_path / "cut", resume=True, listener=lambda record: listened.append(record["round"]))
    assert outcome(found) == outcome(whole)
    assert trained[0] == stopped_at
    assert len(trained) == total - 2
    assert listened == sorted(listened)
    trained.clear()
    assert outcome(tune(search, tmp_path / "cut", resume=True)) == outcome(whole)
    assert trained == []


def test_more_trials_may_follow(tmp_path: Path, trained: list[Path]) -> None:
    few = Search((LAYER,), {RATE: (0.01, 1.0)}, "random", 2)
    first = tune(few, tmp_path / "t")
    more = tune(replace(few, num_trials=3), tmp_path / "t", resume=True)
    assert [path.parent.name for path in trained] == ["000", "001", "002"]
    assert all(trial in more.trials for trial in first.trials)


def test_two_searches_do_not_share_a_folder(tmp_path: Path, trained: list[Path]) -> None:
    tune(SEARCH, tmp_path / "t")
    trained.clear()
    others = {
        r"begun with other settings \(grids\)": replace(SEARCH, grids={RATE: (0.1, 0.3)}),
        r"begun with other settings \(data, seeds\)": replace(SEARCH, seeds=(0,)),
        r"begun with other settings \(sampler\)": replace(SEARCH, sampler="random", num_trials=2),
        r"other settings \(run.rounds\)": replace(SEARCH, layers=(LAYER, {"run": {"rounds": 2}})),
        r"other settings \(solver.momentum\)": replace(SEARCH, layers=(LAYER, {"solver": {"momentum": 0.5}})),
    }
    for message, other in others.items():
        with pytest.raises(UserError, match=message):
            tune(other, tmp_path / "t", resume=True)
    with pytest.raises(UserError, match="is not empty; go on with --resume"):
        tune(SEARCH, tmp_path / "t")
    with RunFolder(tmp_path / "t/base").locked(), pytest.raises(UserError, match="Another process"):
        tune(SEARCH, tmp_path / "t", resume=True)
    assert trained == []


def test_other_data_are_not_mixed_in_and_errors_are_minimised(tmp_path: Path) -> None:
    def write(seed: int) -> None:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(80, 3))
        np.savez(tmp_path / "d.npz", x=x, y=x @ [1.0, -2.0, 0.5], client=np.arange(80) % 4)

    write(0)
    layer = {"method": {"name": "fedavg"}, "data": {"name": "file", "path": str(tmp_path / "d.npz")}}
    search = Search((layer, {"run": {"rounds": 3}}), {RATE: (1e-6, 0.1)})
    found = tune(search, tmp_path / "t")
    assert found.best is not None
    assert (found.metric, found.best.values, found.edges) == ("mean_squared_error", {RATE: 0.1}, {RATE: "upper"})
    means = [trial.spread.mean for trial in found.trials]
    assert means == sorted(means, key=float)
    assert "at the upper edge of what was searched, 1e-06 to 0.1: the best may lie beyond" in tuning_remarks(found)[1]
    assert found.paper_rate is None
    write(1)
    with pytest.raises(UserError, match="The data are not those that the search in"):
        tune(search, tmp_path / "t", resume=True)


# --- the command line

Call = Callable[..., tuple[int, str, str]]
GRID = ["--grid", f"{RATE}=1e-6,0.3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "schedule.rate=0.1"], "Unknown key in [schedule] 'rate'"),
        (["--grid", "nothing.rate=0.1"], "Unknown section 'nothing'"),
        (["--grid", "learning_rate=0.1"], "allowed: section.key=value,value,..."),
        (["--grid", f"{RATE}="], "--grid got 'schedule.learning_rate='; allowed: section.key=value,value,..."),
        (["--grid", f"{RATE}=0.1,"], "allowed: section.key=value,value,..."),
        (["--grid", f"{RATE}=0.1,-1"], "schedule.learning_rate is -1; allowed: at least 0"),
        (["--grid", f"{RATE}=0.1,fast"], "schedule.learning_rate is 'fast'; allowed: a number"),
        (["--grid", f"{RATE}=0.1,0.1"], "allowed: every setting once, and each of its values once"),
        ([*GRID, *GRID], "allowed: every setting once"),
        (["--method", "fedavg", "--grid", "method.mu=0.1"], "Unknown key in [method] 'mu'"),
        (["--grid", "data.num_clients=3,4"], "data.num_clients is the same in all trials"),
        (["--grid", "run.seed=3,4"], "run.seed is the same in all trials"),
        (["--grid", "batching.batch_size=8,-2"], "batching.batch_size is -2"),
        ([*GRID, "--set", f"{RATE}=0.1"], "schedule.learning_rate is both set and searched"),
        (["--set", f"{RATE}=0.1"], "There is no setting to search"),
        (["--set", "run.seed=1"], "--set got 'run.seed=1'; run.seed is given by --seeds"),
        (["--sampler", "bayes"], "Unknown sampler 'bayes'; allowed: grid, random, tpe"),
        (["--sampler", "tpe", "--trials", "0"], "--trials is 0; allowed: at least 1"),
        (["--trials", "3"], "--trials is 3, but a grid is tried as a whole"),
        (["--method", "fedam"], "Unknown method 'fedam'"),
        (["--seeds", "2,2"], "The seeds are 2, 2; allowed: one or several, each once"),
        (["--set", "data.num_validation=0"], "no validation samples to choose by"),
        (["--device", "tpu"], "Unknown device 'tpu'"),
        (["--resume"], "--resume needs the folder"),
        (["--resume", "--out", "nowhere"], "There is no search to resume in nowhere"),
        (["--out", "full"], "full is not empty; go on with --resume, or choose another folder"),
        (["--out", "full/file/t"], "can't be written"),
    ],
)
def test_bad_input_is_refused_before_work(
    run: Call, tmp_path: Path, trained: list[Path], arguments: list[str], message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("tune", "--quiet", *TINY, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert (trained, sorted(tmp_path.rglob("*"))) == ([], before)


def test_a_missing_package_is_told_with_its_extra(run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = run("tune", "--sampler", "tpe", "--quiet", *TINY)
    assert code == 2
    assert "The sampler tpe needs the package optuna" in err
    assert "fedem[tune]" in err
    assert run("tune", "--quiet", *TINY, *GRID)[0] == 0, "a grid needs no sampler"


def test_what_is_chosen_can_be_trained(run: Call, tmp_path: Path) -> None:
    code, out, err = run("tune", *TINY, *GRID, "--seeds", "1,2", "--method", "fedavg", "--out", "t")
    assert code == 0, err
    assert "validation accuracy in %" in " ".join(out.split())
    assert f"Chosen settings: {Path('t/chosen.toml')}" in out
    record = json.loads((tmp_path / "t/tune.json").read_text())
    assert record["command"].startswith("fedem tune --set data.num_clients=6")
    assert record["seeds"] == [1, 2]
    assert [trial["mean"] for trial in record["trials"]] == sorted(
        (np.mean(trial["scores"]) for trial in record["trials"]), reverse=True
    )
    chosen = read_toml(tmp_path / "t/chosen.toml")
    assert chosen["schedule"] == {"learning_rate": record["chosen"][RATE]}
    assert run("train", "t/chosen.toml", "--quiet", "--out", "r", "--seed", "1")[0] == 0
    best = next(trial["number"] for trial in record["trials"] if trial["values"] == record["chosen"])
    first, second = RunFolder(tmp_path / f"t/trials/{best:03d}/seed1").config(), RunFolder(tmp_path / "r").config()
    assert first == second


def test_nothing_is_chosen_where_all_trials_fail(run: Call, tmp_path: Path) -> None:
    code, out, err = run("tune", *TINY, "--grid", f"{RATE}={HUGE}", "--out", "t", "--quiet")
    assert (code, out) == (2, "")
    assert "No trial came to an end, so nothing is chosen. seed 0: Training diverged in round" in err
    assert json.loads((tmp_path / "t/tune.json").read_text())["chosen"] is None
    assert not (tmp_path / "t/chosen.toml").exists()
