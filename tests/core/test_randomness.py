from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedem.core.random import choose, client_keys, derive, scramble, uniform

words = st.integers(-(2**63), 2**63 - 1)


@given(words, words)
def test_derive_is_a_function_of_its_words(key: int, word: int) -> None:
    assert int(derive(key, word)) == int(derive(torch.tensor([key]), torch.tensor(word))[0])


def test_derive_is_splitmix64() -> None:
    """The first outputs of splitmix64 seeded with 0, from its published reference."""
    golden = 0x9E3779B97F4A7C15
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    for index, expected in enumerate(published):
        counter = (golden * index) % 2**64
        signed = counter - 2**64 if counter >= 2**63 else counter
        assert int(derive(0, signed)) % 2**64 == expected


def test_order_of_words_matters_and_streams_do_not_meet() -> None:
    values = {int(derive(seed, purpose, item)) for seed in range(8) for purpose in range(8) for item in range(64)}
    assert len(values) == 8 * 8 * 64


def test_uniform_numbers_are_uniform() -> None:
    numbers = uniform(torch.arange(200), 100)
    assert numbers.shape == (200, 100)
    assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-3
    # Neighbouring keys and neighbouring positions are unrelated.
    assert abs(np.corrcoef(numbers[:-1].flatten(), numbers[1:].flatten())[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:, :-1].flatten(), numbers[:, 1:].flatten())[0, 1]) < 0.03


def test_client_keys_depend_on_the_name_alone() -> None:
    assert torch.equal(client_keys(["a", "b"]).flip(0), client_keys(["b", "a"]))


def test_choice_is_uniform_without_replacement() -> None:
    keys, counts = client_keys([str(i) for i in range(10)]), np.zeros(10)
    for word in range(2000):
        chosen = choose(keys, 3, word)
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        counts[chosen.numpy()] += 1
    assert counts.sum() == 6000
    assert stats.chisquare(counts).pvalue > 1e-3


@given(st.permutations(range(8)), st.integers(1, 8), st.integers(0, 1000))
def test_choice_does_not_depend_on_the_order(order: list[int], count: int, word: int) -> None:
    names = [str(i) for i in range(8)]
    shuffled = [names[i] for i in order]
    first = {names[i] for i in choose(client_keys(names), count, word).tolist()}
    second = {shuffled[i] for i in choose(client_keys(shuffled), count, word).tolist()}
    assert first == second


@pytest.mark.parametrize("count", [1, 7, 500, 19_999])
def test_the_smallest_hashes_are_chosen(count: int) -> None:
    keys = client_keys([str(index) for index in range(20_000)])
    hashes = derive(derive(3, 1), keys).numpy()
    assert choose(keys, count, 3, 1).tolist() == sorted(np.argsort(hashes)[:count].tolist())


def test_the_smallest_are_chosen_even_where_all_hashes_are_large() -> None:
    keys = client_keys([str(index) for index in range(20_000)])
    hashes = derive(derive(3, 1), keys).numpy()
    large = np.argsort(hashes)[-500:]
    chosen = choose(keys[large], 5, 3, 1)
    assert chosen.tolist() == sorted(np.argsort(hashes[large])[:5].tolist())


def test_hashing_leaves_its_input_as_it_was() -> None:
    keys = torch.arange(-5, 5)
    scramble(keys)
    derive(keys, keys)
    assert keys.tolist() == list(range(-5, 5))
