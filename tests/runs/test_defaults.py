"""What the data decide: batches, the length of steps, and rounds that are made again."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fedem
from fedem.core.errors import UserError
from fedem.engines import Batching
from fedem.models import Model
from fedem.models.losses import CrossEntropy, Logistic, Loss, SquaredError
from fedem.runs.defaults import TARGET_STEPS, curvature, settle_batches
from fedem.runs.trainer import Trainer


def _clients(sizes: tuple[int, ...] = (30, 20, 25), scale: float = 1.0, seed: int = 0) -> fedem.Federation:
    generator = np.random.default_rng(seed)
    inputs = [scale * generator.normal(size=(size, 4)) for size in sizes]
    return fedem.Federation.from_clients(
        [(x, x @ [1.0, -1.0, 0.5, 0.0] + generator.normal(size=len(x))) for x in inputs], validation=0.2, test=0.2
    )


class TestBatches:
    @pytest.mark.parametrize("median", [3, 10, 40, 300, 3000, 100_000])
    def test_a_median_client_takes_several_steps(self, median: int) -> None:
        sizes = torch.tensor([1, median, 10 * median])
        settled = settle_batches(Batching(-1, 0), sizes)
        steps = int(settled.num_steps(torch.tensor([median])))
        assert 8 <= settled.batch_size <= 128
        assert 1 <= settled.local_epochs <= 5
        assert steps >= min(TARGET_STEPS // 2, 5)

    def test_a_given_rate_has_the_usual_batches(self) -> None:
        assert settle_batches(Batching(-1, 0), torch.tensor([30]), by_data=False) == Batching()
        assert settle_batches(Batching(16, 0), torch.tensor([30]), by_data=False) == Batching(16)
        batching = fedem.train(_clients(), "fedavg", rounds=1, learning_rate=0.1).recipe.config.batching
        assert batching == Batching()

    def test_what_is_given_stays(self) -> None:
        assert settle_batches(Batching(64, 0), torch.tensor([640])).batch_size == 64
        assert settle_batches(Batching(-1, 3), torch.tensor([640])).local_epochs == 3
        assert settle_batches(Batching(), torch.tensor([640])) == Batching()


class TestCurvature:
    @pytest.mark.parametrize(
        ("loss", "outputs", "factor"),
        [(SquaredError(), 1, 1.0), (SquaredError(variance=4.0), 1, 0.25), (Logistic(), 1, 0.25)],
    )
    def test_of_a_linear_model_is_the_largest_eigenvalue(self, loss: Loss, outputs: int, factor: float) -> None:
        federation = _clients()
        if isinstance(loss, Logistic):
            federation = fedem.Federation.from_clients(
                [(part.inputs, (part.targets > 0).long()) for part in map(federation.train.client, range(3))]
            )

        def build() -> nn.Module:
            layer = nn.Linear(4, outputs)
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
            return layer

        found = curvature(Model(build, loss), federation, Batching(0), 0, torch.device("cpu"))
        exact = 0.0
        for t in range(3):
            inputs = federation.train.client(t).inputs.double().numpy()
            padded = np.hstack([inputs, np.ones((len(inputs), 1))])
            exact = max(exact, factor * np.linalg.eigvalsh(padded.T @ padded / len(inputs)).max())
        assert found == pytest.approx(exact, rel=0.02)

    def test_of_a_network_is_that_of_its_hessian(self) -> None:
        federation = _clients(sizes=(12,))
        model = Model(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), SquaredError())
        found = curvature(model, federation, Batching(0), 0, torch.device("cpu"))
        exact = Model(model.build, model.loss, torch.float64)
        start = exact.init(0)
        shapes = {name: leaf.shape for name, leaf in start.items()}

        def objective(flat: torch.Tensor) -> torch.Tensor:
            pieces = flat.split([shape.numel() for shape in shapes.values()])
            tree = {name: piece.reshape(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
            return exact.losses(tree, *federation.train.client(0)).mean()

        hessian = torch.autograd.functional.hessian(objective, torch.cat([leaf.flatten() for leaf in start.values()]))
        assert found == pytest.approx(float(torch.linalg.eigvalsh(hessian).abs().max()), rel=0.05)

    def test_larger_inputs_get_shorter_steps(self) -> None:
        rates = []
        for scale in (1.0, 10.0):
            result = fedem.train(_clients(scale=scale), "local", rounds=5, seed=0)
            rates.append(result.summary["learning_rate"])
            assert "diverged" not in result.summary
        assert rates[1] < rates[0] / 20


class TestBacktracking:
    HOW: ClassVar = {"rounds": 6, "batch_size": 0, "evaluate_every": 0}

    def test_a_rate_that_diverges_is_halved_until_it_does_not(self) -> None:
        result = fedem.train(_clients(), "fedavg", learning_rate=50.0, backtrack=True, **self.HOW)
        assert result.summary["halvings"] >= 3
        assert result.summary["learning_rate"] == 50.0 / 2 ** result.summary["halvings"]
        assert result.summary["train_mean_squared_error"] < 4
        assert [line["learning_rate"] for line in result.history][-1] <= result.summary["learning_rate"]

    def test_a_given_rate_is_not_touched_and_divergence_is_told(self) -> None:
        result = fedem.train(_clients(), "fedavg", learning_rate=6.0, **self.HOW)
        assert result.summary["diverged"] is True
        assert "halvings" not in result.summary

    def test_a_rate_that_suits_is_left_alone_bit_for_bit(self) -> None:
        plain, watched = (
            fedem.train(_clients(), "fedem", learning_rate=0.1, backtrack=value, **self.HOW) for value in (False, True)
        )
        assert all(torch.equal(leaf, watched.state().shared[name]) for name, leaf in plain.state().shared.items())

    def test_a_run_that_was_slowed_resumes_in_the_same_bits(self, tmp_path: Path) -> None:
        how = self.HOW | {"learning_rate": 50.0, "backtrack": True, "checkpoint_every": 2}
        whole = fedem.train(_clients(), "fedavg", out=tmp_path / "whole", **how)

        def stop(record: dict[str, float]) -> None:
            if record["round"] == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fedem.train(_clients(), "fedavg", out=tmp_path / "cut", listener=stop, **how)
        resumed = fedem.train(_clients(), "fedavg", out=tmp_path / "cut", resume=True, **how)
        assert all(torch.equal(leaf, resumed.state().shared[name]) for name, leaf in whole.state().shared.items())
        assert resumed.summary["halvings"] == whole.summary["halvings"]

    def test_what_was_chosen_is_written_down_and_resumes(self, tmp_path: Path) -> None:
        fedem.train(_clients(), "fedavg", rounds=2, out=tmp_path / "run", schedule="constant")
        config = fedem.Result.load(tmp_path / "run").recipe.config
        assert config.schedule.learning_rate > 0
        assert config.batching.batch_size >= 8
        longer = fedem.train(_clients(), "fedavg", rounds=4, out=tmp_path / "run", resume=True, schedule="constant")
        assert [line["round"] for line in longer.history] == [1, 2, 3, 4]


def test_far_off_is_some_times_a_guess() -> None:
    targets = torch.tensor([0, 1, 2, 1])
    assert CrossEntropy().far_off(targets, 3) == pytest.approx(4 * np.log(3))
    assert Logistic().far_off(targets.clamp(max=1), 1) == pytest.approx(4 * np.log(2))
    numbers = torch.tensor([1.0, -3.0])
    assert SquaredError().far_off(numbers, 1) == pytest.approx(4 * (5 / 2 + np.log(2 * np.pi) / 2))


def test_schedules_still_refuse_negative_rates() -> None:
    with pytest.raises(UserError, match=r"learning_rate is -0\.1"):
        fedem.train(_clients(), "fedavg", rounds=1, learning_rate=-0.1)


def test_prepared_runs_know_their_rate() -> None:
    config = fedem.runs.config.Config.build({"data": {"name": "given"}})
    trainer = Trainer.prepare(config, fedem.data.dataset.Dataset(_clients(), None))
    assert trainer.config.schedule.learning_rate > 0
    assert trainer.config.schedule.backtrack
