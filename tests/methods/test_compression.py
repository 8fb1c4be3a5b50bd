"""Smaller messages: what is sent and what is kept back are the update, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DIMENSION, advance, distance, make_federation, make_personalizer, make_training, same_states
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from newcomers import NEWCOMERS
from torch import Tensor, nn
from torch.func import vmap

import fedem
from fedem.core.random import SHUFFLE, derive
from fedem.core.tree import Tree, take_prefix, tree_bytes, tree_index, tree_map
from fedem.engines import Cohort, OneByOne, Stacked, Work
from fedem.methods.wrappers.compression import (
    Codec,
    Compression,
    join_residual,
    read_update,
    split_residual,
    write_update,
)
from fedem.models import Model
from fedem.models.losses import Logistic
from fedem.runs.folder import RunFolder
from fedem.runs.rounds import State, Training

METHODS = ("fedem", "fedavg", "fedprox", "ditto", "apfl", "perfedavg")
FORMATS = ("bfloat16", "int8")
every_format = pytest.mark.parametrize("form", FORMATS)
KINDS = {
    "bfloat16": Compression("bfloat16"),
    "int8": Compression("int8"),
    "both ways": Compression("int8", "int8"),
    "few components": Compression("int8", "bfloat16", 0.3),
    "few as they are": Compression(threshold=0.3),
    "downloads alone": Compression(downloads="int8"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def compressed(training: Training, compression: Compression) -> Training:
    return replace(training, codec=make_codec(training, compression))


def make_codec(training: Training, compression: Compression) -> Codec:
    return Codec(compression, training.algorithm.model, int(training.algorithm.is_mixture))


def normalising() -> Model:
    return Model(
        lambda: nn.Sequential(nn.Linear(DIMENSION, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)), Logistic(), torch.float64
    )


def uploads_of(training: Training, state: State) -> tuple[Tree, Tree]:
    """Everybody's message and personal tree of the round that comes next, ``[T, ...]``."""
    clients, keys = torch.arange(training.federation.num_clients), training.federation.keys
    served = training.mixer.read(state.shared, state.memory, clients)
    personal, residual = split_residual(state.personal)
    cohort = Cohort(*served, personal, training.federation.train)
    work = Work(training.batching, derive(keys, SHUFFLE, training.seed, state.round), 0.2)
    (found,) = Stacked().train(training.algorithm, cohort, work)
    order = found.positions.argsort()
    uploads, personal = tree_index(found.uploads, order), tree_index(found.personal, order)
    assert training.codec is not None
    encode = vmap(training.codec.encode, in_dims=(0, None, 0, 0))
    messages, residual = encode(uploads, tree_index(state.shared, 0), personal, residual)
    return messages, join_residual(personal, residual)


# What is written.

numbers = st.floats(-1e6, 1e6, width=32).map(lambda value: 0.0 if abs(value) < 1e-20 else value)
leaves = arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 5)), elements=numbers).map(torch.from_numpy)


@every_format
@given(leaf=leaves, leading=st.integers(0, 1))
def test_what_is_said_and_what_is_left_are_the_update_to_the_last_bit(form: str, leaf: Tensor, leading: int) -> None:
    message, rest = write_update({"w": leaf}, {"w": torch.zeros_like(leaf)}, form, leading)
    said = read_update(message, leaf.dtype)["w"]
    assert torch.equal(said + rest["w"], leaf)
    if message["w"].dtype == torch.int8:
        scale = message["scale/w"].float()
        assert bool((rest["w"].abs() <= scale.reshape(*scale.shape, *(1,) * (leaf.ndim - scale.ndim)) / 2).all())
    else:
        assert message["w"].dtype == torch.bfloat16
        assert bool((rest["w"].abs() <= leaf.abs() / 2**8).all())


@every_format
@settings(max_examples=25)
@given(updates=arrays(np.float64, (12, 2, 5), elements=st.floats(-1, 1)).map(torch.from_numpy))
def test_all_that_was_said_follows_all_that_happened(form: str, updates: Tensor) -> None:
    rest, said = {"w": torch.zeros(2, 5, dtype=torch.float64)}, torch.zeros(2, 5, dtype=torch.float64)
    for count in range(len(updates)):
        message, rest = write_update({"w": updates[count]}, rest, form, 1)
        said = said + read_update(message, torch.float64)["w"]
        torch.testing.assert_close(said + rest["w"], updates[: count + 1].sum(0), rtol=0, atol=1e-12)
        # What is left never adds up: it is half a step of at most 1.01 at first, whatever came before.
        assert float(rest["w"].abs().max()) <= 1.01 / 127


