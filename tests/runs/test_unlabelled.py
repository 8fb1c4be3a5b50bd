"""Clients without labels: the sums, the densities, the temperature, novelty, and runs with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LOSSES, StopError, advance, make_federation, make_personalizer, make_training, stacked, stop_at
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.mixture import GaussianMixture
from small_runs import SMALL, small_config, small_run
from torch import Tensor

import fedem
from fedem.core.em import fit_log_weights
from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.data.federation import Federation
from fedem.deploy.plan import Plan
from fedem.engines import Engine, OneByOne
from fedem.methods import METHODS
from fedem.models import MLP, Model
from fedem.models.base import component_of
from fedem.models.losses import CrossEntropy
from fedem.runs.rounds import State, Training
from fedem.runs.trainer import describe_inputs, reassess
from fedem.runs.unlabelled import (
    SILENT,
    TEMPERATURES,
    UNLIKE,
    Densities,
    Statistics,
    features_in_common,
    fit,
    gather,
)

RNG = np.random.default_rng(5)
MIXTURES = [name for name, row in METHODS.items() if row.algorithm.is_mixture]


def _everybody(training: Training) -> Tensor:
    return torch.ones(training.federation.num_clients, dtype=torch.bool)


def _gathered(training: Training, state: State, engine: Engine | None = None, **settings: Any) -> Statistics:
    return gather(make_personalizer(training, engine, **settings), state, training.federation, _everybody(training))


def _mlp(outputs: int = 3) -> Model:
    return Model(lambda: MLP(hidden=5).build((4,), outputs), CrossEntropy(), torch.float64)


# The sums.


@pytest.mark.parametrize("loss", LOSSES)
def test_sums_are_those_of_numpy(loss: str) -> None:
    """Of a linear model, whose features are its inputs, by responsibilities computed plainly."""
    training = make_training("fedem", loss=loss, num_components=2)
    state, model = advance(training), training.algorithm.model
    found = _gathered(training, state)
    counts, sums, squares = np.zeros(2), np.zeros((2, 4)), np.zeros((2, 4))
    for position in range(training.federation.num_clients):
        inputs, targets = training.federation.train.client(position)
        components, weights = tree_index(state.shared, 0), state.personal["log_weights"][position].exp().numpy()
        losses = np.stack([model.losses(component_of(components, m), inputs, targets).numpy() for m in range(2)])
        joint = weights[:, None] * np.exp(-losses)
        shares = joint / joint.sum(0)
        for m in range(2):
            for share, x in zip(shares[m], inputs.numpy(), strict=True):
                counts[m] += share
                sums[m] += share * x
                squares[m] += share * x**2
    np.testing.assert_allclose(found.counts, counts, rtol=1e-9)
    np.testing.assert_allclose(found.sums, sums, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.squares, squares, rtol=1e-9)
    assert torch.equal(found.input_sums, found.sums)  # the features of a linear model are its inputs
    assert torch.equal(found.input_squares, found.squares)
    np.testing.assert_allclose(found.weights, state.personal["log_weights"].exp().mean(0), rtol=1e-12)
    assert float(found.counts.sum()) == pytest.approx(len(training.federation.train))
    assert float(found.histogram.sum()) == len(training.federation.validation)


def test_features_are_one_space_for_all_components() -> None:
    model, inputs = _mlp(), torch.from_numpy(RNG.normal(size=(6, 4)))
    apart = make_training("fedem", loss="cross_entropy", model=model, num_components=3)
    shared = tree_index(apart.init().shared, 0)
    expected = torch.cat([model.features(component_of(shared, m), inputs) for m in range(3)], 1)
    torch.testing.assert_close(features_in_common(model, shared, inputs), expected)
    heads = make_training("fedem-heads", loss="cross_entropy", model=model, num_components=3)
    shared = tree_index(heads.init().shared, 0)
    assert torch.equal(features_in_common(model, shared, inputs), model.features(component_of(shared, 0), inputs))
    linear = make_training("fedem", num_components=3)
    shared = tree_index(linear.init().shared, 0)
    assert torch.equal(features_in_common(linear.algorithm.model, shared, inputs), inputs)


@pytest.mark.parametrize("method", MIXTURES)
@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_stacked_is_one_by_one(method: str, loss: str) -> None:
    model = Model(lambda: MLP(hidden=5).build((4,), 3 if loss == "cross_entropy" else 1), LOSSES[loss], torch.float64)
    training = make_training(method, loss=loss, model=model, num_components=2)
    state, newcomers = advance(training), make_federation(loss, (6, 3), ("fay", "gus"), seed=9)
    found = [_gathered(training, state, engine) for engine in (OneByOne(), stacked(), stacked(chunk_size=2))]
    for name in vars(found[0]):
        for other in found[1:]:
            torch.testing.assert_close(getattr(other, name), getattr(found[0], name), rtol=1e-8, atol=1e-6)
    told = replace(found[0], gains=torch.ones_like(found[0].gains), gain_squares=torch.ones_like(found[0].gains) / 5)
    fits = [
        fit(make_personalizer(training, engine), told, state, newcomers.train, newcomers.keys)
        for engine in (OneByOne(), stacked())
    ]
    assert told.temperature == 1.0
    first, second = (each[0].personal["log_weights"].exp() for each in fits)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9)
    assert [seen.novelty for seen in fits[0][1]] == pytest.approx([seen.novelty for seen in fits[1][1]])


def test_sums_of_some_clients_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training("fedem", num_components=2)
    state = advance(training)
    whole = _gathered(training, state)
    monkeypatch.setattr("fedem.runs.unlabelled._SUMMED_BYTES", 1)
    torch.testing.assert_close(vars(_gathered(training, state)), vars(whole), rtol=1e-9, atol=1e-9)


def test_training_samples_are_asked_where_there_are_no_others() -> None:
    pairs = [(RNG.normal(size=(9, 4)), RNG.integers(0, 2, size=9)) for _ in range(3)]
    training = make_training("fedem", Federation.from_parts(pairs), num_components=2)
    assert float(_gathered(training, advance(training)).histogram.sum()) == 27


# Densities.


def _densities(count: int = 4000) -> tuple[Densities, np.ndarray, np.ndarray, np.ndarray]:
    """Two components with samples enough that the one from the common density does not matter."""
    means, deviations = np.array([[0.0, 50.0, 7.0], [3.0, 20.0, 7.0]]), np.array([[1.0, 9.0, 0.0], [2.0, 5.0, 0.0]])
    samples = [
        mean + deviation * RNG.normal(size=(count, 3)) for mean, deviation in zip(means, deviations, strict=True)
    ]
    counts = torch.full((2,), float(count)).double()
    sums, squares = (torch.from_numpy(np.stack([(x**power).sum(0) for x in samples])) for power in (1, 2))
    found = Densities.of(counts, sums, squares)
    return found, np.stack([x.mean(0) for x in samples]), np.stack([x.std(0) for x in samples]), np.concatenate(samples)


def test_losses_are_gaussian_likelihoods_without_the_feature_that_never_varies() -> None:
    densities, means, deviations, samples = _densities()
    asked = samples[::400] + np.array([0.0, 0.0, 3.0])
    expected = -norm.logpdf(asked[None, :, :2], means[:, None, :2], deviations[:, None, :2]).sum(2)
    found = densities.losses(torch.from_numpy(asked)).numpy()
    np.testing.assert_allclose(found, expected - expected.min(0), rtol=2e-2, atol=2e-2)
    squares = (((asked[None] - means[:, None]) / np.maximum(deviations[:, None], 1e-300))[..., :2] ** 2).mean(2)
    np.testing.assert_allclose(densities.distances(torch.from_numpy(asked)).numpy(), squares.min(0), rtol=2e-2)


def test_responsibilities_are_those_of_scikit_learn() -> None:
    densities, _, _, samples = _densities()
    weights = np.array([0.3, 0.7])
    reference = GaussianMixture(2, covariance_type="diag").fit(samples[:, :2])
    reference.weights_ = weights
    reference.means_ = (densities.means / densities.scale.clamp(min=1e-9) + densities.centre).numpy()[:, :2]
    reference.precisions_cholesky_ = (densities.scale / densities.variances.sqrt()).numpy()[:, :2]
    joint = np.log(weights)[:, None] - densities.losses(torch.from_numpy(samples[::100])).numpy()
    found = np.exp(joint - logsumexp(joint, axis=0))
    np.testing.assert_allclose(found.T, reference.predict_proba(samples[::100, :2]), atol=1e-9)


def test_variances_have_a_floor_and_components_without_samples_are_not_chosen() -> None:
    counts = torch.tensor([1000.0, 0.0, 1000.0]).double()
    sums = torch.tensor([[0.0], [0.0], [1000.0]]).double()
    found = Densities.of(counts, sums, sums)  # all samples of a component are alike
    assert float(found.variances[0]) == pytest.approx(0.01)
    assert found.heard.tolist() == [True, False, True]
    losses = found.losses(torch.zeros(4, 1).double())
    assert bool(losses[1].isinf().all())
    assert float(fit_log_weights(losses, prior=1.0)[1].exp()) < 0.07
    few = Densities.of(torch.tensor([0.5, 0.4]).double(), sums[:2], sums[:2])
    assert few.heard.tolist() == [True, False]  # one always is


# The temperature, and what is said.


def _statistics(gains: list[float], others: list[float], spread: float = 1.0, clients: int = 10) -> Statistics:
    both = torch.tensor([gains + [0.0] * (len(TEMPERATURES) - len(gains)) for gains in (gains, others)]).double()
    ones, nothing = torch.ones(2).double(), torch.zeros(2, 1).double()
    histogram = torch.zeros(12 * 64).double()
    histogram[4 * 64] = 100  # from a distance of 1 up to 10 ** (1 / 64)
    variances = both.square() / clients + spread**2 * clients * (clients - 1) / clients
    sums = [nothing] * 4
    return Statistics(ones, *sums, ones / 2, histogram, both, variances, torch.tensor(float(clients)).double())


def test_errors_are_those_of_a_sum() -> None:
    gains = RNG.normal(size=(30, 2, len(TEMPERATURES)))
    both = (torch.from_numpy(each) for each in (gains.sum(0), (gains**2).sum(0)))
    found = replace(_statistics([], []), **dict(zip(("gains", "gain_squares"), both, strict=True)))
    found = replace(found, num_clients=torch.tensor(30.0).double())
    np.testing.assert_allclose(found.errors, gains.std(0, ddof=1) * math.sqrt(30), rtol=1e-9)


def test_the_temperature_gains_most_of_those_that_gain_beyond_chance() -> None:
    # Ten clients whose gains have deviation 1: the sum has one of sqrt(10), and two of these are 6.3.
    assert _statistics([7.0, 9.0, 8.0], [7.0, 9.0, 8.0]).temperature == 2.0
    assert _statistics([7.0, 9.0, 8.0], [7.0, 6.0, 8.0]).temperature == 4.0  # other weights would be as good for all
    assert math.isinf(_statistics([6.0, 6.0], [6.0, 6.0]).temperature)
    assert math.isinf(_statistics([50.0], [50.0], clients=1).temperature)
    assert _statistics([6.0], [6.0]).note == SILENT
    assert "at temperature 1: the run's clients lose 0.07 nats a sample less" in _statistics([7.0], [7.0]).note


def test_shares_beyond_a_distance_go_through_the_bins() -> None:
    found = _statistics([], [])
    assert found.share_beyond(0.99) == 1.0
    assert found.share_beyond(10 ** (0.25 / 64)) == pytest.approx(0.75)
    assert found.share_beyond(1.1) == found.share_beyond(1e30) == 0.0
    assert found.share_beyond(0.0) == 1.0
    assert math.isnan(found.share_beyond(math.nan))
    assert found.seen(5.0).is_novel
    assert UNLIKE in found.seen(5.0).note
    assert not found.seen(1.0).is_novel
    assert not found.seen(math.nan).is_novel


# Clients whose inputs say which component they come from, or do not.


def _client(
    rng: np.random.Generator, weight: float, size: int, shift: float, number: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Samples of two components: opposite slopes, and inputs that lie ``shift`` apart."""
    sign = np.where(rng.random(size) < weight, 1.0, -1.0)
    x = rng.normal(size=(size, 4)).astype(np.float32)
    signal = 3 * sign * x[:, 0]
    x[:, 1] += sign * shift / 2
    if number:
        return x, (signal + 0.3 * rng.normal(size=size)).astype(np.float32)
    return x, (rng.random(size) < 1 / (1 + np.exp(-signal))).astype(np.int64)


