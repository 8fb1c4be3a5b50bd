"""Samples as rows of a pool: nothing is copied, nothing depends on the pool's order, only what is used is read."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import advance, distance, make_training
from hypothesis import given
from hypothesis import strategies as st

from fedem.core.errors import UserError
from fedem.core.random import client_keys
from fedem.data import Public
from fedem.data.federation import PARTS, Federation
from fedem.data.partitions import Collection, Dirichlet, Natural, Uniform, content_ids, from_arrays
from fedem.data.samples import Pool, Samples, offsets_of, split_rows
from fedem.engines import OneByOne, Stacked
from fedem.runs.trainer import Trainer

SIZES = (7, 1, 12, 30, 5)
NAMES = ("ann", "bob", "cem", "dan", "eve")


def _arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    owners = np.repeat(NAMES, SIZES)
    inputs = rng.normal(size=(len(owners), 4))
    return inputs, (inputs @ rng.normal(size=4) > 0).astype(np.int64), owners


def _collection(order: np.ndarray | None = None) -> Collection:
    inputs, targets, owners = _arrays()
    order = np.arange(len(owners)) if order is None else order
    return from_arrays(inputs[order], targets[order], owners[order])


def _federation(collection: Collection, seed: int = 0) -> Federation:
    assignment = Natural(min_samples=1).assign(collection, seed)
    made = Federation.from_pool(collection.pool, *assignment, collection.ids, seed=seed)
    return replace(made, origin=collection.fingerprint)


@given(st.data(), st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_rows_of_a_pool_read_as_flat_arrays_do(data: st.DataObject, sizes: list[int]) -> None:
    offsets = offsets_of(torch.tensor(sizes))
    total, inputs = int(offsets[-1]), torch.arange(40).reshape(20, 2)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 19), min_size=total, max_size=total)), dtype=torch.int64)
    pooled = Samples(Pool(inputs, inputs[:, 0]), offsets, rows)
    flat = Samples(Pool(inputs[rows], inputs[rows, 0]), offsets)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=8)))
    for mine, theirs in ((pooled, flat), (pooled.take(chosen), flat.take(chosen)), (pooled.gathered(), flat)):
        assert len(mine) == len(theirs)
        assert torch.equal(mine.inputs, theirs.inputs)
        assert torch.equal(mine.targets, theirs.targets)
        assert mine.num_bytes == theirs.gathered().num_bytes
        for position in range(mine.num_clients):
            assert all(map(torch.equal, mine.client(position), theirs.client(position)))
        if len(mine):
            where = torch.tensor([[0, len(mine) - 1], [len(mine) // 2, 0]])
            assert all(map(torch.equal, mine.read(where), theirs.read(where)))


def test_taking_clients_reads_nothing() -> None:
    federation = _federation(_collection())
    taken = federation.take(torch.tensor([3, 1]))
    assert taken.train.pool is federation.train.pool
    assert federation.hold_out(0.4).train.pool is federation.train.pool


@pytest.mark.parametrize("engine", [OneByOne(), Stacked(), Stacked(chunk_size=2)])
def test_training_on_rows_is_training_on_arrays(engine: OneByOne | Stacked) -> None:
    pooled = _federation(_collection())
    flat = Federation(pooled.names, *(pooled.part(part).gathered() for part in PARTS))
    states = [advance(make_training(federation=federation, engine=engine)) for federation in (pooled, flat)]
    assert distance(*states) == 0


@given(st.permutations(range(sum(SIZES))), st.integers(0, 5))
def test_splits_do_not_depend_on_the_order_of_the_pool(order: list[int], seed: int) -> None:
    first, second = _federation(_collection(), seed), _federation(_collection(np.array(order)), seed)
    assert first.names == second.names
    assert first.fingerprint == second.fingerprint
    for part in PARTS:
        # Even a client's samples come in the same order, so training gives the same bits.
        assert torch.equal(first.part(part).inputs, second.part(part).inputs)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.floats(0, 0.5), st.floats(0, 0.45), st.integers(0, 9))
def test_every_row_is_in_one_part_and_shares_are_kept(
    sizes: list[int], validation: float, test: float, seed: int
) -> None:
    offsets = offsets_of(torch.tensor(sizes))
    rows = torch.randperm(int(offsets[-1]), generator=torch.Generator().manual_seed(seed))
    ids = torch.from_numpy(np.random.default_rng(seed).integers(-(2**62), 2**62, len(rows)))
    names = [str(t) for t in range(len(sizes))]
    parts = split_rows(client_keys(names), rows, offsets, ids, validation, test, seed)
    assert sorted(torch.cat([own for own, _ in parts]).tolist()) == list(range(len(rows)))
    for position, size in enumerate(sizes):
        mine = set(rows[int(offsets[position]) : int(offsets[position + 1])].tolist())
        counts = []
        for own, starts in parts:
            part = own[int(starts[position]) : int(starts[position + 1])].tolist()
            assert set(part) <= mine
            counts.append(len(part))
        assert counts[0] >= 1
        assert counts[2] == min(round(test * size), size - 1)
        assert counts[1] == min(round(validation * size), size - 1 - counts[2])


def test_equal_samples_have_equal_ids_and_others_do_not() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 3, (2000, 5), dtype=np.uint8)
    ids = content_ids(inputs, np.zeros(2000))
    unique = np.unique(inputs, axis=0, return_inverse=True)[1].reshape(-1)
    assert len(set(zip(ids.tolist(), unique.tolist(), strict=True))) == len(set(ids.tolist())) == unique.max() + 1
    assert not (content_ids(inputs, np.ones(2000)) == ids).any()
    one_bit = inputs.copy()
    one_bit[:, 4] ^= 128
    assert not (content_ids(one_bit, np.zeros(2000)) == ids).any()


def _repeated(count: int = 400, seed: int = 0) -> Collection:
    """A client whose samples are of four kinds: one feature and one label, both 0 or 1."""
    kinds = np.random.default_rng(seed).choice(4, count, p=[0.4, 0.3, 0.2, 0.1])
    return from_arrays((kinds // 2)[:, None], kinds % 2, np.full(count, "ann"))


def _kinds(collection: Collection, rows: torch.Tensor) -> np.ndarray:
    kinds = 2 * collection.pool.inputs[rows, 0] + collection.pool.targets[rows]
    return np.bincount(kinds.numpy(), minlength=4)


def _looks_hypergeometric(drawn: np.ndarray, whole: np.ndarray) -> None:
    """Mean and variance of counts ``[draws, 4]`` out of ``whole`` are those of drawing without replacement."""
    size, total, draws = drawn[0].sum(), whole.sum(), len(drawn)
    share = whole / total
    variance = size * share * (1 - share) * (total - size) / (total - 1)
    assert (np.abs(drawn.mean(0) - size * share) < 4.5 * np.sqrt(variance / draws)).all()
    # The variance of a sample of normal numbers deviates by the square root of 2 / draws.
    assert (np.abs(drawn.var(0) / variance - 1) < 4.5 * np.sqrt(2 / draws)).all()


def test_samples_that_repeat_are_split_at_random() -> None:
    collection = _repeated()
    whole = _kinds(collection, torch.arange(400))
    federations = [_federation(collection, seed) for seed in range(300)]
    for part in ("validation", "test"):
        drawn = [_kinds(collection, rows) for f in federations if (rows := f.part(part).rows) is not None]
        _looks_hypergeometric(np.stack(drawn), whole)


def test_samples_that_repeat_are_dealt_at_random() -> None:
    collection = _repeated()
    whole = _kinds(collection, torch.arange(400))
    for partition in (Uniform(num_clients=4), Uniform(num_clients=1, share=0.3)):
        firsts = [(a.rows, int(a.offsets[1])) for a in (partition.assign(collection, seed) for seed in range(300))]
        _looks_hypergeometric(np.stack([_kinds(collection, rows[:end]) for rows, end in firsts]), whole)


@given(st.permutations(range(30)))
def test_samples_that_repeat_are_interchangeable(order: list[int]) -> None:
    first = _repeated(30)
    second = from_arrays(first.pool.inputs.numpy()[order], first.pool.targets.numpy()[order], np.full(30, "ann"))
    assert len(set(first.ids.tolist())) == 30
    assert first.fingerprint == second.fingerprint
    one, other = _federation(first), _federation(second)
    for part in PARTS:
        mine, yours = one.part(part).rows, other.part(part).rows
        assert mine is not None
        assert yours is not None
        assert _kinds(first, mine).tolist() == _kinds(second, yours).tolist()


def test_the_fingerprint_is_that_of_the_content() -> None:
    whole = _federation(_collection())
    assert whole.fingerprint == _federation(_collection()).fingerprint
    assert whole.fingerprint != _federation(_collection(), seed=1).fingerprint
    # Wherever the samples are; "meta" stands for a GPU here.
    assert whole.to(torch.device("meta")).fingerprint == whole.fingerprint
    inputs, targets, owners = _arrays()
    inputs[3, 2] += 1e-9
    assert whole.fingerprint != _federation(from_arrays(inputs, targets, owners)).fingerprint


class _Here(Public):
    labels = None

    def read(self, source: Path) -> None:
        raise AssertionError("nothing is read: the samples are there already")

    def collect(self) -> Collection:
        return _collection()


def test_a_run_is_bound_to_its_partition() -> None:
    from fedem.runs.config import Config

    asked = {"data": {"name": "given"}, "run": {"rounds": 1}}
    dataset = _Here().make(0, Dirichlet(num_clients=3, min_samples=2))
    trainer = Trainer.prepare(Config.build(asked), dataset)
    assert trainer.config.run.partition_hash == dataset.partition_hash != ""
    assert Trainer.prepare(trainer.config, dataset).config.sections == trainer.config.sections
    other = _Here().make(1, Dirichlet(num_clients=3, min_samples=2))
    assert other.partition_hash != dataset.partition_hash
    with pytest.raises(UserError, match="the clients got other samples"):
        Trainer.prepare(trainer.config, other)


@pytest.mark.slow
def test_only_the_cohorts_samples_are_read(tmp_path: Path) -> None:
    """A file of 4 GiB that is mostly holes: a round of two clients must not hold a tenth of it."""
    script = """
import resource, sys, numpy as np, torch
sys.path.insert(0, "tests")
from helpers import make_training
from fedem.data.federation import Federation
from fedem.models import Linear, Model
from fedem.models.losses import Logistic
from fedem.data.samples import Pool, offsets_of
count, width, clients = 1 << 20, 4096, 1 << 10
inputs = np.lib.format.open_memmap(sys.argv[1], "w+", np.uint8, (count, width))
pool = Pool(torch.from_numpy(inputs), torch.arange(count) % 2)
offsets = offsets_of(torch.full((clients,), count // clients))
names = [str(t) for t in range(clients)]
federation = Federation.from_pool(pool, names, torch.arange(count), offsets, torch.arange(count))
model = Model(lambda: Linear().build((width,), 1), Logistic())
model.probe(federation.train.span(0, 5).inputs)
training = make_training("fedem", federation, model=model, cohort_size=2)
state = training.init()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
training.step(state)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "inputs.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 400  # MiB
