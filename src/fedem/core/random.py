"""Randomness as a pure function of keys.

Whatever is drawn at random is derived from (seed, purpose, round, client, position) by hashing, never from the state of
a generator. So no result depends on the engine, on the size of a chunk, on the order of the clients or on where a
killed run was resumed.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

# Purposes, so that the streams of one seed never meet.
COHORT, SHUFFLE, PERSONAL, COMPONENTS, HOLD_OUT, SPLIT, MIXER, FINE_TUNE, SOLVER, CURVATURE, ATTACK = range(1, 12)
STOCHASTIC_LAYERS = -1  # folded into a shuffling key beside epochs, which count from 0

# The constants of splitmix64 (Steele, Lea, Flood 2014), as signed words.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift without dragging the sign along."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def scramble(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to each word, so that a change of one bit changes them all; int64 wraps around."""
    # In place but for the first step: of a million words each new tensor costs more than what is computed.
    x = (x ^ _shift_right(x, 30)).mul_(_MIX_1)
    x = x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31))


def derive(key: Tensor | int, *words: Tensor | int) -> Tensor:
    """Fold ``words`` into ``key`` one after the other; tensors broadcast. Returns int64 words.

    >>> int(derive(0, 1)) != int(derive(0, 2)) != int(derive(1, 2))
    True
    """
    state = torch.as_tensor(key, dtype=torch.int64)
    for word in words:
        state = scramble(state * _MIX_1 + word + _GOLDEN)
    return state


def uniform(key: Tensor, count: int) -> Tensor:
    """Draw ``count`` numbers in (0, 1) for each key. Shapes: ``[...]`` -> ``[..., count]``, float64."""
    words = derive(key.unsqueeze(-1), torch.arange(count, device=key.device))
    return (_shift_right(words, 11).double() + 0.5) * 2.0**-53


def client_keys(names: Sequence[str]) -> Tensor:
    """Hash client names to words, so that a client keeps its random numbers wherever it stands. ``[T]`` int64."""
    digests = b"".join(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest() for name in names)
    return torch.from_numpy(np.frombuffer(digests, dtype=np.int64).copy())


def choose(keys: Tensor, count: int, *words: int) -> Tensor:
    """Choose ``count`` of the keyed items uniformly without replacement; returns their positions in ascending order."""
    # An item is chosen by its own hash, so the choice does not depend on the order of the items.
    if count >= len(keys):
        return torch.arange(len(keys))
    tickets = derive(derive(*words), keys)  # the words once, and not for each of perhaps a million keys
    # Tickets are uniform, so the smallest are almost surely below this bound, and what is below is found in one pass.
    share = min(1.0, (count + 6 * math.sqrt(count) + 20) / len(keys))
    below = np.flatnonzero(tickets.numpy() < min(int(share * 2**64) - 2**63, 2**63 - 1))
    few = torch.from_numpy(below if len(below) >= count else np.arange(len(keys)))
    return few[torch.topk(tickets[few], count, largest=False, sorted=False).indices].sort().values