def _planted(shift: float, count: int = 24, seed: int = 0, number: bool = False) -> Federation:
    rng = np.random.default_rng(seed)
    pairs = [_client(rng, weight, 150, shift, number) for weight in rng.choice([0.05, 0.95], size=count)]
    return Federation.from_clients(pairs, validation=0.3, test=0.2)


def _trained(shift: float, method: str = "fedem", number: bool = False, **options: Any) -> fedem.Result:
    settings = {"rounds": 40, "num_components": 2, "evaluate_every": 0, "learning_rate": 0.3, "unlabelled": True}
    if number:
        settings["learning_rate"] = 0.05
    return fedem.train(_planted(shift, number=number), method, **settings | options)


@pytest.mark.parametrize("number", [False, True], ids=["classes", "numbers"])
def test_weights_without_labels_are_near_those_with_labels(number: bool) -> None:
    result = _trained(4.0, number=number)
    rng = np.random.default_rng(8)
    mean = result.newcomer().mixture_weights
    for weight in (0.05, 0.95, 0.6):
        inputs, targets = _client(rng, weight, 300, 4.0, number)
        labelled, without = (result.personalize(inputs, given) for given in (targets, None))
        away = float((labelled.mixture_weights - mean).abs().max())
        assert float((labelled.mixture_weights - without.mixture_weights).abs().max()) < 0.12 + 0.1 * away
        assert without.seen is not None
        assert not without.seen.is_novel
        assert labelled.seen is None
        assert float(without.mixture_weights.sum()) == pytest.approx(1)
    few = result.personalize(inputs[:0])
    torch.testing.assert_close(few.mixture_weights, mean)
    assert few.seen is not None
    assert math.isnan(few.seen.novelty)


