"""How exactly a GPU multiplies: as a run asks where models compute, and with all digits everywhere else.

In TF32 the factors of a product keep 10 bits. A gradient bears that, since its batch is far more noise. What is added
up over clients and rounds does not: models that hardly differ would be rounded to one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.func import grad

PRECISIONS = ("tf32", "float32", "bfloat16")

_ASKED: ContextVar[str | None] = ContextVar("precision", default=None)  # None: nobody did, and torch's flags stand


@contextmanager
def products(name: str, device: torch.device) -> Iterator[None]:
    """Work on a GPU where models compute by this precision (:func:`where_models_compute`); then set all back.

    Whatever else is multiplied has all digits of its float32 factors. "bfloat16" goes further than TF32, where a model
    computes (:class:`~fedem.models.base.Model`); what it leaves in float32 is in TF32.
    """
    if device.type != "cuda":
        yield
        return
    deterministic, asked = torch.backends.cudnn.deterministic, _ASKED.set(name)
    # Summed in one order: the same run gives the same bits, at the same speed.
    torch.backends.cudnn.deterministic = True
    try:
        # Recordings are made on the current device.
        with _tf32(False), nullcontext() if device.index is None else torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.deterministic = deterministic
        _ASKED.reset(asked)


@contextmanager
def where_models_compute() -> Iterator[None]:
    """Multiply as the run asks; outside of :func:`products` as torch is told to."""
    asked = _ASKED.get()
    with nullcontext() if asked is None else _tf32(asked != "float32"):
        yield


@contextmanager
def with_all_digits() -> Iterator[None]:
    """Multiply with all digits where models compute as well: for small differences of what they make."""
    asked = _ASKED.get()
    if asked is None:
        yield
        return
    token = _ASKED.set("float32")
    try:
        with _tf32(False):
            yield
    finally:
        _ASKED.reset(token)


def model_gradient(function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """Return ``torch.func.grad`` of what models compute; the way back multiplies as the way there does."""
    decorated: Callable[..., Any] = where_models_compute()(grad(function, has_aux=has_aux))
    return decorated


@contextmanager
def _tf32(is_on: bool) -> Iterator[None]:
    matrices, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matrices.allow_tf32, convolutions.allow_tf32
    matrices.allow_tf32 = convolutions.allow_tf32 = is_on
    try:
        yield
    finally:
        matrices.allow_tf32, convolutions.allow_tf32 = before
