"""A client on its own samples alone does what the simulator does for it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deployments
import numpy as np
import pytest
import shops
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedem.core.errors import UserError
from fedem.core.tree import Tree, tree_index, tree_repeat, tree_stack
from fedem.data import Dataset
from fedem.data.federation import PARTS, Federation
from fedem.deploy.kept import Earlier, Kept, kept_path
from fedem.deploy.node import Node
from fedem.deploy.plan import Plan
from fedem.runs.config import SECTIONS, Config

METHODS = ("fedem", "fedavg", "scaffold", "ditto", "ifca", "qffl", "apfl")


def _equal(one: Tree, other: Tree, tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        torch.testing.assert_close(leaf, other[name], rtol=tolerance, atol=tolerance)


def _same_samples(one: Federation, other: Federation) -> None:
    for part in PARTS:
        mine, theirs = one.part(part).gathered(), other.part(part).gathered()
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.targets, theirs.targets)


@pytest.mark.parametrize("method", METHODS)
def test_rounds_of_nodes_are_the_simulators(tmp_path: Path, method: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "method": {"name": method},
        "run": {"dtype": "float64"},
        "solver": {"name": "sgd", "momentum": 0.5},
    }
    sample = deployments.write_sample(tmp_path)
    plan, trainer = deployments.make_plan(sample, **settings)
    algorithm = plan.algorithm
    nodes = [Node.open(plan, sample, name) for name in trainer.federation.names]
    assert [node.num_samples for node in nodes] == trainer.federation.train.sizes.tolist()
    state = trainer.training.init()
    shared = tree_index(state.shared, 0)
    personals = [node.first_personal(shared) for node in nodes]
    for index in range(3):
        answers = [node.train(shared, own, index, plan.rate(index)) for node, own in zip(nodes, personals, strict=True)]
        personals = [personal for _, personal in answers]
        summands = tree_stack([algorithm.summand(upload) for upload, _ in answers])
        this = trainer.training.round(index, torch.arange(len(nodes)))
        mixed, _ = plan.mixer.mix(tree_repeat(shared, 1), {}, this, [(this.clients, summands)])
        shared = algorithm.update(shared, tree_index(mixed.means, 0), share=1.0)
        state, _ = trainer.training.step(state)
        _equal(shared, tree_index(state.shared, 0), 1e-10)
        for position, own in enumerate(personals):
            _equal(own, tree_index(state.personal, position), 1e-10)


def test_a_scaled_rate_is_a_smaller_rate(tmp_path: Path) -> None:
    sample = deployments.write_sample(tmp_path)
    plan, trainer = deployments.make_plan(sample)
    node = Node(plan, "shop B", trainer.federation)
    shared = tree_index(trainer.training.init().shared, 0)
    start = node.first_personal(shared)
    _equal(node.train(shared, start, 0, 0.4, scale=0.25)[0], node.train(shared, start, 0, 0.1)[0], 1e-6)


@pytest.mark.parametrize("target", ["sold", "units"])
def test_a_file_of_one_client_gives_the_simulators_samples(tmp_path: Path, target: str) -> None:
    columns = ("shop", "weekday", "price", "temperature", "promotion", target)
    rows = shops.make_shops(20, names=deployments.NAMES)
    # For one shop all weekdays read like numbers; they stay text.
    rows = [row | {"weekday": "7"} if row["shop"] == "shop B" else row for row in rows]
    whole = shops.write_shops(tmp_path / "all.csv", rows, columns)
    plan, trainer = deployments.make_plan(whole, data={"target_column": target})
    for name in deployments.NAMES:
        own = [row for row in rows if row["shop"] == name]
        path = shops.write_shops(tmp_path / "own.csv", own[::-1], columns[1:])
        alone = Node.open(plan, path, name)
        _same_samples(alone.federation, trainer.federation.take(torch.tensor([trainer.federation.position(name)])))
        _same_samples(alone.federation, Node.open(plan, whole, name)._own)


def test_arrays_without_an_encoding(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40)
    clients = np.repeat(["a", "b"], 20)
    federation = Federation.from_arrays(x, y, clients, seed=4)
    config = Config.build({"data": {"name": "given"}, "run": {"seed": 4, "device": "cpu"}})
    plan = Plan.make(config, Dataset(federation))
    np.savez(tmp_path / "b.npz", x=x[20:], y=y[20:])
    node = Node.open(plan, tmp_path / "b.npz", "b")
    _same_samples(node.federation, federation.take(torch.tensor([1])))
    np.savez(tmp_path / "wide.npz", x=np.zeros((9, 4), dtype=np.float32), y=y[:9])
    with pytest.raises(UserError, match=r"'b' has inputs of shape \[4\]; allowed: \[3\]"):
        Node.open(plan, tmp_path / "wide.npz", "b")
    with pytest.raises(UserError, match="the name of the client is needed"):
        Node.open(plan, tmp_path / "b.npz")


@pytest.mark.parametrize("tuned", [0, 1])
def test_sums_are_the_simulators_scores(tmp_path: Path, tuned: int) -> None:
    sample = deployments.write_sample(tmp_path)
    plan, trainer = deployments.make_plan(sample, run={"fine_tune_epochs": tuned})
    state, _ = trainer.training.step(trainer.training.init())
    scores = trainer.scores(trainer.predictors(state))
    for position, name in enumerate(trainer.federation.names):
        own = tree_index(state.personal, position)
        found = Node.open(plan, sample, name).score(tree_index(state.shared, 0), own)
        for part, entry in found.items():
            assert entry.samples == int(scores[part].counts[position])
            assert entry.loss / entry.samples == pytest.approx(float(scores[part].losses[position]), rel=1e-4)
            assert entry.value / entry.samples == pytest.approx(float(scores[part].values[position]), rel=1e-4)


def test_fitted_weights_beat_all_others(tmp_path: Path) -> None:
    sample = deployments.write_sample(tmp_path)
    plan, trainer = deployments.make_plan(sample, run={"dtype": "float64"}, method={"unseen_prior": 0.0})
    state, _ = trainer.training.step(trainer.training.init())
    shared = tree_index(state.shared, 0)
    node = Node.open(plan, sample, "shop B")
    fitted = node.score(shared, node.fit(shared))["train"].loss
    draws = torch.distributions.Dirichlet(torch.ones(3, dtype=torch.float64)).sample((50,)).log()
    assert all(fitted <= node.score(shared, {"log_weights": other})["train"].loss + 1e-6 for other in draws)


def test_what_a_plan_refuses(tmp_path: Path) -> None:
    sample = deployments.write_sample(tmp_path)
    for key, value in (("unseen", 0.4), ("diagnose_every", 1), ("measure_alpha_every", 2)):
        with pytest.raises(UserError, match=f"run.{key} is {value}; allowed in a deployment"):
            deployments.make_plan(sample, run={key: value})
    with pytest.raises(UserError, match=r"attack\.name is 'noise', .*; allowed in a deployment: none"):
        deployments.make_plan(sample, attack={"name": "noise"})
    with pytest.raises(UserError, match=r"holds no plan.*`fedem deploy init` makes one.*`fedem peer plan`"):
        Plan.load(tmp_path)
    plan, _ = deployments.make_plan(sample)
    plan.save(tmp_path / "plan")
    (tmp_path / "plan" / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"plan\.json can't be read"):
        Plan.load(tmp_path / "plan")


def test_a_plan_comes_back_and_tells_others_from_itself(tmp_path: Path) -> None:
    sample = deployments.write_sample(tmp_path)
    plan = Plan.make(*deployments.configure(sample, run={"clients_per_round": 50}))
    plan.save(tmp_path / "plan")
    back = Plan.load(tmp_path / "plan")
    assert back.fingerprint == plan.fingerprint == Plan.from_json(json.loads(json.dumps(plan.to_json()))).fingerprint
    assert back.config.run.clients_per_round == 50
    assert back.format.encoding == plan.format.encoding
    assert str(tmp_path) not in (tmp_path / "plan" / "config.toml").read_text()
    elsewhere = Plan(plan.config.replace("run", device="cuda:3"), plan.format)
    assert elsewhere.fingerprint == plan.fingerprint
    assert Plan(plan.config.replace("run", seed=1), plan.format).fingerprint != plan.fingerprint
    assert Plan(plan.config.replace("server", name="adam"), plan.format).fingerprint != plan.fingerprint


def test_a_plan_from_before_a_section_or_a_setting_came_is_read_and_keeps_its_hash(tmp_path: Path) -> None:
    plan, _ = deployments.make_plan(deployments.write_sample(tmp_path))
    old = plan.on_node("auto").to_json()
    for name, section in SECTIONS.items():
        if section.came_later:
            assert old["config"].pop(name) == {"name": "none"}
    assert (old["config"]["data"].pop("max_memory"), old["config"]["data"].pop("clip_outliers")) == (0.0, False)
    assert old["config"]["run"].pop("keep_momentum") is False
    assert old["config"]["batching"].pop("drop_short") is False
    assert old["config"]["method"].pop("own_speed") == 1
    assert Plan(plan.config.replace("data", clip_outliers=True), plan.format).fingerprint != plan.fingerprint
    digest = hashlib.blake2b(json.dumps(old, sort_keys=True).encode(), digest_size=16)
    assert Plan.from_json(old).fingerprint == plan.fingerprint == digest.hexdigest()


def test_what_a_node_refuses(tmp_path: Path) -> None:
    sample = deployments.write_sample(tmp_path)
    plan, _ = deployments.make_plan(sample)
    with pytest.raises(UserError, match=r"has 3 clients .*; a client's name is needed"):
        Node.open(plan, sample)
    with pytest.raises(UserError, match="Unknown client 'shop Z'"):
        Node.open(plan, sample, "shop Z")
    rows = shops.make_shops(5, names=("x",))
    nameless = shops.write_shops(tmp_path / "own.csv", rows, ("weekday", "price", "temperature", "promotion", "sold"))
    with pytest.raises(UserError, match=r"no column 'shop'.*the name of the client is needed"):
        Node.open(plan, nameless)
    targetless = shops.write_shops(tmp_path / "no.csv", rows, ("weekday", "price", "temperature", "promotion"))
    with pytest.raises(UserError, match=r"no column 'sold'.*targets are needed"):
        Node.open(plan, targetless, "x")


def test_categories_that_the_plan_has_not_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sample = deployments.write_sample(tmp_path)
    plan, _ = deployments.make_plan(sample)
    Node.open(plan, sample, "shop B")
    assert not caplog.records
    rows = shops.make_shops(10, names=("shop B",))
    rows = [row | {"weekday": "Monday" if at else "Doomsday"} for at, row in enumerate(rows)]
    Node.open(plan, shops.write_shops(tmp_path / "own.csv", rows), "shop B")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Column 'weekday'" in record.getMessage()
    assert "1 category that the plan has not (Doomsday)" in record.getMessage()


@pytest.fixture
def _open_to_all() -> Iterator[None]:
    """A system on which new files are for everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.skipif(os.name == "nt", reason="modes are of other systems")
