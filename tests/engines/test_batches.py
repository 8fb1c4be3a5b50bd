from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedem.engines.base import Batching, BatchPlan, blocks

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(lambda s: torch.tensor(sorted(s, reverse=True)))


CPU = torch.device("cpu")


def _plan(batching: Batching, sizes: torch.Tensor, keys: torch.Tensor) -> BatchPlan:
    return BatchPlan(batching, sizes, keys, CPU)


def _walk(plan: BatchPlan) -> list[list[list[int]]]:
    """Each client's batches, without their padding."""
    walked: list[list[list[int]]] = [[] for _ in plan.steps]
    for step in range(int(plan.steps.max())):
        active = int((plan.steps > step).sum())
        batch = plan.batch(step, slice(active))
        assert batch.padded == (not bool(batch.mask.all()))
        for client in range(active):
            walked[client].append(batch.positions[client][batch.mask[client]].tolist())
    return walked


@given(sizes, st.integers(0, 12), st.integers(1, 3), st.integers(0, 2**40))
def test_every_epoch_visits_every_sample_once(sizes: torch.Tensor, batch_size: int, epochs: int, word: int) -> None:
    plan = _plan(Batching(batch_size, epochs), sizes, torch.arange(len(sizes)) + word)
    for size, batches in zip(sizes.tolist(), _walk(plan), strict=True):
        width = batch_size or size
        per_epoch = -(-size // width)
        assert len(batches) == epochs * per_epoch
        for epoch in range(epochs):
            mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert sorted(position for batch in mine for position in batch) == list(range(size))
            assert all(len(batch) == min(width, size) for batch in mine[:-1])


@given(sizes, st.integers(0, 12), st.integers(1, 3))
def test_short_batches_may_be_left_out(sizes: torch.Tensor, batch_size: int, epochs: int) -> None:
    walked = [
        _walk(_plan(Batching(batch_size, epochs, drop_short=drops), sizes, torch.arange(len(sizes))))
        for drops in (False, True)
    ]
    for size, everything, kept in zip(sizes.tolist(), *walked, strict=True):
        width = min(batch_size or size, size)
        assert kept == [batch for batch in everything if len(batch) == width]
        assert len(kept) == epochs * (size // width)


@given(sizes, st.integers(1, 12), st.integers(1, 9))
def test_steps_are_counted_exactly(sizes: torch.Tensor, batch_size: int, steps: int) -> None:
    plan = _plan(Batching(batch_size, local_steps=steps), sizes, torch.arange(len(sizes)))
    assert plan.steps.tolist() == [steps] * len(sizes)
    for size, batches in zip(sizes.tolist(), _walk(plan), strict=True):
        assert len(batches) == steps
        assert all(1 <= len(batch) <= min(batch_size, size) for batch in batches)
        assert all(len(set(batch)) == len(batch) for batch in batches)


@given(sizes, st.integers(1, 12))
def test_a_clients_batches_do_not_depend_on_the_others(sizes: torch.Tensor, batch_size: int) -> None:
    keys = torch.arange(len(sizes)) * 17
    together = _walk(_plan(Batching(batch_size, 2), sizes, keys))
    for client in range(len(sizes)):
        alone = _plan(Batching(batch_size, 2), sizes[client : client + 1], keys[client : client + 1])
        assert _walk(alone)[0] == together[client]


def test_epochs_and_keys_shuffle_differently() -> None:
    plan = _plan(Batching(0, 2), torch.tensor([30, 30]), torch.tensor([1, 2]))
    orders = [tuple(batch) for client in _walk(plan) for batch in client]
    assert len(set(orders)) == 4


def test_shuffles_are_uniform() -> None:
    plan = _plan(Batching(0, 1), torch.full((6000,), 3), torch.arange(6000))
    orders = [tuple(client[0]) for client in _walk(plan)]
    counts = [orders.count(order) for order in sorted(set(orders))]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-3


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 7))
def test_blocks_cover_every_sample_in_order(raw: list[int], width: int) -> None:
    sizes = torch.tensor(sorted(raw, reverse=True))
    seen: list[list[int]] = [[] for _ in raw]
    for active, where in blocks(sizes, width, CPU):
        assert where.positions.shape[1] <= width
        for client in range(active):
            seen[client] += where.positions[client][where.mask[client]].tolist()
    assert seen == [list(range(size)) for size in sizes.tolist()]
