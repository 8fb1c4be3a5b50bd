"""Recordings are the function itself: the same bits, for every method, solver and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import NEVER, advance, make_federation, make_training, same_states
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedem
from fedem.engines import Batching, Stacked, stacked
from fedem.engines.replay import Captured, Traced
from fedem.methods import METHODS
from fedem.models.base import Model
from fedem.solvers import LBFGS, SOLVERS, Various

SIZES = (5, 1, 7)
# A loss is the same operations in whichever method.
CASES = [*((method, "logistic") for method in METHODS), ("fedem", "cross_entropy"), ("fedem", "squared_error")]
# These differ most in what they hand to an engine; a method takes a second to record.
QUICK_METHODS = ("fedem", "scaffold", "apfl", "ifca", "local", "fedfomo", "qffl")


@pytest.mark.parametrize(
    ("method", "loss"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in QUICK_METHODS)) for case in CASES],
)
def test_replayed_rounds_give_the_same_bits(method: str, loss: str) -> None:
    federation = make_federation(loss, SIZES)
    states = [
        advance(make_training(method, federation, loss=loss, engine=Stacked(record_after=after)), 2)
        for after in (NEVER, 0)
    ]
    assert same_states(*states)


# What a solver tries is unrolled in a recording, so few trials and iterations are as good as many.
QUICK = {"lbfgs": LBFGS(0.1, history=1, num_trials=4), "various": Various(0.1, iterations=1)}


@pytest.mark.parametrize("solver", SOLVERS)
def test_replayed_solvers_give_the_same_bits(solver: str) -> None:
    settings = {"solver": QUICK.get(solver, SOLVERS[solver](weight_decay=0.1)), "batching": Batching(0, local_epochs=2)}
    federation = make_federation(sizes=SIZES)
    states = [
        advance(make_training("fedem", federation, engine=Stacked(record_after=after), **settings), 2)
        for after in (NEVER, 0)
    ]
    assert same_states(*states)


# Which clients and how many are the engine's affair, and these differ most in what they hand it.
@pytest.mark.parametrize("method", ["fedem", "scaffold", "apfl", "ifca", "local", "fedfomo"])
def test_sampled_cohorts_and_chunks_give_the_same_bits(method: str) -> None:
    states = [
        advance(make_training(method, engine=Stacked(2, record_after=after), cohort_size=3), 4) for after in (NEVER, 1)
    ]
    assert same_states(*states)


def test_the_learning_rate_is_not_frozen_into_a_recording() -> None:
    from fedem.solvers.schedules import Cosine

    states = [
        advance(make_training("fedem", engine=Stacked(record_after=a), schedule=Cosine(0.3), num_rounds=6), 6)
        for a in (NEVER, 0)
    ]
    assert same_states(*states)


def test_a_function_is_recorded_once_a_shape_and_only_when_it_comes_back() -> None:
    calls = []

    def double(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        calls.append(a.shape)
        return 2 * a + b * c

    replay = Traced(vmap(double, in_dims=(0, 0, None)), after=2)
    small, large = (torch.arange(float(n * 3)).reshape(n, 3) for n in (2, 4))
    for _ in range(6):
        assert torch.equal(replay(small, small, torch.tensor(3.0)), 5 * small)
    assert len(calls) == 3  # two plain calls and the recording
    assert torch.equal(replay(large, large, torch.tensor(3.0)), 5 * large)
    assert len(calls) == 4
    # Another layout is another recording: a view that fits one need not fit the other.
    assert torch.equal(replay(small, small.T.contiguous().T, torch.tensor(3.0)), 5 * small)
    assert len(calls) == 5


class _Graph(TorchDispatchMode):
    """A CUDA graph on a CPU: what is called while it records is called again, with the same tensors in their places.

    As on a GPU, recording leaves everything as it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pairs = zip(func._schema.arguments, args, strict=False)
        written = [given for one, given in pairs if one.alias_info is not None and one.alias_info.is_write]
        self.before += [(leaf, leaf.clone()) for leaf in tree_leaves(written)]
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for place, leaf in reversed(self.before):
            place.copy_(leaf)

    def replay(self) -> None:
        for func, args, kwargs, found in self.calls:
            is_view = any(one.alias_info is not None for one in func._schema.returns) and not func._schema.is_mutable
            again = found if is_view else func(*args, **kwargs)
            for place, leaf in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and place is not leaf:
                    place.copy_(leaf)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps be captured on a CPU, as they are on a GPU."""

    @contextmanager
    def recording(graph: _Graph, pool: object) -> Iterator[None]:
        with graph:
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


def _stirred(state: dict[str, Tensor], batch: Tensor) -> dict[str, Tensor]:
    """A step whose results stand in another order; one lies as its argument does but turned, one is its argument."""
    added = {"weight": state["weight"] + batch.sum(), "turned": state["turned"].mT, "fixed": state["fixed"]}
    return dict(reversed((added | {"long": 2 * state["long"]}).items()))


def test_captured_steps_are_the_steps_whatever_order_and_layout_results_have(on_a_cpu: None) -> None:
    def first() -> dict[str, Tensor]:
        numbers = torch.arange(36.0).reshape(4, 3, 3)
        return {"fixed": numbers + 5, "long": numbers[:, 0], "turned": numbers, "weight": numbers[:, :1] + 1}

    captured, ours, expected = Captured(_stirred, after=1), first(), first()
    for rows in (4, 4, 4, 3, 3, 2, 2, 2):
        ours, expected = ({name: leaf[:rows] for name, leaf in tree.items()} for tree in (ours, expected))
        batch = torch.full((rows, 2), float(rows))
        ours, expected = captured(ours, batch), _stirred(expected, batch)
        assert list(ours) == list(first())
        assert all(torch.equal(leaf, expected[name]) for name, leaf in ours.items())
    assert len(captured._recordings) == 3  # one for each number of rows


def test_a_step_that_can_not_be_captured_is_called_and_the_next_has_memory_of_its_own(
    on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = []

    @contextmanager
    def refusing_once(graph: _Graph, pool: object) -> Iterator[None]:
        pools.append(pool)
        if len(pools) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        with graph:
            yield

    monkeypatch.setattr(torch.cuda, "graph", refusing_once)
    captured = Captured(lambda state: {"x": state["x"] + 1}, after=1)
    with pytest.warns(UserWarning, match="not permitted"):
        assert [captured({"x": torch.zeros(2)})["x"].tolist() for _ in range(3)] == [[1, 1]] * 3
    assert [captured({"x": torch.zeros(3)})["x"].tolist() for _ in range(3)] == [[1, 1, 1]] * 3
    assert len(pools) == 2
    assert pools[0] is not pools[1]


class _Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))


def _owned(owners: Tensor) -> fedem.Federation:
    """Samples of clients, each of which owns one of them or more."""
    inputs = torch.randn(len(owners), 3, generator=torch.Generator().manual_seed(0))
    labels = 1 + inputs[:, 0].sign().long() + (inputs[:, 1] > 2)
    return fedem.Federation.from_arrays(inputs, labels, owners)


def _check_captured(federation: fedem.Federation, method: str, monkeypatch: pytest.MonkeyPatch) -> list[Captured]:
    """Train as on a GPU with steps launched and with steps captured, to the same bits; return the captured steps."""
    made: dict[int, dict[Any, Captured]] = {NEVER: {}, 1: {}}  # by their patience, and what they do

    def steps(after: int) -> Callable[..., Any]:
        def chosen(self: Stacked, step: Any, model: Any, rate_dim: int | None, device: torch.device) -> Any:
            new = Captured(vmap(step, in_dims=(0, 0, rate_dim)), after)
            return made[after].setdefault((step, rate_dim), new)

        return chosen

    monkeypatch.setattr(stacked.Walk, "_on_gpu", property(lambda self: True))
    states = []
    for after in made:
        monkeypatch.setattr(Stacked, "_steps", steps(after))
        result = fedem.train(federation, method, model=_Small(), rounds=4, batch_size=4, engine="stacked")
        states.append(result.state())
    assert same_states(*states)
    plain, captured = (list(each.values()) for each in made.values())
    assert not any(each._recordings for each in plain)
    for each in captured:
        in_any_order = {tuple(sorted(map(str, key))) for key in each._calls}
        assert len(each._recordings) == len(in_any_order)
    return captured


@pytest.mark.parametrize("method", ["fedavg", "fedem", "fedem-heads", "fedrep", "ditto", "qffl", "pfedme"])
def test_captured_rounds_give_the_same_bits(method: str, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients that end one after the other, with statistics that are averaged too."""
    owners = (6 * torch.rand(90, generator=torch.Generator().manual_seed(0)) ** 2).long()
    captured = _check_captured(_owned(owners), method, monkeypatch)
    assert len(captured) == (2 if method == "fedrep" else 1)
    assert all(len(each._recordings) > 1 for each in captured)


@pytest.mark.parametrize("sizes", [[15] * 18, [18] * 17 + [15], [40, 30, 20, 15, 15, 7, 3]])
def test_captured_last_batches_of_a_large_model_give_the_same_bits(
    sizes: list[int], on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the end, where they are taken by their sizes: all clients as they stand, or some in their place."""
    monkeypatch.setattr(Model, "is_large", True)
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    (captured,) = _check_captured(_owned(owners), "fedavg", monkeypatch)
    assert len(captured._recordings) >= min(2, len(set(sizes)))
