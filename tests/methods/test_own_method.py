"""A user's own method: one file with its row of the table, from outside of the package."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import StopError, distance, make_federation, same_states, stop_at
from torch import Tensor

import fedem
from fedem.core.errors import UserError
from fedem.methods import ALIASES, Local, Penalty, SingleModel, Star, Tree, register, trained_leaves

GUIDE = Path(__file__).parents[2] / "docs" / "methods.md"


@dataclass(frozen=True, eq=False)
class Shrinking(SingleModel):
    """FedAvg whose clients are pulled towards zero."""

    strength: float = field(default=0.1, metadata={"min": 0})

    def penalty(self, local: Local) -> Penalty | None:
        def value(candidate: Tree) -> Tensor:
            leaves = trained_leaves(self.model, candidate).values()
            return self.strength / 2 * sum((leaf.square().sum() for leaf in leaves), torch.zeros(()))

        return value


@pytest.fixture
def table() -> Iterator[None]:
    """The table of methods, as it was before, afterwards."""
    before = dict(fedem.METHODS), dict(ALIASES)
    yield
    for kept, now in zip(before, (fedem.METHODS, ALIASES), strict=True):
        now.clear()
        now.update(kept)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    row = fedem.Method("shrinking", Shrinking, Star, "Shrinking", "FedAvg towards zero")
    monkeypatch.setitem(fedem.METHODS, "shrinking", row)


@pytest.mark.usefixtures("own")
def test_a_row_of_ones_own_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    federation = make_federation(dtype=float)
    options = {"rounds": 3, "learning_rate": 0.1, "dtype": "float64", "weight_decay": 0.0}
    result = fedem.train(federation, "shrinking", strength=0.5, out=tmp_path / "run", **options)
    assert result.config.values("method") == {"strength": 0.5, "weighting": "samples"}
    # A pull towards zero is what weight decay is.
    decayed = fedem.train(federation, "fedavg", **options | {"weight_decay": 0.5})
    for name, leaf in result.state().shared.items():
        torch.testing.assert_close(leaf, decayed.state().shared[name])
    inputs = federation.test.inputs[:2]
    assert torch.equal(fedem.Result.load(tmp_path / "run").predict("ann", inputs), result.predict("ann", inputs))
    with pytest.raises(UserError, match="strength is -1"):
        fedem.train(federation, "shrinking", strength=-1.0)


@pytest.mark.usefixtures("table")
def test_the_guides_method_is_what_it_says() -> None:
    """The script of docs/methods.md, in a file without text for annotations, is FedAvg with weight decay."""
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "a_file_of_the_users"}
    exec(compile(script, "methods.md", "exec", dont_inherit=True), names)
    assert names["result"].config.values("method") == {"strength": 0.5, "weighting": "samples"}
    data = fedem.Synthetic(num_clients=20).make(seed=0)
    decayed = fedem.train(data, "fedavg", weight_decay=0.5, rounds=5)
    for name, leaf in names["result"].state().shared.items():
        torch.testing.assert_close(leaf, decayed.state().shared[name])


def test_annotations_may_be_types_instead_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without ``from __future__ import annotations`` has them so."""
    names: dict[str, Any] = {"__name__": "a_file_of_the_users", "field": field, "SingleModel": SingleModel}
    code = "class Plain(SingleModel):\n    strength: float = field(default=0.1, metadata={'min': 0})\n"
    exec(compile(code, "a file", "exec", dont_inherit=True), names)
    plain = dataclass(frozen=True, eq=False)(names["Plain"])
    assert plain.__annotations__["strength"] is float
    monkeypatch.setitem(fedem.METHODS, "plain", fedem.Method("plain", plain, Star, "Plain", "FedAvg"))
    result = fedem.train(make_federation(), "plain", strength=0.5, rounds=1)
    assert result.config.values("method") == {"strength": 0.5, "weighting": "samples"}
    with pytest.raises(UserError, match="strength is -1"):
        fedem.train(make_federation(), "plain", strength=-1.0)


@pytest.mark.usefixtures("table")
def test_a_whole_method_from_outside_is_one_file(tmp_path: Path) -> None:
    """It trains with either engine, resumes, is loaded, deployed to newcomers, and refused what it did not declare."""
    runpy.run_path(str(Path(__file__).with_name("outside_method.py")))
    federation = make_federation(dtype=float)
    options: dict[str, Any] = {"learning_rate": 0.1, "dtype": "float64", "clients_per_round": 3, "trust": 0.3}
    loop, stacked = (
        fedem.train(federation, "blend", rounds=4, engine=engine, caution=0.5, unseen=0.2, **options)
        for engine in ("one_by_one", "stacked")
    )
    assert distance(loop.state(), stacked.state()) < 1e-12
    assert loop.config.values("method") == {"trust": 0.3, "caution": 0.5}
    assert int(loop.state().memory["rounds"]) == 4
    assert {"unseen_test_accuracy", "test_accuracy"} <= set(loop.summary)
    out, listener = tmp_path / "run", stop_at(2)
    with pytest.raises(StopError):
        fedem.train(federation, "blending", rounds=4, out=out, checkpoint_every=1, listener=listener, **options)
    resumed = fedem.train(federation, "blending", rounds=4, out=out, checkpoint_every=1, resume=True, **options)
    whole = fedem.train(federation, "blending", rounds=4, **options)
    assert same_states(resumed.state(), whole.state())
    inputs = federation.test.inputs[:2]
    assert torch.equal(fedem.Result.load(out).predict("ann", inputs), whole.predict("ann", inputs))
    assert whole.personalize(*federation.train.client(0)).predict(inputs).shape == (2, 2)
    with pytest.raises(UserError, match=r"method blending needs a server; allowed over a graph.*: fedem, dfedem, dsgd"):
        fedem.train(federation, "blending", graph="ring")
    with pytest.raises(UserError, match="There is a method 'blend' already"):
        register(fedem.Method("blend", Shrinking, Star, "Blend", "another"))


def test_without_its_row_the_name_is_unknown() -> None:
    with pytest.raises(UserError, match="Unknown method 'shrinking'"):
        fedem.train(make_federation(), "shrinking")
