"""The number of components is found while training: what is not worth keeping goes, what carries much is split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import TINY
from helpers import DIMENSION, StopError, same_states, stacked, stop_at
from numpy.typing import NDArray
from planted import THETAS
from scipy.special import logsumexp
from torch import Tensor

import fedem
from fedem.core.errors import UserError
from fedem.core.tree import tree_index
from fedem.data.dataset import Dataset
from fedem.data.federation import Federation
from fedem.data.samples import Samples
from fedem.deploy.plan import Plan
from fedem.engines import Stacked
from fedem.report.console import remarks
from fedem.runs.components import Components, Search, looks
from fedem.runs.config import GIVEN, Config, route
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import State
from fedem.runs.trainer import Progress, Trainer

ROUNDS = 60
USUAL: dict[str, Any] = {
    "num_components": "auto", "initial_components": 5, "rounds": ROUNDS, "learning_rate": 0.5, "evaluate_every": 0,
    "device": "cpu",
}  # fmt: skip
FEW: dict[str, Any] = {"rounds": 14, "initial_components": 4}  # looks after rounds 3 and 6
ENGINES = ("one_by_one", "stacked")
Numbers = NDArray[np.float64]


def _clients(members: Sequence[int] = (0, 1, 2) * 5, validation: bool = True) -> Federation:
    """Clients of which each follows one of the planted directions."""
    rng = np.random.default_rng(0)

    def part(size: int) -> list[tuple[Numbers, Any]]:
        inputs = [rng.normal(size=(size, DIMENSION)) for _ in members]
        return [
            (x, (x @ THETAS[m] + rng.logistic(size=size) > 0).astype(int)) for m, x in zip(members, inputs, strict=True)
        ]

    names = [f"client {position}" for position in range(len(members))]
    return Federation.from_parts(part(60), part(40) if validation else None, part(20), names)


def _trainer(federation: Federation | None = None, method: str = "fedem", **options: Any) -> Trainer:
    """A run, prepared; its engine makes no recordings, which take longer than they save here."""
    config = Config.build({"data": {"name": GIVEN}}, route(USUAL | options, method))
    trainer = Trainer.prepare(config, Dataset(federation or _clients()))
    if isinstance(trainer.training.engine, Stacked):
        vars(trainer)["training"] = replace(trainer.training, engine=stacked())
    return trainer


def _trained(trainer: Trainer) -> Progress:
    """Train until the number of components is final."""
    progress = Progress(trainer.training.init())
    while progress.rounds < trainer.config.run.rounds // 2:
        trainer.advance(progress)
    return progress


def _after(trainer: Trainer, rounds: int) -> State:
    state = trainer.training.init()
    for _ in range(rounds):
        state, _ = trainer.training.step(state)
    return state


def _components(trainer: Trainer) -> Components:
    assert trainer.components is not None
    return trainer.components


def _copied(components: Components, state: State, which: int) -> State:
    """The state with a copy of one component, which everybody gives half of its weight."""
    weights, count = state.personal["log_weights"], state.personal["log_weights"].shape[1]
    halved = torch.cat([weights, weights[:, [which]]], 1)
    halved[:, [which, count]] -= np.log(2)
    return components.taken(state, torch.tensor([*range(count), which]), halved)


def _losses(trainer: Trainer, state: State, samples: Samples) -> Tensor:
    """Each client's summed loss, by the weights that it has."""
    return trainer.personalizer.losses(trainer.predictors(state), samples)


def _leaving_out(losses: Numbers) -> Numbers:
    """Weights ``[1 + M, M]`` by plain loops of EM with one sample that all components share."""
    count, size = losses.shape

    def fitted(weights: Numbers, kept: list[int]) -> Numbers:
        found = np.zeros(count)
        for _ in range(40):
            shares = weights[:, None] * np.exp(-losses[kept])
            weights = ((shares / shares.sum(0)).sum(1) + 1 / len(kept)) / (size + 1)
        found[kept] = weights
        return found

    whole = fitted(np.full(count, 1 / count), list(range(count)))
    each = [[m for m in range(count) if m != out] for out in range(count)]
    return np.array([whole] + [fitted(whole[kept] + (1 - whole[kept].sum()) / len(kept), kept) for kept in each])


