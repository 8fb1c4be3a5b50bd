"""A user's own method: one class and a row in the table, from outside of the package."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_federation
from torch import Tensor

import fedem
from fedem.core.errors import UserError
from fedem.core.tree import Tree
from fedem.methods.base import Local
from fedem.methods.mixer import Star
from fedem.methods.steps import Penalty, SingleModel, trained_leaves

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
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    row = fedem.Method(Shrinking, Star, "Shrinking", "FedAvg towards zero", "", "nothing", "a model", "takes it")
    monkeypatch.setitem(fedem.METHODS, "shrinking", row)


@pytest.mark.usefixtures("own")
def test_a_row_of_ones_own_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    federation = make_federation(dtype=float)
    options = {"rounds": 3, "learning_rate": 0.1, "dtype": "float64", "weight_decay": 0.0}
    result = fedem.train(federation, "shrinking", strength=0.5, out=tmp_path / "run", **options)
    assert result.config.values("method") == {"strength": 0.5}
    # A pull towards zero is what weight decay is.
    decayed = fedem.train(federation, "fedavg", **options | {"weight_decay": 0.5})
    for name, leaf in result.state().shared.items():
        torch.testing.assert_close(leaf, decayed.state().shared[name])
    inputs = federation.test.inputs[:2]
    assert torch.equal(fedem.Result.load(tmp_path / "run").predict("ann", inputs), result.predict("ann", inputs))
    with pytest.raises(UserError, match="strength is -1"):
        fedem.train(federation, "shrinking", strength=-1.0)


def test_the_guides_method_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of docs/methods.md, in a file without text for annotations, is FedAvg with weight decay."""
    monkeypatch.setitem(fedem.METHODS, "shrinking", fedem.METHODS["fedavg"])  # taken out again afterwards
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "a_file_of_the_users"}
    exec(compile(script, "methods.md", "exec", dont_inherit=True), names)
    assert names["result"].config.values("method") == {"strength": 0.5}
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
    row = fedem.Method(plain, Star, "Plain", "FedAvg", "", "nothing", "a model", "takes it")
    monkeypatch.setitem(fedem.METHODS, "plain", row)
    result = fedem.train(make_federation(), "plain", strength=0.5, rounds=1)
    assert result.config.values("method") == {"strength": 0.5}
    with pytest.raises(UserError, match="strength is -1"):
        fedem.train(make_federation(), "plain", strength=-1.0)


def test_without_its_row_the_name_is_unknown() -> None:
    with pytest.raises(UserError, match="Unknown method 'shrinking'"):
        fedem.train(make_federation(), "shrinking")
