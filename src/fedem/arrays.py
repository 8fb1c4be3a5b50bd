"""A client's arrays, checked on entry: what is wrong is said by the client's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedem.errors import UserError

_INPUT_KINDS = "uint8, int64 or float (32 or 64 bit)"


def describe(x: Tensor) -> str:
    """Say what kind of array this is."""
    return f"{str(x.dtype).removeprefix('torch.')} of shape [n, {', '.join(map(str, x.shape[1:]))}]".replace(", ]", "]")


def check_inputs(name: str, values: Any, *, finite: bool = True) -> Tensor:
    """Return one client's inputs as a tensor of an allowed kind; refuse NaN and infinities by the client's name.

    A flat array ``[n]`` is n samples of one feature.
    """
    inputs = _as_tensor(name, "inputs", values)
    if inputs.dtype in (torch.int8, torch.int16, torch.int32):
        inputs = inputs.long()
    elif inputs.dtype in (torch.float16, torch.bfloat16):
        inputs = inputs.float()
    elif inputs.dtype not in (torch.uint8, torch.int64, torch.float32, torch.float64):
        raise UserError(f"Client {name!r} has inputs of type {inputs.dtype}; allowed: {_INPUT_KINDS}.")
    if finite:
        _check_finite(name, "inputs", inputs)
    return inputs[:, None] if inputs.ndim == 1 else inputs


def check_pair(name: str, pair: tuple[Any, Any], *, finite: bool = True) -> tuple[Tensor, Tensor]:
    """Return one client's inputs and targets as tensors of allowed kinds, as many of each."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UserError(f"Client {name!r} is a {type(pair).__name__}; allowed: a pair (inputs, targets).")
    inputs, targets = check_inputs(name, pair[0], finite=finite), _as_tensor(name, "targets", pair[1])
    if targets.is_complex():
        raise UserError(f"Client {name!r} has targets of type {targets.dtype}; allowed: integers or floats.")
    if targets.dtype in (torch.float16, torch.bfloat16):
        targets = targets.float()
    elif not targets.is_floating_point():
        whole = targets.long()
        if targets.dtype == torch.uint64 and bool((whole < 0).any()):
            raise UserError(f"Client {name!r} has integer targets above {2**63 - 1}, the largest allowed.")
        targets = whole
    if targets.ndim > 2:
        raise UserError(f"Client {name!r} has targets of shape {list(targets.shape)}; allowed: [n] or [n, D].")
    if len(inputs) != len(targets):
        raise UserError(
            f"Client {name!r} has {len(inputs)} inputs but {len(targets)} targets; allowed: as many of each."
        )
    if finite:
        _check_finite(name, "targets", targets)
    return inputs, targets


def _as_tensor(name: str, what: str, values: Any) -> Tensor:
    try:
        tensor = values.detach().cpu() if isinstance(values, Tensor) else torch.from_numpy(_writable(values))
    except (TypeError, ValueError) as error:
        raise UserError(f"Client {name!r} has {what} that are no array of numbers ({error}).") from None
    if tensor.ndim == 0:
        raise UserError(f"Client {name!r} has a single number as {what}; allowed: an array of shape [n, ...].")
    return tensor


def _writable(values: Any) -> NDArray[Any]:
    """Torch wants arrays that may be written; a read-only one is copied."""
    array = np.asarray(values)
    return np.require(array, requirements=["C", "W"] if array.ndim else ["W"])


def first_not_finite(values: Tensor) -> int | None:
    """Return the first row that has a NaN or an infinity, if there is one."""
    if not values.is_floating_point() or bool(torch.isfinite(values).all()):
        return None
    return int((~torch.isfinite(values.reshape(len(values), -1))).any(1).nonzero()[0])


def not_finite(name: str, what: str, row: int) -> UserError:
    """Return the error for a NaN or an infinity in a client's ``row``."""
    return UserError(
        f"Client {str(name)!r} has NaN or infinite {what}, first in row {row}; only finite numbers are allowed."
    )


def _check_finite(name: str, what: str, values: Tensor) -> None:
    if (row := first_not_finite(values)) is not None:
        raise not_finite(name, what, row)