def test_the_worth_of_a_component_is_what_clients_lose_without_it() -> None:
    trainer = _trainer(_clients(range(4)), initial_components=3, dtype="float64")
    components, state = _components(trainer), _after(trainer, 4)
    worth = components.worth(state, components.fits(state))
    shared, there, model = tree_index(state.shared, 0), trainer.federation, trainer.recipe.model
    rises = []
    for position in range(there.num_clients):
        train, validation = (
            model.component_losses(shared, *part.client(position)).numpy() for part in (there.train, there.validation)
        )
        with np.errstate(divide="ignore"):
            logs = np.log(_leaving_out(train))
        lost = -logsumexp(logs[:, :, None] - validation, axis=1).sum(1)
        rises.append(lost[1:] - lost[0])
    total = len(there.validation)
    np.testing.assert_allclose(worth.rises, np.sum(rises, 0) / total, rtol=1e-6)
    # Everybody has as many samples, so the mean over samples is one over clients.
    errors = np.std(rises, axis=0) * len(rises) ** 0.5 / total
    np.testing.assert_allclose(worth.errors, errors, rtol=1e-6)


def test_a_component_that_nobody_uses_is_not_missed() -> None:
    trainer = _trainer(dtype="float64")
    state = _after(trainer, 3)
    weights = state.personal["log_weights"].clone()
    weights[:, 2] = -np.inf
    state = replace(state, personal={"log_weights": weights.log_softmax(1)})
    fewer = _components(trainer).taken(
        state, torch.tensor([0, 1, 3, 4]), state.personal["log_weights"][:, [0, 1, 3, 4]]
    )
    for role in (trainer.federation.train, trainer.federation.test):
        torch.testing.assert_close(_losses(trainer, fewer, role), _losses(trainer, state, role))


def test_of_twins_the_other_takes_it_all() -> None:
    trainer = _trainer(dtype="float64", initial_components=3)
    components = _components(trainer)
    single = _after(trainer, 8)
    state = _copied(components, single, 1)
    torch.testing.assert_close(
        _losses(trainer, state, trainer.federation.test), _losses(trainer, single, trainer.federation.test)
    )
    worth = components.worth(state, components.fits(state))
    # Nothing but the sample that all components share weighs otherwise.
    assert worth.rises[1] == pytest.approx(worth.rises[3])
    assert worth.rises[[1, 3]].abs().max() < 0.002 < worth.rises[[0, 2]].min()
    revised, look = components.revise(state, [])
    assert (look["action"], {look["component"], look["into"]}) == ("merged", {1, 3})
    assert revised.personal["log_weights"].shape == single.personal["log_weights"].shape
    for name, leaf in revised.shared.items():
        assert leaf[0, [0, 1, 2]].sort(0).values.equal(single.shared[name][0].sort(0).values)


@pytest.mark.parametrize("method", ["fedem", "bfedem"])
@pytest.mark.parametrize("validation", [True, False])
def test_the_number_is_found(method: str, validation: bool) -> None:
    progress = _trained(_trainer(_clients(validation=validation), method))
    assert progress.history[-1]["num_components"] == 3
    assert {look["by"] for _, look in looks(progress.history)} == {"validation" if validation else "bic"}


def test_too_few_components_are_split() -> None:
    progress = _trained(_trainer(initial_components=2))
    actions = [look["action"] for _, look in looks(progress.history)]
    assert (actions[0], progress.history[-1]["num_components"]) == ("split", 3)