def test_heads_on_a_shared_body_fit_without_labels() -> None:
    model = {"name": "mlp", "hidden": 16}
    result = _trained(4.0, "fedem-heads", model=model, rounds=60)
    assert math.isfinite(result.statistics["last"].temperature)
    assert result.statistics["last"].sums.shape == (2, 16)
    inputs, targets = _client(np.random.default_rng(8), 0.95, 300, 4.0, number=False)
    labelled, without = (result.personalize(inputs, given).mixture_weights for given in (targets, None))
    assert int(labelled.argmax()) == int(without.argmax())


def test_where_inputs_say_nothing_weights_are_the_mean() -> None:
    result = _trained(0.0)
    inputs, targets = _client(np.random.default_rng(8), 0.95, 300, 0.0, number=False)
    without = result.personalize(inputs)
    torch.testing.assert_close(without.mixture_weights, result.newcomer().mixture_weights)
    assert float(result.personalize(inputs, targets).mixture_weights.max()) > 0.8
    assert without.seen is not None
    assert without.seen.note == SILENT
    assert math.isinf(without.seen.temperature)
    assert result.summary["unlabelled"]["note"] == SILENT
    assert result.summary["unlabelled"]["inputs_tell"] is False


def test_inputs_of_the_papers_mixture_say_nothing() -> None:
    data = fedem.Synthetic(num_clients=40, dimension=20, num_test=20, max_samples=200).make(0)
    result = fedem.train(data, "fedem", rounds=10, evaluate_every=0, unlabelled=True, unseen=0.25)
    about = result.summary["unlabelled"]
    assert about["note"] == SILENT
    assert about["unseen_test_accuracy"] == about["unseen_mean_weights_test_accuracy"]