def test_rows_of_zeros_and_leaves_of_any_shape_can_be_written() -> None:
    tree = {"zero": torch.zeros(2, 4), "scalar": torch.tensor([0.3, -4.0]), "none": torch.zeros(2, 0)}
    message, rest = write_update(tree, tree_map(torch.zeros_like, tree), "int8", 1)
    for name, leaf in read_update(message, torch.float32).items():
        assert torch.equal(leaf + rest[name], tree[name])


# Rounds.


@pytest.mark.parametrize("method", METHODS)
def test_updates_written_as_they_are_change_nothing(method: str) -> None:
    """Also with buffers and counters, which are part of u."""
    for model in (None, normalising()):
        plain = make_training(method, make_federation(sizes=(7, 4, 12)), model=model)
        written = compressed(plain, Compression())
        assert distance(advance(written), advance(plain)) < 1e-12


@pytest.mark.parametrize("method", METHODS)
@every_format
def test_in_the_first_round_what_all_kept_back_is_what_the_shared_tree_lacks(method: str, form: str) -> None:
    plain = make_training(method, make_federation(sizes=(7, 4, 12)), model=normalising())
    training = compressed(plain, Compression(form, form))
    expected, (found, _) = advance(plain, 1), training.step(training.init())
    weights = torch.tensor([7, 4, 12]).double() / 23
    for name, leaf in expected.shared.items():
        kept = 0
        if name in plain.algorithm.model.trainable:
            residual = found.personal[f"residual/{name}"]
            kept = torch.tensordot(weights, residual, 1) + found.memory[f"rest/{name}"]
            assert bool((residual != 0).any())
        torch.testing.assert_close(found.shared[name] + kept, leaf, rtol=0, atol=1e-12)
    for name, leaf in expected.personal.items():
        torch.testing.assert_close(found.personal[name], leaf, rtol=0, atol=1e-12)


@every_kind
def test_loop_equals_stacked(kind: str) -> None:
    trainings = [compressed(make_training(engine=engine), KINDS[kind]) for engine in (OneByOne(), Stacked())]
    assert distance(*map(advance, trainings)) < 1e-12


@every_kind
def test_a_checkpoint_holds_what_was_kept_back(kind: str, tmp_path: Path) -> None:
    training = compressed(make_training(cohort_size=3), KINDS[kind])
    state = advance(training, 2)
    RunFolder(tmp_path).save({"last": state}, {})
    loaded = RunFolder(tmp_path).load()[0]["last"]
    assert same_states(advance(training, 2, loaded), advance(training, 2, state))


@every_format
def test_whoever_follows_the_news_holds_what_the_server_holds(form: str) -> None:
    plain = make_training(model=normalising(), federation=make_federation(sizes=(7, 4)))
    training = compressed(plain, Compression("int8", form))
    assert training.codec is not None
    state = training.init()
    mine = tree_index(state.shared, 0)
    for _ in range(4):
        state, _ = training.step(state)
        news = training.codec.news(state.memory)
        assert news
        mine = tree_map(torch.add, mine, training.codec.decode(tree_index(news, 0)))
        assert all(torch.equal(leaf, state.shared[name][0]) for name, leaf in mine.items())


# Components that are not worth sending.


def test_a_client_sends_the_components_above_the_threshold_and_no_others() -> None:
    training = compressed(make_training(), KINDS["few components"])
    codec = training.codec
    assert codec is not None
    state = advance(training, 2)
    uploads, personal = uploads_of(training, state)
    sent = uploads["sent/components"]
    assert torch.equal(sent, personal["log_weights"].exp() > 0.3)
    assert bool(sent.any(1).all())
    assert not bool(sent.all())
    for name, leaf in take_prefix("residual", personal).items():
        assert torch.equal(leaf[~sent], state.personal[f"residual/{name}"][~sent])
    packed = [codec.pack(tree_index(uploads, position)) for position in range(5)]
    assert codec.num_bytes(uploads) == sum(map(tree_bytes, packed))
    for position, message in enumerate(packed):
        again = codec.unpack(message)
        assert again.keys() == uploads.keys()
        assert all(torch.equal(leaf, uploads[name][position]) for name, leaf in again.items())
    assert training.step(state)[1].bytes_up == codec.num_bytes(uploads)