def test_a_split_divides_the_weight_of_one_component_by_how_well_it_fits() -> None:
    trainer = _trainer(initial_components=2, dtype="float64")
    state, components = _after(trainer, 5), _components(trainer)
    revised, look = components.revise(replace(state, round=12), [])
    assert (look["action"], look["into"], look["kept"]) == ("split", 2, [0, 1, 2])
    split, fitted = look["component"], components.fits(state)["log_weights"][:, 0].exp()
    now = revised.personal["log_weights"].exp()
    torch.testing.assert_close(now[:, split] + now[:, 2], fitted[:, split], atol=1e-3, rtol=0)
    shares = (now[:, 2] / (now[:, split] + now[:, 2])).round(decimals=3)
    assert set(shares.tolist()) == {0.1, 0.9}
    for leaf in revised.shared.values():
        assert leaf[0, 2].equal(leaf[0, split])


def test_engines_look_alike() -> None:
    each = [_trained(_trainer(_clients(range(3)), engine=engine, dtype="float64", **FEW)) for engine in ENGINES]
    (first, *lines), (second, *others) = ([look for _, look in looks(run.history)] for run in each)
    assert lines
    assert len(lines) == len(others)
    for one, other in zip([first, *lines], [second, *others], strict=True):
        rises = one.pop("rise"), other.pop("rise")
        assert rises[0] == pytest.approx(rises[1], abs=1e-6)
        assert one.pop("error") == pytest.approx(other.pop("error"), abs=1e-6)
        assert one == other
    for name, leaf in each[0].state.shared.items():
        torch.testing.assert_close(leaf, each[1].state.shared[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("stop", [3, 6])
def test_a_run_stopped_after_a_look_goes_on_as_if_it_never_had(tmp_path: Path, stop: int) -> None:
    options = {**USUAL, **FEW, "checkpoint_every": 3, "evaluate_every": 2, "patience": 100, "clients_per_round": 0.5}
    data = _clients(range(4))
    whole = fedem.train(data, out=tmp_path / "whole", **options)
    with pytest.raises(StopError):
        fedem.train(data, out=tmp_path / "cut", listener=stop_at(stop + 1), **options)
    resumed = fedem.train(data, out=tmp_path / "cut", resume=True, **options)
    assert [line["num_components"] for line in whole.history] == [4] * 2 + [3] * 3 + [2] * 9
    for role in ("last", "best"):
        assert same_states(whole.state(role), resumed.state(role))
    assert [line | {"seconds": 0} for line in whole.history] == [line | {"seconds": 0} for line in resumed.history]
    loaded = fedem.Result.load(tmp_path / "cut")
    inputs = data.test.client(0)[0].numpy()
    assert loaded.predict("client 0", inputs).equal(whole.predict("client 0", inputs))
    assert RunFolder(tmp_path / "cut").config().method.values["num_components"] == "auto"
    # The best state has another number than the last one of the history.
    assert whole.summary["num_components"] == whole.state().personal["log_weights"].shape[1] == 3
    assert [line.partition("; after round 6")[1:] for line in remarks(whole.summary) if "3 were kept" in line] == [
        ("", "")
    ]


def test_a_run_that_finds_the_number_is_not_made_longer(tmp_path: Path) -> None:
    options = {**USUAL, **FEW, "rounds": 4, "schedule": "constant"}
    fedem.train(_clients(range(3)), out=tmp_path, **options)
    with pytest.raises(UserError, match=r"num_components is 'auto'.*allowed: a new run of 5 rounds"):
        fedem.train(_clients(range(3)), out=tmp_path, resume=True, **options | {"rounds": 5})


AROUND: dict[str, dict[str, Any]] = {
    "label shares": {"label_shares": True},
    "an own intercept": {"local_layers": "bias"},
    "a server that steps": {"server": "momentum"},
    "compressed messages": {"compression": {"updates": "int8", "downloads": "bfloat16"}},
    "heads": {"method": "fedem-heads", "model": {"name": "mlp", "hidden": 3}},
}


@pytest.mark.parametrize("name", AROUND)
def test_whatever_belongs_to_a_component_goes_with_it(name: str) -> None:
    trainer = _trainer(_clients(range(3)), **FEW | {"rounds": 10} | AROUND[name])
    progress, first = Progress(trainer.training.init()), trainer.training.init()
    while not trainer.is_over(progress):
        trainer.advance(progress)
    state, own = progress.state, trainer.recipe.model.leaf_shapes.keys() - trainer.recipe.algorithm.common
    count = progress.history[-1]["num_components"]
    assert count < 4
    for part in ("shared", "memory", "personal"):
        before, after = getattr(first, part), getattr(state, part)
        assert before.keys() == after.keys()
        for leaf in before:
            prefix, _, last = leaf.rpartition("/")
            owned = leaf == "log_weights" or (last in own and (part != "personal" or prefix == "residual"))
            expected = (len(before[leaf]), count, *before[leaf].shape[2:]) if owned else before[leaf].shape
            assert after[leaf].shape == expected, leaf
    assert trainer.conclude(progress).summary["num_components"] == count


def test_a_look_is_due_in_the_first_half() -> None:
    search = Search(rounds=200, least_gain=0.01)
    due = [done for done in range(1, 201) if search.is_due(done, [])]
    assert due == list(range(40, 101, 5))
    split = [{"round": 50, "components": {"action": "split"}}]
    assert next(done for done in due if search.is_due(done, split) and done > 50) == 65
    assert search.may_split(85, split)
    assert not search.may_split(86, split)
    assert not search.may_split(70, [*split, {"round": 65, "components": {"action": "merged", "in_vain": True}}])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a word": ({"num_components": "many"}, "num_components is 'many'; allowed: at least 1, or auto"),
    "none": ({"num_components": 0}, "num_components is 0; allowed: at least 1, or auto"),
    "a graph": ({"graph": "ring"}, "graph.name is 'ring'.*allowed over a graph: a number"),
    "dfedem": ({"method": "dfedem"}, "num_components is 'auto'.*allowed over a graph: a number"),
    "a threshold": ({"compression": {"threshold": 0.1}}, "threshold is 0.1, but method.num_components is 'auto'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_the_number_must_be_given(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        _trainer(_clients(range(3)), **options)


def test_an_ensemble_has_a_number_of_its_own() -> None:
    with pytest.raises(UserError, match="num_components is 'auto'; allowed: a whole number"):
        fedem.train(_clients(range(3)), "ensemble", num_components="auto")


def test_a_deployment_needs_a_number() -> None:
    config = Config.build({"data": {"name": GIVEN}}, route(USUAL, "fedem"))
    with pytest.raises(UserError, match=r"num_components is 'auto'.*allowed in a deployment: a number"):
        Plan.make(config, Dataset(_clients(range(3))))


def test_the_summary_and_the_report_say_what_happened(tmp_path: Path) -> None:
    result = fedem.train(_clients(range(4)), out=tmp_path, **USUAL | FEW)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["initial_components"], summary["num_components"]) == (4, 2)
    told = [(look["round"], look["action"], len(look["kept"])) for look in summary["components_history"]]
    assert [(when, count) for when, _, count in told] == [(3, 3), (6, 2)]
    assert summary["components_history"] == [{"round": when} | look for when, look in looks(result.history)]
    (line,) = [
        line for line in remarks(summary) if line.startswith("Started with 4 components, numbered from 0; after")
    ]
    assert line.endswith("; 2 were kept.")
    for look in summary["components_history"]:
        assert f"after round {look['round']} component {look['component']} was " in line


def test_the_command_line_takes_the_word(run: Any, tmp_path: Path) -> None:
    words = ["train", "--data", "synthetic", *TINY, "--quiet", "--components"]
    assert run(*words, "auto", "--out", tmp_path / "run")[0] == 0
    assert RunFolder(tmp_path / "run").metrics()[-1]["num_components"] <= 8
    assert RunFolder(tmp_path / "run").config().method.values["num_components"] == "auto"
    code, *texts = run(*words, "some", "--out", tmp_path / "other")
    assert code == 2
    assert "method.num_components is 'some'; allowed: at least 1, or auto." in " ".join(texts)