def test_inputs_that_move_with_the_component_gain_what_labels_gain() -> None:
    result = _trained(4.0, unseen=0.25)
    about, labelled = result.summary["unlabelled"], result.summary["unseen_test_loss"]
    assert about["inputs_tell"] is True
    gain = about["unseen_mean_weights_test_loss"] - labelled
    assert gain > 0.05
    assert about["unseen_test_loss"] < labelled + 0.2 * gain


# Novelty.


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_clients_like_those_of_training_are_not_novel_and_others_are(model: str) -> None:
    result = _trained(2.0, model=model)
    rng = np.random.default_rng(11)
    shares = []
    for weight in np.linspace(0, 1, 21):
        seen = result.personalize(_client(rng, weight, 60, 2.0, number=False)[0]).seen
        assert seen is not None
        shares.append(seen.novelty)
    assert min(shares) > 0.2
    assert max(shares) < 0.8
    assert float(np.mean(shares)) == pytest.approx(0.5, abs=0.1)
    # The median of one sample is that sample, and its share is uniform.
    alone = result.with_unlabelled(_client(rng, 0.5, 200, 2.0, number=False)[0], list(map(str, range(200))))
    single = [row["novelty"] for row in alone.clients]
    assert np.abs(np.sort(single) - np.linspace(0, 1, 200)).max() < 0.12  # 1.63 / sqrt(200), at one per cent
    far = result.personalize(_client(rng, 0.5, 60, 2.0, number=False)[0] + 6)
    assert far.seen is not None
    assert far.seen.is_novel
    assert far.seen.novelty < 0.001
    assert UNLIKE in far.seen.note