def test_a_component_that_nobody_sends_stays_as_it_is() -> None:
    plain = make_training(model=normalising(), federation=make_federation(sizes=(7, 4)))
    training = compressed(plain, Compression("int8", threshold=0.01))
    start = training.init()
    weights = torch.tensor([1e-9, 0.5, 0.5 - 1e-9], dtype=torch.float64).log().expand(2, 3)
    start = replace(start, personal=start.personal | {"log_weights": weights})
    after, _ = training.step(start)
    for name, leaf in after.shared.items():
        assert torch.equal(leaf[0, 0], start.shared[name][0, 0])
    assert not torch.equal(after.shared["0.weight"][0, 1], start.shared["0.weight"][0, 1])
    assert all(not bool(leaf[:, 0].any()) for leaf in take_prefix("residual", after.personal).values())


def test_a_threshold_below_all_weights_sends_all() -> None:
    all_of_them = compressed(make_training(), KINDS["int8"])
    tiny = compressed(make_training(), Compression("int8", threshold=1e-300))
    assert same_states(advance(all_of_them), advance(tiny))
    assert "sent/components" not in uploads_of(all_of_them, all_of_them.init())[0]


# Bytes.


def test_followers_are_counted_by_the_news_and_the_others_by_the_whole() -> None:
    training = compressed(make_training(cohort_size=3, model=normalising()), KINDS["both ways"])
    assert training.codec is not None
    state = training.init()
    whole, before = tree_bytes(state.shared), set[int]()
    for _ in range(4):
        news = training.codec.news(state.memory)
        assert news
        cohort = set(training.sample(state.round).tolist())
        state, costs = training.step(state)
        following = len(before & cohort)
        assert costs.bytes_down == following * tree_bytes(news) + (3 - following) * whole
        before = cohort


@pytest.mark.parametrize(("form", "fewer"), [("bfloat16", 2.0), ("int8", 3.9)])
def test_messages_of_the_papers_synthetic_models_are_so_much_smaller(form: str, fewer: float) -> None:
    data = {"num_clients": 4, "num_test": 10, "num_validation": 0}

    def traffic(**compression: object) -> tuple[int, int]:
        config = fedem.Config.build({"run": {"rounds": 2}, "data": data, "compression": compression})
        line = fedem.run(config, config.make_data()).history[-1]
        return line["bytes_up"], line["bytes_down"]

    off, on = traffic(), traffic(updates=form, downloads=form)
    assert off == (4 * 3 * 151 * 4,) * 2
    assert all(before >= fewer * after for before, after in zip(off, on, strict=True))


# Predictors: what is kept back is no part of them.


@pytest.mark.parametrize("method", ["fedem", "ditto"])
@pytest.mark.parametrize("fine_tune_epochs", [0, 1])
def test_predictors_are_those_of_the_method_itself(method: str, fine_tune_epochs: int) -> None:
    training = compressed(make_training(method), KINDS["both ways"])
    plain = replace(training, codec=None)
    state = advance(training)
    bare = {name: leaf for name, leaf in state.personal.items() if not name.startswith("residual/")}
    makers = [make_personalizer(which, fine_tune_epochs=fine_tune_epochs) for which in (training, plain)]
    seen = [
        maker.predictors(which, training.federation)
        for maker, which in zip(makers, (state, replace(state, personal=bare)), strict=True)
    ]
    unseen = [maker.personalize(state, NEWCOMERS.train, NEWCOMERS.keys) for maker in makers]
    for ours, theirs in (seen, unseen):
        for position in range(3):
            first, second = ours.of(training.algorithm, position), theirs.of(plain.algorithm, position)
            torch.testing.assert_close(first.log_weights, second.log_weights, rtol=0, atol=1e-12)
            assert first.components.keys() == second.components.keys()
            for name, leaf in first.components.items():
                torch.testing.assert_close(leaf, second.components[name], rtol=0, atol=1e-12)
