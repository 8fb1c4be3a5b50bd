"""Memory: chosen from what is free, bounded by the chunk, and what happens when it runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import advance, distance, make_federation, make_training, scores_of

import fedem
from fedem.core.errors import UserError
from fedem.engines import OneByOne, Stacked
from fedem.engines import device as memory
from fedem.engines.device import budget, free_bytes, is_out_of_memory, peak_bytes
from fedem.methods.base import Batch, Local
from fedem.models import Model

CPU = torch.device("cpu")


def _shortage(monkeypatch: pytest.MonkeyPatch, most: int, error: RuntimeError | None = None) -> list[int]:
    """Let steps of more than ``most`` clients fail as torch does; returns how many each step had."""
    seen: list[int] = []
    plain = Stacked._steps

    def steps(self: Stacked, *given: Any) -> Any:
        step = plain(self, *given)

        def limited(local: Local, batch: Batch, rate: Any) -> Any:
            seen.append(len(batch.targets))
            if seen[-1] > most:
                raise error or torch.OutOfMemoryError("CUDA out of memory.")
            return step(local, batch, rate)

        return limited

    monkeypatch.setattr(Stacked, "_steps", steps)
    return seen


@pytest.mark.parametrize("method", ["fedem", "local", "scaffold"])
def test_running_out_of_memory_halves_the_chunk_and_goes_on(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = advance(make_training(method, engine=OneByOne()))
    seen = _shortage(monkeypatch, most=1)
    training = make_training(method)
    assert distance(advance(training), expected) < 1e-12
    # 5 clients, then 2, then one at a time; in later rounds nothing is tried that failed before.
    assert [count for count in seen if count > 1] == [5, 2]
    assert training.engine.most_together == 1


@pytest.mark.slow
def test_scoring_takes_fewer_samples_at_once_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training(engine=OneByOne())
    state = advance(training)
    expected = scores_of(training, state)
    seen: list[int] = []
    plain = Model.component_outputs

    def limited(self: Model, components: Any, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(len(inputs))
        if len(inputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(self, components, inputs)

    monkeypatch.setattr(Model, "component_outputs", limited)
    found = scores_of(training, state, Stacked())
    for part, scores in expected.items():
        torch.testing.assert_close(found[part].losses, scores.losses)
    assert max(seen) > 2 >= seen[-1]


def test_a_shortage_on_the_cpu_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")
    expected = advance(make_training(engine=OneByOne()))
    _shortage(monkeypatch, most=2, error=error)
    assert distance(advance(make_training()), expected) < 1e-12


def test_one_client_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _shortage(monkeypatch, most=0)
    with pytest.raises(torch.OutOfMemoryError):
        advance(make_training())


def test_other_errors_are_not_taken_for_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    _shortage(monkeypatch, most=0, error=RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        advance(make_training())
    assert not is_out_of_memory(RuntimeError("something else"))


def test_memory_decides_how_many_are_stacked() -> None:
    sizes = (20,) * 12
    names = tuple(map(str, range(12)))
    counts = []
    for limit in (1, 9_000, 0):
        training = make_training(federation=make_federation(sizes=sizes, names=names), engine=Stacked(max_bytes=limit))
        advance(training, 1)
        counts.append(training.engine.most_together)
    assert counts[0] == 1
    assert 1 < counts[1] < 12
    assert counts[2] == 12


def test_what_is_free_is_read_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_bytes(CPU)
    assert 1 << 20 < free < 1 << 50
    assert 0 < budget(CPU) <= free // 4
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    assert budget(CPU) == 250
    assert budget(torch.device("cuda")) == 400


def test_a_summary_tells_how_many_and_how_much() -> None:
    result = fedem.train(make_federation(), rounds=1)
    assert result.summary["clients_together"] == 5
    assert result.summary["peak_host_bytes"] == pytest.approx(peak_bytes(CPU)["peak_host_bytes"], rel=0.1)
    assert "peak_gpu_bytes" not in result.summary


def test_bfloat16_and_float64_are_refused_together() -> None:
    with pytest.raises(UserError, match=r"'bfloat16' but run\.dtype is 'float64'"):
        fedem.train(make_federation(), rounds=1, precision="bfloat16", dtype="float64")