# Runs.


def test_a_saved_run_fits_without_its_data(tmp_path: Path) -> None:
    result = small_run(tmp_path / "run", unlabelled=True)
    loaded, inputs = fedem.Result.load(tmp_path / "run"), RNG.normal(size=(7, SMALL["dimension"])).astype(np.float32)
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "run" / "checkpoints").glob("inputs-*"))
    for which in ("last", "best"):
        for name, leaf in vars(result.statistics[which]).items():
            assert torch.equal(getattr(loaded.statistics[which], name), leaf)
        first, second = (each.personalize(inputs, which=which) for each in (result, loaded))
        assert torch.equal(first.mixture_weights, second.mixture_weights)
        assert first.seen == second.seen
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["unlabelled"]["note"] == SILENT


def test_sums_are_made_afterwards_as_in_training(tmp_path: Path) -> None:
    asked, plain = small_run(None, unlabelled=True), small_run(tmp_path / "run")
    assert plain.statistics == {}
    again = reassess(tmp_path / "run", unlabelled=True).save(tmp_path / "kept")
    for found in (fedem.Result.load(again).statistics, describe_inputs(tmp_path / "run")):
        assert set(found) == {"last", "best"}
        for which, statistics in asked.statistics.items():
            torch.testing.assert_close(vars(found[which]), vars(statistics))
    assert not list((tmp_path / "run" / "checkpoints").glob("inputs-*"))  # the run is as it was


def test_a_run_that_was_stopped_has_no_sums_yet_and_resumed_has_them(tmp_path: Path) -> None:
    config = small_config(unlabelled=True)
    with pytest.raises(StopError):
        fedem.run(config, config.data.make(0), out=tmp_path / "run", listener=stop_at(3))
    assert fedem.Result.load(tmp_path / "run").statistics == {}
    resumed = fedem.run(config, config.data.make(0), out=tmp_path / "run", resume=True)
    whole = small_run(None, unlabelled=True)
    torch.testing.assert_close(vars(resumed.statistics["last"]), vars(whole.statistics["last"]))


