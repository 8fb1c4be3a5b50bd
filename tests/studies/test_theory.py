"""The study of the convergence theorems: its slopes, its command and its pictures."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import sparse
from scipy.stats import linregress, sem, t

from fedem.core.errors import UserError
from fedem.report.studies import draw_study, plot_diagnostics, study_remarks, study_table
from fedem.runs.config import Config
from fedem.runs.measures import Diagnosis, diagnose
from fedem.runs.rounds import mixer_seed
from fedem.runs.trainer import Trainer
from fedem.studies.theory import OUTCOMES, QUANTITIES, SMALL, Study, assumed, fit_trend, is_due, study

TINY = {"data": {"num_clients": 4, "dimension": 3, "max_samples": 30, "min_samples": 20}}
OPTIONS = [word for key, value in TINY["data"].items() for word in ("--set", f"data.{key}={value}")]


def _config(method: str = "fedem", **sections: dict[str, object]) -> Config:
    graph = {"graph": {"name": "ring"}} if method.startswith("d") else {}
    return Config.build(assumed(method), SMALL, TINY, graph, {"method": {"name": method}}, sections)


def _tiny(method: str = "fedem", **settings: object) -> Study:
    return study(_config(method), (1, 2, 4), a0=2.0, **settings)


@pytest.fixture(scope="module")
def found() -> dict[str, Study]:
    return {method: _tiny(method) for method in ("fedem", "dfedem", "fedavg", "dsgd")}


def test_means_are_over_all_rounds_and_seeds() -> None:
    seeds = (3, 5)
    result = study(_config(), (1, 2, 3), a0=2.0, every=1, seeds=seeds)
    config = _config()
    data = config.make_data()
    for point in result.points:
        assert point.learning_rate == 2 / point.rounds**0.5
        values = []
        for seed in seeds:
            fixed = config.replace("schedule", name="constant", learning_rate=point.learning_rate)
            training = Trainer.prepare(fixed.replace("run", rounds=point.rounds, seed=seed), data).training
            states = [training.init()]
            for _ in range(point.rounds):
                states.append(training.step(states[-1])[0])
            values += [diagnose(training, *pair) for pair in pairwise(states)]
        for name in QUANTITIES:
            assert point.means[name] == pytest.approx(np.mean([getattr(value, name) for value in values]), rel=1e-5)


def test_few_measurements_give_about_the_mean_over_all_rounds() -> None:
    for power in (-0.5, -1.0, -2.0):
        rounds = np.arange(1, 1001)
        due = np.array([number for number in rounds if is_due(number, 1000, 20)])
        assert len(due) < 120
        assert due[:10].tolist() == list(range(1, 11))
        assert due[-1] == 1000
        known = np.interp(rounds, due, due**power).mean()
        assert known == pytest.approx((rounds**power).mean(), rel=0.005)
    assert all(is_due(number, 1000, 1) for number in rounds)


@given(st.floats(-3, 0), st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=8))
def test_the_line_of_one_seed_is_that_of_scipy(slope: float, noise: list[float]) -> None:
    rounds = [25 * 2**power for power in range(len(noise))]
    means = np.exp(slope * np.log(rounds) + noise)
    trend = fit_trend(rounds, means[:, None].tolist(), -0.5)
    assert trend is not None
    expected = linregress(np.log(rounds), np.log(means))
    assume(expected.stderr > 1e-6)  # of a perfect fit scipy finds no error
    half = t.ppf(0.975, len(noise) - 2) * expected.stderr
    assert trend.slope == pytest.approx(expected.slope, abs=1e-9)
    assert trend.intercept == pytest.approx(expected.intercept, abs=1e-8)
    assert (trend.low, trend.high) == pytest.approx((expected.slope - half, expected.slope + half), abs=1e-6)


@given(st.lists(st.floats(-3, 0), min_size=2, max_size=6))
def test_the_interval_of_seeds_on_lines_of_their_own_is_that_of_scipy(slopes: list[float]) -> None:
    """Exact lines leave nothing but the spread of their slopes."""
    rounds = np.array([25, 50, 100, 200])
    trend = fit_trend(rounds.tolist(), np.exp(np.outer(np.log(rounds), slopes)).tolist(), -0.5)
    assert trend is not None
    assert trend.slope == pytest.approx(np.mean(slopes), abs=1e-9)
    assume(sem(slopes) > 1e-6)
    expected = t.interval(0.95, len(slopes) - 1, loc=np.mean(slopes), scale=sem(slopes))
    assert (trend.low, trend.high) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("slope", "outcome"), [(-0.5, "consistent"), (-0.8, "consistent"), (-0.49, "refuted"), (0.1, "refuted")]
)
def test_an_exact_power_is_decided(slope: float, outcome: str) -> None:
    rounds = (10, 20, 40, 80)
    means = [[7 * number**slope, 5 * number**slope] for number in rounds]
    trend, free = (fit_trend(rounds, means, rate) for rate in (-0.5, None))
    assert trend is not None
    assert free is not None
    assert (trend.outcome, free.outcome) == (outcome, None)


def test_noise_decides_nothing() -> None:
    """A slope of about +0.5 beside a rate of -0.75, with an error as large as itself: once it was said to hold."""
    trend = fit_trend((2, 4, 8), [[1.0], [0.4], [2.0]], -0.75)
    assert trend is not None
    assert trend.slope == pytest.approx(0.5)
    assert trend.outcome == "undecided"


@pytest.mark.parametrize("slope", [-0.5, -0.4])
def test_wrong_decisions_are_rare(slope: float) -> None:
    """At a slope that is the rate, and at one that is flatter by 0.1, with noise of runs and of seeds."""
    rng, rounds = np.random.default_rng(0), (50, 100, 200, 400, 800)
    found = dict.fromkeys(OUTCOMES, 0)
    for _ in range(400):
        own = slope + 0.05 * rng.normal(size=5)
        logs = np.outer(np.log(rounds), own) + 0.05 * rng.normal(size=(5, 5))
        trend = fit_trend(rounds, np.exp(logs).tolist(), -0.5)
        assert trend is not None
        found[str(trend.outcome)] += 1
    assert found["consistent"] <= 20  # one in forty, of 400: 10, and chance
    assert found["refuted"] <= 20 if slope == -0.5 else found["refuted"] >= 200


@pytest.mark.parametrize(
    ("method", "zero", "rated"),
    [
        ("fedem", {"consensus"}, {"gradient_norm2": -0.5, "improvement": -0.75}),
        ("dfedem", set(), {"gradient_norm2": -0.5, "weights_kl": -1.0, "consensus": -0.5}),
        ("fedavg", {"improvement", "weights_kl", "consensus"}, {"gradient_norm2": -0.5}),
        ("dsgd", {"improvement", "weights_kl"}, {"gradient_norm2": -0.5, "consensus": -0.5}),
    ],
)
def test_what_is_zero_is_not_fitted_and_each_theorem_has_its_rates(
    found: dict[str, Study], method: str, zero: set[str], rated: dict[str, float]
) -> None:
    trends = found[method].trends
    assert {name for name, trend in trends.items() if trend is None} == zero
    assert {name: trend.rate for name, trend in trends.items() if trend and trend.rate is not None} == rated
    for point in found[method].points:
        assert {name for name, mean in point.means.items() if mean == 0} == zero


@pytest.mark.slow
def test_a_convex_problem_falls_as_the_theorem_says() -> None:
    """One model for all: no plateau before the components part, so few rounds are enough."""
    config = _config("fedavg", data={"num_clients": 10, "max_samples": 60, "dimension": 5})
    trend = study(config, (4, 8, 16, 32), a0=5.0, seeds=(0, 1, 2)).trends["gradient_norm2"]
    assert trend is not None
    assert trend.outcome != "refuted"
    assert -1.2 < trend.slope < -0.4


def test_the_listener_counts_all_rounds() -> None:
    seen: list[int] = []
    study(_config(), (2, 3, 4), 1.0, seeds=(0, 1), listener=lambda record: seen.append(record["round"]))
    assert seen == list(range(1, 19))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedem", "dfedem", "fedavg"])
def test_tables_and_pictures(found: dict[str, Study], method: str) -> None:
    result = found[method]
    table = study_table(result)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["1", "2", "4", "slope", "95% interval", "theorem", "outcome"]
    for column, name in zip(cells[2:], QUANTITIES, strict=True):
        trend = result.trends[name]
        if trend is None:
            assert column[3:] == ["zero", "", "", ""]
        else:
            assert column[3] == f"{trend.slope:.3f}"
            assert column[4] == f"{trend.low:.3f} to {trend.high:.3f}"
            assert column[6] == (trend.outcome or "")
    picture = draw_study(result)
    assert picture[:4] == b"\x89PNG"
    assert picture == draw_study(result)
    assert "G = " in study_remarks(result)[0]


@pytest.mark.slow
def test_a_runs_diagnostics_are_drawn(tmp_path: Path) -> None:
    lines = [Diagnosis(-0.1, 0.3 / k, 0.0 if k == 2 else 0.1, 0.1, 0.0, 1.0)._asdict() for k in range(1, 6)]
    metrics = [{"round": k, **line} for k, line in enumerate(lines, 1)] + [
        {"round": 6},
        {"round": 7, "objective": None},
    ]
    for ending in ("png", "svg"):
        plot_diagnostics(metrics, tmp_path / f"d.{ending}")
    assert (tmp_path / "d.png").read_bytes()[:4] == b"\x89PNG"
    drawn = (tmp_path / "d.svg").read_text()
    assert "objective f" in drawn
    assert "distance to consensus" not in drawn
    plot_diagnostics([{"round": 1}], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounds": (2, 4)}, "rounds are 2, 4; allowed: at least 3"),
        ({"rounds": (2, 8, 4)}, "rounds are 2, 8, 4; allowed"),
        ({"rounds": (2, 2, 4)}, "each larger than the one before"),
        ({"rounds": (0, 2, 4)}, "from 1"),
        ({"rounds": ()}, "rounds are none"),
        ({"a0": 0.0}, "a0 is 0; allowed: a number above 0"),
        ({"a0": float("nan")}, "a0 is nan"),
        ({"every": 0}, "every is 0; allowed: at least 1"),
        ({"seeds": ()}, "seeds are none"),
        ({"seeds": (1, 1)}, "seeds are 1, 1; allowed: one or several, each once"),
        ({"config": "fedprox"}, "FedProx can't be diagnosed"),
        ({"config": "local"}, "mixed by Alone can't be diagnosed"),
        ({"config": "bfedem"}, r"The theorems do not cover BalancedFedEM, .*; allowed: .*fedem"),
        ({"config": "fedavg+"}, "run.fine_tune_epochs is 1; allowed in a study of the theorems, .*: 0"),
    ],
)
def test_what_cant_be_studied_is_refused(arguments: dict[str, object], message: str) -> None:
    seen: list[object] = []
    values = {"config": "fedem", "rounds": (2, 4, 8), "a0": 1.0} | arguments
    with pytest.raises(UserError, match=message):
        study(**values | {"config": _config(str(values["config"]))}, listener=seen.append)
    assert not seen


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("solver.name", "adam", "'sgd'"),
        ("solver.momentum", 0.9, "0.0"),
        ("solver.weight_decay", 0.1, "0.0"),
        ("run.clients_per_round", 0.5, "1.0"),
        ("run.unseen", 0.25, "0.0"),
        ("run.local_layers", "batch_norm", "'none'"),
        ("attack.name", "noise", "'none'"),
        ("run.fine_tune_epochs", 2, "0"),
    ],
)
def test_what_the_theorems_do_not_speak_of_is_refused(setting: str, value: object, allowed: str) -> None:
    section, key = setting.split(".")
    with pytest.raises(UserError, match=rf"^{setting} is {value!r}; allowed in a study .* plain SGD .*: {allowed}\.$"):
        study(_config(**{section: {key: value}}), (2, 4, 8), 1.0)


@pytest.mark.parametrize(
    ("method", "sections", "message"),
    [
        ("dfedem", {"graph": {"scale": "none"}}, r"graph\.scale is 'none'; allowed in a study .*n_t / n.*: 'steps'"),
        ("dfedem", {"graph": {"scale": "updates"}}, r"graph\.scale is 'updates'; allowed .*: 'steps'"),
        ("dsgd", {"graph": {"start": "apart"}}, r"graph\.start is 'apart'; allowed .*: 'alike'"),
        ("fedem", {"batching": {"local_steps": 0}}, r"batching\.local_steps is 0; allowed .* the same number of steps"),
        ("fedem", {"compression": {"updates": "int8"}}, "compressed messages can't be diagnosed"),
        ("fedem", {"model": {"name": "mlp", "dropout": 0.5}}, "do not cover a model with Dropout"),
        (
            "fedem",
            {"loss": {"name": "squared_error"}, "data": {"name": "synthetic"}},
            "do not cover mixtures with SquaredError, whose gradients are not bounded",
        ),
    ],
)
def test_runs_that_the_theorems_do_not_cover_are_refused(
    method: str, sections: dict[str, dict[str, object]], message: str
) -> None:
    seen: list[object] = []
    with pytest.raises(UserError, match=message):
        study(_config(method, **sections), (2, 4, 8), 1.0, listener=seen.append)
    assert not seen


def test_clients_that_take_all_samples_at_once_take_as_many_steps() -> None:
    config = _config(batching={"batch_size": 0, "local_steps": 0})
    assert study(config, (1, 2, 3), 1.0).config.batching.local_steps == 0


def test_the_worst_outcome_is_that_of_the_study(found: dict[str, Study]) -> None:
    for result in found.values():
        own = [trend.outcome for trend in result.trends.values() if trend is not None and trend.outcome]
        assert result.outcome == max(own, key=OUTCOMES.index)
        assert result.record()["outcome"] == result.outcome


@pytest.mark.slow
def test_the_run_that_can_not_be_prepared_is_named() -> None:
    config = _config("dfedem", graph={"name": "erdos_renyi", "probability": 0.06})
    graph, keys, connected = config.graph, config.make_data().federation.keys, []
    assert graph is not None
    for seed in range(20):
        edges = graph.edges(keys, mixer_seed(seed))[0]
        joined = sparse.coo_matrix((np.ones(len(edges)), edges.T), shape=(4, 4))
        connected.append(sparse.csgraph.connected_components(joined)[0] == 1)
    good, bad = connected.index(True), connected.index(False)
    with pytest.raises(UserError, match=rf"^K = 2, seed {bad}: The graph has \d components") as found:
        study(config, (2, 4, 8), 1.0, seeds=(good, bad))
    assert isinstance(found.value.__cause__, UserError)
    assert study(config, (1, 2, 3), 1.0, seeds=(good,)).seeds == (good,)


def test_the_record_holds_no_setting_that_nobody_ran() -> None:
    result = study(_config(run={"seed": 7}), (1, 2, 3), 2.0, seeds=(1, 2))
    record = result.record()
    assert (record["data_seed"], record["seeds"], record["initial_rate"]) == (7, [1, 2], 2.0)
    assert record["config"]["schedule"] == {"name": "inverse_sqrt", "backtrack": False}
    left_out = {f"{section}.{key}" for section, values in result.config.sections.items() for key in values} - {
        f"{section}.{key}" for section, values in record["config"].items() for key in values
    }
    assert left_out == {"run.rounds", "run.seed", "schedule.learning_rate"}


@pytest.fixture
def command(run):
    """``fedem theory ...`` in this process."""
    return lambda *arguments: run("theory", *arguments)


def test_the_command_writes_what_it_prints(command, tmp_path: Path) -> None:
    code, out, err = command(*OPTIONS, "--rounds", "2,4,8", "--seeds", "2", "--out", tmp_path / "s", "-q")
    content = json.loads((tmp_path / "s" / "theory.json").read_text())
    assert (code, err) == ({"consistent": 0, "undecided": 3, "refuted": 4}[content["outcome"]], "")
    assert out == f"Study: {tmp_path / 's'}\n"
    assert [len(point["each"]["improvement"]) for point in content["points"]] == [2, 2, 2]
    assert content["command"].startswith("fedem theory")
    assert content["seeds"] == [0, 1]
    assert [point["rounds"] for point in content["points"]] == [2, 4, 8]
    assert content["trends"]["consensus"] is None
    assert content["trends"]["improvement"]["rate"] == -0.75
    assert content["trends"]["improvement"]["outcome"] in OUTCOMES
    assert content["config"]["solver"]["momentum"] == 0
    assert "rounds" not in content["config"]["run"]
    assert (tmp_path / "s" / "theory.png").read_bytes()[:4] == b"\x89PNG"
    code, _, err = command(*OPTIONS, "--rounds", "2,4,8", "--out", tmp_path / "s")
    assert code == 2
    assert "holds a study already" in err


def test_the_command_prints_slopes_beside_rates(command, tmp_path: Path) -> None:
    code, out, _ = command(*OPTIONS, "--method", "dsgd", "--set", "graph.name=ring", "--rounds", "1,2,3")
    assert code == (0, 3, 4)[next(k for k, word in reversed(list(enumerate(OUTCOMES))) if word in out)]
    assert "D-SGD" in out
    assert "theorem" in out
    assert "-0.5" in out
    assert (tmp_path / "runs" / "theory-dsgd" / "theory.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "2,4"], "rounds are 2, 4; allowed: at least 3"),
        (["--rounds", "2,many"], "--rounds is '2,many'; allowed: whole numbers"),
        (["--a0", "-1"], "a0 is -1; allowed: a number above 0"),
        (
            ["--a0", "1e8", "--rounds", "2,3,4", "--set", "data.max_samples=90"],
            "Training diverged within 2 rounds at learning rate",
        ),
        (["--seeds", "0"], "--seeds is 0; allowed: at least 1"),
        (["--method", "fedm"], "Did you mean 'fedem'?"),
        (["--method", "ditto"], "Ditto can't be diagnosed"),
        (["--method", "bfedem"], "The theorems do not cover BalancedFedEM"),
        (["--method", "dfedem", "--set", "graph.scale=none"], "graph.scale is 'none'; allowed in a study"),
        (["--set", "run.local_layers=batch_norm"], "run.local_layers is 'batch_norm'; allowed in a study"),
        (["--set", "solver.momentum=0.5"], "solver.momentum is 0.5; allowed in a study"),
        (["--set", "schedule.learning_rate=1"], "schedule.learning_rate is given by --a0"),
        (["--set", "schedule.name=step"], "schedule.name is given by --a0"),
        (
            ["--set", "run.rounds=5"],
            "--set got 'run.rounds=5'; run.rounds is given by --rounds",
        ),
        (["--set", "run.seed=5"], "run.seed is given by --seeds"),
        (["--out", "file"], "file can't be written"),
    ],
)
def test_the_command_refuses_in_a_sentence(command, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = command(*OPTIONS, *arguments, "-q")
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert not (tmp_path / "runs").exists()