@pytest.mark.usefixtures("_open_to_all")
def test_what_a_client_keeps_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = deployments.make_plan(deployments.write_sample(tmp_path))
    path = kept_path(tmp_path / "state", "trial", "shop A")
    kept = Kept(plan, 1, {"log_weights": torch.zeros(3)}, client="shop A")
    kept.save(path)
    # A process that was killed has left one by the name that is written to first.
    path.with_name(f".{path.name}.tmp").touch(0o666)
    modes: list[int] = []
    move = os.replace
    monkeypatch.setattr(os, "replace", lambda one, two: (modes.append(os.stat(one).st_mode), move(one, two)))
    kept.save(path)
    assert [mode & 0o777 for mode in modes] == [0o600], "before it has its name"
    places = (path, path.parent, path.parent.parent)
    assert [place.stat().st_mode & 0o777 for place in places] == [0o600, 0o700, 0o700]
    assert Kept.load(path).client == "shop A"


def test_a_kept_file_comes_back_whole(tmp_path: Path) -> None:
    plan, trainer = deployments.make_plan(deployments.write_sample(tmp_path))
    shared = tree_index(trainer.training.init().shared, 0)
    weights = {"log_weights": torch.tensor([0.0, -torch.inf, -3.5])}
    path = kept_path(tmp_path, "trial", "shop A")
    past = [Earlier(2, weights), Earlier(0, weights)]
    for entry in (Kept(plan, 2, weights), Kept(plan, 3, {}, shared, past[:1]), Kept(plan, 3, weights, earlier=past)):
        entry.save(path)
        back = Kept.load(path)
        assert (back.round, back.plan.fingerprint) == (entry.round, plan.fingerprint)
        for name in ("personal", "shared", "before"):
            mine, theirs = getattr(entry, name), getattr(back, name)
            assert (mine is None) == (theirs is None)
            _equal(mine or {}, theirs or {}, 0)
        assert [each.round for each in back.earlier] == [each.round for each in entry.earlier]
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign"])
def test_a_damaged_kept_file_is_named(tmp_path: Path, damage: str) -> None:
    plan, _ = deployments.make_plan(deployments.write_sample(tmp_path))
    path = kept_path(tmp_path, "trial", "shop A")
    Kept(plan, 1, {"log_weights": torch.zeros(3)}).save(path)
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-5], "empty": b"", "foreign": content}[damage])
    if damage == "foreign":
        save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(UserError, match=r"shop%20%41\.safetensors can't be read"):
        Kept.load(path)


_WORDS = st.text(min_size=1, max_size=300)


@given(_WORDS, _WORDS)
def test_every_client_has_a_file_of_its_own(one: str, other: str) -> None:
    paths = [kept_path(Path("state"), "trial", name) for name in (one, other)]
    assert (str(paths[0]).lower() == str(paths[1]).lower()) == (one == other)
    for path in paths:
        assert path.parent == Path("state/trial")
        assert len(path.name.encode()) <= 255
        assert not path.name.startswith(".")