def test_what_labels_decide_besides_plays_no_part(tmp_path: Path) -> None:
    """Newcomers without labels neither fine-tune nor ask neighbours, whatever the clients of the run do."""
    plain = small_run(None, unlabelled=True)
    result = small_run(None, unlabelled=True, fine_tune_epochs=1, neighbours=3)
    torch.testing.assert_close(vars(result.statistics["last"]), vars(plain.statistics["last"]))
    inputs = RNG.normal(size=(4, SMALL["dimension"])).astype(np.float32)
    fitted = result.with_unlabelled(inputs, ["a", "b", "a", "a"])
    loaded = fedem.Result.load(fitted.save(tmp_path / "fitted"))
    for name, rows in (("a", [0, 2, 3]), ("b", [1])):
        personal = plain.personalize(inputs[rows])
        torch.testing.assert_close(loaded.predict(name, inputs), personal.predict(inputs))
        row = next(row for row in loaded.clients if row["client"] == name)
        assert personal.seen is not None
        assert float(row["novelty"]) == pytest.approx(personal.seen.novelty)
        assert int(row["train_samples"]) == len(rows)


def test_clients_of_a_graph_see_inputs_through_the_mean_components() -> None:
    result = fedem.train(
        _planted(4.0), "dfedem", rounds=30, num_components=2, evaluate_every=0, learning_rate=0.3, unlabelled=True
    )
    inputs, targets = _client(np.random.default_rng(8), 0.95, 300, 4.0, number=False)
    labelled, without = (result.personalize(inputs, given).mixture_weights for given in (targets, None))
    assert float((labelled - without).abs().max()) < 0.15


# The command line, and what is refused.


def test_clients_without_labels_on_the_command_line(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    result = small_run(tmp_path / "run", unlabelled=True)
    small_run(tmp_path / "plain")
    inputs, owners = RNG.uniform(-1, 1, (6, SMALL["dimension"])).astype(np.float32), np.array(["far", "new"] * 3)
    inputs[::2] += 100
    np.savez(tmp_path / "new.npz", x=inputs, client=owners)
    code, out, err = run("personalize", "run", "--data", "new.npz", "--unlabelled", "--out", "fitted")
    assert (code, err) == (0, "")
    assert "2 clients without labels." in out
    assert SILENT in " ".join(out.split())
    assert f"1 client is {UNLIKE}: 'far'" in " ".join(out.split())
    code, _, err = run("predict", "fitted", "--data", "new.npz", "--out", "found.npz")
    assert (code, err) == (0, "")
    expected = result.personalize(inputs[1::2]).predict(inputs[1::2]).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "found.npz")["predictions"][1::2], expected, rtol=1e-6)
    # Of a run without sums they are made from its data, which is said.
    code, _, err = run("personalize", "plain", "--data", "new.npz", "--unlabelled", "--out", "again")
    assert (code, "they were made from its data" in " ".join(err.split())) == (0, True), err
    both = [fedem.Result.load(tmp_path / name) for name in ("fitted", "again")]
    torch.testing.assert_close(both[0].predict("new", inputs), both[1].predict("new", inputs))
    code, out, err = run("show", "fitted")
    assert (code, err) == (0, "")
    code, _, err = run("evaluate", "plain", "--unlabelled", "--save", "kept", "--quiet")
    assert (code, err) == (0, "")
    assert set(fedem.Result.load(tmp_path / "kept").statistics) == {"last", "best"}
    for options, problem in (
        (["--unlabelled", "--fine-tune-epochs", "1"], "--fine-tune-epochs is given with --unlabelled"),
        (["--unlabelled", "--beside", "0"], "--beside is given with --unlabelled"),
        ([], "`fedem personalize --unlabelled` fits mixture weights without"),
    ):
        code, _, err = run("personalize", "run", "--data", "new.npz", "--out", "other", *options)
        assert (code, problem in " ".join(err.split())) == (2, True), err


