"""The same on a GPU; skipped where there is none."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from helpers import (
    NEVER,
    StopError,
    advance,
    distance,
    make_federation,
    make_personalizer,
    make_training,
    same_states,
    stop_at,
)

import fedem
from fedem.core.tree import tree_flat
from fedem.engines import OneByOne, Stacked
from fedem.methods import METHODS
from fedem.runs.evaluate import evaluate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
every_method = pytest.mark.parametrize("method", METHODS)


@every_method
def test_loop_equals_stacked_on_the_gpu(method: str) -> None:
    states = [advance(make_training(method, engine=engine, device="cuda")) for engine in (OneByOne(), Stacked(2))]
    assert distance(*states) < 1e-11


@every_method
def test_the_gpu_agrees_with_the_cpu(method: str) -> None:
    states = [advance(make_training(method, device=device)) for device in ("cpu", "cuda")]
    assert distance(*states) < 1e-11


@every_method
def test_samples_that_stay_on_the_host_are_sent_chunk_by_chunk(method: str) -> None:
    federation = make_federation()
    moved = federation.to(torch.device("cuda"))
    assert (federation.train.pool.device.type, moved.train.pool.device.type) == ("cpu", "cuda")
    sent, resident = (
        advance(make_training(method, data, device="cuda", cohort_size=2)) for data in (federation, moved)
    )
    assert distance(resident, sent) == 0


def test_a_run_on_the_gpu_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = {"rounds": 6, "checkpoint_every": 2, "device": "cuda", "clients_per_round": 0.5, "learning_rate": 0.1}
    whole = fedem.train(make_federation(), out=tmp_path / "whole", **settings)

    with pytest.raises(StopError):
        fedem.train(make_federation(), out=tmp_path / "cut", listener=stop_at(3), **settings)
    resumed = fedem.train(make_federation(), out=tmp_path / "cut", resume=True, **settings)
    assert same_states(whole.state(), resumed.state())
    loaded = fedem.Result.load(tmp_path / "cut", device="cpu")
    inputs = make_federation().test.inputs[:3]
    torch.testing.assert_close(loaded.predict("ann", inputs), resumed.predict("ann", inputs))


def test_convolutions_on_the_gpu_give_the_same_bits_each_time() -> None:
    images = torch.rand(360, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    federation = fedem.Federation.from_arrays(images, torch.arange(360) % 10, torch.arange(360) % 6)
    first, second = (
        fedem.train(federation, rounds=4, model="cnn", batch_size=16, device="cuda").state() for _ in range(2)
    )
    assert same_states(first, second)


@every_method
def test_captured_rounds_give_the_same_bits(method: str) -> None:
    states = [
        advance(make_training(method, engine=Stacked(2, record_after=after), cohort_size=3, device="cuda"), 5)
        for after in (NEVER, 0)
    ]
    assert same_states(*states)


def components_of(name: str, **how: str) -> torch.Tensor:
    """The components [all of their numbers] of a network after four rounds."""
    generator = torch.Generator().manual_seed(0)
    samples = {
        "cnn": torch.rand(90, 1, 28, 28, generator=generator),
        "lstm": torch.randint(1, 80, (90, 20), generator=generator),
    }.get(name, torch.rand(90, 3, 64, 64, generator=generator))
    federation = fedem.Federation.from_arrays(samples, torch.arange(90) % 3, torch.arange(90) % 4)
    settings = {"model": name, "num_components": 2, "batch_size": 16, "device": "cuda", "rounds": 4}
    # Short steps, so that what is compared is rounding and not where it leads to.
    shared = fedem.train(federation, learning_rate=1e-3, **settings, **how).state().shared
    return tree_flat({leaf: tensor.double() for leaf, tensor in shared.items() if "num_batches" not in leaf})


@functools.cache
def exact_components_of(name: str) -> torch.Tensor:
    return components_of(name, engine="one_by_one", dtype="float64")


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("name", ["cnn", "mobilenet_v2", "resnet18", "efficientnet_lite0", "lstm"])
def test_networks_train_stacked_as_one_by_one(name: str, precision: str) -> None:
    exact = exact_components_of(name)
    alone, stacked = (components_of(name, engine=engine, precision=precision) for engine in ("one_by_one", "stacked"))
    # Rounding parts any two ways of computing; stacked models must be as near to exact ones as those trained alone.
    assert 0 < (stacked - exact).norm() < 2 * (alone - exact).norm()


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "resnet34", "efficientnet_lite0"])
@pytest.mark.parametrize("engine", ["stacked", "one_by_one"])
def test_networks_with_batch_norm_train_in_bfloat16(name: str, engine: str) -> None:
    # One batch for each client, of several sizes: at 1 x 1 pixels, statistics of two or three rows ruin any precision.
    images = torch.rand(90, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    federation = fedem.Federation.from_arrays(images, torch.arange(90) % 3, torch.arange(90) % 4)  # 23, 23, 22, 22
    settings = {"model": name, "num_components": 2, "batch_size": 32, "learning_rate": 0.001, "engine": engine}
    result = fedem.train(federation, rounds=2, device="cuda", precision="bfloat16", **settings)
    assert all(leaf.dtype in (torch.float32, torch.int64) for leaf in result.state().shared.values())
    assert all(leaf.isfinite().all() for leaf in result.state().shared.values())
    assert 0 <= result.summary["test_accuracy"] <= 1


@pytest.mark.parametrize("method", [name for name in METHODS if name != "local"])
def test_unseen_clients_are_fitted_on_the_gpu_as_on_the_cpu(method: str) -> None:
    newcomers = make_federation(sizes=(9, 6), names=("flo", "gus"), seed=3)
    weights = []
    for device in ("cpu", "cuda"):
        training = make_training(method, device=device)
        found = make_personalizer(training).personalize(advance(training), newcomers.train, newcomers.keys)
        scores = evaluate(training.algorithm, training.engine, found, newcomers)
        weights.append(scores["train"].losses)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-9)


@every_method
def test_a_whole_run_on_the_gpu(method: str) -> None:
    federation = make_federation(sizes=(7, 3, 12, 30, 5)).hold_out(0.3, 0)
    result = fedem.train(federation, method, rounds=3, device="cuda", evaluate_every=1)
    assert 0 <= result.summary["test_accuracy"] <= 1
    assert ("unseen_test_accuracy" in result.summary) == (method != "local")
