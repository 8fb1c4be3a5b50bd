"""What a GPU is told while fedem computes, and that it is told back; torch keeps these flags without a GPU too."""

from __future__ import annotations

import pytest
import torch

from fedem.engines.device import PRECISIONS, products


def _flags() -> tuple[bool, bool, bool]:
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
    )


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_gpu_is_told_how_exactly_and_always_in_the_same_order_and_then_told_back(name: str) -> None:
    before, seen = _flags(), []

    def fail() -> None:
        with products(name, torch.device("cuda")):
            seen.append(_flags())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [(name != "float32", name != "float32", True)]
    assert _flags() == before


def test_a_cpu_needs_none_of_it() -> None:
    before = _flags()
    with products("tf32", torch.device("cpu")):
        assert _flags() == before