def test_rows_of_which_some_have_targets_are_refused(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    rows = [f"{a % 3},{a},{b:.3f},{'yes' if b > 0.5 else 'no'}" for a, b in enumerate(RNG.random(40))]
    (tmp_path / "old.csv").write_text("\n".join(["client,a,b,y", *rows]))
    code, _, err = run(
        "train", "--data", "old.csv", "--rounds", "2", "--set", "run.unlabelled=true", "--out", "r", "-q"
    )
    assert code == 0, err
    (tmp_path / "new.csv").write_text("client,a,b,y\nzoe,3,0.2,yes\nzoe,4,0.9,\n")
    code, _, err = run("personalize", "r", "--data", "new.csv", "--unlabelled", "--out", "p")
    assert (code, "1 of 2 rows have a target in column 'y', the others none" in " ".join(err.split())) == (2, True), err
    (tmp_path / "none.csv").write_text("client,a,b\nzoe,3,0.2\nzoe,4,0.9\n")
    code, _, err = run("personalize", "r", "--data", "none.csv", "--unlabelled", "--out", "p", "-q")
    assert (code, err) == (0, "")
    code, _, err = run("predict", "p", "--data", "none.csv", "--out", "found.csv")
    assert code == 0, err
    # A run without sums, whose data are gone, says what to do.
    assert run("train", "--data", "old.csv", "--rounds", "1", "--out", "plain", "-q")[0] == 0
    (tmp_path / "old.csv").unlink()
    code, _, err = run("personalize", "plain", "--data", "none.csv", "--unlabelled", "--out", "q")
    text = " ".join(err.split())
    assert (code, "can't be made from its data" in text, "Train with run.unlabelled=true" in text) == (2, True, True), (
        err
    )


def test_what_can_not_be_had_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"Method fedavg has no mixture weights.*allowed: .*fedem"):
        fedem.train(make_federation(), "fedavg", rounds=1, unlabelled=True)
    with pytest.raises(UserError, match=r"run\.label_shares is true"):
        fedem.train(make_federation(), "fedem", rounds=1, unlabelled=True, label_shares=True)
    plain, other = (fedem.train(make_federation(), method, rounds=1) for method in ("fedem", "fedavg"))
    inputs = RNG.normal(size=(3, 4))
    with pytest.raises(UserError, match=r"no sums over its clients' inputs.*run\.unlabelled=true"):
        plain.personalize(inputs)
    with pytest.raises(UserError, match="Method fedavg has no mixture weights"):
        other.personalize(inputs)
    asked = fedem.train(make_federation(), "fedem", rounds=1, unlabelled=True)
    for options in ({"fine_tune_epochs": 1}, {"unseen_epochs": 2}, {"beside": "ann"}):
        with pytest.raises(UserError, match=f"{next(iter(options))} is .* but a client without labels"):
            asked.personalize(inputs, **options)
    with pytest.raises(UserError, match="1 of 3 targets is missing"):
        asked.personalize(inputs, [1, None, 0])
    with pytest.raises(UserError, match="2 of 3 targets are missing"):
        asked.personalize(inputs, np.array([1, np.nan, np.nan]))
    with pytest.raises(UserError, match=r"shape \[3\] each; allowed: \[4\]"):
        asked.personalize(inputs[:, :3])
    with pytest.raises(UserError, match=r"clients of shape \[2\] for 3 inputs"):
        asked.with_unlabelled(inputs, ["zoe", "yan"])
    with pytest.raises(UserError, match="max_iterations is -1"):
        asked.personalize(inputs, max_iterations=-1)
    with pytest.raises(UserError, match="were fitted after training"):
        asked.with_unlabelled(inputs, ["zoe"] * 3).personalize(inputs)


def test_sums_are_refused_in_a_deployment() -> None:
    config = small_config(unlabelled=True)
    with pytest.raises(UserError, match=r"run\.unlabelled is True; allowed in a deployment.*: false"):
        Plan.make(config, config.data.make(0))
