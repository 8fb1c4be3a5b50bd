"""The LSTM of characters, and how models are named from Python."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

import fedem
from fedem.core.errors import UserError
from fedem.core.tree import tree_index, tree_stack
from fedem.data.federation import Federation
from fedem.models import LSTM, Model
from fedem.models.losses import CrossEntropy


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_an_lstm_by_its_equations() -> None:
    module = LSTM(vocabulary=11, embedding=3, hidden=4, layers=2).build((5,), 6).double()
    inputs = torch.randint(0, 11, (7, 5))
    series = module.embedding.weight[inputs]
    for layer in range(2):
        leaves = (f"{kind}_l{layer}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        read, recall, *biases = (getattr(module.recurrent, leaf) for leaf in leaves)
        hidden = cell = torch.zeros(7, 4, dtype=torch.float64)
        states = []
        for step in series.unbind(1):
            gates = step @ read.T + hidden @ recall.T + sum(biases)
            enter, forget, new, leave = gates.chunk(4, -1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            states.append(hidden)
        series = torch.stack(states, 1)
    torch.testing.assert_close(module(inputs), hidden @ module.head.weight.T + module.head.bias)


def test_characters_outside_the_vocabulary_are_refused_before_training() -> None:
    model = Model(lambda: LSTM(vocabulary=10, hidden=4).build((3,), 5), CrossEntropy())
    with pytest.raises(UserError, match=r"can't take inputs of shape \[3\]"):
        model.check(torch.tensor([[1, 2, 10]]), torch.tensor([4]))


@pytest.mark.parametrize(("lowest", "highest"), [(0, 10), (-1, 9), (-3, 400)])
def test_a_vocabulary_knows_what_lies_outside(lowest: int, highest: int) -> None:
    spec = LSTM(vocabulary=10)
    spec.check(0, 9)
    message = f"the numbers {lowest} to {highest}, but model.vocabulary is 10; allowed: 0 to 9"
    with pytest.raises(UserError, match=message):
        spec.check(lowest, highest)


def test_an_lstm_trains_in_few_bits() -> None:
    def build() -> nn.Module:
        return LSTM(vocabulary=11, embedding=5, hidden=6).build((7,), 4)

    exact, model = Model(build, CrossEntropy()), Model(build, CrossEntropy(), precision="bfloat16")
    inputs, targets = torch.randint(0, 11, (2, 8, 7)), torch.randint(0, 4, (2, 8))
    trees = tree_stack([model.init(0), model.init(1)])

    def pull(model: Model, tree: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        def loss(leaves: dict[str, Tensor]) -> Tensor:
            return model.training_losses(leaves, inputs, targets, None, torch.tensor(0))[0].mean()

        return grad(loss)(tree)

    together = vmap(partial(pull, model))(trees, inputs, targets)
    for row in range(2):
        one = tree_index(trees, row), inputs[row], targets[row]
        alone, reference = pull(model, *one), pull(exact, *one)
        for name, leaf in tree_index(together, row).items():
            assert leaf.dtype == torch.float32
            assert leaf.isfinite().all()
            torch.testing.assert_close(leaf, alone[name], rtol=1e-2, atol=1e-2)
            assert float((leaf - reference[name]).norm()) < 0.05 * float(reference[name].norm())
    assert not all(torch.equal(alone[name], reference[name]) for name in alone)
    federation = Federation.from_parts(*[[(inputs[row], targets[row]) for row in range(2)]] * 3, ["ann", "bob"])
    settings = {"vocabulary": 11, "hidden": 6, "embedding": 5, "precision": "bfloat16", "learning_rate": 1.0}
    result = fedem.train(federation, "fedavg", model="lstm", rounds=8, evaluate_every=1, **settings)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_characters_outside_the_vocabulary_are_refused_wherever_they_come_in() -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 9, (20, 5)), rng.integers(0, 3, 20)) for _ in range(3)]
    late = [*pairs, (np.full((20, 5), 11), rng.integers(0, 3, 20))]
    settings = {"model": {"name": "lstm", "vocabulary": 10, "hidden": 4}, "rounds": 1}
    with pytest.raises(UserError, match=r"numbers 0 to 11, but model\.vocabulary is 10"):
        fedem.train(fedem.Federation.from_clients(late), **settings)
    result = fedem.train(fedem.Federation.from_clients(pairs), **settings)
    with pytest.raises(UserError, match=r"numbers 0 to 10, but model\.vocabulary is 10"):
        result.personalize([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 0, 0, 0, 10]], [0, 1, 2])
    with pytest.raises(UserError, match="can't take inputs"):
        result.predict("0", [[0, 1, 2, 3, 10]])
    assert result.predict("0", [[0, 1, 2, 3, 9]]).shape == (1, 3)
